"""Restore, step by step.

The running kernel is given up when the other one has come up beside it, and is as it was where that fails. Where the
two cannot be there at once (`beside`), it is given up before, after everything that can be known beforehand is known
to fit.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ... import settings
from ...checked import from_json
from ...client.broker_connection import COMES_BACK, usable_criu
from ...client.record import Operation, Parent, now
from ...errors import (
    GpuckptError,
    NoSuchSnapshot,
    Refused,
)
from ...freeze import images
from ...freeze.criu_program import CriuProgram
from ...freeze.holder_programs import HolderPrograms
from ...linux.reserved_ports import Reserved
from ...operations.requests import Redo, Restore, Undo
from ...operations.results import Restored, ResumedFrom, Woken
from ...snapshots.hibernated import forget
from ...snapshots.naming import find, find_own, latest_own
from ...snapshots.saved import kernel_of, machine_of, processes_of
from ...snapshots.summary import summary
from ...store import Manifest, Snapshot, Store, name_of
from .. import ports, preflight
from ..answers import unforeseen
from ..gpu import sharing
from ..gpu.parked import parked_in
from ..ipython_history import begin_session
from ..owner import owner_of
from ..ports import Places
from ..steps import back, forward, remove_old, undone_after
from ..unsaved import cells_since, resumed_from, saved_with, unsaved
from .failed_restore import failed_restore, not_restored, start_afresh
from .fresh_sleeper import EarlySleeper, plan_restore, resume
from .keep_unsaved import Kept, keep_unsaved
from .memory_writers import MemoryWriters
from .parts import CRIU_IMAGES
from .predecessor import Predecessor, has_room
from .prepared_restore import PreparedRestore
from .progress import OperationProgress, ProgressCallback, to_nobody
from .takeover import AtOnce, Coming, InPlace, Later, SideBySide, take_over
from .wake import awaken, until_whole
from .wake_at_touch import tell_not_woken

if TYPE_CHECKING:
    from ..kernel_life import Keeper

log = logging.getLogger("gpuckpt.keeper")

_ANSWERS = 1.0  # how long a restored kernel has to answer before it is woken all the same, in seconds
_LOOK = 0.5  # how often to look whether a snapshot has been saved, in seconds
_LINGERING = 70.0  # how long to wait for a port that nobody has and nobody can have, in seconds; Linux keeps it for 60


async def restore(keeper: Keeper, operation: Operation, request: Restore, on_progress: ProgressCallback) -> Restored:
    """Put the kernel back to a snapshot, and answer the cell that asked from there.

    Raises
    ------
    Refused, NoSuchSnapshot, Untrusted, Damaged, Cancelled : the running kernel was not touched. Refused and Cancelled
        also where a kernel that was restored lazily could not have its GPU state back yet: it sleeps.
    RestoreFailed : the restore failed. The running kernel is as it was; or it had to be given up before, and a fresh
        one was started in its place: which, is said.
    KernelLost : and no fresh kernel could be started either; or the GPU state could not be brought back.
    """
    try:
        prepared = await _prepare(keeper, operation, request, on_progress)
        return await prepared.carry_out()
    finally:
        if request.resume:
            keeper.drop_lease()


async def undo(keeper: Keeper, operation: Operation, request: Undo, on_progress: ProgressCallback) -> Restored:
    """Put the kernel back so many snapshots; what it is now is kept first. Raises as `restore`, `back` and `save`."""
    _refuse_job(keeper, "undone")
    to = await asyncio.to_thread(back, keeper, request.steps, request.cell)
    notes = []
    if (cells := cells_since(keeper, to, asked_by=request.cell) or 0) > request.steps:
        notes = [f"This undid {cells} cells; no state between them was saved."]
        if (failed := keeper.not_saved_by_itself) is not None:
            notes.append(f"The last automatic save had failed: {failed.why}")
    return await _step(keeper, operation, to, request.cell, on_progress, notes)


async def redo(keeper: Keeper, operation: Operation, request: Redo, on_progress: ProgressCallback) -> Restored:
    """Take the last undos back; what it is now is kept first. Raises as `restore`, `forward` and `save`."""
    _refuse_job(keeper, "redone")
    to = await asyncio.to_thread(forward, keeper, request.steps)
    return await _step(keeper, operation, to, request.cell, on_progress)


def _refuse_job(keeper: Keeper, done: str) -> None:
    if job := keeper.launch.job:
        raise Refused(
            f"Nothing was {done}.",
            "An undo goes back by cells, and a job has none.",
            f"`gpuckpt restore {job} SNAPSHOT` goes back to a snapshot; `gpuckpt list --auto` shows them.",
        )


async def _step(
    keeper: Keeper,
    operation: Operation,
    to: Manifest,
    cell: dict[str, Any] | None,
    on_progress: ProgressCallback,
    notes: Sequence[str] = (),
) -> Restored:
    """Go to a snapshot; what was saved in the middle of a cell stops there. There are `notes` for the user."""
    stop_here = kernel_of(to).cells is not None
    request = Restore(key=to.name, keep=True, stop_here=stop_here, cell=cell)
    prepared = await _prepare(keeper, operation, request, on_progress)
    prepared.verified.warnings += notes
    return await prepared.carry_out()


async def _prepare(keeper: Keeper, operation: Operation, request: Restore, on_progress: ProgressCallback) -> _Prepared:
    """Do all that can be done while the running kernel goes on as if nothing were; it may be saved."""
    progress = OperationProgress(operation, on_progress)
    await progress.enter("checking")
    progress.watch.begin("plan")
    store = operation.store or keeper.store
    key = await _key_once_saved(keeper, store, request, progress)
    name = operation.name = name_of(key)
    writers, holders = MemoryWriters(), HolderPrograms()
    async with contextlib.AsyncExitStack() as way_back:
        way_back.push_async_callback(asyncio.to_thread, writers.close)
        way_back.push_async_callback(asyncio.to_thread, holders.close)
        sleeper = EarlySleeper(keeper)
        way_back.push_async_callback(sleeper.close)
        starting = asyncio.create_task(asyncio.to_thread(_start_workers, keeper, store, key, holders))
        way_back.push_async_callback(asyncio.wait, [starting])
        (manifest, files), _ = await asyncio.gather(
            asyncio.to_thread(plan_restore, store, key), asyncio.to_thread(writers.begin, store, key)
        )
        telling = asyncio.create_task(asyncio.to_thread(writers.plan, files.straight_runs))
        way_back.push_async_callback(asyncio.wait, [telling])
        _refuse_to_stop(manifest, request)
        program = await asyncio.to_thread(usable_criu, COMES_BACK)
        before = keeper.space  # None where a job comes up that does not run
        leaving = keeper.tree()
        progress.watch.begin("machine")
        check = functools.partial(
            preflight.check_machine, manifest, files, keeper.launch, keeper.worker, program, leaving
        )
        check = functools.partial(check, keeper.marks, request.gpus)
        if request.resume:
            await asyncio.to_thread(keeper.take_lease, manifest.id)
        alone = before is None
        fits, why_at_once = await _lazy_fit(manifest, check) if request.lazy else (None, "")
        lazily = fits is not None
        fitting = asyncio.create_task(_fitting(starting, keeper, progress, check) if fits is None else _known(fits))
        way_back.push_async_callback(_give_up, fitting)
        if not alone:  # else it is read meanwhile
            await fitting
        progress.watch.begin("keep")
        kept = Kept() if request.discard else await keep_unsaved(keeper, operation, request, progress, on_progress)
        progress.watch.begin("room")
        beside = bool(leaving) and not request.in_place and not keeper.launch.job
        beside = beside and await _has_room(keeper, manifest, await fitting, lazily)
        predecessor = Predecessor(keeper, progress, name, request.cell)
        way_back.push_async_callback(predecessor.stay)
        if beside:
            predecessor.get_ready(leaving)
        of = functools.partial(PreparedRestore.of, keeper, store, manifest, files, program, fitting, leaving, progress)
        of = functools.partial(of, writers=writers, holders=holders, sleeper=sleeper)
        verified = await of(lazily=lazily, beside=beside, alone=alone)
        if verified.memory is None:
            await asyncio.to_thread(writers.close)
        way_back.push_async_callback(verified.discard)
        if why_at_once:
            verified.warnings.append(f"The restore was not lazy: {why_at_once}.")
        if kept.why_not:
            verified.warnings.append(f"That could not be saved first: {kept.why_not}")
        undoing = way_back.pop_all()
        return _Prepared(
            *(keeper, operation, request, progress, program, leaving, predecessor, verified, kept.name, undoing),
            came_up_alone=alone,
        )


@dataclass
class _Prepared:
    """A restore of which all is known that can be known beforehand; the running kernel is as it was."""

    keeper: Keeper
    operation: Operation
    request: Restore
    progress: OperationProgress
    program: CriuProgram
    leaving: Sequence[int]
    """The processes of the running kernel."""
    predecessor: Predecessor
    verified: PreparedRestore
    kept: str
    """The name of the snapshot that was made of it; empty where none was."""
    way_back: contextlib.AsyncExitStack
    """What undoes all that was done so far: `Predecessor.leave` clears it."""
    reserved: Reserved = field(default_factory=Reserved)
    waking: asyncio.Task[Woken] | None = None
    came_up_alone: bool = False
    """Whether no kernel ran before."""

    @property
    def _name(self) -> str:
        return self.operation.name

    @property
    def _lazily(self) -> bool:
        return self.verified.late is not None

    async def carry_out(self) -> Restored:
        """Have the other kernel take the place of the one that runs, and answer. Raises as `restore`."""
        keeper, snapshot = self.keeper, self.verified.snapshot
        try:
            async with self.way_back:
                result, tidying = await self._take_over()
            result = await self._answer(result, tidying)
            log.info("restore of %r, in seconds: %s", self._name, self.progress.watch)
        except Exception as e:
            log.exception("the restore of %r failed", self._name)
            cause = e if isinstance(e, GpuckptError | OSError) else unforeseen("restore", e, keeper.folder.path)
            raise await self._failed(cause) from e
        finally:
            self.reserved.close()
            await asyncio.to_thread(snapshot.close)
        if self._is_step:
            await asyncio.to_thread(remove_old, keeper, snapshot.manifest.id)
        if self.request.resume:
            await asyncio.to_thread(forget, keeper.store, snapshot.manifest.name, snapshot.manifest.id)
            if settings.remote():
                from ...snapshots.at_remote import remove_one  # which brings in what few keepers need

                told = (keeper.store, snapshot.manifest.name, snapshot.manifest.id)
                threading.Thread(target=remove_one, args=told).start()  # nobody waits for it, but this process's end
        if self.waking is not None:
            keeper.state.operation = None  # whoever holds the kernel next has one that sleeps
            keeper.note_state()
            await _until_awake(keeper, self.waking)
        return replace(result, seconds=self.progress.seconds())

    @property
    def _is_step(self) -> bool:
        """Whether it can be undone or redone: not where it brings back what a hibernated kernel or a job was."""
        return not (self.request.resume or self.keeper.launch.job)

    async def _take_over(self) -> tuple[Restored, asyncio.Task[None]]:
        """Give one kernel up for the other; return what that one is told, and what is tidied up yet."""
        keeper, predecessor = self.keeper, self.predecessor
        snapshot, new, gpu, late = self.verified.snapshot, self.verified.new, self.verified.gpu, self.verified.late
        memory = self.verified.memory
        watch = self.progress.watch
        watch.begin("ports")
        of_job = await asyncio.to_thread(self._places_of_job) if keeper.launch.job else None
        given_up = unsaved(keeper, asked_by=self.request.cell)
        result = predecessor.result = Restored(
            **vars(summary(snapshot.manifest)),
            lazy=self._lazily,
            warnings=self.verified.warnings,
            kept=self.kept,
            given_up=None if self.kept else given_up,
            stop_here=self.request.stop_here,
        )
        shared = await predecessor.ports_with(snapshot)
        way: InPlace | SideBySide
        if shared is not None:
            way = SideBySide(predecessor, late, self.way_back, self.progress)
        else:
            if not self.came_up_alone:  # nothing of what runs is given up for what may not be right
                await gpu.have_read()
            if memory is not None and not self.came_up_alone:
                await memory.complete()
                memory = None
            if late is not None:
                late.start()
            await predecessor.leave(late, self.way_back)
            way = InPlace(predecessor.peers)
        if of_job is not None:
            places = of_job
            await _until_ports_are_free(snapshot, places, self.progress)
        else:
            places = self._places_of_kernel(shared or ())
        manifest = snapshot.manifest
        gpu_state = AtOnce(gpu, new, manifest) if late is None else Later(gpu, new, manifest, late, keeper)
        parent: Parent | None = Parent(self._name, manifest.id)
        undone = keeper.state.undone
        if self._is_step:
            undone = await asyncio.to_thread(undone_after, keeper, manifest)
        if self.request.resume:
            parent = await asyncio.to_thread(_origin, keeper.store, manifest)
        coming = Coming(keeper, snapshot, new, self.program, gpu_state, self.verified.warnings, memory, watch)
        tidying = await take_over(coming, way, places)
        # At once: the keeper may be killed before the cell has its answer, or right after.
        keeper.state.parent, keeper.state.undone = parent, undone
        keeper.state.resumed = _resumed(manifest) if self.request.resume else None
        if self._is_step:
            keeper.last_cell = kernel_of(manifest).after
            keeper.ran.clear()
        goes_on = kernel_of(manifest).in_cell and not self.request.stop_here
        saved_with(keeper, kernel_of(manifest).cells, in_cell=goes_on)
        if self.request.resume:
            resumed_from(keeper, manifest)
            keeper.state.choose(kernel_of(manifest).choices)
        keeper.note_state()
        return result, tidying

    def _places_of_job(self) -> Places:
        """Return where the sockets of a job come back: at the ports that they had.

        Raises
        ------
        Refused : somebody has one of them, and others were not asked for (``other_ports``).
        """
        bound = images.bound_sockets(self.verified.snapshot.directory / CRIU_IMAGES)
        places = Places.of_job(ports.elsewhere(bound, self.leaving, may_differ=self.request.other_ports))
        self.verified.warnings += [f"Port {port} is port {new} now." for port, new in places.table.items()]
        return places

    def _places_of_kernel(self, shared: Collection[int]) -> Places:
        kernel, file = kernel_of(self.verified.snapshot.manifest), self.keeper.launch.connection_file
        aside = ports.endpoint_differs(kernel, file)
        return Places.of_restore(kernel.connection, file, self.reserved, shared, aside=aside)

    async def _answer(self, result: Restored, tidying_gpu: asyncio.Task[None]) -> Restored:
        """Have the restored kernel answer; return what there is to say."""
        keeper, operation, progress = self.keeper, self.operation, self.progress
        snapshot = self.verified.snapshot
        progress.watch.begin("answer")
        # criu is done with its files, and the memory that they lie in may be much.
        tidying = asyncio.create_task(asyncio.to_thread(snapshot.close))
        operation.answering = True
        answered = asyncio.Event()
        if self._lazily:
            # At the same time: what the kernel does on its way, such as its hooks, may need the GPU already.
            operation.kind, operation.cancellable = "wake", True
            self.waking = asyncio.create_task(_waken_soon(keeper, answered, progress))
        if kernel_of(snapshot.manifest).agent:
            channel, asked = self.verified.new.channel, self.predecessor.asked
            result.warnings.extend(await resume(channel, asked, result, progress.asked_at()))
            keeper.leave_out_work()
        await asyncio.to_thread(begin_session, keeper.launch)
        answered.set()
        if self._lazily:
            result = replace(result, answered=progress.seconds())
        for fault in await asyncio.gather(tidying, tidying_gpu, return_exceptions=True):
            if isinstance(fault, Exception):  # the kernel is back and runs: that does not end it
                log.error("what is left of the restore of %r could not be tidied up", self._name, exc_info=fault)
        return result

    async def _failed(self, cause: Exception) -> Exception:
        """See to it that there is a kernel after a restore that failed, and return the error to raise."""
        keeper, name = self.keeper, self._name
        if not self.predecessor.has_left:
            return not_restored(name, cause, has_ended=keeper.exit_status is not None)
        if self.waking is not None:
            self.operation.cancelling.set()
        await self._clear_away()
        self.operation.answering = True
        if keeper.launch.job or self.came_up_alone:
            await keeper.ended(-signal.SIGKILL)
            return failed_restore(name, cause, keeper.launch.job)
        return await start_afresh(keeper, name, self.predecessor.asked, self.predecessor.peers, cause)

    async def _clear_away(self) -> None:
        """End what came up in its place; what of it cannot be ended keeps nothing else from coming."""
        try:
            await self.verified.new.discard()
            if self.waking is not None:
                await asyncio.wait([self.waking])
            await self.keeper.forget_sleep()
            if self.verified.late is not None:
                await self.verified.late.close()
        except Exception:
            log.exception("what was left of the restore could not be ended")


def _resumed(hibernated: Manifest) -> ResumedFrom:
    """Return where a kernel comes from that was hibernated."""
    name = name_of(hibernated.name)
    return ResumedFrom(name=name, saved=hibernated.created, host=machine_of(hibernated).host, at=now())


def _origin(store: Store, hibernated: Manifest) -> Parent | None:
    """Return what a hibernated kernel came from, as `State.parent` has it: its own snapshot goes when it is back."""
    try:
        found = (manifest for manifest in store.list() if manifest.id == hibernated.parent)
        return next((Parent(name_of(manifest.name), manifest.id) for manifest in found), None)
    except GpuckptError:
        return None


def _refuse_to_stop(manifest: Manifest, request: Restore) -> None:
    if request.stop_here and kernel_of(manifest).cells is None:
        raise Refused(
            "The snapshot was not restored; nothing was touched.",
            "It cannot stop where it was saved: it is not a kernel, or was saved by an older version.",
            "Restore it without --stop-here: the rest of the saved cell is run.",
        )


async def _has_room(keeper: Keeper, manifest: Manifest, fits: preflight.PreflightResult, lazily: bool) -> bool:
    return await asyncio.to_thread(has_room, keeper, manifest, fits.gpu_map, gpu_later=lazily)


async def _lazy_fit(
    manifest: Manifest, check: Callable[..., preflight.PreflightResult]
) -> tuple[preflight.PreflightResult | None, str]:
    """Return how a snapshot fits whose GPU memory comes later; None where it cannot, and why if it has any.

    Raises
    ------
    Refused : it does not fit; GPUs without room are no reason.
    """
    if not processes_of(manifest).cuda:
        return None, ""
    if why := _why_at_once(manifest):
        return None, why
    found = await asyncio.to_thread(check, gpu_room_later=True)
    if found.gpu_map is not None:
        return None, "its GPU memory moves to another GPU"
    return found, ""


def _why_at_once(manifest: Manifest) -> str:
    """Return why a kernel cannot run while it has no GPU state yet; nothing where it can."""
    kernel, saved = kernel_of(manifest), processes_of(manifest)
    if not kernel.agent:
        return "it is not a kernel with an agent"
    if not kernel.waits_for_gpu:
        return (
            "some of its CUDA calls would not wait (it was saved by an older version, with GPUCKPT_PARKING=off, or "
            "while its GPUs had access to each other's memory)"
        )
    if saved.cuda != [saved.pid]:
        return "its child processes use a GPU, too"
    return ""


async def _waken_soon(keeper: Keeper, answered: asyncio.Event, progress: OperationProgress) -> Woken:
    """Wake the restored kernel when all of its GPU memory is there and it has answered: its threads are held for that.

    One that does not answer may be waiting for the GPU itself.
    """
    await until_whole(keeper, progress)
    with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
        await asyncio.wait_for(answered.wait(), _ANSWERS)
    return await awaken(keeper, progress)


async def _until_awake(keeper: Keeper, waking: asyncio.Task[Woken]) -> None:
    """Wait until the restored kernel has what it had on GPUs; where it cannot have it, it is told.

    Raises
    ------
    Refused, StoreError, Cancelled : it sleeps.
    KernelLost : its GPU state could not be brought back.
    """
    try:
        await waking
    except GpuckptError as e:
        log.warning("the restored kernel has no GPU state: %s", e)
        if keeper.channel is not None:
            await tell_not_woken(keeper.channel, e)
        raise


async def _fitting(
    starting: Awaitable[None],
    keeper: Keeper,
    progress: OperationProgress,
    check: Callable[[], preflight.PreflightResult],
) -> preflight.PreflightResult:
    """Return that the snapshot fits this machine, when what calls the driver has started. Raises as `fitting`."""
    await starting
    return await sharing.fitting(keeper, progress, check)


async def _known(fits: preflight.PreflightResult) -> preflight.PreflightResult:
    return fits


async def _give_up(task: asyncio.Task[preflight.PreflightResult]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _start_workers(keeper: Keeper, store: Store, key: str, holders: HolderPrograms) -> None:
    """Start what makes the calls to the driver, and `holders`, beside what is read of a snapshot with GPU state."""
    with contextlib.suppress(GpuckptError):  # who needs it is told
        manifest = store.trusted(key)
        # Without a context yet: what fits the GPUs is seen meanwhile.
        holders.start([()] * len(parked_in(manifest.cuda)))
        if on_gpu := processes_of(manifest).cuda:
            keeper.worker.have(len(on_gpu))


async def _key_once_saved(keeper: Keeper, store: Store, request: Restore, progress: OperationProgress) -> str:
    """Return the key of the snapshot that is meant, and wait for it where another kernel is just saving it.

    Raises
    ------
    BadName, NoSuchSnapshot, Refused, Cancelled : as `_key`; or nobody wants to wait any longer.
    """
    waited = False
    while True:
        try:
            key = await asyncio.to_thread(_key, keeper, store, request)
            await asyncio.to_thread(store.get, key)
            return key
        except NoSuchSnapshot as e:
            saving = bool(e.data.get("saving"))
            if not saving and not waited:
                raise
            waited = saving  # it may have been saved between the two looks: one more
            if saving:
                await progress.enter(f"waiting until {e.data['name']} is saved. {e.why}")
        await progress.or_cancelled(asyncio.sleep(_LOOK))


def _key(keeper: Keeper, store: Store, request: Restore) -> str:
    """Return the key of the snapshot that is meant.

    Raises
    ------
    BadName, NoSuchSnapshot, Refused : as `find`, `find_own` and `latest_own`.
    """
    if request.key:
        return request.key
    if request.of_any:
        return find(store, request.of_any)
    if request.name:
        return find_own(store, request.name, owner_of(keeper))
    return latest_own(store, owner_of(keeper))


async def _until_ports_are_free(snapshot: Snapshot, places: Places, progress: OperationProgress) -> None:
    """Wait for the ports that the system keeps for a while after a server's end."""
    bound = images.bound_sockets(snapshot.directory / CRIU_IMAGES)
    deadline = time.monotonic() + _LINGERING
    while (kept := await asyncio.to_thread(ports.lingering, bound, places.table)) and time.monotonic() < deadline:
        await progress.enter(f"waiting until port {kept[0]} is free", cancellable=False)
        await asyncio.sleep(0.2)


async def bring_up(keeper: Keeper) -> None:
    """Bring up a job that does not run, or a hibernated kernel, as it was ordered: from the snapshot to be restored.

    Raises
    ------
    GpuckptError, OSError : it did not come up.
    """
    request = from_json(Restore, keeper.folder.take_order())
    with keeper.operations.begin(Operation("restore", name_of(request.key or ""))) as operation:
        try:
            result = await restore(keeper, operation, request, to_nobody)
        finally:
            keeper.state.operation = None
    keeper.notes = result.warnings
    keeper.note_state()
