"""The keeper's process: it holds one kernel, listens at one socket, and does one operation at a time."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import shutil
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__, settings
from ..errors import Busy, Cancelled, GpuckptError, KernelLost, Refused, RestoreFailed
from ..freeze import cuda, processes
from ..lock_files import KEEPER_LOCK
from ..store import Store
from . import tally
from .bedtime import hibernate_sleepers
from .comparison import compare
from .gpu_sleep import GpuSleep
from .idleness import AutoSleep
from .link import AgentSilent, Link
from .namespace import FIRST_PID, Namespace, run_path
from .needs import Marks
from .operations.fork import arrive, fork
from .operations.hibernate import forget, hibernate
from .operations.move import move
from .operations.parts import CAPTURE, WORKING_COPY
from .operations.recover import recover
from .operations.restore import bring_up, restore
from .operations.save import save
from .operations.sleep import ASLEEP, sleep
from .operations.stages import Stages, to_nobody
from .operations.wake import awaken, wake
from .operations.wake_at_touch import wake_at_touch
from .protocol import PROTOCOL, REQUEST_LIMIT, peer_pid, peer_uid, short_path
from .record import KERNEL_LOG, OUTPUT, SOCKET, KernelFolder, Operation, now
from .summary import details, listing, summary

if TYPE_CHECKING:
    from .doorman import Doorman

log = logging.getLogger("gpuckpt.keeper")


_PR_SET_CHILD_SUBREAPER = 36
_M_ARENA_MAX = -8
_ANSWER = 5.0  # how long the kernel may take to answer a question, in seconds
_FAREWELL = 20.0  # how long an ended kernel's keeper waits for the server to take note, in seconds
_GOODBYE = 1.0  # how long a kernel that ends in its sleep has for what it does at its end, in seconds
_PATIENCE = 30.0  # how long a shutdown waits for a broken-off operation to end, in seconds
_TICK = os.sysconf("SC_CLK_TCK")
PULSE = 2.0  # how often a client that waits hears that its request is being worked on, in seconds
MOST_CLIENTS = 64
"""So many connections are served at once; more are hung up on."""
MOST_REQUESTS = 16
"""So many requests of one connection are worked on at once; what it sends beyond is not read before one is answered."""
_MOST_LOOKS = 4  # so many requests that read much of the store are served at once: a save needs threads and disk, too
_SLOW_READER = 30.0  # how long a client may let its answers pile up, in seconds
KERNEL_LOG_LIMIT = 10 << 20
"""So long a kernel's log may become, in bytes, before its beginning is cut off. A job's is its output, and stays."""
_KERNEL_LOG_KEPT = 1 << 20
_TRIM = 60.0  # how often that is looked at, in seconds

_DOING = {
    "save": "saving",
    "restore": "restoring",
    "fork": "forking",
    "move": "moving",
    "sleep": "falling asleep",
    "hibernate": "hibernating",
    "wake": "waking",
}
_WANTS_IT_AWAKE = ("fork", "move")
_TAKES_IT = ("save", "hibernate")
"""Operations that take a kernel that sleeps as it is, where they can."""
_IS_WAITED_FOR = ("sleep", "wake")
"""Operations that others wait for: who asks for something of a kernel need not know that it falls asleep or wakes."""

_BREAKS_OFF = {"wake": ("sleep", "hibernate"), "restore": ("wake",)}
"""What an operation ends that is under way: a kernel that is wanted need not sleep, nor one wake that is given up."""

Tell = Callable[[dict[str, Any]], Awaitable[None]]


class Keeper:
    """One kernel and everything that may be done to it."""

    def __init__(self, folder: KernelFolder) -> None:
        self.folder = folder
        self.launch = folder.launch()
        self.state = folder.state()
        self.store = Store(settings.store_dir())
        self.worker = cuda.CudaWorker()
        self.marks = Marks()
        self.space: Namespace | None = None
        self.link: Link | None = None
        self.doorman: Doorman | None = None
        self.operation: Operation | None = None
        self.asleep: GpuSleep | None = None
        """What the kernel, which sleeps, had on GPUs; None while it is awake."""
        self.exit_status: int | None = None
        self.notes: list[str] = []
        """What there was to say when the kernel came up as a copy of another."""
        self.ending = False
        """Set when the kernel is to end: no other is to be started in its place."""
        self.held = asyncio.Event()
        """Set when the kernel can be asked for something: it was started, or taken over and mended."""
        self.idle = asyncio.Event()
        """Set while no operation is under way."""
        self.idle.set()
        self.closing = asyncio.Event()
        self.auto_sleep = AutoSleep(self)
        self.woken: dict[str, Any] | None = None
        """When the kernel was last woken (``at``) and how long that took (``seconds``)."""
        self._spaces: list[Namespace] = []
        self._connections = 0
        self._looking = asyncio.Semaphore(_MOST_LOOKS)
        self._attached: set[asyncio.StreamWriter] = set()
        self._tidying: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._queued: list[Operation] = []
        self._shut_down = False

    # -- the kernel's life

    def new_link(self, run_dir: Path) -> Link:
        """Make the FIFOs of a run folder and listen to them; the agent sees by the lock whether this keeper lives."""
        with contextlib.suppress(FileExistsError):
            (run_dir / KEEPER_LOCK).hardlink_to(self.folder.path / KEEPER_LOCK)
        return Link(run_dir, self._on_agent_request)

    async def new_namespace(self, furnish: Callable[[Path], None] = lambda _: None) -> tuple[Namespace, Link]:
        """Start a sleeper over a new run folder, which `furnish` may put more into.

        Raises
        ------
        GpuckptError, OSError : it could not be started; nothing is left behind.
        """
        links: list[Link] = []

        def prepare(run_dir: Path) -> None:
            links.append(self.new_link(run_dir))
            furnish(run_dir)

        try:
            space = await Namespace.start(self.folder.path, prepare)
        except BaseException:
            for link in links:
                link.close()
            raise
        self._spaces = [s for s in self._spaces if not s.dead.is_set()] + [space]
        if self.ending:
            links[0].close()
            await space.kill()
            raise KernelLost("The kernel was ended.", "It was shut down meanwhile.", "Start it again.")
        return space, links[0]

    def namespace(self) -> Namespace:
        """Return the namespace that the kernel lives in.

        Raises
        ------
        Refused : it is hibernated.
        KernelLost : it has ended.
        """
        if self.state.hibernated is not None and self.space is None and self.exit_status is None:
            name = self.state.hibernated["snapshot"]["name"]
            raise Refused(
                "The kernel is hibernated.",
                f"It is on the disk alone, as the snapshot {name}.",
                "Wake it (run a cell, or `jupyter gpuckpt wake KERNEL`), and ask again.",
                name=name,
            )
        if self.space is None or self.exit_status is not None:
            raise KernelLost("The kernel has ended.", "", "Restart it; its snapshots are there.")
        return self.space

    def keep_output(self) -> None:
        """Have what a job has written outlive its run folder."""
        if self.launch.job and self.space is not None:
            with contextlib.suppress(OSError):
                (self.space.run_dir / KERNEL_LOG).replace(self.folder.path / OUTPUT)

    async def start_kernel(self) -> None:
        """Start the kernel afresh, in a new sleeper."""
        space, link = await self.new_namespace()
        try:
            pid = await space.spawn(
                self.launch.argv,
                env={**self.launch.env, settings.ENV_RUN_DIR: settings.NAMESPACE_RUN_DIR},
                cwd=self.launch.cwd,
                umask=self.launch.umask,
                stdout=run_path(KERNEL_LOG),
                after_pid=FIRST_PID - 1,
                subreaper=True,
            )
        except BaseException:
            link.close()
            await space.kill()
            raise
        self.state.parent, self.state.own_files, self.state.output = None, False, 0
        self.state.sleep, self.state.worked = None, 0.0
        self.hold(space, link, pid)

    def hold(self, space: Namespace, link: Link, pid: int) -> None:
        """Take this running kernel as the one to keep; `pid` is its pid in the namespace."""
        self.space, self.link = space, link
        self.state.sleeper = (space.pid, space.start_time or 0)
        self.state.run = space.run_dir.name
        self.state.kernel_pid = pid
        self.state.started, self.state.ended = now(), None
        self.watch()
        (self.folder.path / OUTPUT).unlink(missing_ok=True)  # of what ran before
        self.note_state()

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

    async def give_up(self) -> None:
        """End the kernel, on the way to another one."""
        self.let_go()
        link, self.link = self.link, None
        if link is not None:
            link.close()
        if self.space is not None:
            self.keep_output()
            await self.space.kill()
        await self.forget_sleep()

    def fell_asleep(self, asleep: GpuSleep) -> None:
        """Note that the kernel sleeps, and wake it when it touches a GPU."""
        self.asleep = asleep
        if asleep.freed and self.state.sleep is not None:
            self.in_background(wake_at_touch(self, asleep, self.state.sleep.get("waits", ())))

    async def forget_sleep(self) -> None:
        """End what helps a kernel that sleeps: it has ended."""
        asleep, self.asleep = self.asleep, None
        if asleep is not None:
            await asleep.close()

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something that nobody waits for."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def tidy(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something that nobody waits for but the next operation."""
        self._tidying = asyncio.create_task(work)

    # -- hibernated

    def without_kernel(self) -> None:
        """Stand in for the hibernated kernel: a doorman takes its ports."""
        self.let_go()
        self.space = self.link = None
        self.state.sleeper, self.state.run, self.state.kernel_pid = None, "", 0
        self.state.sleep = None
        self.state.operation = None
        self.note_state()
        if self.doorman is None and self.state.hibernated is not None and not self.ending:
            from .doorman import Doorman  # here, since most kernels are never hibernated

            said = self.state.hibernated["said"]
            try:
                self.doorman = Doorman(
                    self.launch.connection_file,
                    said,
                    self.state.hibernated["clients"],
                    self._on_kernel_request,
                    self._on_shutdown,
                )
            except (OSError, ValueError, KeyError) as e:
                log.error("nobody holds the ports of the hibernated kernel, only `wake` wakes it: %s", e)
                return
            self.doorman.open()

    async def doorman_leaves(self) -> None:
        """Have the ports for the kernel that comes back."""
        doorman, self.doorman = self.doorman, None
        if doorman is not None:
            try:
                await doorman.leave()
            except BaseException:
                await doorman.close()
                raise

    def announce(self, what: str) -> None:
        """Tell who listens to the hibernated kernel what becomes of it."""
        if self.doorman is not None:
            self.doorman.announce(what)

    async def refuse_requests(self, error: GpuckptError) -> None:
        """Answer what waits for the hibernated kernel with an error; and end, if it was to end meanwhile."""
        hibernated = self.state.hibernated
        if self.ending:
            await self.ended(-signal.SIGKILL)
        if hibernated is None or self.doorman is None:
            return
        requests, hibernated["requests"] = hibernated["requests"], []
        self.note_state()
        raw = [[bytes.fromhex(frame) for frame in frames] for frames in requests]
        await self.doorman.refuse(raw, error)

    def _on_kernel_request(self, frames: list[bytes]) -> None:
        """Note what a client sent to the hibernated kernel, and wake it."""
        if self.state.hibernated is None:
            return
        self.state.hibernated["requests"].append([frame.hex() for frame in frames])
        self.note_state()
        self._wake_if_asked()

    def _wake_if_asked(self) -> None:
        """Wake the hibernated kernel where something waits for it; a wake under way will see to that itself."""
        hibernated = self.state.hibernated
        if hibernated is not None and hibernated["requests"] and self.operation is None and not self.ending:
            self.in_background(self._wake())

    async def _wake(self) -> None:
        with contextlib.suppress(GpuckptError):  # who asked was told
            await self.do("wake", {}, to_nobody)

    def _on_shutdown(self) -> None:
        self.in_background(self.ended(0))

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
            self.state.ended = {"status": status, "at": now()}
            self.note_state()
        if self.link is not None:
            self.link.close()  # who waits for the agent need not wait any longer
        # Together: one that does not read must not keep the others waiting.
        await asyncio.gather(*(self._tell(one, {"event": "exited", "status": status}) for one in self._attached))
        if self.space is not None:
            if status != 0 and not self.launch.job:
                self._quote_kernel_log(self.space)
            self.keep_output()
            with contextlib.suppress(GpuckptError):
                await self.space.kill()
        loop = asyncio.get_running_loop()
        loop.call_later(_FAREWELL if self._attached else 0, self.closing.set)

    def _quote_kernel_log(self, space: Namespace) -> None:
        with contextlib.suppress(OSError):
            tail = (space.run_dir / KERNEL_LOG).read_text("utf-8", "replace").splitlines()[-40:]
            if tail:
                log.warning("the kernel's last words:\n%s", "\n".join(tail))

    async def trim_log(self) -> None:
        """Cut off the beginning of the kernel's log now and then, where it has become long."""
        while not self.launch.job:
            await asyncio.sleep(_TRIM)
            # In the middle of an operation it is being saved, with the size that it has.
            if self.operation is None and self.space is not None:
                with contextlib.suppress(OSError):
                    _cut(self.space.run_dir / KERNEL_LOG)

    async def take_over(self) -> None:
        """Hold the kernel that a dead keeper held; `recover` then undoes or finishes what that one had begun.

        Raises
        ------
        KernelLost : the kernel cannot be held any more.
        """
        state, left = self.state, self.state.operation
        if state.hibernated is not None and (left or {}).get("kind") != "wake":
            state.sleeper = None  # it was to be killed
        kept = state.sleeper[0] if state.sleeper is not None and self.folder.has_sleeper() else None
        for pid in self.folder.sleepers():
            if pid != kept:  # a restore had begun with it
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for run_dir in self.folder.path.glob("run-*/"):
            if kept is None or run_dir.name != state.run:
                shutil.rmtree(run_dir, ignore_errors=True)
        for left_over in (WORKING_COPY, CAPTURE):
            shutil.rmtree(self.folder.path / left_over, ignore_errors=True)
        if kept is None and state.hibernated is not None:
            self.without_kernel()
            return
        if kept is None:
            if left is None or left.get("kind") != "restore" or self.launch.job:
                raise KernelLost("The kernel is gone.", "Its keeper died, and so did its namespace.", "Restart it.")
            log.warning("the keeper before this one died in the middle of a restore; the kernel starts afresh")
            state.operation = {**left, "fresh": True}
            await self.start_kernel()
            return
        space = await Namespace.attach(self.folder.path, state.run, kept)
        self._spaces.append(space)
        if space.outer(state.kernel_pid) is None:
            log.warning("the kernel did not outlive its keeper")
        link = self.new_link(space.run_dir)
        self.hold(space, link, state.kernel_pid)
        link.introduce(self.launch.agent)

    async def recover(self) -> None:
        """Undo or finish what a dead keeper had begun."""
        try:
            await recover(self)
        except KernelLost as e:
            log.error("the kernel is lost: %s", e)
            await self.ended(-signal.SIGKILL)
        except RestoreFailed as e:
            log.warning("the kernel is hibernated again: %s", e)
        self._wake_if_asked()

    async def shut_down(self) -> None:
        """End the kernel and all of its processes, and what is under way; remove its folder.

        A save that is being written goes on: what was taken is not the kernel's any more.
        """
        if self._shut_down:
            return  # the folder may be another keeper's by now
        self._shut_down = self.ending = True
        self.let_go()
        self.keep_output()
        if self.operation is not None and not self.operation.writing:
            self.operation.cancelling.set()
        for space in self._spaces:
            await space.kill()
        await self.forget_sleep()
        if self.link is not None:
            self.link.close()
        if self.doorman is not None:
            await self.doorman.close()
        await asyncio.to_thread(self.worker.close)
        if self.writes is None:
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(self.idle.wait(), _PATIENCE)
        if self.state.hibernated is not None:
            # As a shutdown ends any kernel; `hibernate` with ``end`` is what leaves the snapshot.
            await asyncio.to_thread(forget, self.store, self.state.hibernated["snapshot"])
        if self.launch.copy_of and not self._attached:
            # Nobody else will: it was written for the fork.
            Path(self.launch.connection_file).unlink(missing_ok=True)
        self.folder.leave(self.exit_status)

    @property
    def writes(self) -> str | None:
        """The name of the snapshot that is being written while the kernel runs on; None for none."""
        return self.operation.name if self.operation is not None and self.operation.writing else None

    def save_state(self) -> None:
        """Write down where the kernel is, for the keeper that comes after this one.

        Raises
        ------
        OSError : it could not be written.
        """
        if not self._shut_down:
            self.folder.write_state(self.state)

    def note_state(self) -> None:
        """Write down where the kernel is, if that can be done: it has changed already."""
        try:
            self.save_state()
        except OSError as e:
            if not self.ending:
                log.error("the keeper's record could not be written: %s", e)

    # -- requests

    async def do(self, op: str, args: dict[str, Any], tell: Tell) -> Any:
        """Do what a client or the agent asks for; `tell` passes progress on.

        Raises
        ------
        GpuckptError : what there is to say to the person.
        """
        if op == "status":
            return self.status()
        if op == "cancel":
            return self._cancel(str(args.get("kind") or ""))
        if op == "signal":
            return self._signal(int(args["signum"]))
        if op == "save":
            return await self._exclusively("save", str(args["name"]), save, args, tell)
        if op == "restore":
            return await self._exclusively("restore", str(args.get("name") or ""), restore, args, tell)
        if op == "fork":
            name = str(args.get("name") or args.get("snapshot") or "this kernel")
            return await self._exclusively("fork", name, fork, args, tell)
        if op == "move":
            return await self._exclusively("move", "this kernel", move, args, tell)
        if op == "sleep":
            return await self._exclusively("sleep", "this kernel", sleep, args, tell)
        if op == "hibernate":
            return await self._exclusively("hibernate", "this kernel", hibernate, args, tell)
        if op == "wake":
            return await self._exclusively("wake", "this kernel", wake, args, tell)
        if op == "awake":
            self.state.awake = bool(args["on"])
            self.save_state()
            return {"pinned": self.state.awake}
        if op == "ending":
            return self._end_asleep()
        if op != "list" and self.writes is not None and self.writes in args.values():
            await self.idle.wait()
        if op in ("list", "show", "diff"):
            async with self._looking:
                return await asyncio.to_thread(self._look, op, args)
        if op == "mv":
            return summary(await asyncio.to_thread(self.store.rename, str(args["name"]), str(args["new"])))
        if op == "pin":
            return asdict(await asyncio.to_thread(self.store.pin, str(args["name"]), bool(args["pinned"])))
        if op == "tag":
            tags, remove = list(map(str, args["tags"])), list(map(str, args["remove"]))
            return asdict(await asyncio.to_thread(self.store.tag, str(args["name"]), tags, remove))
        if op == "rm":
            return {"freed": await asyncio.to_thread(self.store.remove, str(args["name"]))}
        if op == "executed":
            return await self._executed()
        if op == "autosleep":
            return self._set_auto_sleep(args["after"])
        raise GpuckptError(f"The keeper does not know {op!r}.", "", "Upgrade the older of the two.")

    def _look(self, op: str, args: dict[str, Any]) -> Any:
        if op == "list":
            return {**listing(self.store), "writing": self.writes}
        if op == "show":
            return details(self.store.get(str(args["name"])))
        return compare(self.store, str(args["old"]), str(args["new"]))

    async def _exclusively(
        self,
        kind: str,
        name: str,
        steps: Callable[[Keeper, Operation, dict[str, Any], Tell], Awaitable[Any]],
        args: dict[str, Any],
        tell: Tell,
    ) -> Any:
        await self.held.wait()
        await self._wait_for_others(kind, patient="idle_for" not in args)
        if self.operation is not None and self.operation.writing:
            await self._until_written(Operation(kind, name), tell)
        if self.state.hibernated is None or kind not in ("hibernate", "wake"):
            self.namespace()
        if self.operation is not None:
            under_way = self.operation
            raise Busy(
                f"The kernel is busy with a {under_way.kind} of {under_way.name!r}.",
                "One operation is done at a time.",
                "Wait for it, or cancel it, and ask again.",
            )
        operation = self.operation = Operation(kind, name)
        self.idle.clear()
        began, result = time.monotonic(), "failed"
        try:
            if self._tidying is not None:
                await asyncio.wait([self._tidying])
            if kind in _WANTS_IT_AWAKE or (kind in _TAKES_IT and not await self._can_be_taken_asleep()):
                await awaken(self, Stages(operation, tell))
            done = await steps(self, operation, args, tell)
            result = "" if isinstance(done, dict) and done.get("already") else "done"
            if kind == "wake" and result:
                self.woken = {"at": now(), "seconds": time.monotonic() - began}
            return done
        except Cancelled:
            result = "cancelled"
            raise
        finally:
            if result:
                asyncio.get_running_loop().run_in_executor(None, tally.note, kind, result, time.monotonic() - began)
            self.operation = None
            if self.state.operation is not None:
                self.state.operation = None
                self.note_state()
            self.idle.set()
            self._wake_if_asked()
            _give_memory_back()

    async def _can_be_taken_asleep(self) -> bool:
        """Tell whether a kernel that sleeps can be saved in its sleep: nothing of it may use a GPU before or after."""
        asleep, noted = self.asleep, self.state.sleep
        if asleep is None or noted is None or noted.get("hooks"):
            return False
        kernel = self.space.outer(self.state.kernel_pid) if self.space is not None else None
        return kernel is not None and await asleep.is_all(kernel)

    async def _wait_for_others(self, kind: str, *, patient: bool) -> None:
        """Wait for what is under way where that is right for an operation of this kind, or break it off."""
        while (under_way := self.operation) is not None:
            soon = patient and (under_way.kind in _IS_WAITED_FOR or kind == "wake")
            if not (soon or under_way.answering):
                return
            if under_way.kind in _BREAKS_OFF.get(kind, ()):
                under_way.cancelling.set()
            await self.idle.wait()

    async def _until_written(self, operation: Operation, tell: Tell) -> None:
        """Let an operation wait for the save before it, whose kernel runs on already, to be on the disk."""
        stages = Stages(operation, tell)
        self._queued.append(operation)
        try:
            assert self.operation is not None
            await stages.enter(f"waiting until {self.operation.name} is written")
            await stages.or_cancelled(self.idle.wait())
        finally:
            self._queued.remove(operation)

    def status(self) -> dict[str, Any]:
        """Return what the kernel is doing, for listings."""
        tree = processes.descendants(self.space.pid) if self.space is not None else []
        operation = self.operation
        pid = self.space.outer(self.state.kernel_pid) if self.space is not None else None
        word = _DOING.get(operation.kind) if operation is not None and not operation.writing else None
        asleep = self.state.sleep if self.state.sleep is not None and self.state.sleep["stage"] == ASLEEP else None
        resting = "hibernated" if self.state.hibernated is not None else "sleeping" if asleep else "running"
        word = word or resting
        return {
            "kernel_id": self.launch.kernel_id,
            "name": self.launch.name,
            "notebook": self.launch.notebook,
            "job": self.launch.job,
            "connection_file": self.launch.connection_file,
            "state": "ended" if self.exit_status is not None else word,
            "writing": self.writes,
            "queued": [queued.kind for queued in self._queued],
            "stage": operation.stage if operation else "",
            "pid": pid,
            "keeper_pid": os.getpid(),
            "version": __version__,
            "pids": tree,
            "memory": processes.resident_bytes(tree),
            "started": self.state.started,
            "parent": self.state.parent,
            "copy_of": self.launch.copy_of,
            "computed": max(0.0, self.work() - self.state.worked),
            "hibernated": self._hibernated(),
            "sleep_after": self.state.sleep_after,
            "notes": self.notes,
            "attended": bool(self._attached),
            "busy": self.link.busy if self.link is not None else False,
            "last_active": self.link.last_active if self.link is not None else self.state.started,
            "pinned": self.state.awake,
            "asleep_since": asleep["since"] if asleep else None,
            "woken": self.woken,
            "gpu": {
                "held": 0 if asleep or not cuda.cuda_pids(tree) else None,
                "freed": asleep["freed"] if asleep else 0,
            },
        }

    def work(self) -> float:
        """Return how many seconds of processor time the kernel's processes have used."""
        tree = processes.descendants(self.space.pid) if self.space is not None else []
        return sum(processes.work_done(pid)[0] for pid in tree) / _TICK

    def _hibernated(self) -> dict[str, Any] | None:
        """Return what listings tell of a hibernated kernel: its snapshot, and since when."""
        hibernated = self.state.hibernated
        if hibernated is None:
            return None
        snapshot = hibernated["snapshot"]
        return {
            "since": hibernated["since"],
            **{key: snapshot[key] for key in ("name", "size", "stored", "gpu_memory")},
        }

    def holders(self) -> list[int]:
        """Return the pids of the programs that hold the kernel: Jupyter servers, as a rule."""
        return [peer_pid(writer.get_extra_info("socket")) for writer in self._attached]

    def _set_auto_sleep(self, after: float | None) -> dict[str, Any]:
        """Set after how many idle seconds the kernel goes to sleep by itself; None or 0 for never."""
        self.state.sleep_after = float(after) if after else None
        self.note_state()
        self.auto_sleep.look_again()
        return {"sleep_after": self.state.sleep_after}

    async def _executed(self) -> dict[str, Any]:
        """Ask the kernel which cells it has executed; one without an agent does not know."""
        if self.operation is not None and self.operation.kind == "restore":
            await self.idle.wait()  # before that it does not know what it was put back to
        if self.link is None and self.state.hibernated is not None:
            account: dict[str, Any] = self.state.hibernated["said"]["executed"]
            return account
        if self.link is None or not self.launch.agent:
            return {"restored": "", "cells": {}, "others": []}
        try:
            found: dict[str, Any] = await self.link.call("executed", {}, _ANSWER)
        except AgentSilent:
            raise Busy(
                "The kernel does not say which cells it has executed.",
                f"It has not answered for {_ANSWER:.0f} s: it is being saved or restored, or holds Python's lock.",
                "Ask again.",
            ) from None
        return found

    def _end_asleep(self) -> None:
        """End the kernel, which says that it ends, where it sleeps: at its end it would wait for the GPU for ever."""
        if self.asleep is not None and self.asleep.freed and not self.ending:
            asyncio.get_running_loop().call_later(_GOODBYE, self._signal, signal.SIGKILL)

    def _cancel(self, kind: str) -> bool:
        """Cancel the operation of this kind, or the one there is; what waits for its turn comes first."""
        present = [*self._queued, *([self.operation] if self.operation is not None else [])]
        for operation in present:
            if kind in ("", operation.kind) and operation.cancellable:
                operation.cancelling.set()
                return True
        return False

    def _signal(self, signum: int) -> bool:
        """Send a signal to the kernel's process group, as the kernel manager would; False when there is none now."""
        if self.exit_status is not None:
            return False
        if self.state.hibernated is not None and self.operation is None:
            if signum in (signal.SIGKILL, signal.SIGTERM):
                self.in_background(self.ended(-signum))
            return True
        if signum == signal.SIGKILL:
            # What a kernel leaves behind ends with it, and so does one that is on its way back from a snapshot.
            self.ending = True
            for space in self._spaces:
                space.kill_now()
            return True
        pid = self.space.outer(self.state.kernel_pid) if self.space is not None else None
        if pid is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            if signum == 0:
                os.kill(pid, 0)
            else:
                os.killpg(pid, signum)
        return True

    # -- who asks: the agent in the kernel

    async def _on_agent_request(self, number: int, op: str, args: dict[str, Any]) -> None:
        link = self.link
        if link is None:
            return

        async def tell(progress: dict[str, Any]) -> None:
            with contextlib.suppress(AgentSilent):
                await link.send({"for": number, "progress": progress})

        async def pulse(progress: dict[str, Any]) -> None:
            with contextlib.suppress(AgentSilent):
                await link.pulse({"for": number, "progress": progress})

        answer: dict[str, Any]
        try:
            answer = {"result": await self._with_pulse(self.do(op, args, tell), pulse)}
        except GpuckptError as e:
            answer = {"error": e.as_dict()}
        except Exception as e:
            log.exception("%s failed", op)
            answer = {"error": _unforeseen(op, e, self.folder).as_dict()}
        # A restore that succeeded has closed this link, and answers through the restored kernel.
        with contextlib.suppress(AgentSilent):
            await link.send({"for": number, **answer})

    async def _with_pulse(self, work: Coroutine[Any, Any, Any], pulse: Tell) -> Any:
        """Do something for somebody, and let them hear now and then that it is being done."""

        async def beat() -> None:
            began = time.monotonic()
            while True:
                await asyncio.sleep(PULSE)
                stage = self.operation.stage if self.operation is not None else ""
                await pulse({"stage": stage, "seconds": time.monotonic() - began})

        beating = asyncio.create_task(beat())
        try:
            return await work
        finally:
            beating.cancel()

    # -- who asks: clients of the socket

    async def serve(self) -> asyncio.AbstractServer:
        """Open the socket (0600) and listen."""
        listener = socket.socket(socket.AF_UNIX)
        (self.folder.path / SOCKET).unlink(missing_ok=True)
        with short_path(self.folder.path / SOCKET) as path:
            listener.bind(path)
        (self.folder.path / SOCKET).chmod(0o600)
        return await asyncio.start_unix_server(self._client, sock=listener, limit=REQUEST_LIMIT)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = peer_uid(writer.get_extra_info("socket"))
        if peer not in (0, os.getuid()):
            log.warning("refused a connection of user %d", peer)
            writer.close()
            return
        if self._connections >= MOST_CLIENTS:
            log.warning("a client was hung up on: %d others are connected", self._connections)
            writer.close()
            return
        self._connections += 1
        slots = asyncio.Semaphore(MOST_REQUESTS)
        try:
            while line := await reader.readline():
                request = json.loads(line)
                if not isinstance(request, dict):
                    raise ValueError("a request is a JSON object")
                await slots.acquire()
                task = asyncio.create_task(self._serve_request(request, writer))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                task.add_done_callback(lambda _: slots.release())
        except (ValueError, RecursionError, ConnectionError) as e:
            log.warning("a client was cut off: %s", e)
        finally:
            self._connections -= 1
            self._attached.discard(writer)
            writer.close()
            if self.exit_status is not None and not self._attached:
                self.closing.set()

    async def _serve_request(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        number, op, args = request.get("id"), str(request.get("op")), request.get("args") or {}

        async def tell(progress: dict[str, Any]) -> None:
            await self._tell(writer, {"id": number, "progress": progress})

        try:
            if op == "attach":
                self._attached.add(writer)
                if self.exit_status is not None:
                    await self._tell(writer, {"event": "exited", "status": self.exit_status})
                result: Any = None
            elif op == "close":
                await self._with_pulse(self.shut_down(), tell)
                result = {"writing": self.writes}
                self.closing.set()
            else:
                result = await self._with_pulse(self.do(op, args, tell), tell)
            await self._tell(writer, {"id": number, "result": result})
        except GpuckptError as e:
            await self._tell(writer, {"id": number, "error": e.as_dict()})
        except Exception as e:
            log.exception("%s failed", op)
            await self._tell(writer, {"id": number, "error": _unforeseen(op, e, self.folder).as_dict()})

    async def _tell(self, writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
        try:
            writer.write(json.dumps(message).encode() + b"\n")
            await asyncio.wait_for(writer.drain(), _SLOW_READER)
        except (TimeoutError, asyncio.TimeoutError):
            # It may have been stopped; when it goes on, it finds the connection closed and makes another.
            log.warning("a client was cut off: it has not read for %.0f s", _SLOW_READER)
            writer.transport.abort()
        except ConnectionError:
            pass


def _cut(kernel_log: Path) -> None:
    """Leave only the end of a log that is too long; who writes to it has it open for appending."""
    if kernel_log.stat().st_size <= KERNEL_LOG_LIMIT:
        return
    with kernel_log.open("rb") as file:
        file.seek(-_KERNEL_LOG_KEPT, os.SEEK_END)
        end = file.read()
    os.truncate(kernel_log, 0)
    with kernel_log.open("ab") as file:
        file.write(b"[cut off here: the log had become too long]\n" + end.partition(b"\n")[2])


def _have_few_arenas() -> None:
    """Have the C library share its memory among threads: each would keep what it once had (mallopt(3)).

    A keeper lives for weeks, and works with many threads for a moment now and then.
    """
    with contextlib.suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)


def _give_memory_back() -> None:
    """Return to the system what the last operation had needed (malloc_trim(3))."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _unforeseen(op: str, error: Exception, folder: KernelFolder) -> GpuckptError:
    return GpuckptError(
        f"The {op} failed in a way that was not foreseen.",
        f"{type(error).__name__}: {error}",
        f"The keeper's log has the details: {folder.path}/keeper.log",
    )


async def keep(folder: KernelFolder, how: str, ready: Callable[[str], None]) -> None:
    """Be the keeper of the kernel in this folder until it has ended; its lock is held by this process.

    `how` is ``start`` (or ``job``, for a job), ``take-over``, ``copy`` for a kernel that comes up as a copy of another,
    or ``restore`` for a job that comes up from a snapshot. `ready` is called once: with nothing when the kernel is
    held, else with the error.
    """
    # The sleeper's parent ends at once: sleepers become this process's children, and are reaped by it.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _have_few_arenas()
    keeper = Keeper(folder)
    pid = os.getpid()
    keeper.state.keeper = (pid, processes.start_time(pid) or 0)
    keeper.state.version, keeper.state.protocol = __version__, PROTOCOL
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # A keeper ends with its kernel, not with the terminal that its server was started from.
        loop.add_signal_handler(number, lambda: None)
    try:
        try:
            keeper.save_state()
            server = await keeper.serve()
            if how == "take-over":
                await keeper.take_over()
            elif how == "copy":
                await arrive(keeper, folder.take_order())
            elif how == "restore":
                await bring_up(keeper, folder.take_order())
            else:
                await keeper.start_kernel()
        except Exception as e:
            log.exception("the kernel could not be held")
            error = e if isinstance(e, GpuckptError) else _unforeseen("start", e, folder)
            ready(json.dumps(error.as_dict()))
            return
        ready("")
        if how == "take-over":
            await keeper.recover()
        keeper.held.set()
        watching = [
            asyncio.create_task(watch)
            for watch in (keeper.auto_sleep.run(), hibernate_sleepers(keeper), keeper.trim_log())
        ]
        await keeper.closing.wait()
        for task in watching:
            task.cancel()
        server.close()
        await asyncio.sleep(0)  # the last answers go out
    finally:
        await keeper.shut_down()
        await keeper.idle.wait()
        await asyncio.sleep(0)  # the last answers go out
