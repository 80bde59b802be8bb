"""The GPU side of a freeze: every CUDA process of a kernel moved off its GPUs, and back.

The order is NVIDIA's (CUDA driver API, "CUDA checkpointing"): lock, checkpoint, restore, unlock.
All processes are locked before the first is checkpointed, so that none waits for another that is
already away, and all are restored before the first is unlocked. Each of these is done with all of
them at once, by as many workers as there are.

This module is the room's door; what it re-exports is described where it is made.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from .. import settings
from ..errors import DriverError, GpuFailed, KernelLost, KernelWaits, NoRoomYet, SaveFailed
from ..linux import processes
from .cuda_calls import CudaWorker, Gpu, State, Usage
from .cuda_preflight import (
    describe,
    fits,
    freezable,
    in_use,
    moves,
    needs,
    no_peers_afterwards,
    preflight,
    refuse_much_unseen,
    refuse_other_use,
    refuse_together,
    refuse_without_memory,
)
from .gpu_processes import cuda_pids, ended

__all__ = [
    "CudaWorker",
    "Found",
    "Gpu",
    "State",
    "Usage",
    "cuda_pids",
    "describe",
    "ended",
    "fits",
    "freezable",
    "freeze",
    "in_use",
    "mend",
    "moves",
    "needs",
    "no_peers_afterwards",
    "preflight",
    "refuse_much_unseen",
    "refuse_other_use",
    "refuse_together",
    "refuse_without_memory",
    "still_at_work",
    "thaw",
]

_THEN_LOST = "{Restart} and restore the latest snapshot."
_ROOM_POLL = 0.2
"""Seconds between two looks at the memory of the GPUs."""

_FAILED = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        "ASSERT",
        "ECC_UNCORRECTABLE",
        "HARDWARE_STACK_ERROR",
        "ILLEGAL_ADDRESS",
        "ILLEGAL_INSTRUCTION",
        "INVALID_ADDRESS_SPACE",
        "INVALID_PC",
        "LAUNCH_FAILED",
        "LAUNCH_TIMEOUT",
        "MISALIGNED_ADDRESS",
        "NVLINK_UNCORRECTABLE",
    )
)
"""Errors after which CUDA does nothing more for a process ("leaves the process in an inconsistent state", CUDA driver
API, `CUresult`). A checkpoint gives the one that there was, or another of them (driver 580.159)."""

Found = Literal["none", "running", "locked", "checkpointed", "gone"]
"""How `mend` found a process; ``gone``: it has ended."""


def freeze(
    worker: CudaWorker,
    pids: Sequence[int],
    described: Mapping[str, Any] | None = None,
    taking: Callable[[int], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> None:
    """Lock, then checkpoint every process; on any failure undo all of it.

    `described` is what `describe` says of the running processes, where that was asked already. Each is checkpointed
    within the context that `taking` gives for its pid.

    Raises
    ------
    SaveFailed : a step failed and was undone; every process that still lives runs on.
    KernelLost : a step failed, and a process could not be brought back.
    """
    processes = (described or describe(worker, pids))["processes"]
    try:
        _raise_first(_together(worker, pids, lambda one, pid: one.lock(pid, settings.lock_timeout())))

        def checkpoint(one: CudaWorker, pid: int) -> None:
            with taking(pid):
                one.checkpoint(pid)

        _raise_first(_together(worker, pids, checkpoint))
    except DriverError as error:
        mend(worker, pids, processes)
        raise _save_failed(error) from error
    except BaseException:  # an interrupt: the processes must not stay frozen for it
        mend(worker, pids, processes)
        raise


def thaw(
    worker: CudaWorker,
    pids: Sequence[int],
    gpu_map: Mapping[str, str] | None = None,
    held: Mapping[str, int] | None = None,
    patience: float | None = None,
) -> None:
    """Restore, then unlock every checkpointed process; all of them are read back as running.

    `held` says how many bytes of each GPU all of them need (`needs`). A restore that finds too
    little loses the process for good, so this waits until there is enough, for `patience` seconds.

    Raises
    ------
    DriverError : a step failed; what that means (a lost kernel, a failed restore) the caller knows.
        ``lost`` in its data names the processes that did not come back; all others run.
    NoRoomYet : nothing was tried: `thaw` can be called again.
    """
    _wait_for_room(worker, gpu_map or {}, held or {}, patience=patience)
    # One lost child must not take the kernel with it.
    failures = _together(worker, pids, lambda one, pid: one.restore(pid, gpu_map))
    failures |= _together(worker, [pid for pid in pids if pid not in failures], CudaWorker.unlock)
    for first in failures.values():
        first.data["lost"] = list(failures)
        raise first


def _together(worker: CudaWorker, pids: Sequence[int], do: Callable[[CudaWorker, int], None]) -> dict[int, DriverError]:
    """Do something with all processes at once, by the workers that there are; return what failed, by pid."""
    failures: dict[int, DriverError] = {}

    def try_it(one: CudaWorker, pid: int) -> None:
        try:
            do(one, pid)
        except DriverError as error:
            failures[pid] = error

    if len(pids) == 1:
        try_it(worker, pids[0])
    elif pids:
        workers = worker.all
        with ThreadPoolExecutor(len(workers)) as together:
            list(together.map(try_it, itertools.cycle(workers), pids))
    return failures


def _raise_first(failures: Mapping[int, DriverError]) -> None:
    for error in failures.values():
        raise error


def mend(
    worker: CudaWorker,
    pids: Iterable[int],
    processes: Iterable[Mapping[str, Any]] = (),
    patience: float | None = None,
) -> dict[int, Found]:
    """Bring back every process that a broken-off freeze left locked or checkpointed.

    Returns how each was found. Processes that have ended are no failure here, and a stopped one is
    let go on: the driver reaches no other. A driver call that is still under way, though its maker
    was killed, is waited for. `processes` is what `describe` said of them before the freeze: with
    it, a process is not restored before its GPUs have room for it, which is waited for `patience` seconds.

    Raises
    ------
    KernelLost : a process cannot be brought back; all others have been.
    KernelWaits : it is only not back yet: `mend` can be called again.
    """
    held = {process["pid"]: process["used"] for process in processes}
    found: dict[int, Found] = {}
    lost: list[DriverError] = []
    for pid in reversed(list(pids)):
        try:
            found[pid] = _restored(worker, pid, held.get(pid, {}), patience)
        except DriverError as error:
            lost.append(error)
    for pid, state in found.items():
        if state in ("locked", "checkpointed"):
            try:
                worker.unlock(pid)
            except DriverError as error:
                lost.append(error)
    if lost:
        first = lost[0]
        waits = isinstance(first, NoRoomYet)
        raise (KernelWaits if waits else KernelLost)(
            f"The GPU state of process {first.data['pid']} could not be brought back.",
            f"{first.what} {first.why}",
            first.then if waits else _THEN_LOST,
            **first.data,
        )
    return found


def _restored(worker: CudaWorker, pid: int, held: Mapping[str, int], patience: float | None) -> Found:
    """Restore the process if it is checkpointed; return how it was found."""
    if processes.stopped([pid]):
        os.kill(pid, signal.SIGCONT)
    try:
        state = worker.state(pid)
        if state == "failed":
            raise DriverError(
                f"The CUDA state of process {pid} is `failed`.",
                "the driver gave it up in an earlier checkpoint or restore",
                call="state",
                pid=pid,
                number=None,
                name="FAILED",
            )
        if state == "checkpointed":
            _wait_for_room(worker, {}, held, pid, patience)
            worker.restore(pid)
    except DriverError:
        if ended(pid):
            return "gone"
        raise
    return state


def _wait_for_room(
    worker: CudaWorker,
    gpu_map: Mapping[str, str],
    held: Mapping[str, int],
    pid: int | None = None,
    patience: float | None = None,
) -> None:
    """Wait until every GPU has free what is to come back to it.

    Others may have taken the memory since the checkpoint. Measured: a restore without room gives
    CUDA_ERROR_OUT_OF_MEMORY, and every later one CUDA_ERROR_OPERATING_SYSTEM, however much is free.
    """
    deadline = time.monotonic() + (settings.driver_timeout() if patience is None else patience)
    while shortage := _shortage(worker, gpu_map, held):
        if time.monotonic() > deadline:
            raise NoRoomYet(
                "The GPU state has not been moved back yet.",
                shortage,
                "End the other programs on the GPU (`nvidia-smi` lists them); the state is kept in memory until then.",
                call="restore",
                pid=pid,
                number=None,
                name="NO_ROOM",
            )
        time.sleep(_ROOM_POLL)


def _shortage(worker: CudaWorker, gpu_map: Mapping[str, str], held: Mapping[str, int]) -> str:
    """Return which GPU has too little memory free, in words; nothing if all have enough."""
    gpus = {gpu.uuid: gpu for gpu in worker.gpus()} if held else {}
    for old, size in held.items():
        # Not here and not mapped: a single GPU's state, which the driver puts on the first.
        place = gpus.get(gpu_map.get(old, old)) or next(iter(gpus.values()))
        if place.free < size:
            return (
                f"it needs {size / 2**30:.1f} GiB of GPU {place.index} ({place.name}), "
                f"and {place.free / 2**30:.1f} GiB are free"
            )
    return ""


def still_at_work(pid: int) -> SaveFailed:
    """Return why a process was not frozen whose GPUs did not come to an end of what they were given in time."""
    return _save_failed(DriverError("", "", "", call="lock", name="TIMEOUT", pid=pid))


def _save_failed(error: DriverError) -> SaveFailed:
    call, name, pid = error.data["call"], error.data["name"], error.data["pid"]
    why, then, kind = f"{error.what} {error.why}", error.then, SaveFailed
    if pid is not None and ended(pid):
        why, then = f"process {pid} of the {{kernel}} ended meanwhile", "Save again."
    elif name in _FAILED:
        why = (
            f"the GPU has failed for process {pid} ({name}): a program on it did what it must not, and CUDA does "
            "nothing more for this process"
        )
        then = "To go back to a snapshot from before: `gpuckpt undo @` or `gpuckpt restore @`. Or {restart}."
        kind = GpuFailed
    elif call == "lock" and name in ("CUDA_ERROR_NOT_READY", "TIMEOUT"):
        why = f"work on the GPU of process {pid} did not pause within the time limit"
        then = "Wait until the GPU work is done and try again, or raise GPUCKPT_LOCK_TIMEOUT (seconds)."
    elif call == "lock" and name == "CUDA_ERROR_NOT_SUPPORTED":
        why = (
            f"the driver does not freeze process {pid}: {error.why}; it never does once a profiler "
            "has recorded CUDA there (CUPTI, which torch.profiler uses)"
        )
        then = (
            "If torch.profiler or another profiler has run: {restart}, or restore a snapshot from before. "
            "Profile in a {kernel} that need not be saved, or only what runs on the CPU "
            "(`activities=[torch.profiler.ProfilerActivity.CPU]`)."
        )
    elif call == "checkpoint" and name == "CUDA_ERROR_NOT_SUPPORTED":
        why = (
            "the {kernel} has managed (unified) memory, which the driver cannot checkpoint, and which was not copied "
            "out of it beforehand"
        )
        then = (
            "Free all memory allocated with cudaMallocManaged (in CuPy: `malloc_managed`; in RAPIDS: "
            "`managed_memory`), or {restart} with GPUCKPT_MANAGED=on in its environment, by which such memory is "
            "copied out for a save. If it has been started so: save again when none of its threads computes, and "
            "declare no variables `__managed__`."
        )
    return kind(
        "The save failed before anything was written; the {kernel} keeps running.",
        why,
        then,
        **error.data,
    )
