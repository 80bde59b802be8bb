"""The GPU side of a save and of a restore: what is done about it before, in and after the freeze."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from ...client.in_progress import ParkedMemory
from ...errors import Cancelled, DriverError, GpuckptError, KernelLost, Refused
from ...freeze import cuda, parking_channel
from ...freeze import parking as parking_
from ...freeze.parking import Elsewhere, FileState, Parked, Parking, single_hashes
from ...freeze.ranges import Range, size_of, within
from ...freeze.staging_buffer import StagingBuffer
from ...freeze.vram import VramFiles
from ...linux import processes
from ...store import CHUNK, HASH_OF_ZEROS, Postponed, Progress
from ..namespace import Namespace
from ..stopwatch import Stopwatch
from . import gate

__all__ = [
    "GpuFreeze",
    "GpuReturn",
    "Judge",
    "LookElsewhere",
    "judge_nothing",
    "noted_parked",
    "parked_in",
    "parked_of",
    "place_of",
    "refuse_imports",
]

log = logging.getLogger("gpuckpt.keeper")
T = TypeVar("T")
R = TypeVar("R")

_HELPER = 1 << 30
"""Bytes of GPU memory that the program which fills the rest takes itself, at most."""
_CHECKPOINT = 64 << 20
"""Bytes of GPU memory that the driver's checkpoint is left, to be sure: with 15 MiB it succeeds, with next to none it
does not (driver 580.159)."""
_CONTEXT = 2 << 30
"""Bytes of GPU memory that the driver brings back itself, at most, beside what was parked."""
_TWICE = 2 << 30
"""Bytes of what is parked that are on the GPU twice while it changes hands, at most: a part of a block, and a piece of
what is held (`vram_holder`)."""
_HOLDER_ENDS = 300.0  # how long the program that holds parked memory may take to end with its keeper, in seconds
_NEARLY = 0.3  # seconds: what a client of a kernel takes to connect again, and a little more
_WORTH_PARKING = 256 << 20
"""Bytes from which on parking is quicker than the driver's own copy."""


LookElsewhere = Callable[[], Elsewhere]
"""Says what of parked memory is found elsewhere."""
Judge = Callable[[int], None]
"""Refuses what has no room, where so many bytes of what processes have on GPUs are zeros."""


def judge_nothing(_: int) -> None:
    """Leave it to others to look for room."""


class GpuFreeze:
    """One save's GPU side; nothing, where no process has GPU state.

    Parameters
    ----------
    space : the processes' namespace.
    pids : the processes with GPU state.
    described : what `cuda.describe` says of them.
    vram : the files for what is in VRAM.
    look_elsewhere : says what of their memory need not be copied; None where all is to be in the files.
    unless_parked : why those of them are refused that could not be restored if their memory were not parked.

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
        look_elsewhere: LookElsewhere | None = None,
        unless_parked: Mapping[int, Refused] | None = None,
    ) -> None:
        self._unless_parked = dict(unless_parked or {})
        self.watch = Stopwatch()
        self.hashes: dict[str, bytes] = {}
        self._look_elsewhere = look_elsewhere
        self._worker, self._space, self._vram = worker, space, vram
        self._pids, self._described = pids, described
        self._parkings: dict[int, Parking] = {}
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
        elsewhere = None
        if parked and self._look_elsewhere is not None:
            elsewhere = self._elsewhere = await asyncio.to_thread(self._look_elsewhere)

        def begin(one: Parked) -> Parking:
            space, vram = self._space, self._vram
            return Parking(space.run_dir, vram.outside, vram.inside, one, "new", elsewhere=elsewhere)

        self._parkings = dict(zip(parked, await _together(begin, parked.values()), strict=True))
        names = {
            pid: (str(processes.inner_pid(pid)), max(0, size - parked[pid].size) if pid in parked else size)
            for pid, size in sizes.items()
        }
        await asyncio.to_thread(self._vram.prepare, names)
        await asyncio.to_thread(self._worker.have_others, len(self._pids))
        ready = dict(zip(self._parkings, await _together(Parking.get_ready, self._parkings.values()), strict=True))
        free = {gpu.uuid: gpu.free for gpu in await asyncio.to_thread(self._worker.gpus)} if any(ready.values()) else {}
        await self._keep_those(pid for pid, one in parked.items() if ready[pid] and _has_room(one.gpus, free))
        self._refuse_but(self._parkings)
        await self._stage(sum(sizes.values()), judge)
        self._refuse_but(self._parkings)

    async def _parkable(self, may_park: Container[int] | None) -> dict[int, Parked]:
        """Return what is worth parking of these processes, by pid."""
        pids = [pid for pid in self._pids if may_park is None or pid in may_park] if parking_.is_supported() else []
        places = await _together(functools.partial(parking_channel.parkable, self._space.run_dir), pids)
        found = {pid: Parked(processes.inner_pid(pid), 0, tuple(each)) for pid, each in zip(pids, places, strict=True)}
        return {pid: one for pid, one in found.items() if one.size >= self._least(pid)}

    async def _stage(self, size: int, judge: Judge) -> None:
        """See what is in use of what can be parked, and make memory ready for it; all of the GPU memory is `size`.

        Raises
        ------
        Refused : as `prepare`.
        """
        parkings = self._parkings
        seen = dict(zip(parkings, await _together(lambda one: one[1].see(one[0]), parkings.items()), strict=True))
        known = {pid: (parkings[pid].parked.size, one) for pid, one in seen.items() if one is not None}
        judge(sum(all_of_it - one.in_use for all_of_it, one in known.values()))
        needed = size - sum(all_of_it - one.new for all_of_it, one in known.values())
        await asyncio.to_thread(cuda.refuse_without_memory, self._pids, needed)
        staged = dict(zip(parkings, await _together(Parking.stage, parkings.values()), strict=True))
        await self._keep_those(pid for pid, is_staged in staged.items() if is_staged)

    async def _keep_those(self, pids: Iterable[int]) -> None:
        """End the parkings of all processes but these: the driver copies what those have."""
        keep = set(pids)
        ending = [self._parkings.pop(pid) for pid in list(self._parkings) if pid not in keep]
        await _together(Parking.close, ending)

    def _least(self, pid: int) -> int:
        """Return from how many bytes on the memory of a process is parked."""
        return 1 if pid in self._unless_parked else _WORTH_PARKING

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
        try:
            await self._freeze(note)
        except BaseException:
            gate.open_(self._space.run_dir)
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
            self._refuse_but([pid for pid, parking in self._parkings.items() if parking.is_parked])
            self.watch.begin("checkpoint")
            await asyncio.to_thread(cuda.freeze, self._worker, self._pids, self._described, self._vram.taking)
        except BaseException:
            await asyncio.to_thread(_give_back, self._parkings)
            raise
        for parking in self._parkings.values():
            parking.let_go()

    async def _park(self, note: Callable[[int, Parked], None]) -> None:
        """Close the gate for all processes, and park what can be parked."""
        halted = await _together(lambda one: one[1].halt(one[0]), self._parkings.items())
        others = set(self._pids) - set(self._parkings)
        await _together(functools.partial(parking_channel.watch_gate, self._space.run_dir), others)
        # Not before: who waits at the gate may hold Python's lock, which is needed to halt a process.
        await asyncio.to_thread(self._close_gate)
        ready = [one for one, is_halted in zip(self._parkings.items(), halted, strict=True) if is_halted]
        here, run_dir = {pid: parking.imports for pid, parking in ready}, self._space.run_dir
        await _together(
            lambda pid: _refuse_imports(pid, here[pid]() if pid in here else parking_channel.imports(run_dir, pid)),
            self._pids,
        )
        await _together(lambda one: one[1].park(one[0], functools.partial(note, one[0])), ready)

    def _close_gate(self) -> None:
        gate.close(self._space.run_dir)
        gate.settle()

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
        await _together(Parking.finish_copy, self._parkings.values())
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
            await _together(Parking.rest, self._parkings.values())
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
            gate.open_(self._space.run_dir)

    def _thaw(self) -> None:
        self.watch.begin("hold")
        with _or_lost(), parking_.giving_back(self._parkings):
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
        await _together(Parking.close, parkings.values())


class GpuReturn:
    """The GPU side of a restore, or of what a dead keeper had begun: what was parked goes back with the rest.

    Parameters
    ----------
    space : the namespace that the processes are in, or come into.
    parked : what is parked.
    gpu_map : from the UUIDs of the GPUs at the save to those of now, where they differ.
    vram : the files with what was in VRAM.
    read_again : writes what was parked into its file, where it was read straight to the GPU and is lost there; may
        raise `GpuckptError`.
    in_use : by the name of its file, where what a process parked is not zero; all of it, unless said.
    """

    def __init__(
        self,
        worker: cuda.CudaWorker,
        space: Namespace,
        parked: Sequence[Parked],
        gpu_map: Mapping[str, str] | None,
        vram: VramFiles,
        read_again: Callable[[Parked], None] | None = None,
        in_use: Mapping[str, Sequence[Range]] = MappingProxyType({}),
    ) -> None:
        self._worker, self._space, self._parked, self._in_use = worker, space, parked, in_use
        self._gpu_map, self._vram, self._read_again = gpu_map, vram, read_again
        self._parkings: list[Parking] = []
        self._preloading: asyncio.Task[object] | None = None
        self._borrowing: asyncio.Task[object] | None = None
        self._reading: Future[None] | None = None
        self._reading_files: Future[None] | None = None
        self._may_read = asyncio.Event()
        self._nearly_read = asyncio.Event()
        self._stopped = False
        self._watch = Stopwatch()

    @classmethod
    async def after(
        cls, worker: cuda.CudaWorker, space: Namespace, noted: Sequence[ParkedMemory], vram: VramFiles
    ) -> GpuReturn:
        """Return what brings back what a dead keeper had parked, by its notes: its helpers end by themselves."""
        for one in noted:
            if not one.thread:
                await asyncio.to_thread(parking_channel.refuse, space.run_dir, one.pid)
        deadline = time.monotonic() + _HOLDER_ENDS
        for holder in [one.holder for one in noted if one.holder is not None]:
            while processes.start_time(holder) is not None:
                if time.monotonic() > deadline:
                    raise KernelLost(
                        "The {kernel}'s GPU memory could not be restored.",
                        f"Process {holder}, which holds it, does not end: it hangs in the GPU driver.",
                        "{Restart}, and restore a snapshot. `dmesg` may say what the driver waits for.",
                    )
                await asyncio.sleep(0.05)
        return cls(worker, space, [parked for one in noted if (parked := parked_of(one))], None, vram)

    async def prepare(self, *, early: bool = False, reading: bool = False) -> None:
        """Start the programs that fill the GPUs, so that they are ready when they are needed.

        `early` is before the files are written, which are then written into memory that is ready; and only if the GPUs
        have room for these programs now. Where the files are `reading` from the store next, and a GPU has room for all
        that was parked on it now, they are read straight to the GPU (`takers`).
        """
        if not self._parked or self._parkings:
            return
        free = {gpu.uuid: gpu.free for gpu in await asyncio.to_thread(self._worker.gpus)}
        places = self._places(free)
        parked_on: dict[str, list[int]] = {}
        for parked in self._parked:
            for gpu, size in self._used(parked).items():
                parked_on.setdefault(places[gpu], []).append(size)
        if early and any(free[place] <= _HELPER * len(sizes) for place, sizes in parked_on.items()):
            return
        beside = _TWICE + _HELPER + _CONTEXT
        have_room = {place for place, sizes in parked_on.items() if free[place] > sum(sizes) + beside * len(sizes)}

        def parking(parked: Parked) -> Parking:
            state: FileState = "awaited" if early else "kept"
            if reading and have_room.issuperset(places[gpu] for gpu in parked.gpus):
                state = "brought"
            again = functools.partial(self._read_again, parked) if self._read_again is not None else None
            in_use, vram = self._in_use.get(parked.file), self._vram
            return Parking(
                *(self._space.run_dir, vram.outside, vram.inside, parked, state, places, again), in_use=in_use
            )

        self._parkings = await _together(parking, self._parked)
        await asyncio.to_thread(self._worker.have_others, len(self._parked))
        await _together(Parking.get_still, self._parkings)

    def _used(self, parked: Parked) -> dict[str, int]:
        """Return the bytes of what a process parked that are not zero, by the UUID of the GPU that they were on."""
        in_use = self._in_use.get(parked.file)
        if in_use is None:
            return parked.gpus
        ends = zip(parked.gpus.items(), itertools.accumulate(parked.gpus.values()), strict=True)
        return {gpu: size_of(within([(end - size, end)], in_use)) for (gpu, size), end in ends}

    def _places(self, here: Iterable[str]) -> dict[str, str]:
        """Return the GPU here (UUIDs, in order) for each GPU that has parked memory."""
        gpu_map, uuids = self._gpu_map or {}, list(here)
        return {gpu: place_of(gpu_map.get(gpu, gpu), uuids) for parked in self._parked for gpu in parked.gpus}

    @property
    def takers(self) -> dict[str, StagingBuffer]:
        """What takes the bytes to the GPUs as they are read, by the name of the file that has them otherwise."""
        return {one.parked.file: one.buffer for one in self._parkings if one.buffer is not None}

    def borrow(self, running: Namespace, hashes: Mapping[str, bytes], has_much: Callable[[], bool]) -> None:
        """Begin to copy, on the GPUs, what the running kernel has there of what is read to them; the rest is read then.

        `hashes` are those of all chunks of what was parked, by the name of its file. `has_much` tells whether it is
        worth it; it may take a moment.
        """

        def borrow(parking: Parking) -> None:
            wanted, lender = hashes.get(parking.parked.file), running.outer(parking.parked.pid)
            if wanted is not None and lender is not None:
                parking.borrow(lender, running.run_dir, wanted)

        async def borrow_all() -> None:
            if await asyncio.to_thread(has_much):
                await _together(borrow, self._parkings)

        self._borrowing = asyncio.create_task(borrow_all())

    async def _borrowed(self) -> None:
        """Wait until what the running kernel has is there, if that was begun; where it failed, all of it is read."""
        if self._borrowing is not None:
            try:
                await self._borrowing
            except OSError as e:
                log.warning("nothing of the running kernel's GPU memory was copied: %s", e)

    def read_behind(self, files: Postponed, taken: Postponed, progress: Progress) -> None:
        """Begin to read the `files` that the driver restores from, and then what is `taken` to the GPU.

        `thaw` waits for both, or `have_read`. With what is taken it begins when `go_on_reading` says so.
        """
        loop = asyncio.get_running_loop()
        self._reading_files = asyncio.run_coroutine_threadsafe(asyncio.to_thread(self._read, files, progress), loop)
        self._reading = asyncio.run_coroutine_threadsafe(self._read_taken(taken, progress), loop)
        self._reading.add_done_callback(lambda _: self._nearly_read.set())

    def go_on_reading(self) -> None:
        """Read what is taken, too: its threads would slow down whatever else is done in Python meanwhile."""
        self._may_read.set()

    async def _read_taken(self, taken: Postponed, progress: Progress) -> None:
        loop, began = asyncio.get_running_loop(), math.nan

        def go_on(stage: str, done: int, total: int) -> None:
            if (total - done) * (time.monotonic() - began) < done * _NEARLY:
                loop.call_soon_threadsafe(self._nearly_read.set)
            progress(stage, done, total)

        with contextlib.closing(taken):
            assert self._reading_files is not None
            await asyncio.wrap_future(self._reading_files)
            await self._borrowed()
            await self._may_read.wait()
            began = time.monotonic()
            await asyncio.to_thread(self._read, taken, go_on)

    def _read(self, files: Postponed, progress: Progress) -> None:
        def go_on(stage: str, done: int, total: int) -> None:
            if self._stopped:
                raise Cancelled("The restore was aborted.", "", "")
            progress(stage, done, total)

        with contextlib.closing(files):
            files.read(go_on)

    async def nearly_read(self) -> None:
        """Wait until what is read behind will be read in a moment, at the speed that it was read with so far."""
        if self._reading is not None:
            await self._nearly_read.wait()

    async def have_read(self) -> None:
        """Wait until all that was taken is on the GPU; where it is not, the file has it all afterwards.

        Raises
        ------
        GpuckptError : neither can be.
        """
        if self._reading is not None:
            self.go_on_reading()
            await asyncio.wrap_future(self._reading)
        for parking in [one for one in self._parkings if one.buffer is not None]:
            if not await asyncio.to_thread(parking.have_all):
                self._parkings.remove(parking)
                await asyncio.to_thread(parking.close)
                if self._read_again is not None:
                    await asyncio.to_thread(self._read_again, parking.parked)

    async def preload(self) -> None:
        """Begin to bring what was parked to the GPUs, where there is room for it; to be waited for by `thaw`."""
        if self._parkings:
            self._preloading = asyncio.create_task(_together(Parking.preload, self._parkings))

    def hand_over(self) -> Parking | None:
        """Return what gives parked memory back, of the only process that had any; who has it ends it."""
        parkings, self._parkings = self._parkings, []
        return parkings[0] if parkings else None

    def can_stay(self, pids: Sequence[int]) -> bool:
        """Tell whether these processes' threads can be held while their GPU state is brought back."""
        return set(pids) == set(self._by_pid()) and bool(pids)

    async def thaw(
        self,
        pids: Sequence[int],
        needs: Mapping[str, int],
        populating: asyncio.Task[None] | None = None,
        *,
        stay: bool = False,
    ) -> None:
        """Bring back the GPU state of restored processes, which needs so many bytes of each GPU.

        What is still `populating` its files is waited for first. With `stay` they are paused (SIGSTOP), and their
        threads are held from now on, until `go`.

        Raises
        ------
        DriverError : it did not come back.
        StoreError, Cancelled : what is read behind could not be read.
        """
        files_ready = asyncio.run_coroutine_threadsafe(_done(populating), asyncio.get_running_loop())

        def bring_back() -> None:
            self._watch.begin("files")
            files_ready.result()
            if self._reading_files is not None:
                self._reading_files.result()
            self._watch.begin("driver")
            self._leave_room(needs)
            cuda.thaw(self._worker, pids, self._gpu_map, self._still_needed(needs))
            self._watch.begin("read")
            if self._reading is not None:
                self._reading.result()
                for parking in self._parkings:
                    if parking.buffer is not None:
                        parking.have_all()

        await self._around(bring_back, stay=stay)
        if not stay:
            gate.open_(self._space.run_dir)

    def _by_pid(self) -> dict[int, Parking]:
        """Return the parkings by the pids that their processes have here."""
        found = {self._space.outer(one.parked.pid): one for one in self._parkings}
        return {pid: one for pid, one in found.items() if pid is not None}

    def _still_needed(self, needs: Mapping[str, int]) -> Mapping[str, int]:
        """Return what the driver has to find room for: parked memory that is there, or comes, changes hands only."""
        left = dict(needs)
        for parking in filter(_is_on_gpu, self._parkings):
            left = parking.parked.without(left)
        return left

    def _leave_room(self, needs: Mapping[str, int]) -> None:
        """End the programs that fill, where they take what the rest needs: the processes then read the files."""
        waiting = [parking for parking in self._parkings if not _is_on_gpu(parking)]
        if not waiting:
            return
        free = {gpu.uuid: gpu.free for gpu in self._worker.gpus()}
        left, places = self._still_needed(needs), self._places(free)
        for parking in waiting:
            if any(free[places[gpu]] < left.get(gpu, 0) for gpu in parking.parked.gpus):
                parking.do_without_holder()

    async def go(self) -> None:
        """Let the threads go on that `thaw` has left held."""
        for parking in self._parkings:
            await asyncio.to_thread(parking.let_go)
        gate.open_(self._space.run_dir)

    async def mend(self, pids: Sequence[int], held: Sequence[Mapping[str, Any]], patience: float | None = None) -> None:
        """Bring back the GPU state of processes that was left somewhere on the way.

        Room for it is waited for `patience` seconds; the driver's time limit unless said.

        Raises
        ------
        KernelLost : it could not be brought back.
        """
        with _or_lost():
            await self._around(lambda: cuda.mend(self._worker, pids, held, patience))
        gate.open_(self._space.run_dir)

    async def _around(self, bring_back: Callable[[], object], *, stay: bool = False) -> None:
        self._watch.begin("helpers")
        if self._preloading is not None:
            await self._preloading
        parkings = self._by_pid()
        if self._reading is None:
            await _together(Parking.get_ready, parkings.values())

        def both() -> None:
            self._watch.begin("hold")
            with parking_.giving_back(parkings, stay=stay):
                bring_back()
                self._watch.begin("fill")

        await asyncio.to_thread(both)
        log.info("GPU state came back, in seconds: %s", self._watch)

    async def close(self) -> None:
        """End the programs that helped."""
        self._stopped = True
        self.go_on_reading()
        if self._borrowing is not None:
            await asyncio.wait([self._borrowing])
        if self._reading is not None:
            with contextlib.suppress(GpuckptError, OSError):
                await asyncio.wrap_future(self._reading)
        if self._preloading is not None:
            await self._preloading
        parkings, self._parkings = self._parkings, []
        await _together(Parking.close, parkings)


def _is_on_gpu(parking: Parking) -> bool:
    """Tell whether what was parked is on the GPU already, or is being read to there."""
    return parking.holds or parking.buffer is not None


async def _together(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Do something with each of these at once, in threads; when all are done, raise what the first one raised."""
    done = await asyncio.gather(*(asyncio.to_thread(function, item) for item in items), return_exceptions=True)
    for one in done:
        if isinstance(one, BaseException):
            raise one
    return [one for one in done if not isinstance(one, BaseException)]


async def _done(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        await task


def _has_room(uuids: Iterable[str], free: Mapping[str, int]) -> bool:
    """Tell whether the programs that hold parked memory have left the driver what a checkpoint takes."""
    full = [uuid for uuid in uuids if free.get(uuid, 0) < _CHECKPOINT]
    for uuid in full:
        log.warning("the GPU memory is not parked: GPU %s has %d MiB free", uuid, free.get(uuid, 0) >> 20)
    return not full


@contextlib.contextmanager
def _or_lost() -> Iterator[None]:
    """Tell of parked memory that cannot be given back as what it is: the loss of the kernel."""
    try:
        yield
    except DriverError as e:
        raise KernelLost(
            "The {kernel}'s GPU memory could not be restored.",
            f"{e.what} {e.why}",
            "{Restart}, and restore a snapshot.",
            **e.data,
        ) from e


def _give_back(parkings: Mapping[int, Parking]) -> None:
    for parking in parkings.values():
        if not parking.is_parked:
            parking.go_on()
    with parking_.giving_back(parkings):
        pass


def refuse_imports(run_dir: Path, pids: Iterable[int]) -> None:
    """Refuse processes that have others' GPU memory open through the library: the driver could not restore them.

    Raises
    ------
    Refused : what stands in the way.
    """
    for pid in pids:
        _refuse_imports(pid, parking_channel.imports(run_dir, pid))


def _refuse_imports(pid: int, imports: int) -> None:
    if imports:
        raise Refused(
            "The save was refused; nothing was touched.",
            f"process {pid} has GPU memory of another process open (CUDA IPC, as torch.multiprocessing does), and the "
            "driver could not restore it",
            "Delete the shared tensors in the process that received them, or end it, and save again; or pass tensors "
            "between processes on the CPU.",
            pid=pid,
        )


def place_of(gpu: str, here: Iterable[str]) -> str:
    """Return the UUID of the GPU here (UUIDs, in order) that what was on a GPU comes to, where it is not mapped."""
    uuids = list(here)
    # Not here and not mapped: a single GPU's state, which the driver puts on the first.
    return gpu if gpu in uuids else uuids[0]


def parked_in(described: Mapping[str, Any]) -> list[Parked]:
    """Return what a snapshot (its manifest's ``cuda``) says is parked, of each process; older ones have one alone."""
    said = described.get("parked") or []
    return [
        Parked(int(one["pid"]), int(one["thread"]), tuple((str(gpu), int(size)) for gpu, size in one["places"]))
        for one in ([said] if isinstance(said, Mapping) else said)
        if one["thread"]
    ]


def noted_parked(parked: Parked, holder: int | None) -> ParkedMemory:
    """Return parked memory as the record has it."""
    return ParkedMemory(parked.pid, parked.thread, parked.places, holder)


def parked_of(noted: ParkedMemory | None) -> Parked | None:
    """Return the parked memory that the record has; None where the process had not given it up yet."""
    return Parked(noted.pid, noted.thread, noted.places) if noted is not None and noted.thread else None
