"""What everything of a batch job ends with, also where the batch system does not find all of its processes."""

from __future__ import annotations

import os

from . import processes

__all__ = ["of_this_process"]

_JOB, _STEP = "SLURM_JOB_ID", "slurmstepd"


def of_this_process() -> tuple[int, int] | None:
    """Return the pid and start time of the process of Slurm's that began this one; None where it is of no job."""
    if _JOB not in os.environ:
        return None
    for pid in processes.ancestors(os.getpid()):
        if processes.name(pid) == _STEP and (began := processes.start_time(pid)) is not None:
            return pid, began
    return None
