"""The life of the one kernel that a keeper holds: its start, the sleeper that it lives in, its end, its record."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from .. import settings
from ..client.in_progress import RestoreInProgress
from ..client.kernel_start import kernel_program, new_run_folder
from ..client.record import KERNEL_LOG, OUTPUT, Ended, KernelFolder, now
from ..errors import GpuckptError, KernelLost, Refused
from ..freeze.cuda_calls import CudaWorker
from ..linux import processes
from ..linux.reserved_ports import Reserved
from ..operations.requests import Long, Wake
from ..operations.results import RunningCell, WakeNote
from ..subject import speak_of_a_job
from . import kernel_log
from .agent_channel import AgentChannel
from .holders import Holders
from .kept_twins import KeptTwins
from .namespace import Namespace
from .one_at_a_time import OneAtATime
from .operations.progress import ProgressCallback, to_nobody
from .removed_folder import refuse_without_folder
from .stand_in import StandIn

if TYPE_CHECKING:
    # Not at the start: a new job would wait for these to be imported, with all that they need.
    from ..freeze.huge_pages import HugePages
    from ..snapshots.needs import Marks
    from ..snapshots.saved import SavedCell
    from ..store import Session, Store
    from .gpu.sleep import GpuSleep
    from .store_growth import StoreGrowth

__all__ = ["Abilities", "Keeper"]

log = logging.getLogger("gpuckpt.keeper")

_T = TypeVar("_T")
_FAREWELL = 20.0  # how long an ended kernel's keeper waits for the server to take note, in seconds
_STILL = 1.0  # how long a killed kernel may take to execute nothing any more, in seconds
_GOODBYE = 1.0  # how long a kernel that ends in its sleep has for what it does at its end, in seconds
_TICK = os.sysconf("SC_CLK_TCK")


class Abilities(Protocol):
    """What a keeper can do with its kernel beyond its start."""

    async def do_by_itself(self, request: Long[Any], on_progress: ProgressCallback) -> Any:
        """Do what nobody asked for."""

    async def answer_agent(self, number: int, op: str, args: dict[str, Any]) -> None:
        """Do what the agent in the kernel asks for."""


class Keeper:
    """One kernel, and what its keeper knows and holds of it.

    It can start the kernel as soon as it is made. What it can do beyond that is loaded behind the start (`can`); who
    asks for it before waits until it is.
    """

    def __init__(self, folder: KernelFolder) -> None:
        self.folder = folder
        self.launch = folder.launch()
        speak_of_a_job(bool(self.launch.job))
        self.state = folder.state()
        self.worker = CudaWorker()
        self.operations = OneAtATime()
        self.holders = Holders()
        self.space: Namespace | None = None
        self.channel: AgentChannel | None = None
        self.asleep: GpuSleep | None = None
        """What the kernel, which sleeps, had on GPUs; None while it is awake."""
        self.exit_status: int | None = None
        self.notes: list[str] = []
        """What there was to say when the kernel came up as a copy of another."""
        self.woken: WakeNote | None = None
        self.ending = False
        """Set when the kernel is to end: no other is to be started in its place."""
        self.held = asyncio.Event()
        """Set when the kernel can be asked for something: it was started, or taken over and mended."""
        self.closing = asyncio.Event()
        """Set when the keeper is to end."""
        self.record_is_closed = False
        """Set when the folder may be another keeper's: nothing is written into it any more."""
        self.stand_in = StandIn(
            self.launch,
            self.state,
            self.note_state,
            self.wake_if_asked,
            lambda: self.in_background(self.ended(0)),
        )
        self._ports = Reserved()
        """Those of the kernel's channels, at which no other user may listen while it does not itself."""
        self._sleepers: list[Namespace] = []
        self.last_cell: SavedCell | None = None
        self.ran: dict[int, float] = {}
        """Cells that are in no snapshot and were followed by no longer one: seconds, by how many had begun then."""
        self.lease: Session | None = None
        """That of the snapshot which the kernel is hibernated as, or comes back from."""
        self.not_saved_by_itself: GpuckptError | None = None
        """Why the last automatic save failed; None where it did not."""
        self.twins = KeptTwins()
        self.became_idle = asyncio.Event()
        self._tidying: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._abilities: asyncio.Future[Abilities] = asyncio.get_running_loop().create_future()

    @functools.cached_property
    def store(self) -> Store:
        """Where its snapshots are."""
        from ..store import Store  # here, since a start is not to wait for that

        return Store(settings.store_dir())

    @functools.cached_property
    def huge_pages(self) -> HugePages:
        """Which of the kernel's memory is in huge pages, or was to be."""
        from ..freeze.huge_pages import HugePages  # likewise

        return HugePages()

    @functools.cached_property
    def store_growth(self) -> StoreGrowth:
        """What keeps the store from growing with each save."""
        from .store_growth import StoreGrowth  # likewise

        return StoreGrowth(self.store)

    @functools.cached_property
    def marks(self) -> Marks:
        """What is known of the files that snapshots need."""
        from ..snapshots.needs import Marks  # likewise

        return Marks()

    def can(self, abilities: Abilities) -> None:
        """Have the keeper do from now on what else it can do with its kernel."""
        self._abilities.set_result(abilities)

    async def ask(self, request: Long[Any], on_progress: ProgressCallback) -> Any:
        """Do an operation that nobody asked for, as for any client. Raises `GpuckptError`."""
        return await (await asyncio.shield(self._abilities)).do_by_itself(request, on_progress)

    async def _answer_agent(self, number: int, op: str, args: dict[str, Any]) -> None:
        await (await asyncio.shield(self._abilities)).answer_agent(number, op, args)

    def _note_idle(self, cell: RunningCell | None, seconds: float) -> None:
        from ..snapshots.saved import SavedCell  # likewise

        if cell is not None:
            self.last_cell = SavedCell(number=cell.number, begins=cell.begins, seconds=seconds)
            if self.channel is not None and self.channel.cells is not None:
                longer = {begun: ran for begun, ran in self.ran.items() if ran > seconds}
                self.ran = {**longer, self.channel.cells: seconds}
        self.became_idle.set()

    # -- the sleeper that it lives in

    def new_channel(self, run_dir: Path) -> AgentChannel:
        """Listen to the agent at the FIFOs of a run folder."""
        return AgentChannel(run_dir, self._answer_agent, self._note_idle)

    async def new_namespace(self) -> tuple[Namespace, AgentChannel]:
        """Start a sleeper over a new run folder.

        Raises
        ------
        GpuckptError, OSError : it could not be started; nothing is left behind.
        """
        refuse_without_folder(self.folder.path)
        run_dir = new_run_folder(self.folder.path, kernel_program(self.launch).env)
        with contextlib.ExitStack() as undoing:
            channel = self.new_channel(run_dir)
            undoing.callback(channel.close)
            space = await Namespace.start(self.folder.path, run_dir)
            undoing.pop_all()
        self._sleepers = [s for s in self._sleepers if not s.dead.is_set()] + [space]
        if self.ending:
            channel.close()
            await space.kill()
            raise KernelLost("The {kernel} was ended.", "It was shut down in the meantime.", "Start it again.")
        return space, channel

    async def attach(self, run: str, sleeper: int, kernel: int) -> None:
        """Hold a kernel that runs already: its run folder's name, its sleeper's pid, and its own in the namespace."""
        space = await Namespace.attach(self.folder.path, run, sleeper)
        self._sleepers.append(space)
        self.hold(space, self.new_channel(space.run_dir), kernel)

    def namespace(self) -> Namespace:
        """Return the namespace that the kernel lives in.

        Raises
        ------
        Refused : it is hibernated.
        KernelLost : it has ended.
        """
        if self.state.hibernated is not None and self.space is None and self.exit_status is None:
            name = self.state.hibernated.snapshot.name
            raise Refused(
                "The kernel is hibernated.",
                f"It exists only on disk, as the snapshot {name}.",
                "Wake it (run a cell, or `gpuckpt wake @`), and try again.",
                name=name,
            )
        if self.space is None or self.exit_status is not None:
            raise KernelLost("The {kernel} has ended.", "", "Restart it; its snapshots are kept.")
        return self.space

    # -- its start

    async def start_kernel(self) -> None:
        """Start a fresh kernel in a new sleeper."""
        if not self.launch.agent:
            self._ports.close()  # it could not take them
        space, channel = await self.new_namespace()
        async with contextlib.AsyncExitStack() as undoing:
            undoing.push_async_callback(space.kill)
            undoing.callback(channel.close)
            pid = await space.spawn(kernel_program(self.launch))
            undoing.pop_all()
        self.state.parent, self.state.saved, self.state.own_files, self.state.output = None, None, False, 0
        self.state.resumed, self.state.shared_files = None, {}
        self.last_cell, self.ran = None, {}
        self.state.sleep, self.state.worked = None, 0.0
        if isinstance(self.state.operation, RestoreInProgress):
            self.state.operation.fresh = True
        self.hold(space, channel, pid)
        self.expect_start()

    def expect_start(self) -> None:
        """Leave out what the kernel, a fresh one, computes until its agent is there."""
        assert self.channel is not None
        self.channel.hello.add_done_callback(lambda hello: None if hello.exception() else self.leave_out_work())

    def leave_out_work(self) -> None:
        """Leave out what the kernel has computed so far: its start, or a restore, is no work of its user's."""
        self.state.worked = self.work()
        self.note_state()

    def hold(self, space: Namespace, channel: AgentChannel, pid: int) -> None:
        """Take this running kernel as the one to keep; `pid` is its pid in the namespace."""
        self.space, self.channel = space, channel
        self.state.sleeper = (space.pid, space.start_time or 0)
        self.state.run = space.run_dir.name
        self.state.kernel_pid = pid
        self.state.started, self.state.ended = now(), None
        self.watch()
        (self.folder.path / OUTPUT).unlink(missing_ok=True)  # of what ran before
        self.note_state()

    # -- while it is hibernated

    async def hold_ports(self) -> None:
        """See to it that nobody of another user's can listen where clients look for the kernel."""
        from ..linux.foreign_sockets import hold  # here, since a start is not to wait for that
        from .ports import endpoint, of_connection_file

        file = self.launch.connection_file
        tree = processes.descendants(self.space.pid) if self.space is not None else []
        try:
            if endpoint(file).get("transport") != "tcp":
                return
            channels = of_connection_file(file).values()
            await asyncio.to_thread(hold, self._ports, channels, [*tree, os.getpid()])
        except (OSError, ValueError, KeyError) as e:
            log.warning("the kernel's ports are not held for it while it is not there: %s", e)

    def let_ports_go(self) -> None:
        """Leave the ports to whoever wants them: no kernel comes back to them."""
        self._ports.close()

    def without_kernel(self) -> None:
        """Keep no kernel but its snapshot: what stands in for it takes its ports."""
        self.let_go()
        self.space = self.channel = None
        self.state.sleeper, self.state.run, self.state.kernel_pid = None, "", 0
        self.state.sleep = None
        self.state.operation = None
        self.note_state()
        if not self.ending:
            self.stand_in.take_ports()

    async def refuse_requests(self, error: GpuckptError) -> None:
        """Answer what waits for the hibernated kernel with an error; and end, if it was to end meanwhile."""
        if self.ending:
            await self.ended(-signal.SIGKILL)
        await self.stand_in.refuse_requests(error)

    def wake_if_asked(self) -> None:
        """Wake the hibernated kernel where something waits for it; a wake under way will see to that itself."""
        if self.stand_in.is_asked and self.operations.current is None and not self.ending:
            self.in_background(self._wake())

    async def _wake(self) -> None:
        with contextlib.suppress(GpuckptError):  # who asked was told
            await self.ask(Wake(), to_nobody)

    # -- its end

    def watch(self) -> None:
        """Notice the end of the kernel from now on."""
        if self._watch is not None:
            self._watch.cancel()
        self._watch = asyncio.create_task(self._watch_kernel(self.namespace(), self.state.kernel_pid))

    def let_go(self) -> None:
        """Stop watching the kernel: its end is about to be wanted."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    async def _watch_kernel(self, space: Namespace, pid: int) -> None:
        try:
            status = await space.wait(pid)
        except KernelLost:
            status = -signal.SIGKILL
        if self.state.hibernated is None:  # a wake sees to a kernel that does not outlive it
            await self.ended(status)

    async def ended(self, status: int) -> None:
        """Note that the kernel has ended, tell who wants to know, and finish."""
        log.info("the kernel ended with status %d", status)
        self.exit_status = status
        if self.launch.job and self.state.ended is None:
            self.state.ended = Ended(status, now())
            self.note_state()
        self.drop_lease()
        if self.channel is not None:
            self.channel.close()  # who waits for the agent need not wait any longer
        await self.holders.tell({"event": "exited", "status": status})
        if self.space is not None:
            if status != 0 and not self.launch.job:
                kernel_log.quote(self.space.run_dir / KERNEL_LOG)
            self.keep_output()
            with contextlib.suppress(GpuckptError):
                await self.space.kill()
        loop = asyncio.get_running_loop()
        loop.call_later(_FAREWELL if self.holders.want_to_know else 0, self.closing.set)

    def take_lease(self, snapshot_id: str) -> None:
        """Have the hibernated kernel that a snapshot is be this one, and no other keeper's; in a thread.

        Raises
        ------
        Busy, StoreError : it cannot be.
        """
        if self.lease is None or self.lease.id != snapshot_id:
            self.drop_lease()
            self.lease = self.store.lease(snapshot_id, self.launch.title)

    def drop_lease(self) -> None:
        """Leave a hibernated kernel to whoever brings it back."""
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.close()

    async def end_unless_watched(self) -> None:
        """Note the end of a kernel that was given up for another, which did not come: nobody waits for it in vain."""
        if self._watch is None and self.exit_status is None and self.state.hibernated is None and not self.ending:
            log.error("the kernel was given up, and no other came in its place")
            await self.ended(-signal.SIGKILL)

    async def give_up(self, *, wait: bool = True) -> None:
        """End the kernel, on the way to another one.

        Without `wait`, nothing of it is executed any more, but only the next operation waits until it is gone.
        """
        self.let_go()
        await self.hold_ports()
        self.state.untold = None
        channel, self.channel = self.channel, None
        if channel is not None:
            channel.close()
        space = self.space
        if space is not None:
            self.keep_output()
            tree = processes.descendants(space.pid)
            space.kill_now()
            if not wait and await asyncio.to_thread(processes.kill, tree, _STILL):
                self.tidy(self._end(space))
            else:
                await space.kill()
        await self.forget_sleep()

    async def _end(self, space: Namespace) -> None:
        try:
            await space.kill()
        except GpuckptError as e:
            log.error("the kernel before this one: %s", e)

    async def end_sleepers(self) -> None:
        """End the kernel, what it has left behind, and one that is on its way back from a snapshot."""
        for space in self._sleepers:
            await space.kill()
        await self.forget_sleep()

    async def forget_sleep(self) -> None:
        """End what helps a kernel that sleeps: it has ended."""
        asleep, self.asleep = self.asleep, None
        if asleep is not None:
            await asleep.close()

    def keep_output(self) -> None:
        """Have what a job has written outlive its run folder."""
        if self.launch.job and self.space is not None:
            with contextlib.suppress(OSError):
                (self.space.run_dir / KERNEL_LOG).replace(self.folder.path / OUTPUT)

    def end_asleep(self) -> None:
        """End the kernel, which says that it ends, where it sleeps: at its end it would wait for the GPU for ever."""
        if self.asleep is not None and self.asleep.freed and not self.ending:
            asyncio.get_running_loop().call_later(_GOODBYE, self.signal, signal.SIGKILL)

    def signal(self, signum: int) -> bool:
        """Send a signal to the kernel's process group, as the kernel manager would; False when there is none now."""
        if self.exit_status is not None:
            return False
        if self.state.hibernated is not None and self.operations.current is None:
            if signum in (signal.SIGKILL, signal.SIGTERM):
                self.in_background(self.ended(-signum))
            return True
        if signum == signal.SIGKILL:
            # What a kernel leaves behind ends with it, and so does one that is on its way back from a snapshot.
            self.ending = True
            for space in self._sleepers:
                space.kill_now()
            return True
        pid = self.space.outer(self.state.kernel_pid) if self.space is not None else None
        if pid is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            if signum == 0:
                os.kill(pid, 0)
            else:
                assert self.space is not None
                processes.signal_group(self.space.pid, pid, signum)
        return True

    # -- its record, and what is known of it

    def ends_with(self, pid: int, after: float | None) -> None:
        """Have the kernel end so many seconds after this process has, if nobody uses it then; never with None."""
        began = processes.start_time(pid) or 0
        self.state.client, self.state.end_after = (pid, began), after
        self.note_state()

    def save_state(self) -> None:
        """Write down where the kernel is, for the keeper that comes after this one.

        Raises
        ------
        OSError : it could not be written.
        """
        if not self.record_is_closed:
            self.folder.write_state(self.state)

    def note_state(self) -> None:
        """Write down where the kernel is, if that can be done: it has changed already."""
        try:
            self.save_state()
        except OSError as e:
            if not self.ending:
                log.error("the keeper's record could not be written: %s", e)

    def belong_to(self, notebook: str) -> None:
        """Have the kernel belong to the notebook of this path from now on, also where it is restarted."""
        self.launch.notebook = self.launch.env["JPY_SESSION_NAME"] = notebook
        if not self.record_is_closed:
            self.folder.write_launch(self.launch)

    def work(self) -> float:
        """Return how many seconds of processor time the kernel's processes have used."""
        return sum(processes.work_done(pid)[0] for pid in self.tree()) / _TICK

    def tree(self) -> list[int]:
        """Return the pids of the kernel's processes; none where there is no kernel."""
        below = processes.descendants(self.space.pid) if self.space is not None else []
        apart = self.twins.pids
        return [pid for pid in below if pid not in apart]

    def quiet_log(self) -> Path | None:
        """Return the kernel's log, which may be cut; None while it may not."""
        # In the middle of an operation it is being saved, with the size that it has.
        if self.operations.current is not None or self.space is None:
            return None
        return self.space.run_dir / KERNEL_LOG

    # -- beside the operations

    def in_background(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Do something that need not be waited for."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def tidy(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something that nobody waits for but the next operation."""
        self._tidying = asyncio.create_task(work)

    async def tidied(self) -> None:
        """Wait until that is done."""
        if self._tidying is not None:
            await asyncio.wait([self._tidying])
