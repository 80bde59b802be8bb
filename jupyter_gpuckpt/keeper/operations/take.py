"""Take a kernel: the part of a save, a hibernation and a fork in which it is paused.

It is prepared, frozen, taken and let go, in this order. Each step says beside itself how it is undone; where a later
one fails, all that has been done is undone in reverse, and the kernel continues as before.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import settings
from ...checked import Odd, from_json
from ...client.in_progress import ParkedMemory, SaveInProgress, held_of
from ...errors import (
    GpuckptError,
    KernelLost,
    Refused,
    SaveFailed,
)
from ...freeze import cpu_affinity, criu, cuda, images, memory_copy, parking_channel, twin
from ...freeze.cpu_affinity import BoundThreads
from ...freeze.criu_errors import Cause
from ...freeze.criu_program import CriuProgram
from ...freeze.nccl import Communicators
from ...linux import memory, processes
from ...snapshots import databases
from ...snapshots.saved import SavedProcesses
from .. import file_numbers, lost_names, preflight
from ..agent_channel import AgentChannel, AgentSilent
from ..agent_replies import NOTHING, AfterSave, ReadyForSave, checked_reply
from ..gpu.freeze import Ahead, GpuFreeze, LookElsewhere, RunFrom, owners_of_imports
from ..gpu.peers import parked_or_apart
from ..gpu.sleep import FrozenAsleep, GpuSleep
from ..namespace import Namespace
from ..removed_folder import refuse_without_folder
from ..staging import Staging
from . import criu_run
from .parts import CRIU_IMAGES
from .progress import OperationProgress

if TYPE_CHECKING:
    from ...client.record import Operation
    from ..kernel_life import Keeper
    from .host_memory import HostMemory

__all__ = ["Check", "Frozen", "Taken", "after_save", "before_save", "run_on", "take"]

log = logging.getLogger("gpuckpt.keeper")

_AFTER_FAILURE = 5.0  # how long the kernel has to put right what it had prepared for a save that failed, in seconds
_SAYS = 0.1
"""How long the kernel has to say what it does, while it is off its GPU, in seconds."""
_LAST_WORDS = 7.0
"""How long the kernel may take to have all that it has said sent, in seconds."""
_BLOCK = 512
"""What `st_blocks` counts, in bytes."""
_NOT_SAVED = "The {kernel} was not saved; it keeps running."
_NO_MEMORY = "It was paused until it was written to disk: there is too little free memory to buffer it."

Check = Callable[[int, Mapping[str, Any]], None]
"""Refuses, before a freeze, what could not be done with the kernel's private bytes and `cuda.describe` of it.

It is called twice: before anything is known of what is in use on GPUs, as if all were zeros, and when that was seen
(`cuda.in_use`).
"""


@dataclass
class Frozen:
    """What a freeze found and took."""

    seconds: float
    gpu: GpuFreeze
    cuda: Mapping[str, Any]
    process: SavedProcesses
    notes: list[str] = field(default_factory=list)
    """What the user should know of it."""
    still: list[int] = field(default_factory=list)
    """The processes that were stopped already (SIGSTOP)."""
    in_transaction: set[str] = field(default_factory=set)
    """Databases of LMDB's of which a write transaction was open."""
    begun: int | None = None
    """How many requests the kernel had begun to execute since it was prepared, right after the dump; None where that is
    not known."""
    memory: memory_copy.Memory | None = None
    """What was copied of host memory since the kernel runs again, where its twins are there still."""
    _tidying: asyncio.Task[None] | None = None

    def begin_to_tidy(self) -> None:
        """End what helped with the GPU, while the kernel runs again."""
        self._tidying = self._tidying or asyncio.create_task(self.gpu.close())

    async def tidied(self) -> None:
        """End what helped with the GPU, and wait for it."""
        self.begin_to_tidy()
        assert self._tidying is not None
        await self._tidying


@dataclass(frozen=True)
class Taken:
    """All of a kernel, not stored yet."""

    staging: Staging
    frozen: Frozen
    agent: ReadyForSave
    """What the agent says about its kernel."""
    communicators: Communicators
    begun: int = 0
    """How many requests the kernel has begun to execute since it was prepared, until the freeze was over."""


async def take(
    keeper: Keeper,
    operation: Operation,
    directory: Path,
    program: CriuProgram,
    progress: OperationProgress,
    check: Check,
    left: criu.Left = "running",
    look_elsewhere: LookElsewhere | None = None,
    host_memory: HostMemory | None = None,
    refuse_late: Callable[[], None] | None = None,
    *,
    automatic: bool = False,
) -> Taken:
    """Freeze the kernel for a moment and take all of it: into the staging, which has `directory` on the disk.

    `check` is called before the freeze; `look_elsewhere` says what of its GPU memory need not be taken, and
    `host_memory` what of its host memory; the caller ends the twins of that then (`Frozen.memory`). A kernel that is
    `left` stopped stays as it was taken, off the GPU, until `run_on`.

    Where it is `automatic`, its agent is quicker about it.

    The kernel runs on while the driver takes its GPU state, where no cell can begin meanwhile that is not to be in what
    is taken: one that runs waits for this, or `refuse_late` is called afterwards, and refuses where one has begun. It
    runs on while the driver brings that back. In both, its calls to CUDA wait.

    Raises
    ------
    SaveFailed, Refused, Cancelled : nothing was taken, and the kernel is as it was.
    KernelLost : the GPU state could not be brought back.
    """
    preflight.refuse_ipc(keeper.launch, "The save was refused; nothing was touched.")
    refuse_without_folder(keeper.folder.path, keeper.namespace().run_dir)
    channel, has_agent = keeper.channel, keeper.launch.agent
    assert channel is not None
    # A kernel that is not prepared has nothing to put right but its hooks, and one of them may hang.
    patience = 0.0

    async def put_right(_: object, error: BaseException | None, __: object) -> None:
        assert error is not None
        failure = error if isinstance(error, GpuckptError) else _not_saved(error)
        await after_save(channel, has_agent, failure, patience)

    await progress.enter("preparing the {kernel}")
    async with contextlib.AsyncExitStack() as undoing:
        undoing.push_async_exit(put_right)
        undoing.enter_context(_in_words())
        ahead = Ahead(look_elsewhere)
        undoing.push_async_callback(ahead.close)
        if keeper.asleep is None:
            ahead.begin(keeper.namespace().run_dir, keeper.tree())
        agent = await progress.or_cancelled(before_save(channel, has_agent, automatic=automatic))
        await ahead.have_asked()
        patience = _AFTER_FAILURE
        communicators = Communicators(keeper.namespace().run_dir)
        undoing.push_async_callback(asyncio.to_thread, communicators.make_again)
        found = await _look(keeper, agent, communicators)
        check(found.private, found.with_zeros(sum(cuda.needs(found.described).values())))
        staging, frozen = await _Freeze(
            *(keeper, operation, directory, program, progress, left, found, check, ahead, host_memory),
            communicators,
            agent,
            refuse_late,
        ).take()
        undoing.pop_all()
    begun = 0
    if left == "running":
        try:
            said = await after_save(channel, has_agent, None, settings.hook_timeout())
        except BaseException:
            if frozen.memory is not None:
                await asyncio.to_thread(frozen.memory.end)
            raise
        agent, begun = replace(agent, waited=said.waited or agent.waited), said.begun
    return Taken(staging, frozen, agent, communicators, begun)


@contextlib.contextmanager
def _in_words() -> Iterator[None]:
    try:
        yield
    except memory_copy.Unreliable as e:
        raise SaveFailed(
            _NOT_SAVED,
            str(e),
            "Save again: all of its memory is copied then. Earlier snapshots of it may be wrong; to have every save "
            f"copy all, set {settings.unchanged.variable}=copy where Jupyter starts.",
        ) from e
    except twin.MappingsChanged as e:
        then = "Save again: that is read during the pause from now on, which makes it a little longer."
        raise SaveFailed(_NOT_SAVED, str(e), then) from e
    except OSError as e:
        log.exception("the save failed")  # what the system said does not say where
        raise _not_saved(e) from e


async def run_on(keeper: Keeper, taken: Taken, failure: GpuckptError, progress: OperationProgress) -> None:
    """Let a kernel that was left stopped run on, as if it had not been taken.

    Raises
    ------
    KernelLost : the GPU state could not be brought back.
    """
    channel = keeper.channel
    assert channel is not None
    try:
        kernel = keeper.namespace().outer(keeper.state.kernel_pid)
        await criu_run.let_run(kernel, taken.frozen.still, progress.tell_of)
        await taken.frozen.gpu.thaw()
        await asyncio.to_thread(taken.communicators.make_again)
    finally:
        keeper.state.operation = None
        keeper.note_state()
        await after_save(channel, keeper.launch.agent, failure, settings.hook_timeout())


async def before_save(channel: AgentChannel, has_agent: bool, *, automatic: bool = False) -> ReadyForSave:
    """Have the agent run the hooks; return what it says about its kernel."""
    if not has_agent:
        return NOTHING
    try:
        told = {"automatic": True} if automatic and channel.is_told_more else {}
        answer = await channel.call_when_there("before_save", told, settings.hook_timeout())
    except AgentSilent:
        raise SaveFailed(
            _NOT_SAVED,
            f"Its hooks did not finish within {settings.hook_timeout():.0f} s: "
            "something in it holds Python's lock, or a hook hangs.",
            "Save again when the running cell is done, or raise GPUCKPT_HOOK_TIMEOUT (seconds).",
        ) from None
    ready = checked_reply(ReadyForSave, answer, SaveFailed, _NOT_SAVED)
    channel.is_told_more = ready.is_told_more
    return ready


async def after_save(
    channel: AgentChannel, has_agent: bool, failure: GpuckptError | None, patience: float
) -> AfterSave:
    """Have the agent undo its part, and wait until it has, for `patience` seconds at most; return what it says."""
    if not has_agent:
        return AfterSave()
    arguments = {"error": failure.as_dict() if failure else None}
    try:
        if patience:
            said = (
                await channel.call("after_save", arguments, patience) or {}
            )  # an agent of an older version says nothing
            return from_json(AfterSave, said)
        await channel.send({"call": "after_save", "id": 0, "args": arguments})
    except AgentSilent:
        log.warning("the hooks after the save did not finish in time")
    except Odd as e:
        log.warning("invalid answer of the agent after the save: %s", e)
    return AfterSave()


@dataclass(frozen=True)
class _Found:
    """What a kernel is before it is frozen: it can be, as far as can be known."""

    space: Namespace
    asleep: GpuSleep | None
    kernel: int
    tree: Sequence[int]
    on_gpu: Sequence[int]
    """Those of its processes with GPU state."""
    described: Mapping[str, Any]
    """What `cuda.describe` says of them."""
    private: int
    """Bytes of host memory to be taken."""
    shared_files: int
    """Bytes of files in its /dev/shm."""
    still: list[int]
    """The processes that are stopped already (SIGSTOP)."""
    unless_parked: Mapping[int, Refused]
    """Why those of its processes are refused that could not be restored if their memory were not parked."""
    apart: Sequence[int]
    """Those with several GPUs, which are kept apart where their memory is not parked."""
    ours: Sequence[int]
    """Those that have shared no GPU memory by handles of the driver's."""
    bound: list[BoundThreads]
    """Threads that may not run on all processors."""

    def with_zeros(self, size: int) -> Mapping[str, Any]:
        """Return what `cuda.describe` says, with so many bytes that are zeros."""
        return {**self.described, "zeros": size} if self.described else self.described


async def _look(keeper: Keeper, agent: ReadyForSave, communicators: Communicators) -> _Found:
    """See what there is to take. Raises `Refused` and `SaveFailed` for what could not be dumped, or not be undone."""
    space, worker, asleep = keeper.namespace(), keeper.worker, keeper.asleep
    kernel = space.outer(keeper.state.kernel_pid)
    if kernel is None:
        raise KernelLost("The {kernel} has ended.", "", "{Restart}.")
    tree = [kernel, *processes.descendants(kernel)]
    await asyncio.to_thread(communicators.look, _living(space))
    preflight.refuse_unsavable(space.pid, kernel, tree, keeper.twins.pids)
    apart: list[int] = []
    ours: list[int] = []
    on_gpu = asleep.living if asleep is not None else await asyncio.to_thread(cuda.freezable, worker, tree)
    described: dict[str, Any] = dict(asleep.described) if asleep is not None and on_gpu else {}
    unless_parked: Mapping[int, Refused] = {}
    if on_gpu and asleep is None:
        peers = {kernel: agent.peers} if agent.peers is not None else {}
        sharing = {pid: await asyncio.to_thread(parking_channel.sharing, space.run_dir, pid) for pid in on_gpu}
        owners = owners_of_imports(space, sharing, on_gpu)
        ours = [pid for pid, one in sharing.items() if not one.by_driver]
        connected = [pid for pid in on_gpu if processes.inner_pid(pid) in communicators.pids]
        refused = await asyncio.to_thread(
            cuda.preflight, worker, on_gpu, peers, connected=connected, sharing=ours, room_later=True
        )
        described = await asyncio.to_thread(cuda.describe, worker, on_gpu)
        to_be_parked, apart = await asyncio.to_thread(parked_or_apart, space.run_dir, on_gpu, refused, described)
        unless_parked = owners | to_be_parked
    private = processes.private_bytes(tree) + processes.swapped_bytes(tree) + _beyond_mapped(space, tree)
    if asleep is not None:
        private = max(0, private - asleep.vram.taken(on_gpu))  # which are counted as GPU memory
    still = processes.stopped(tree)
    shared_files = await asyncio.to_thread(_bytes_of_files, space.shared_memory)
    bound = await asyncio.to_thread(cpu_affinity.bound, tree, space.pid)
    return _Found(
        *(space, asleep, kernel, tree, on_gpu, described, private, shared_files, still),
        *(unless_parked, apart, ours, bound),
    )


@dataclass(frozen=True)
class _Freeze:
    """One freeze of a kernel."""

    keeper: Keeper
    operation: Operation
    directory: Path
    program: CriuProgram
    progress: OperationProgress
    left: criu.Left
    found: _Found
    check: Check
    ahead: Ahead
    host_memory: HostMemory | None
    communicators: Communicators
    agent: ReadyForSave
    refuse_late: Callable[[], None] | None

    async def take(self) -> tuple[Staging, Frozen]:
        """Freeze the kernel's tree, take it, and leave it as asked; what criu wrote is in the staging."""
        keeper, found = self.keeper, self.found
        inner, on_gpu = processes.inner_pids(found.tree), [processes.inner_pid(pid) for pid in found.on_gpu]
        noted = self._write_down()

        # What a device writes to is not seen as what a process writes to is.
        host_memory = self.host_memory if not found.on_gpu else None

        def criu_runs(pid: int) -> None:
            noted.criu = pid
            keeper.note_state()
            if host_memory is not None:
                host_memory.look_up()

        def parks(parked: Sequence[ParkedMemory]) -> None:
            noted.parking = list(parked)
            keeper.note_state()

        async with contextlib.AsyncExitStack() as undoing:
            await asyncio.to_thread(self._end_twins)  # nothing of an older dump is taken for this one's
            staging = await self._staging()
            undoing.push_async_callback(asyncio.to_thread, staging.discard)
            undoing.push_async_callback(asyncio.to_thread, self._end_twins)
            mapped = {path for pid in found.tree for path in processes.mapped_files(pid)}
            root = found.space.path("/")
            gpu = self._gpu_side(staging)
            undoing.push_async_callback(gpu.close)
            await gpu.prepare(judge=self._judge)
            await asyncio.to_thread(staging.prepare, found.shared_files, found.private)
            await asyncio.to_thread(self._take_communicators_down)
            await self.progress.enter("freezing", quiet=True)
            began = self.communicators.began or time.monotonic()
            if self.left == "stopped":
                await self._have_it_stop_sending()
            await gpu.freeze(parks)
            async with contextlib.AsyncExitStack() as undoing_freeze:
                undoing_freeze.push_async_callback(gpu.thaw)
                undoing_freeze.push_async_callback(criu_run.let_run, found.kernel, found.still, self.progress.tell_of)
                undoing_freeze.callback(self._end_cancelling)
                if found.asleep is None:
                    await asyncio.to_thread(cuda.refuse_other_use, found.on_gpu)
                if found.on_gpu and self.refuse_late is not None:
                    self.refuse_late()
                gpu.watch.begin("criu")
                # criu lets the tree run when it is done: a transaction that is seen then may have begun since.
                written = databases.written_by_lmdb(mapped, root) if self.left == "running" else set()
                await self._dump(staging, gpu, criu_runs)
                written |= databases.written_by_lmdb(mapped, root)
                await gpu.dumped()
                begun = await self._begun(gpu)
                device, number = file_numbers.following(found.space.shared_memory)
                self._end_cancelling()
                gpu.watch.begin("copy")
                parked = await gpu.finish_copy()
                gpu.watch.begin("look")
                notes = await self._look_at(staging)
                undoing_freeze.pop_all()
            if self.left == "running":
                await gpu.thaw()
                await asyncio.to_thread(self.communicators.make_again)
            # Without GPU state, only criu stops the kernel, and for less long than it runs.
            seconds, away = images.frozen_seconds(staging.outside), None
            if found.on_gpu and found.asleep is None:
                log.info("criu paused it for %.3f s", seconds)
                away = time.monotonic() - began
                at_once = self.left == "running" and not self.communicators.pids
                seconds = gpu.paused(seconds) if at_once else away
            if away is not None and self.left == "running":
                log.info("it was paused for %.3f s, off its GPU for %.2f s, in seconds: %s", seconds, away, gpu.watch)
            if found.space.outer(keeper.state.kernel_pid) is None:
                raise KernelLost("The {kernel} ended during the save.", "", "{Restart}.")
            await self.progress.enter("copying memory", cancellable=False)
            before = await host_memory.before() if host_memory is not None else None
            try:
                copied = await asyncio.to_thread(
                    memory_copy.copy, found.space.run_dir, staging.outside, found.space.outer, before
                )
            except twin.MappingsChanged:
                keeper.twins.reads_ahead = False
                raise
            if not (staging.in_memory or copied.copies):
                notes.append(_NO_MEMORY)
            if host_memory is None:
                await asyncio.to_thread(copied.end)
            undoing.pop_all()
        process = SavedProcesses(
            pid=keeper.state.kernel_pid,
            processes=list(inner),
            cuda=on_gpu,
            private_bytes=found.private,
            frozen_seconds=seconds,
            gpu_seconds=away,
            shared_files={**keeper.state.shared_files, device: number},
            bound=found.bound,
        )
        described = dict(found.described)
        if parked:
            described |= {"parked": [asdict(one) for one in parked], "zeros": gpu.zeros}
        if self.communicators.pids:
            described |= {"communicators": self.communicators.pids}
        frozen = Frozen(seconds, gpu, described, process, notes, found.still, written, begun, copied)
        if self.left == "running":
            frozen.begin_to_tidy()
            keeper.state.operation = None
            keeper.note_state()
        return staging, frozen

    async def _have_it_stop_sending(self) -> None:
        """Have all that the kernel has said reach its clients, and nothing more come: they are disconnected next."""
        if self.keeper.launch.agent and self.keeper.channel is not None:
            with contextlib.suppress(AgentSilent, GpuckptError):  # it is busy with Python's lock, or of before this
                await self.keeper.channel.call("stops_sending", {}, _LAST_WORDS)

    def _judge(self, zeros: int) -> None:
        """Refuse what has no room, where so many bytes of GPU memory are zeros."""
        self.check(self.found.private, self.found.with_zeros(zeros))

    def _take_communicators_down(self) -> None:
        self.communicators.take_down()
        if self.communicators.pids:
            cuda.refuse_together(self.found.on_gpu, self.found.ours)

    def _write_down(self) -> SaveInProgress:
        """Tell the next keeper what to undo, should this one be killed."""
        keeper, found = self.keeper, self.found
        noted = SaveInProgress(self.operation.name, self.left, found.still)
        if found.asleep is None:
            noted.cuda, noted.held = list(found.on_gpu), held_of(found.described)
        keeper.state.operation = noted
        keeper.save_state()
        return noted

    def _end_cancelling(self) -> None:
        self.operation.cancellable = False

    async def _staging(self) -> Staging:
        sleeps = self.found.asleep is not None
        return await asyncio.to_thread(Staging, self.found.space, self.directory / CRIU_IMAGES, sleeps=sleeps)

    def _gpu_side(self, staging: Staging) -> GpuFreeze:
        found, worker = self.found, self.keeper.worker
        if found.asleep is not None:
            return FrozenAsleep(found.asleep, worker, found.space)
        return GpuFreeze(
            worker,
            found.space,
            found.on_gpu,
            found.described,
            staging.vram,
            self.ahead,
            found.unless_parked,
            found.apart,
            run_from=self._runs_from(),
        )

    def _runs_from(self) -> RunFrom:
        """Return from when on the kernel may run: no call passes the gate by, and no cell gets into what is taken."""
        found = self.found
        alone = list(found.on_gpu) == [found.kernel] and not self.communicators.pids
        if not (self.agent.waits_for_gpu and alone and self.left == "running"):
            return "the end"
        return "parking" if self.agent.waits or self.refuse_late is not None else "dump"

    async def _dump(self, staging: Staging, gpu: GpuFreeze, started: Callable[[int], None]) -> None:
        self.progress.check()
        # What the driver has not put into files lies in the processes' memory by now, as what was managed memory does,
        # of which neither is known how much there was.
        left = max(0, sum(cuda.needs(self.found.described).values()) - gpu.taken())
        size = max(self.found.private + left, processes.anonymous_bytes(self.found.tree))
        staging.open_for(size)
        dumping = criu_run.dump(
            self.found.space,
            self.program,
            self.keeper.state.kernel_pid,
            (staging.outside, staging.inside),
            (staging.rest, staging.rest_inside),
            self.left,
            size,
            SaveFailed("The {kernel} could not be saved; it keeps running."),
            started,
            has_twins=self._may_fork(),
            reads_ahead=self.keeper.twins.reads_ahead,
        )
        await self.progress.or_cancelled(dumping)

    async def _begun(self, gpu: GpuFreeze) -> int | None:
        """Return how many requests the kernel has begun to execute since it was prepared, where it runs and says so."""
        channel = self.keeper.channel
        asks = self.refuse_late is not None and gpu.runs
        if not (asks and channel is not None and channel.is_told_more):
            return None
        with contextlib.suppress(AgentSilent, GpuckptError, Odd):  # the end of the freeze counts then
            return from_json(int, await channel.call("begun_since_save", {}, _SAYS))
        return None

    def _may_fork(self) -> bool:
        """Tell whether the tree's memory can be copied out of twins, when it runs again.

        A twin loses what is in reserved huge pages when its parent writes there and none is free (hugetlb's
        copy-on-write). Where all that the tree writes to meanwhile has no room in its cgroup, the system would kill.
        """
        found = self.found
        if self.left != "running" or found.space.deputy is not None or processes.has_huge_pages(found.tree):
            return False
        room = memory.room(os.getpid(), found.kernel)
        return not room.where or room.bytes > found.private

    def _end_twins(self) -> None:
        twin.end(self.found.space.run_dir, self.found.space.outer)

    async def _look_at(self, staging: Staging) -> list[str]:
        """Refuse what could not be restored, while the kernel is paused; return what the user must know."""
        _refuse_half_connections(staging)
        return await asyncio.to_thread(lost_names.keep, staging.outside, self.found.tree)


def _not_saved(error: BaseException) -> SaveFailed:
    return SaveFailed("The {kernel} could not be saved; it keeps running.", str(error), Cause.of(error).advice)


def _living(space: Namespace) -> set[int]:
    return set(processes.inner_pids(processes.descendants(space.pid)))


def _beyond_mapped(space: Namespace, tree: Sequence[int]) -> int:
    """Return the bytes of files in the kernel's /dev/shm beyond those that its processes have mapped.

    It is negative where several have mapped the same, so that this counts once.
    """
    about = os.statvfs(space.shared_memory)
    used = (about.f_blocks - about.f_bfree) * about.f_frsize
    return used - processes.mapped_bytes(tree, "/dev/shm/") if used else 0  # noqa: S108


def _bytes_of_files(folder: Path) -> int:
    """Return how many bytes the files in a folder have in memory, without those of other file systems in it."""
    device, total = folder.stat().st_dev, 0
    folders = [str(folder)]
    for one in folders:  # grows on the way
        with contextlib.suppress(OSError), os.scandir(one) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # it is gone
                    about = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(about.st_mode) and about.st_dev == device:
                        folders.append(entry.path)
                    elif stat.S_ISREG(about.st_mode):
                        total += about.st_blocks * _BLOCK
    return total


def _refuse_half_connections(staging: Staging) -> None:
    if images.has_half_connection(staging.outside):
        raise SaveFailed(
            "The {kernel} could not be saved; it keeps running.",
            "It is waiting for another program to accept a Unix socket connection, so a restore would fail.",
            "Close the connection, or wait until it is accepted, and save again.",
        )
