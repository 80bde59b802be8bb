"""The GPU side of a save and of a restore: what is done about it before, in and after the freeze."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from ...client.in_progress import ParkedMemory
from ...errors import Cancelled, DriverError, GpuckptError, KernelLost
from ...freeze import cuda
from ...freeze import parking as parking_
from ...freeze.parking import Elsewhere, FileState, Parked, Parking
from ...freeze.staging_buffer import StagingBuffer
from ...freeze.vram import VramFiles
from ...linux import processes
from ...store import Postponed, Progress
from ..agent_channel import AgentChannel
from ..namespace import Namespace
from . import gate

__all__ = ["GpuFreeze", "GpuReturn", "LookElsewhere", "noted_parked", "parked_in", "parked_of", "place_of"]

log = logging.getLogger("gpuckpt.keeper")

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


LookElsewhere = Callable[[str], Elsewhere]
"""Says what of parked memory, by the name of its file, is found elsewhere."""


class GpuFreeze:
    """One save's GPU side; nothing, where no process has GPU state.

    Parameters
    ----------
    space, link : the kernel's namespace, and the way to its agent.
    pids : the processes with GPU state.
    described : what `cuda.describe` says of them.
    vram : the files for what is in VRAM.
    look_elsewhere : says what of the kernel's memory need not be copied; None where all is to be in the files.

    Attributes
    ----------
    hashes : those of all chunks of what was parked, once it is copied, where its file lacks what is found elsewhere.
    """

    def __init__(
        self,
        worker: cuda.CudaWorker,
        space: Namespace,
        channel: AgentChannel,
        pids: Sequence[int],
        described: Mapping[str, Any],
        vram: VramFiles,
        look_elsewhere: LookElsewhere | None = None,
    ) -> None:
        self.hashes = b""
        self._look_elsewhere = look_elsewhere
        self._worker, self._space, self._channel, self._vram = worker, space, channel, vram
        self._pids, self._described = pids, described
        self._kernel = 0
        self._parking: Parking | None = None

    async def prepare(self, kernel: int, parkable: Sequence[tuple[str, int]]) -> None:
        """Make the memory ready that VRAM goes into; the kernel has `parkable` bytes (`Parked.places`)."""
        if not self._pids:
            return
        self._kernel = kernel
        held = {one["pid"]: one["used"] for one in self._described["processes"]}
        sizes = {pid: sum(held[pid].values()) for pid in self._pids}
        parked = Parked(processes.inner_pid(kernel), 0, tuple(parkable))
        if parked.size >= _WORTH_PARKING and parking_.is_supported():
            look = self._look_elsewhere
            elsewhere = await asyncio.to_thread(look, parked.file) if look is not None else None
            self._parking = await asyncio.to_thread(
                Parking,
                self._space.run_dir,
                self._vram.outside,
                self._vram.inside,
                parked,
                "bare" if elsewhere is not None and elsewhere.is_most else "new",
                elsewhere=elsewhere,
            )
            sizes[kernel] = max(0, sizes[kernel] - parked.size)
        names = {pid: (str(processes.inner_pid(pid)), size) for pid, size in sizes.items()}
        await asyncio.to_thread(self._vram.prepare, names)
        if self._parking is not None:
            ready = await asyncio.to_thread(self._parking.get_ready)
            if not ready or not await self._has_room(self._parking.parked.gpus):
                await self.close()

    async def _has_room(self, uuids: Iterable[str]) -> bool:
        """Tell whether the program that holds parked memory has left the driver what a checkpoint takes."""
        free = {gpu.uuid: gpu.free for gpu in await asyncio.to_thread(self._worker.gpus)}
        full = [uuid for uuid in uuids if free.get(uuid, 0) < _CHECKPOINT]
        for uuid in full:
            log.warning("the GPU memory is not parked: GPU %s has %d MiB free", uuid, free.get(uuid, 0) >> 20)
        return not full

    async def freeze(self, note: Callable[[ParkedMemory], None]) -> None:
        """Take the GPU state of all processes off the GPUs; `note` writes down what `GpuReturn.after` must know.

        Raises
        ------
        SaveFailed, KernelLost : as `cuda.freeze`.
        """
        if not self._pids:
            return
        try:
            await self._freeze(note)
        except BaseException:
            gate.open_(self._space.run_dir)
            raise

    async def _freeze(self, note: Callable[[ParkedMemory], None]) -> None:
        parking = self._parking
        if parking is not None:
            holder = parking.holder

            def note_parked(parked: Parked) -> None:
                note(noted_parked(parked, holder))

            note_parked(parking.parked)
            await self._channel.send({"call": "park", "id": 0, "args": {}})
            # The gate is closed when that thread has come: who waits there may hold Python's lock, which it needs.
            await asyncio.to_thread(parking.park, self._kernel, note_parked, self._close_gate)
        if self.parked() is None:
            await asyncio.to_thread(self._close_gate)
        try:
            await asyncio.to_thread(cuda.freeze, self._worker, self._pids, self._described, self._vram.taking)
        except BaseException:
            if parking is not None:
                await asyncio.to_thread(_give_back, parking, self._kernel)
            raise
        if parking is not None:
            parking.let_go()

    def _close_gate(self) -> None:
        gate.close(self._space.run_dir)
        gate.settle()

    def taken(self) -> int:
        """Return how many bytes of VRAM lie in files; what could not be had in files criu has to write."""
        parked = self.parked()
        return self._vram.taken(self._pids) + (parked.size if parked is not None else 0)

    def parked(self) -> Parked | None:
        """Return what is parked."""
        return self._parking.parked if self._parking is not None and self._parking.is_parked else None

    async def finish_copy(self) -> Parked | None:
        """Wait until all of VRAM is in the files that is not found elsewhere; return what of it was parked.

        Raises
        ------
        DriverError : it could not be copied.
        """
        parked = self.parked()
        if parked is not None and self._parking is not None:
            await asyncio.to_thread(self._parking.finish_copy)
            self.hashes = self._parking.hashes
        return parked

    async def rest(self) -> None:
        """Let the processes run on without their GPU state, and have what helps give up all that it has on GPUs.

        Raises
        ------
        DriverError : parked memory could not be copied.
        """
        parking = self._parking
        if parking is not None and parking.is_parked:
            parking_.run_on(self._space.run_dir)
            await self.finish_copy()
            await asyncio.to_thread(parking.rest)
        else:
            await self.close()
            for left_over in self._vram.outside.glob("*.part"):
                left_over.unlink()
        await asyncio.to_thread(self._vram.taken, self._pids)

    def hand_over(self) -> Parking | None:
        """Return what gives parked memory back; who has it ends it."""
        parking, self._parking = self._parking, None
        return parking

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
        with contextlib.ExitStack() as stack:
            if self._parking is not None:
                stack.enter_context(_or_lost())
                stack.enter_context(self._parking.giving_back(self._kernel))
            described = self._without_parked()
            try:
                cuda.thaw(self._worker, self._pids, held=cuda.needs(described))
            except GpuckptError:
                log.exception("the GPU state did not come back at once")
                cuda.mend(self._worker, self._pids, described["processes"])

    def _without_parked(self) -> dict[str, Any]:
        """Return what the driver has to find room for: what is parked is still on the GPU, held by another."""
        parked, processes = self.parked(), []
        for process in self._described["processes"]:
            used = dict(process["used"])
            if parked is not None and process["pid"] == self._kernel:
                used = parked.without(used)
            processes.append({**process, "used": used})
        return {**self._described, "processes": processes}

    async def close(self) -> None:
        """End the programs that helped."""
        parking, self._parking = self._parking, None
        if parking is not None:
            await asyncio.to_thread(parking.close)


class GpuReturn:
    """The GPU side of a restore, or of what a dead keeper had begun: what was parked goes back with the rest.

    Parameters
    ----------
    space : the namespace that the processes are in, or come into.
    parked : what is parked, if anything.
    gpu_map : from the UUIDs of the GPUs at the save to those of now, where they differ.
    vram : the files with what was in VRAM.
    read_again : writes what was parked into its file, where it was read straight to the GPU and is lost there; may
        raise `GpuckptError`.
    """

    def __init__(
        self,
        worker: cuda.CudaWorker,
        space: Namespace,
        parked: Parked | None,
        gpu_map: Mapping[str, str] | None,
        vram: VramFiles,
        read_again: Callable[[], None] | None = None,
    ) -> None:
        self._worker, self._space, self._parked = worker, space, parked
        self._gpu_map, self._vram, self._read_again = gpu_map, vram, read_again
        self._parking: Parking | None = None
        self._preloading: asyncio.Task[None] | None = None
        self._reading: Future[None] | None = None
        self._nearly_read = asyncio.Event()
        self._stopped = False

    @classmethod
    async def after(
        cls, worker: cuda.CudaWorker, space: Namespace, noted: ParkedMemory | None, vram: VramFiles
    ) -> GpuReturn:
        """Return what brings back what a dead keeper had parked, by its note: its helper ends by itself."""
        parked, holder = parked_of(noted), noted.holder if noted is not None else None
        if noted is not None and parked is None:
            await asyncio.to_thread(parking_.refuse, space.run_dir)
        deadline = time.monotonic() + _HOLDER_ENDS
        while holder is not None and processes.start_time(holder) is not None:
            if time.monotonic() > deadline:
                raise KernelLost(
                    "The {kernel}'s GPU memory could not be restored.",
                    f"Process {holder}, which holds it, does not end: it hangs in the GPU driver.",
                    "{Restart}, and restore a snapshot. `dmesg` may say what the driver waits for.",
                )
            await asyncio.sleep(0.05)
        return cls(worker, space, parked, None, vram)

    async def prepare(self, *, early: bool = False, reading: bool = False) -> None:
        """Start the program that fills the GPU, so that it is ready when it is needed.

        `early` is before the file is written, which is then written into memory that is ready; and only if the GPU has
        room for one more program now. Where the file is `reading` from the store next, and the GPU has room for all of
        it now, it is read straight to the GPU (`taker`).
        """
        if self._parked is None or self._parking is not None:
            return
        parking_.make_fifos(self._space.run_dir)
        free = {gpu.uuid: gpu.free for gpu in await asyncio.to_thread(self._worker.gpus)}
        places = self._places(free)
        if early and any(free[places[gpu]] <= _HELPER for gpu in self._parked.gpus):
            return
        state: FileState = "awaited" if early else "kept"
        beside = _TWICE + _HELPER + _CONTEXT
        if reading and all(free[places[gpu]] > size + beside for gpu, size in self._parked.gpus.items()):
            state = "brought"
        self._parking = await asyncio.to_thread(
            _parking, self._space, self._vram, self._parked, state, places, self._read_again
        )
        await asyncio.to_thread(self._parking.get_still)

    def _places(self, here: Iterable[str]) -> dict[str, str]:
        """Return the GPU here (UUIDs, in order) for each GPU that has parked memory."""
        gpu_map, uuids = self._gpu_map or {}, list(here)
        gpus = self._parked.gpus if self._parked is not None else {}
        return {gpu: place_of(gpu_map.get(gpu, gpu), uuids) for gpu in gpus}

    @property
    def taker(self) -> StagingBuffer | None:
        """What takes the bytes to the GPU as they are read; None where they are written to the file."""
        return self._parking.buffer if self._parking is not None else None

    def read_behind(self, files: Postponed, progress: Progress) -> None:
        """Begin to read what is taken, which `files` are; `thaw` waits for it, or `have_read`."""
        loop = asyncio.get_running_loop()
        self._reading = asyncio.run_coroutine_threadsafe(asyncio.to_thread(self._read, files, progress, loop), loop)
        self._reading.add_done_callback(lambda _: self._nearly_read.set())

    def _read(self, files: Postponed, progress: Progress, loop: asyncio.AbstractEventLoop) -> None:
        began = time.monotonic()

        def go_on(stage: str, done: int, total: int) -> None:
            if self._stopped:
                raise Cancelled("The restore was aborted.", "", "")
            if (total - done) * (time.monotonic() - began) < done * _NEARLY:
                loop.call_soon_threadsafe(self._nearly_read.set)
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
            await asyncio.wrap_future(self._reading)
        parking = self._parking
        if parking is None or parking.buffer is None or await asyncio.to_thread(parking.have_all):
            return
        await self.close()
        if self._read_again is not None:
            await asyncio.to_thread(self._read_again)

    async def preload(self) -> None:
        """Begin to bring what was parked to the GPU, where there is room for it; to be waited for by `thaw`."""
        parking, parked = self._parking, self._parked
        if parking is not None and parked is not None:
            self._preloading = asyncio.create_task(asyncio.to_thread(parking.preload))

    def hand_over(self) -> Parking | None:
        """Return what gives parked memory back; who has it ends it."""
        parking, self._parking = self._parking, None
        return parking

    def can_stay(self, pids: Sequence[int]) -> bool:
        """Tell whether these processes' threads can be held while their GPU state is brought back."""
        parked = self._parked
        return self._parking is not None and parked is not None and list(pids) == [self._space.outer(parked.pid)]

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
            files_ready.result()
            self._leave_room(needs)
            cuda.thaw(self._worker, pids, self._gpu_map, self._still_needed(needs))
            if self._reading is not None:
                self._reading.result()
                assert self._parking is not None
                self._parking.have_all()

        await self._around(bring_back, stay=stay)
        if not stay:
            gate.open_(self._space.run_dir)

    def _still_needed(self, needs: Mapping[str, int]) -> Mapping[str, int]:
        """Return what the driver has to find room for: parked memory that is there, or comes, changes hands only."""
        parked = self._parked
        if parked is None or not self._is_on_gpu:
            return needs
        return parked.without(needs)

    def _leave_room(self, needs: Mapping[str, int]) -> None:
        """End the program that fills, where it takes what the rest needs: the process then reads the file itself."""
        parking, parked = self._parking, self._parked
        if parking is None or parked is None or self._is_on_gpu:
            return
        free = {gpu.uuid: gpu.free for gpu in self._worker.gpus()}
        if any(free[place] < needs.get(gpu, 0) for gpu, place in self._places(free).items()):
            parking.do_without_holder()

    @property
    def _is_on_gpu(self) -> bool:
        """Whether what was parked is on the GPU already, or is being read to there."""
        return self._parking is not None and (self._parking.holds or self._parking.buffer is not None)

    async def go(self) -> None:
        """Let the threads go on that `thaw` has left held."""
        if self._parking is not None:
            await asyncio.to_thread(self._parking.let_go)
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
        parking, parked = self._parking, self._parked
        pid = self._space.outer(parked.pid) if parked is not None else None
        if parking is None or pid is None:
            await asyncio.to_thread(bring_back)
            return
        if self._preloading is not None:
            await self._preloading
        if self._reading is None:
            await asyncio.to_thread(parking.get_ready)

        def both() -> None:
            with parking.giving_back(pid, stay=stay):
                bring_back()

        await asyncio.to_thread(both)

    async def close(self) -> None:
        """End the program that helped."""
        self._stopped = True
        if self._reading is not None:
            with contextlib.suppress(GpuckptError, OSError):
                await asyncio.wrap_future(self._reading)
        if self._preloading is not None:
            await self._preloading
        parking, self._parking = self._parking, None
        if parking is not None:
            await asyncio.to_thread(parking.close)


async def _done(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        await task


def _parking(
    space: Namespace,
    vram: VramFiles,
    parked: Parked,
    file: FileState,
    places: Mapping[str, str],
    make_whole: Callable[[], None] | None = None,
) -> Parking:
    return Parking(space.run_dir, vram.outside, vram.inside, parked, file, places, make_whole)


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


def _give_back(parking: Parking, pid: int) -> None:
    with parking.giving_back(pid):
        pass


def place_of(gpu: str, here: Iterable[str]) -> str:
    """Return the UUID of the GPU here (UUIDs, in order) that what was on a GPU comes to, where it is not mapped."""
    uuids = list(here)
    # Not here and not mapped: a single GPU's state, which the driver puts on the first.
    return gpu if gpu in uuids else uuids[0]


def parked_in(described: Mapping[str, Any]) -> Parked | None:
    """Return what a snapshot (its manifest's ``cuda``) says is parked; None for nothing."""
    said = described.get("parked")
    if not said or not said["thread"]:
        return None
    places = tuple((str(gpu), int(size)) for gpu, size in said["places"])
    return Parked(int(said["pid"]), int(said["thread"]), places)


def noted_parked(parked: Parked, holder: int | None) -> ParkedMemory:
    """Return parked memory as the record has it."""
    return ParkedMemory(parked.pid, parked.thread, parked.places, holder)


def parked_of(noted: ParkedMemory | None) -> Parked | None:
    """Return the parked memory that the record has; None where the process had not given it up yet."""
    return Parked(noted.pid, noted.thread, noted.places) if noted is not None and noted.thread else None
