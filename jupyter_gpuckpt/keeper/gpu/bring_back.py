"""The GPU side of a restore: what was on GPUs comes back, while the rest does and at once with it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any

from ...client.in_progress import ParkedMemory
from ...errors import Cancelled, GpuckptError, KernelLost
from ...freeze import cuda, parking_channel
from ...freeze import parking as parking_
from ...freeze.holder_programs import HolderPrograms
from ...freeze.parking import FileState, Parked, Parking
from ...freeze.ranges import Range, size_of, within
from ...freeze.staging_buffer import StagingBuffer
from ...freeze.vram import VramFiles
from ...linux import processes
from ...store import Postponed, Progress
from ..namespace import Namespace
from ..stopwatch import Stopwatch
from . import gate
from .parked import bring_imports_back, or_lost, parked_of, place_of, together
from .peers import bring_together

__all__ = ["GpuReturn"]

log = logging.getLogger("gpuckpt.keeper")

_HELPER = 1 << 30
"""Bytes of GPU memory that the program which fills the rest takes itself, at most."""
_CONTEXT = 2 << 30
"""Bytes of GPU memory that the driver brings back itself, at most, beside what was parked."""
_TWICE = 2 << 30
"""Bytes of what is parked that are on the GPU twice while it changes hands, at most: a part of a block, and a piece of
what is held (`vram_holder`)."""
_HOLDER_ENDS = 300.0  # how long the program that holds parked memory may take to end with its keeper, in seconds
_SOON = 16 << 30
"""Bytes that are read to the GPUs in a few seconds: with no more left, they wait for what the driver waits for."""
_HIDDEN = 3 << 30
"""Bytes that are read while the driver restores what it has itself: with no more left, they wait for that."""
_NEARLY = 0.3  # seconds: what a client of a kernel takes to connect again, and a little more


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
    hashes : by the name of its file, those of all chunks of what a process parked.
    holders : programs that were started for this already.
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
        hashes: Mapping[str, bytes] = MappingProxyType({}),
        holders: HolderPrograms | None = None,
    ) -> None:
        self._worker, self._space, self._parked, self._in_use = worker, space, parked, in_use
        self._gpu_map, self._vram, self._read_again = gpu_map, vram, read_again
        self._hashes = hashes
        self._holders = holders or HolderPrograms()
        self._parkings: list[Parking] = []
        self._preloading: asyncio.Task[object] | None = None
        self._borrowing: asyncio.Task[object] | None = None
        self._reading: Future[None] | None = None
        self._reading_files: Future[None] | None = None
        self._may_read = asyncio.Event()
        self._nearly_read = asyncio.Event()
        self._stopped = False
        self._left = 0
        """Bytes that are still to be read to the GPUs."""
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
            await asyncio.to_thread(self._holders.close)
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
                *(self._space.run_dir, vram.outside, vram.inside, parked, state, places, again),
                in_use=in_use,
                wanted=self._hashes.get(parked.file) if state == "brought" else None,
                program=self._holders.take(),
            )

        self._parkings = await together(parking, self._parked)
        await asyncio.to_thread(self._holders.close)
        await asyncio.to_thread(self._worker.have, len(self._parked))
        await together(Parking.get_still, self._parkings)

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

    def borrow(self, running: Namespace, has_much: Callable[[], bool]) -> None:
        """Begin to copy, on the GPUs, what the running kernel has there of what is read to them; the rest is read then.

        `has_much` tells whether it is worth it; it may take a moment.
        """

        def borrow(parking: Parking) -> None:
            if (lender := running.outer(parking.parked.pid)) is not None:
                parking.borrow(lender, running.run_dir)

        async def borrow_all() -> None:
            if await asyncio.to_thread(has_much):
                await together(borrow, self._parkings)

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
        self._left = sum(sum(self._used(one.parked).values()) for one in self._parkings if one.buffer is not None)
        self._reading_files = asyncio.run_coroutine_threadsafe(self._read_files(files, progress), loop)
        self._reading = asyncio.run_coroutine_threadsafe(self._read_taken(taken, progress), loop)
        self._reading.add_done_callback(lambda _: self._nearly_read.set())

    def go_on_reading(self) -> None:
        """Read what is taken, too: its threads would slow down whatever else is done in Python meanwhile."""
        self._may_read.set()
        for taker in self.takers.values():
            taker.go_on()

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """Have what is read to the GPUs wait within the block, where little of it is left; the least, for the driver.

        Its threads take turns at Python's lock with all others: what is waited for first would take twice as long.
        """
        if 0 < self._left <= _SOON:
            for taker in self.takers.values():
                taker.hold_back()
        try:
            yield
        finally:
            if self._left > _HIDDEN:
                self.go_on_reading()

    async def _read_files(self, files: Postponed, progress: Progress) -> None:
        with contextlib.closing(files):
            await asyncio.to_thread(self._read, files, progress)

    async def _read_taken(self, taken: Postponed, progress: Progress) -> None:
        loop, began, in_use = asyncio.get_running_loop(), math.nan, self._left

        def go_on(stage: str, done: int, total: int) -> None:
            self._left = min(in_use, total - done)  # zeros are counted, too, and not read
            if (total - done) * (time.monotonic() - began) < done * _NEARLY:
                loop.call_soon_threadsafe(self._nearly_read.set)
            progress(stage, done, total)

        with contextlib.closing(taken):
            assert self._reading_files is not None
            await asyncio.wrap_future(self._reading_files)
            await self._borrowed()
            await self._may_read.wait()
            await together(lambda taker: taker.until_ready(), self.takers.values())
            began = time.monotonic()
            await asyncio.to_thread(self._read, taken, go_on)
            if not all(await together(Parking.verify, self._parkings)):
                # This time it is verified as it is read, so that what the store has not right is told.
                await asyncio.to_thread(self._read, taken, progress)

    def _read(self, files: Postponed, progress: Progress) -> None:
        def go_on(stage: str, done: int, total: int) -> None:
            if self._stopped:
                raise Cancelled("The restore was aborted.", "", "")
            progress(stage, done, total)

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
            self._preloading = asyncio.create_task(together(Parking.preload, self._parkings))

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
        loop = asyncio.get_running_loop()
        files_ready = asyncio.run_coroutine_threadsafe(_done(populating), loop)

        def bring_back() -> None:
            self._watch.begin("files")
            files_ready.result()
            if self._reading_files is not None:
                self._reading_files.result()
            self._watch.begin("driver")
            loop.call_soon_threadsafe(self.go_on_reading)
            self._leave_room(needs)
            cuda.thaw(self._worker, pids, self._gpu_map, self._still_needed(needs))
            self._watch.begin("read")
            if self._reading is not None:
                self._reading.result()
                for parking in self._parkings:
                    if parking.buffer is not None:
                        parking.have_all()

        await self._around(bring_back, stay=stay)
        await self._as_before(pids)
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
        with or_lost():
            await self._around(lambda: cuda.mend(self._worker, pids, held, patience))
        await self._as_before(pids)
        gate.open_(self._space.run_dir)

    async def _as_before(self, pids: Sequence[int]) -> None:
        """Undo what was done before the freeze about memory of other processes and of other GPUs."""
        if len(pids) > 1:
            await asyncio.to_thread(bring_imports_back, self._space.run_dir, pids)
        unparked = [pid for pid in pids if pid not in self._by_pid()]
        await asyncio.to_thread(bring_together, self._space.run_dir, unparked)

    async def _around(self, bring_back: Callable[[], object], *, stay: bool = False) -> None:
        self._watch.begin("helpers")
        if self._preloading is not None:
            await self._preloading
        parkings = self._by_pid()
        if self._reading is None:
            await together(Parking.get_ready, parkings.values())

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
        await asyncio.to_thread(self._holders.close)
        await together(Parking.close, parkings)


def _is_on_gpu(parking: Parking) -> bool:
    """Tell whether what was parked is on the GPU already, or is being read to there."""
    return parking.holds or parking.buffer is not None


async def _done(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        await task
