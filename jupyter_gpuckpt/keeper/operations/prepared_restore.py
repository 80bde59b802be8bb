"""A snapshot is read into a fresh sleeper, every byte of it verified; no kernel is touched for that."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...errors import Cancelled, GpuckptError, Refused
from ...freeze import cuda
from ...freeze.criu_program import CriuProgram
from ...freeze.holder_programs import HolderPrograms
from ...freeze.parking import PARKED, Parked, single_hashes
from ...freeze.straight_runs import StraightRuns
from ...snapshots.naming import NOT_RESTORED
from ...snapshots.summary import current_name
from ...store import HASH_OF_ZEROS, HOLE, Manifest, Snapshot, Store, Taker
from .. import preflight
from ..gpu.bring_back import GpuReturn
from ..gpu.late_vram import LateVram
from ..gpu.parked import parked_in
from ..staging import vram_files
from ..taken import refuse_taken
from .fresh_sleeper import EarlySleeper, FreshSleeper, RestorePlan
from .memory_writers import MemoryWriters
from .parts import CRIU_IMAGES, VRAM
from .progress import OperationProgress
from .straight_memory import StraightMemory, has_room_for

if TYPE_CHECKING:
    from ..kernel_life import Keeper

__all__ = ["PreparedRestore"]

_WORTH_IT = 0.25
"""Which part of a snapshot's GPU memory the running kernel has to have had: to look for it takes a moment."""


@dataclass
class PreparedRestore:
    """A snapshot of which every byte is right, in a fresh sleeper that it fits; no kernel has been touched for it.

    What is read behind the rest is not verified yet; `gpu` and `late` know of it.
    """

    snapshot: Snapshot
    new: FreshSleeper
    gpu: GpuReturn
    warnings: list[str]
    """What the user must know of it."""
    late: LateVram | None = None
    """Reads what was in GPU memory, where that is not waited for: all else is verified."""
    memory: StraightMemory | None = None
    """What of the host memory is read when criu has restored the processes."""

    _undoing: contextlib.AsyncExitStack = field(kw_only=True)

    @classmethod
    async def of(
        cls,
        keeper: Keeper,
        store: Store,
        manifest: Manifest,
        request: RestorePlan,
        program: CriuProgram,
        fitting: Awaitable[preflight.PreflightResult],
        leaving: Sequence[int],
        progress: OperationProgress,
        *,
        lazily: bool = False,
        beside: bool = False,
        alone: bool = False,
        writers: MemoryWriters | None = None,
        holders: HolderPrograms | None = None,
        sleeper: EarlySleeper | None = None,
    ) -> PreparedRestore:
        """Read it out of the store into a fresh sleeper; `leaving` are the processes that will have ended by then.

        `fitting` tells whether it fits, and is waited for no sooner than need be. The `holders` and the `sleeper` were
        started for this.

        With `lazily`, what was in GPU memory is seen to be there, and is read behind the rest. So is what goes straight
        to the GPU and, where there are `writers`, into the processes, `beside` a kernel that still runs or `alone`,
        where nothing runs that could be lost.

        Raises
        ------
        Refused, StoreError, Cancelled : nothing is left behind.
        """
        await progress.enter("verifying")
        async with contextlib.AsyncExitStack() as undoing:
            progress.watch.begin("sleeper")
            new = await FreshSleeper.prepare(keeper, manifest, request.images, request.lacking, sleeper)
            undoing.push_async_callback(new.discard)
            parked = parked_in(manifest.cuda)
            runs = _straight_runs(request, new, parked, writers) if writers is not None and (beside or alone) else ()
            # What was parked is read behind the rest, for which it need not be known then where the GPUs have room.
            behind = (beside or alone) and bool(parked) and not lazily
            is_wanted = request.is_wanted_at_once if behind or lazily else request.is_wanted
            needs_gpus = bool(parked) and not behind and not lazily
            at_once = _AtOnce(store, manifest, request, new, runs, progress)
            undoing.push_async_callback(at_once.give_up)
            if not needs_gpus:
                at_once.begin(is_wanted, {})
            progress.watch.begin("fits")
            fits = await fitting
            progress.watch.begin("GPU helpers")
            read_again = functools.partial(_read_parked, store, manifest, new)
            vram, in_use = vram_files(new.space), request.parked_in_use
            hashes = request.parked_hashes
            gpu = GpuReturn(
                *(keeper.worker, new.space, parked, fits.gpu_map, vram, read_again),
                in_use=in_use,
                hashes=hashes,
                holders=holders,
            )
            undoing.push_async_callback(gpu.close)
            await gpu.prepare(early=True, reading=not lazily)
            if beside and not lazily and keeper.asleep is None and gpu.takers:
                gpu.borrow(keeper.namespace(), functools.partial(_has_much_of, keeper, hashes))
            late = LateVram(store, manifest.name, manifest.id, VRAM, new.vram) if lazily else None
            if late is not None:
                undoing.push_async_callback(late.close)
                await asyncio.to_thread(late.open)
            progress.watch.begin("read")
            takers: dict[str, Taker] = {f"{VRAM}/{file}": taker for file, taker in gpu.takers.items()}
            if needs_gpus:
                at_once.begin(is_wanted, takers)
            snapshot = await at_once.read()
            if behind:
                await _read_behind(store, manifest, new, gpu, takers, progress)
            elif not lazily:
                await gpu.have_read()
            making: asyncio.Task[StraightMemory] | None = None
            if runs and writers is not None:
                images = snapshot.directory / CRIU_IMAGES
                making = asyncio.create_task(asyncio.to_thread(StraightMemory, store, manifest, runs, images, writers))
                undoing.push_async_callback(_close_once_made, making)
            if late is not None and making is None:  # else it waits for that memory, which the first cell needs
                late.start()
            if snapshot.manifest.id != manifest.id:
                raise Refused(
                    "The snapshot was not restored; nothing was touched.",
                    f"Another snapshot was saved as {manifest.name!r} at this moment.",
                    "Try again.",
                )
            progress.watch.begin("furnish")
            await progress.or_cancelled(new.furnish(snapshot))
            progress.watch.begin("files")
            await new.refuse_without_criu(program)
            root = new.space.path("/")
            await asyncio.to_thread(preflight.check_files, snapshot, root)
            await asyncio.to_thread(refuse_taken, NOT_RESTORED, snapshot.directory / CRIU_IMAGES, root, leaving)
            may_keep = program.new_connections
            found = await asyncio.to_thread(preflight.warnings, snapshot, leaving, may_keep_connections=may_keep)
            warnings = [*fits.notes, *new.notes(), *found]
            if fits.gpu_map is not None:
                warnings += await asyncio.to_thread(cuda.moves, keeper.worker, manifest.cuda, fits.gpu_map)
            memory = await making if making is not None else None
            return cls(snapshot, new, gpu, warnings, late, memory, _undoing=undoing.pop_all())

    async def discard(self) -> None:
        """Give it up."""
        await self._undoing.aclose()


async def _close_once_made(making: asyncio.Task[StraightMemory]) -> None:
    with contextlib.suppress(GpuckptError, OSError):  # whoever waited for it was told
        (await making).close()


def _straight_runs(
    request: RestorePlan, new: FreshSleeper, parked: Sequence[Parked], writers: MemoryWriters
) -> Sequence[StraightRuns]:
    """Return what of the memory is written straight into the processes, where criu would not be as quick."""
    runs = request.straight_runs
    if new.space.deputy is not None or not has_room_for(runs, request.images):
        return ()
    # criu copies the memory of each process by a thread of its own, while this program's threads read to the GPUs.
    return () if len(runs) > 1 and parked and not writers.count else runs


class _AtOnce:
    """What is taken out of the store at once, every byte of it verified, beside what else is done."""

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        request: RestorePlan,
        new: FreshSleeper,
        runs: Sequence[StraightRuns],
        progress: OperationProgress,
    ) -> None:
        self._store, self._name, self._new, self._runs, self._progress = store, manifest.name, new, runs, progress
        self._given_up = False
        self._reading: asyncio.Task[Snapshot] | None = None

    def begin(self, is_wanted: Callable[[str], bool], takers: Mapping[str, Taker]) -> None:
        """Begin to read those of the files that are wanted; of these, `takers` take the bytes."""
        self._reading = asyncio.create_task(asyncio.to_thread(self._read, is_wanted, takers))

    def _read(self, is_wanted: Callable[[str], bool], takers: Mapping[str, Taker]) -> Snapshot:
        new = self._new
        with contextlib.ExitStack() as closing:
            taken = dict(takers)
            for one in self._runs:
                others = closing.enter_context(contextlib.closing(one.others(new.files / CRIU_IMAGES)))
                taken[f"{CRIU_IMAGES}/{one.image}"] = others
            snapshot = self._store.open(self._name, new.files, self._amount, new.elsewhere, is_wanted, taken)
        snapshot.also_close = new.leave_files
        return snapshot

    def _amount(self, stage: str, done: int, total: int) -> None:
        if self._given_up:
            raise Cancelled("The restore was aborted.", "", "")
        self._progress.amount(stage, done, total)

    async def read(self) -> Snapshot:
        """Return it when all is read. Raises as `Store.open`."""
        assert self._reading is not None
        return await asyncio.shield(self._reading)

    async def give_up(self) -> None:
        """Stop, and give up what was read."""
        self._given_up = True
        if self._reading is not None:
            with contextlib.suppress(GpuckptError, OSError):
                await asyncio.to_thread((await self._reading).close)


async def _read_behind(
    store: Store,
    manifest: Manifest,
    new: FreshSleeper,
    gpu: GpuReturn,
    takers: Mapping[str, Taker],
    progress: OperationProgress,
) -> None:
    """Begin with what is read behind the rest: what the driver restores from, and what was parked.

    Where the GPUs have no room for that beside all else, all of it is read now.
    """
    postpone = functools.partial(store.postpone, manifest.name, manifest.id, {VRAM: new.vram})
    files = await asyncio.to_thread(postpone, lambda path: path not in takers)
    try:
        taken = await asyncio.to_thread(postpone, takers.__contains__, takers) if takers else None
        if taken is None:
            await asyncio.to_thread(files.read, progress.amount)
    except BaseException:
        files.close()
        raise
    if taken is None:
        files.close()
    else:
        gpu.read_behind(files, taken, progress.amount)


def _has_much_of(keeper: Keeper, hashes: Mapping[str, bytes]) -> bool:
    """Tell whether enough of these chunks was on GPUs when the running kernel was saved or restored last."""
    wanted = [key for each in hashes.values() for key in single_hashes(each) if key not in (HOLE, HASH_OF_ZEROS)]
    try:
        manifest = next(one for one in keeper.store.list() if one.id == keeper.state.parent_id)
        contents = keeper.store.contents(manifest)
    except (StopIteration, GpuckptError):
        return False
    has = {chunk.hash for path in contents.files if path.endswith(PARKED) for chunk in contents.files[path]}
    return sum(key in has for key in wanted) > len(wanted) * _WORTH_IT


def _read_parked(store: Store, manifest: Manifest, new: FreshSleeper, parked: Parked) -> None:
    """Write what was parked into its file, of a snapshot that is being restored; it may have been renamed meanwhile.

    Raises
    ------
    StoreError : it is not there any more.
    """
    path = f"{VRAM}/{parked.file}"
    name = current_name(store, manifest.name, manifest.id)
    with contextlib.closing(store.postpone(name, manifest.id, {VRAM: new.vram}, path.__eq__)) as files:
        files.read()
