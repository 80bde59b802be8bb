"""The GPU side of a kernel that sleeps: what it had on GPUs lies in host memory, and its processes run on."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from ...client.in_progress import ParkedMemory
from ...client.record import now
from ...client.sleep_record import HostMemory, Sleep, Stage
from ...errors import DriverError, GpuckptError, KernelLost, NoRoomYet, Refused
from ...freeze import cuda, parking_channel
from ...freeze import parking as parking_
from ...freeze.parking import Parked, Parking
from ...freeze.vram import VramFiles
from ...linux import processes
from ..namespace import Namespace
from ..staging import vram_files
from . import gate
from .bring_back import GpuReturn
from .freeze import GpuFreeze, Judge, judge_nothing
from .late_vram import LateVram
from .parked import noted_parked, parked_in, parked_of, place_of
from .peers import bring_together

__all__ = ["HELPER", "FrozenAsleep", "GpuSleep"]

log = logging.getLogger("gpuckpt.keeper")

HELPER = 1 << 30
"""Bytes of GPU memory that the program which fills the rest takes itself, at most."""
_PATIENCE = 5.0
"""For how long a wake waits for memory that was free when it was looked for, in seconds."""


class GpuSleep:
    """What one sleeping kernel had on GPUs; nothing, where no process of it has GPU state.

    Attributes
    ----------
    described : what `cuda.describe` said of the processes while they were awake.
    pids : these processes.
    vram : the files that all is in.
    late : reads a snapshot into these files, where they are not all there yet.
    """

    def __init__(
        self,
        worker: cuda.CudaWorker,
        space: Namespace,
        pids: Sequence[int],
        described: Mapping[str, Any],
        vram: VramFiles,
        parked: Parked | None = None,
        late: LateVram | None = None,
    ) -> None:
        self.described = described
        self.late = late
        self._worker, self._space, self.vram = worker, space, vram
        self.pids = list(pids)
        self._parked = parked
        self._parking: Parking | None = None
        self._sleeps_on = False

    @classmethod
    def noted(
        cls,
        worker: cuda.CudaWorker,
        space: Namespace,
        note: Sleep,
        vram: VramFiles,
        late: LateVram | None = None,
    ) -> GpuSleep:
        """Return what another keeper put to sleep, by its note."""
        return cls(worker, space, note.cuda, note.described, vram, parked_of(note.parked), late)

    @classmethod
    async def of_snapshot(
        cls,
        worker: cuda.CudaWorker,
        space: Namespace,
        gpu: GpuReturn,
        pid: int,
        saved: Mapping[str, Any],
        late: LateVram,
    ) -> GpuSleep:
        """Let a process run on that criu has restored and the driver has not; `saved` is what its manifest says of it.

        Raises
        ------
        DriverError : the driver does not answer.
        """
        gpus = await asyncio.to_thread(worker.gpus)
        here = [one.uuid for one in gpus]
        used = {place_of(uuid, here): held for process in saved["processes"] for uuid, held in process["used"].items()}
        described = {
            **{key: saved[key] for key in ("driver", "cuda")},
            "gpus": [{"uuid": one.uuid, "name": one.name, "total": one.total} for one in gpus],
            "processes": [{"pid": pid, "used": used}],
        }
        parked = next(iter(parked_in(saved)), None)  # a snapshot of one process with GPU state
        if parked is not None:
            places = tuple((place_of(gpu, here), size) for gpu, size in parked.places)
            parked = dataclasses.replace(parked, places=places)
        asleep = cls(worker, space, [pid], described, vram_files(space), parked, late)
        asleep._parking = gpu.hand_over()
        if parked is not None:
            parking_channel.run_on(space.run_dir, parked.pid)
        return asleep

    def note(self, stage: Stage) -> Sleep:
        """Return what `noted` must know, at this stage of the sleep."""
        note = Sleep(stage, now(), freed=self.freed, cuda=self.pids, described=dict(self.described))
        note.parked = noted_parked(self._parked, self._holder) if self._parked is not None else None
        note.late = self.late.snapshot if self.late is not None else None
        return note

    @property
    def _holder(self) -> int | None:
        return self._parking.holder if self._parking is not None else None

    @property
    def freed(self) -> int:
        """Bytes of GPU memory that the processes had."""
        return sum(self.needs.values())

    @property
    def needs(self) -> dict[str, int]:
        """Bytes that are needed of each GPU, by its UUID, to wake."""
        return cuda.needs(self.described)

    @property
    def parked(self) -> Parked | None:
        """What is parked."""
        return self._parked

    @property
    def wishes(self) -> dict[str, int]:
        """As `needs`, with room for the program that makes it quick."""
        needs = self.needs
        if self._parked is not None:
            for gpu in self._parked.gpus:
                needs[gpu] = needs.get(gpu, 0) + HELPER
        return needs

    def host_memory(self) -> HostMemory:
        """Return the bytes of host memory that all is in while it sleeps, apart from what the processes have anyway."""
        parked, parking = self._parked, self._parking
        beside, inside = self.vram.allocated(), 0
        if parking is not None and parking.holder is not None:
            beside += processes.anonymous_bytes([parking.holder])
        parks = self._space.outer(parked.pid) if parked is not None else None
        for process in self.described.get("processes", []):
            if not self.vram.are_mapped_by(process["pid"]):
                elsewhere = parked.size if parked is not None and parks == process["pid"] else 0
                inside += max(0, sum(process["used"].values()) - elsewhere)
        return HostMemory(beside, inside)

    async def fall_asleep(
        self,
        kernel: int,
        note: Callable[[ParkedMemory], None],
        unless_parked: Mapping[int, Refused],
        several: Sequence[int],
    ) -> None:
        """Take everything off the GPUs; `note` writes down what the next keeper must know, should this one die.

        `unless_parked` and `several` are as in `GpuFreeze`.

        Of the processes, the kernel alone parks its memory: a wake gives one back.

        Raises
        ------
        SaveFailed, Refused, DriverError : it could not be done; the processes run on as before.
        KernelLost : nor could they be brought back.
        """
        if not self.pids:
            return
        freeze = GpuFreeze(
            *(self._worker, self._space, self.pids, self.described, self.vram),
            unless_parked=unless_parked,
            several=several,
        )

        def note_all(parked: Sequence[ParkedMemory]) -> None:
            for one in parked:
                note(one)

        try:
            await freeze.prepare([kernel])
            await freeze.freeze(note_all)
            try:
                await freeze.rest()
                await asyncio.to_thread(self._verify)
            except BaseException:
                await freeze.thaw()
                raise
        except BaseException:
            await freeze.close()
            await asyncio.to_thread(self.vram.discard)
            raise
        self._parking = freeze.hand_over()
        if self._parking is not None and self._parking.is_parked:
            self._parked = self._parking.parked
            _note(note, self._parking)

    def _verify(self) -> None:
        for pid in self.pids:
            if (state := self._worker.state(pid)) != "checkpointed":
                raise DriverError(f"Process {pid} is {state}, not checkpointed.", call="checkpoint", pid=pid, name="")

    async def is_all(self, kernel: int) -> bool:
        """Tell whether no process of the kernel's has GPU state but those that were put to sleep, as they were."""
        tree = [kernel, *processes.descendants(kernel)]
        on_gpu = await asyncio.to_thread(cuda.freezable, self._worker, tree)
        return set(on_gpu) == set(self.living) and self.late is None and await self.is_whole()

    async def is_whole(self) -> bool:
        """Tell whether the processes still are as they were put to sleep."""
        states = [await asyncio.to_thread(self._worker.state, pid) for pid in self.living]
        parked = self._parked is None or (self.vram.outside / self._parked.file).exists()
        return parked and all(state == "checkpointed" for state in states)

    async def wake(self, note: Callable[[ParkedMemory], None]) -> None:
        """Bring everything back; the GPUs were seen to have room for it. `note` as in `fall_asleep`.

        `tidy` is to be called afterwards.

        Raises
        ------
        NoRoomYet : there is no room any more; all sleeps on, unharmed.
        KernelLost : it could not be brought back.
        """
        if not self.living:
            return
        try:
            await asyncio.to_thread(self._wake, note)
            parked = self._space.outer(self._parked.pid) if self._parked is not None else None
            unparked = [pid for pid in self.living if pid != parked]
            await asyncio.to_thread(bring_together, self._space.run_dir, unparked)
            gate.open_(self._space.run_dir)
        except BaseException:
            await self._end_holder()
            raise

    @property
    def living(self) -> list[int]:
        """Those of the processes that have not ended since."""
        return [pid for pid in self.pids if not cuda.ended(pid)]

    def _wake(self, note: Callable[[ParkedMemory], None]) -> None:
        parked = self._parked
        pid = self._space.outer(parked.pid) if parked is not None else None
        if parked is None or pid is None:
            self._thaw(self.needs)
            return
        free = {gpu.uuid: gpu.free for gpu in self._worker.gpus()}
        needs = self.needs
        with_holder = all(free.get(gpu, 0) >= needs.get(gpu, 0) + HELPER for gpu in parked.gpus)
        parking = self._parking
        if parking is None:
            parking = self._parking = Parking(self._space.run_dir, self.vram.outside, self.vram.inside, parked, "kept")
            _note(note, parking)
        elif with_holder and parking.rests:
            parking.rouse()
        elif with_holder:
            parking.preload()  # it was made ready for this: its copy goes on while the driver restores
        if not with_holder:
            # It would take what the driver needs, and a driver that finds too little loses the process.
            parking.do_without_holder()
        parking.get_still()
        back = False
        self._sleeps_on = False
        try:
            with parking_.giving_back({pid: parking}, otherwise=self._asleep_again):
                self._thaw(parked.without(needs))
                back = True
        except DriverError as e:
            if not back:
                raise
            if not self._sleeps_on:
                raise _lost(e) from e
            raise NoRoomYet(e.what, e.why, e.then, **e.data) from e

    def _thaw(self, held: Mapping[str, int]) -> None:
        pids = self.living
        try:
            cuda.thaw(self._worker, pids, held=held, patience=_PATIENCE)
        except NoRoomYet:
            raise
        except DriverError:
            log.exception("the GPU state did not come back at once")
            cuda.mend(self._worker, pids)

    def _asleep_again(self) -> None:
        try:
            cuda.freeze(self._worker, self.living, self.described)
        except GpuckptError as e:
            raise _lost(e) from e
        self._sleeps_on = True

    async def close(self) -> None:
        """End what helps, where there is something: the kernel ends, or is replaced."""
        late, self.late = self.late, None
        if late is not None:
            await late.close()
        await self._end_holder()

    async def _end_holder(self) -> None:
        parking, self._parking = self._parking, None
        if parking is not None:
            await asyncio.to_thread(parking.close)

    async def tidy(self) -> None:
        """Free the host memory that all was in: the kernel is awake."""
        await self.close()
        await asyncio.to_thread(self.vram.discard)


class FrozenAsleep(GpuFreeze):
    """A save's GPU side where the kernel sleeps: all is where it is to be already, and stays there."""

    def __init__(self, asleep: GpuSleep, worker: cuda.CudaWorker, space: Namespace) -> None:
        super().__init__(worker, space, asleep.living, asleep.described, asleep.vram)
        self._asleep = asleep

    async def prepare(self, may_park: Container[int] | None = None, judge: Judge = judge_nothing) -> None:
        """There is nothing to make ready."""
        judge(0 if self._asleep.late is not None else await asyncio.to_thread(self._asleep.vram.holes))

    async def freeze(self, note: Callable[[Sequence[ParkedMemory]], None]) -> None:
        """There is nothing on a GPU."""

    def parked(self) -> list[Parked]:
        """Return what is parked."""
        return [self._asleep.parked] if self._asleep.parked is not None else []

    async def finish_copy(self) -> list[Parked]:
        """Return what is parked: all of it was copied when the kernel fell asleep."""
        return self.parked()

    async def thaw(self) -> None:
        """The kernel sleeps on."""

    async def close(self) -> None:
        """What helps to wake the kernel stays."""


def _note(note: Callable[[ParkedMemory], None], parking: Parking) -> None:
    note(noted_parked(parking.parked, parking.holder))


def _lost(error: GpuckptError) -> KernelLost:
    return KernelLost(
        "The {kernel}'s GPU memory could be neither restored nor moved out again.",
        f"{error.what} {error.why}",
        "{Restart}, and restore a snapshot.",
        **error.data,
    )
