"""The GPU side of a freeze: every CUDA process of a kernel moved off its GPUs, and back.

The order is NVIDIA's (CUDA driver API, "CUDA checkpointing"): lock, checkpoint, restore, unlock.
All processes are locked before the first is checkpointed, so that none waits for another that is
already away, and all are restored before the first is unlocked.

This module is the room's door; what it re-exports is described where it is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from .. import settings
from ..errors import DriverError, KernelLost, SaveFailed
from .cuda_calls import CudaWorker, Gpu, State, Usage
from .cuda_fit import describe, fits, preflight
from .gpu_processes import cuda_pids

__all__ = [
    "CudaWorker",
    "Found",
    "Gpu",
    "State",
    "Usage",
    "cuda_pids",
    "describe",
    "fits",
    "freeze",
    "mend",
    "preflight",
    "thaw",
]

Found = Literal["none", "running", "locked", "checkpointed", "gone"]
"""How `mend` found a process; ``gone``: it has ended."""


def freeze(worker: CudaWorker, pids: Sequence[int]) -> None:
    """Lock, then checkpoint every process; on any failure undo all of it.

    Raises
    ------
    SaveFailed : a step failed and was undone; every process that still lives runs on.
    KernelLost : a step failed, and a process could not be brought back.
    """
    try:
        for pid in pids:
            worker.lock(pid, settings.lock_timeout())
        for pid in pids:
            worker.checkpoint(pid)
    except DriverError as error:
        mend(worker, pids)
        raise _save_failed(error) from error
    except BaseException:  # an interrupt: the processes must not stay frozen for it
        mend(worker, pids)
        raise


def thaw(worker: CudaWorker, pids: Sequence[int], gpu_map: Mapping[str, str] | None = None) -> None:
    """Restore, then unlock every checkpointed process; all of them are read back as running.

    Raises
    ------
    DriverError : a step failed; what that means (a lost kernel, a failed restore) the caller knows.
    """
    for pid in reversed(pids):
        worker.restore(pid, gpu_map)
    for pid in reversed(pids):
        worker.unlock(pid)


def mend(worker: CudaWorker, pids: Iterable[int]) -> dict[int, Found]:
    """Bring back every process that a broken-off freeze left locked or checkpointed.

    Returns how each was found. Processes that have ended are no failure here.

    Raises
    ------
    KernelLost : a process cannot be brought back; all others have been.
    """
    found: dict[int, Found] = {}
    lost: list[DriverError] = []
    for pid in reversed(list(pids)):
        try:
            found[pid] = _restored(worker, pid)
        except DriverError as error:
            lost.append(error)
    for pid, state in found.items():
        if state in ("locked", "checkpointed"):
            try:
                worker.unlock(pid)
            except DriverError as error:
                lost.append(error)
    if lost:
        raise KernelLost(
            f"The GPU state of process {lost[0].data['pid']} could not be brought back.",
            f"{lost[0].what} {lost[0].why}",
            "Restart the kernel and restore the latest snapshot.",
            **lost[0].data,
        )
    return found


def _restored(worker: CudaWorker, pid: int) -> Found:
    """Restore the process if it is checkpointed; return how it was found."""
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
            worker.restore(pid)
    except DriverError:
        if not Path(f"/proc/{pid}").exists():
            return "gone"
        raise
    return state


def _save_failed(error: DriverError) -> SaveFailed:
    call, name, pid = error.data["call"], error.data["name"], error.data["pid"]
    why, then = f"{error.what} {error.why}", error.then
    if not Path(f"/proc/{pid}").exists():
        why, then = f"process {pid} of the kernel ended meanwhile", "Save again."
    elif call == "lock" and name in ("CUDA_ERROR_NOT_READY", "TIMEOUT"):
        why = f"work on the GPU of process {pid} did not come to a pause within the time limit"
        then = (
            "Wait until the GPU work is done and save again, "
            "or set GPUCKPT_LOCK_TIMEOUT to more seconds."
        )
    elif call == "checkpoint" and name == "CUDA_ERROR_NOT_SUPPORTED":
        why = "the kernel uses managed (unified) memory, which the driver cannot checkpoint"
        then = (
            "Free everything that was allocated with cudaMallocManaged (in CuPy: "
            "`malloc_managed`; in RAPIDS: `managed_memory`), or use plain GPU memory, "
            "and save again."
        )
    return SaveFailed(
        "The save failed before anything was written; the kernel runs on as before.",
        why,
        then,
        **error.data,
    )
