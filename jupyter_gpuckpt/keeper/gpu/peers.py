"""GPUs of one process that may use each other's memory: not while the driver has the process's GPU state.

A process sees to that itself while it parks its memory. Where that is not parked, its library is told to, while all
calls wait at the gate.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ... import settings
from ...errors import Refused
from ...freeze import cuda, parking_channel

__all__ = ["bring_together", "keep_apart", "parked_or_apart"]

log = logging.getLogger("gpuckpt.keeper")

_LARGE = 801  # CUDA_ERROR_NOT_SUPPORTED: what the library says of memory that there is no access to again


def parked_or_apart(
    run_dir: Path, pids: Iterable[int], refused: Mapping[int, Refused], described: Mapping[str, Any]
) -> tuple[dict[int, Refused], list[int]]:
    """Return which of these processes with several GPUs have to be parked, and which can be kept apart without.

    `refused` says by pid why those are refused that have to be parked and are not (`cuda.preflight`): they are known to
    use several. Of others, their library may know it better. `described` is what `cuda.describe` says.

    Raises
    ------
    Refused : GPUs of one might not get access to each other again: it has much memory that cannot be parked.
    """
    apart = []
    for pid in pids if len(described["gpus"]) > 1 else ():
        asked_for = parking_channel.peer_access_asked_for(run_dir, pid)
        if asked_for:
            _refuse_much_unseen(run_dir, pid, described)
        if asked_for or (asked_for is not None and pid in refused):
            apart.append(pid)
    return {pid: why for pid, why in refused.items() if pid not in apart}, apart


def _refuse_much_unseen(run_dir: Path, pid: int, described: Mapping[str, Any]) -> None:
    used: dict[str, int] = next(one["used"] for one in described["processes"] if one["pid"] == pid)
    parkable = sum(size for _, size in parking_channel.parkable(run_dir, pid))
    cuda.refuse_much_unseen(pid, sum(used.values()) - parkable, len(used))


def keep_apart(run_dir: Path, pids: Iterable[int]) -> None:
    """Keep the GPUs of processes apart that are not parked; the gate is shut, and no call is under way.

    Raises
    ------
    SaveFailed : their GPUs did not come to an end of what they were given.
    Refused : it cannot be done.
    """
    for pid in pids:
        log.info("process %d keeps its GPUs apart", pid)
        result = parking_channel.keep_gpus_apart(run_dir, pid, settings.lock_timeout())
        if result == parking_channel.STILL_AT_WORK:
            raise cuda.still_at_work(pid)
        if result == _LARGE:
            raise cuda.no_peers_afterwards(pid)
        if result != 0:
            raise Refused(
                "The save was refused; the {kernel} keeps running.",
                f"the access of process {pid}'s GPUs to each other's memory could not be switched off "
                f"(CUresult {result})",
                "Save again; if it is refused again, limit the process to one GPU (CUDA_VISIBLE_DEVICES).",
                pid=pid,
                number=result,
            )


def bring_together(run_dir: Path, pids: Iterable[int]) -> None:
    """Give the GPUs of processes access to each other's memory again, as it was before `keep_apart`."""
    for pid in pids:
        parking_channel.bring_gpus_together(run_dir, pid)
