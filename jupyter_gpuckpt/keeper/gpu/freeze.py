"""The GPU side of a save: what is done about it before, in and after the freeze."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ... import settings
from ...client.in_progress import ParkedMemory
from ...errors import GpuckptError, Refused
from ...freeze import cuda, parking_channel
from ...freeze import parking as parking_
from ...freeze.holder_programs import HolderPrograms
from ...freeze.parking import Elsewhere, Parked, Parking, Seen, single_hashes
from ...freeze.parking_channel import ParkingChannel, Sharing
from ...freeze.vram import VramFiles
from ...linux import processes
from ...store import CHUNK, HASH_OF_ZEROS
from ..namespace import Namespace
from ..stopwatch import Stopwatch
from . import gate
from .parked import bring_imports_back, noted_parked, or_lost, together
from .peers import bring_together, keep_apart

__all__ = [
    "Ahead",
    "GpuFreeze",
    "Judge",
    "LookElsewhere",
    "RunFrom",
    "judge_nothing",
    "owners_of_imports",
    "refuse_imports",
]

log = logging.getLogger("gpuckpt.keeper")

_CHECKPOINT = 64 << 20
"""Bytes of GPU memory that the driver's checkpoint is left, to be sure: with 15 MiB it succeeds, with next to none it
does not (driver 580.159)."""
_LOOKS_AGAIN = 2.0
"""Seconds between two looks at all processes whose GPUs are waited for."""
_WORTH_PARKING = 256 << 20
"""Bytes from which on parking is quicker than the driver's own copy."""


LookElsewhere = Callable[[], Elsewhere]
"""Says what of parked memory is found elsewhere."""
RunFrom = Literal["parking", "dump", "the end"]
Judge = Callable[[int], None]
"""Refuses what has no room, where so many bytes of what processes have on GPUs are zeros."""


def judge_nothing(_: int) -> None:
    """Leave it to others to look for room."""


class Ahead:
    """What a save begins with before all else, while the kernel's hooks run: it takes as long as they do.

    Attributes
    ----------
    holders : the programs that hold what is parked.
    """

    def __init__(self, look_elsewhere: LookElsewhere | None = None) -> None:
        """Begin nothing yet; `look_elsewhere` says what of parked memory need not be copied."""
        self.holders = HolderPrograms()
        self._look = look_elsewhere
        self._starting: asyncio.Task[bool] | None = None
        self._looking: asyncio.Task[Elsewhere | None] | None = None

    def begin(self, run_dir: Path, tree: Sequence[int]) -> None:
        """Begin, where one of these processes has memory to park; nobody else asks them until `have_asked`."""
        self._starting = asyncio.create_task(asyncio.to_thread(self._start, run_dir, tree))
        self._looking = asyncio.create_task(self._look_if_started())

    def _start(self, run_dir: Path, tree: Sequence[int]) -> bool:
        gpus: list[set[str]] = []
        with contextlib.suppress(OSError):  # who looks again is told
            found = (parking_channel.parkable(run_dir, pid) for pid in cuda.cuda_pids(tree))
            worth_it = (places for places in found if sum(size for _, size in places) >= _WORTH_PARKING)
            gpus = [{gpu for gpu, size in places if size} for places in worth_it]
        self.holders.start(gpus)
        return bool(gpus)

    async def _look_if_started(self) -> Elsewhere | None:
        assert self._starting is not None
        return await asyncio.to_thread(self._look) if await self._starting and self._look is not None else None

    async def have_asked(self) -> None:
        """Wait until the processes have been asked what they have to park."""
        if self._starting is not None:
            await asyncio.wait([self._starting])

    async def elsewhere(self) -> Elsewhere | None:
        """Return what of parked memory need not be copied; None where all is to be. Raises as that look does."""
        found = await self._looking if self._looking is not None else None
        if found is None and self._look is not None:
            found = await asyncio.to_thread(self._look)
        return found

    async def close(self) -> None:
        """End what nobody has taken."""
        if self._looking is not None:
            await asyncio.gather(self._looking, return_exceptions=True)
        await asyncio.to_thread(self.holders.close)


class GpuFreeze:
    """One save's GPU side; nothing, where no process has GPU state.

    Parameters
    ----------
    space : the processes' namespace.
    pids : the processes with GPU state.
    described : what `cuda.describe` says of them.
    vram : the files for what is in VRAM.
    ahead : what was begun already.
    unless_parked : why those of them are refused that could not be restored if their memory were not parked.
    several : those with several GPUs: these are kept apart where their memory is not parked (`peers`).
    run_from : from when on the processes run that park their memory, if nothing speaks against it (`Parking.let_run`):
        from when it is handed over, while the driver takes the rest of their GPU state; from `dumped` on, while it
        brings that back; or when all is back. Before that, none of their calls may pass the gate by.

    Attributes
    ----------
    hashes : by the name of its file, those of all chunks of what a process parked, once it is copied, where they could
        be made.
    zeros : how many bytes of all that are zeros, as far as that is known.
    watch : what each step of the pause took, for the keeper's log.
    """

    zeros = 0

    def __init__(
        self,
        worker: cuda.CudaWorker,
        space: Namespace,
        pids: Sequence[int],
        described: Mapping[str, Any],
        vram: VramFiles,
        ahead: Ahead | None = None,
        unless_parked: Mapping[int, Refused] | None = None,
        several: Sequence[int] = (),
        *,
        run_from: RunFrom = "the end",
    ) -> None:
        self._run_from = run_from
        self._unless_parked, self._several = dict(unless_parked or {}), several
        self.watch = Stopwatch()
        self.hashes: dict[str, bytes] = {}
        self._ahead = ahead or Ahead()
        self._worker, self._space, self._vram = worker, space, vram
        self._pids, self._described = pids, described
        self._parkings: dict[int, Parking] = {}
        self._began = self._back = 0.0
        self._runs_since: float | None = None
        self._ran_before_dump = False
        self._away: list[int] = []
        self._elsewhere: Elsewhere | None = None

    async def prepare(self, may_park: Container[int] | None = None, judge: Judge = judge_nothing) -> None:
        """Make the memory ready that VRAM goes into; these processes may park, all where it is None.

        Raises
        ------
        Refused : memory cannot be parked that has to be; host memory has no room for what is in use; or as `judge`.
        """
        if not self._pids:
            return
        held = {one["pid"]: one["used"] for one in self._described["processes"]}
        sizes = {pid: sum(held[pid].values()) for pid in self._pids}
        parked = await self._parkable(may_park)
        names = {
            pid: (str(processes.inner_pid(pid)), max(0, size - parked[pid].size) if pid in parked else size)
            for pid, size in sizes.items()
        }
        preparing = asyncio.create_task(asyncio.to_thread(self._vram.prepare, names))
        try:
            await self._begin_parking(parked)
            seen = await self._see()
        finally:
            await asyncio.wait([preparing])
        await preparing
        await self._stage(sum(sizes.values()), seen, judge)
        self._refuse_but(self._parkings)

    async def _begin_parking(self, parked: Mapping[int, Parked]) -> None:
        """Have what parks these processes ready, where GPUs have room for it. Raises `Refused`."""
        elsewhere = self._elsewhere = await self._ahead.elsewhere() if parked else None

        def begin(one: Parked) -> Parking:
            space, vram, program = self._space, self._vram, self._ahead.holders.take(one.gpus)
            return Parking(space.run_dir, vram.outside, vram.inside, one, "new", elsewhere=elsewhere, program=program)

        self._parkings = dict(zip(parked, await together(begin, parked.values()), strict=True))
        await self._ahead.close()
        await asyncio.to_thread(self._worker.have, len(self._pids))
        ready = dict(zip(self._parkings, await together(Parking.get_ready, self._parkings.values()), strict=True))
        free = {gpu.uuid: gpu.free for gpu in await asyncio.to_thread(self._worker.gpus)} if any(ready.values()) else {}
        await self._keep_those(pid for pid, one in parked.items() if ready[pid] and _has_room(one.gpus, free))
        self._refuse_but(self._parkings)

    async def _parkable(self, may_park: Container[int] | None) -> dict[int, Parked]:
        """Return what is worth parking of these processes, by pid."""
        pids = [pid for pid in self._pids if may_park is None or pid in may_park] if parking_.is_supported() else []
        places = await together(functools.partial(parking_channel.parkable, self._space.run_dir), pids)
        found = {pid: Parked(processes.inner_pid(pid), 0, tuple(each)) for pid, each in zip(pids, places, strict=True)}
        return {pid: one for pid, one in found.items() if one.size >= self._least(pid)}

    async def _see(self) -> dict[int, Seen | None]:
        """See what is in use of what can be parked."""
        parkings = self._parkings
        return dict(zip(parkings, await together(lambda one: one[1].see(one[0]), parkings.items()), strict=True))

    async def _stage(self, size: int, seen: Mapping[int, Seen | None], judge: Judge) -> None:
        """Make memory ready for what was seen to be in use; all of the GPU memory is `size`.

        Raises
        ------
        Refused : as `prepare`.
        """
        parkings = self._parkings
        known = {pid: (parkings[pid].parked.size, one) for pid, one in seen.items() if one is not None}
        judge(sum(all_of_it - one.in_use for all_of_it, one in known.values()))
        needed = size - sum(all_of_it - one.new for all_of_it, one in known.values())
        await asyncio.to_thread(cuda.refuse_without_memory, self._pids, needed)
        staged = dict(zip(parkings, await together(Parking.stage, parkings.values()), strict=True))
        await self._keep_those(pid for pid, is_staged in staged.items() if is_staged)

    async def _keep_those(self, pids: Iterable[int]) -> None:
        """End the parkings of all processes but these: the driver copies what those have."""
        keep = set(pids)
        ending = [self._parkings.pop(pid) for pid in list(self._parkings) if pid not in keep]
        await together(Parking.close, ending)

    def _least(self, pid: int) -> int:
        """Return from how many bytes on the memory of a process is parked."""
        return 1 if pid in self._unless_parked or pid in self._several else _WORTH_PARKING

    def _refuse_but(self, parked: Container[int]) -> None:
        """Refuse processes that have to be parked, but for these."""
        for pid, refused in self._unless_parked.items():
            if pid not in parked:
                raise refused

    async def freeze(self, note: Callable[[Sequence[ParkedMemory]], None]) -> None:
        """Take the GPU state of all processes off the GPUs; `note` writes down what `GpuReturn.after` must know.

        Raises
        ------
        SaveFailed, KernelLost : as `cuda.freeze`.
        Refused : memory was not parked that has to be.
        """
        if not self._pids:
            return
        await together(lambda one: one[1].call(one[0]), self._parkings.items())
        self._began = time.monotonic()
        if not self._parkings:
            self._runs_since = self._began  # what is not parked is not held still
        try:
            await self._freeze(note)
        except BaseException:
            await asyncio.to_thread(self._as_before)
            raise

    async def _freeze(self, note: Callable[[Sequence[ParkedMemory]], None]) -> None:
        noted = {pid: noted_parked(one.parked, one.holder) for pid, one in self._parkings.items()}
        turn = threading.Lock()

        def note_parked(pid: int, parked: Parked) -> None:
            with turn:
                noted[pid] = noted_parked(parked, noted[pid].holder)
                note(list(noted.values()))

        if noted:
            note(list(noted.values()))
        try:
            self.watch.begin("park")
            await self._park(note_parked)
            self._refuse_but(self._are_parked())
            await asyncio.to_thread(keep_apart, self._space.run_dir, self._unparked_several())
            self.watch.begin("checkpoint")
            await asyncio.to_thread(cuda.freeze, self._worker, self._pids, self._described, self._vram.taking)
        except BaseException:
            await asyncio.to_thread(_give_back, self._parkings)
            raise
        for parking in self._parkings.values():
            parking.let_go()
            parking.give_up_zeros()
        self._ran_before_dump = self._runs_since is not None

    async def _park(self, note: Callable[[int, Parked], None]) -> None:
        """Close the gate for all processes, and park what can be parked."""
        halted = await together(lambda one: one[1].halt(one[0]), self._parkings.items())
        others = set(self._pids) - set(self._parkings)
        await together(functools.partial(parking_channel.watch_gate, self._space.run_dir), others)
        # Not before: who waits at the gate may hold Python's lock, which is needed to halt a process.
        closed = await asyncio.to_thread(gate.close, self._space.run_dir)
        ready = [one for one, is_halted in zip(self._parkings.items(), halted, strict=True) if is_halted]
        await self._wait_for_gpus(ready)
        here = {pid: parking.channel for pid, parking in ready}
        await together(lambda pid: self._put_imports_away(pid, here, closed), self._pids)
        until_shut = functools.partial(gate.settle, closed)
        early = until_shut if self._run_from == "parking" else None
        await together(lambda one: one[1].park(one[0], functools.partial(note, one[0]), early), ready)
        await asyncio.to_thread(until_shut)
        if early is not None:
            self._let_run()

    async def _wait_for_gpus(self, halted: Sequence[tuple[int, Parking]]) -> None:
        """Wait until GPUs have done what these processes gave them; none waits for long to hear what comes next.

        Raises
        ------
        SaveFailed : they have not in time.
        """
        limit = settings.lock_timeout()
        deadline = time.monotonic() + limit
        while not all(idle := await together(lambda one: one[1].wait_for_gpus(min(limit, _LOOKS_AGAIN)), halted)):
            if time.monotonic() > deadline:
                raise cuda.still_at_work(halted[idle.index(False)][0])

    def _put_imports_away(self, pid: int, here: Mapping[int, ParkingChannel], closed: float) -> None:
        """Have a process close what it has open of others' memory, which has to be parked then; `here` are talked to.

        Raises
        ------
        Refused : it does not, or not all owners can park.
        """
        run_dir = self._space.run_dir
        sharing = here[pid].sharing() if pid in here else parking_channel.sharing(run_dir, pid)
        self._unless_parked |= owners_of_imports(self._space, {pid: sharing}, here)
        if sharing.imports:
            self._away.append(pid)
            gate.settle(closed)
            if not (here[pid].put_imports_away() if pid in here else parking_channel.put_imports_away(run_dir, pid)):
                raise _imports_refused(pid)

    def _are_parked(self) -> list[int]:
        return [pid for pid, parking in self._parkings.items() if parking.is_parked]

    def _unparked_several(self) -> list[int]:
        return [pid for pid in self._several if pid not in self._are_parked()]

    def _as_before(self) -> None:
        """Undo what was done about memory of others and other GPUs, and let calls pass the gate."""
        away, self._away = self._away, []
        bring_imports_back(self._space.run_dir, away)
        bring_together(self._space.run_dir, self._unparked_several())
        gate.open_(self._space.run_dir)

    async def dumped(self) -> None:
        """Note that the processes were dumped: they may run, where nothing speaks against it."""
        if self._run_from != "the end":
            await asyncio.to_thread(self._let_run)

    def _let_run(self) -> None:
        """Let the processes run on that can: nothing of theirs can reach a GPU now."""
        run = [parking.let_run() for parking in self._parkings.values()]
        if all(run) and self._runs_since is None:
            self._runs_since = max(parking.runs_since or 0.0 for parking in self._parkings.values())

    @property
    def runs(self) -> bool:
        """Whether all of the processes run, though they have no GPU state."""
        return self._runs_since is not None

    def paused(self, dump: float) -> float:
        """Return for how many seconds the processes stood still, once they are back; in the dump for `dump` seconds."""
        if self._runs_since is None:
            return self._back - self._began
        return self._runs_since - self._began + (dump if self._ran_before_dump else 0.0)

    def taken(self) -> int:
        """Return how many bytes of VRAM lie in files; what could not be had in files criu has to write."""
        return self._vram.taken(self._pids) + sum(parked.size for parked in self.parked())

    def parked(self) -> list[Parked]:
        """Return what is parked."""
        return [parking.parked for parking in self._parkings.values() if parking.is_parked]

    async def finish_copy(self) -> list[Parked]:
        """Wait until all of VRAM is in the files that is not found elsewhere; return what of it was parked.

        Raises
        ------
        DriverError : it could not be copied.
        """
        await together(Parking.finish_copy, self._parkings.values())
        self.hashes = {one.parked.file: one.hashes for one in self._parkings.values() if one.hashes}
        await asyncio.to_thread(self._count)
        return self.parked()

    def _count(self) -> None:
        keys = Counter(key for hashes in self.hashes.values() for key in single_hashes(hashes))
        count = sum(keys.values())
        self.zeros = keys.pop(HASH_OF_ZEROS, 0) * CHUNK
        known = set(single_hashes(self._elsewhere.hashes)) if self._elsewhere is not None else set()
        if count:
            new = sum(number for key, number in keys.items() if key not in known)
            log.info("%d of %d chunks of GPU memory are new", new, count)

    async def rest(self) -> None:
        """Let the processes run on without their GPU state, and have what helps give up all that it has on GPUs.

        Raises
        ------
        DriverError : parked memory could not be copied.
        """
        if self.parked():
            for parked in self.parked():
                parking_channel.run_on(self._space.run_dir, parked.pid)
            await self.finish_copy()
            await together(Parking.rest, self._parkings.values())
        else:
            await self.close()
            for left_over in self._vram.outside.glob("*.part"):
                left_over.unlink()
        await asyncio.to_thread(self._vram.taken, self._pids)

    def hand_over(self) -> Parking | None:
        """Return what gives the memory back of the only process that may park; who has it ends it."""
        parkings, self._parkings = list(self._parkings.values()), {}
        return parkings[0] if parkings else None

    async def thaw(self) -> None:
        """Bring the GPU state back; where the straight way fails, each process by what is found.

        Raises
        ------
        KernelLost : a process cannot be brought back.
        """
        if self._pids:
            await asyncio.to_thread(self._thaw)
            await asyncio.to_thread(self._as_before)
            self._back = time.monotonic()

    def _thaw(self) -> None:
        self.watch.begin("hold")
        with or_lost(), parking_.giving_back(self._parkings):
            described = self._without_parked()
            self.watch.begin("driver")
            try:
                cuda.thaw(self._worker, self._pids, held=cuda.needs(described))
            except GpuckptError:
                log.exception("the GPU state did not come back at once")
                cuda.mend(self._worker, self._pids, described["processes"])
            self.watch.begin("fill")

    def _without_parked(self) -> dict[str, Any]:
        """Return what the driver has to find room for: what is parked is still on the GPU, held by another."""
        there = []
        for process in self._described["processes"]:
            used, parking = dict(process["used"]), self._parkings.get(process["pid"])
            if parking is not None and parking.is_parked:
                used = parking.parked.without(used)
            there.append({**process, "used": used})
        return {**self._described, "processes": there}

    async def close(self) -> None:
        """End the programs that helped."""
        parkings, self._parkings = self._parkings, {}
        await self._ahead.close()
        await together(Parking.close, parkings.values())


def _has_room(uuids: Iterable[str], free: Mapping[str, int]) -> bool:
    """Tell whether the programs that hold parked memory have left the driver what a checkpoint takes."""
    full = [uuid for uuid in uuids if free.get(uuid, 0) < _CHECKPOINT]
    for uuid in full:
        log.warning("the GPU memory is not parked: GPU %s has %d MiB free", uuid, free.get(uuid, 0) >> 20)
    return not full


def _give_back(parkings: Mapping[int, Parking]) -> None:
    for parking in parkings.values():
        if not parking.is_parked:
            parking.go_on()
    with parking_.giving_back(parkings):
        pass


def owners_of_imports(space: Namespace, sharing: Mapping[int, Sharing], pids: Container[int]) -> dict[int, Refused]:
    """Return whose GPU memory processes have open, which must be parked for a save, and why they are refused if not.

    Raises
    ------
    Refused : it is not known of all, or not one of these `pids`.
    """
    owners: dict[int, Refused] = {}
    for pid, one in sharing.items():
        theirs = [space.outer(owner) for owner in one.owners]
        if one.imports and (not theirs or not all(owner is not None and owner in pids for owner in theirs)):
            raise _imports_refused(pid)
        owners |= {owner: _imports_refused(pid) for owner in theirs if owner is not None}
    return owners


def refuse_imports(run_dir: Path, pids: Iterable[int]) -> None:
    """Refuse processes that have others' GPU memory open, where it is not closed and opened again.

    Raises
    ------
    Refused : what stands in the way.
    """
    for pid in pids:
        if parking_channel.sharing(run_dir, pid).imports:
            raise _imports_refused(pid)


def _imports_refused(pid: int) -> Refused:
    return Refused(
        "The save was refused; nothing was touched.",
        f"process {pid} has GPU memory of another process open (CUDA IPC, as torch.multiprocessing does), and the "
        "driver could not restore it",
        "Delete the shared tensors in the process that received them, or end it, and save again; or pass tensors "
        "between processes on the CPU.",
        pid=pid,
    )
