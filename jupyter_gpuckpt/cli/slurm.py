"""What `run` asks of Slurm: the job that it runs in, whether that is to be started again, and to see to it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from ..errors import GpuckptError
from . import output

__all__ = ["has_left", "is_job", "requeue", "warn_of_deaf_script"]

_ID, _RESTARTS = "SLURM_JOB_ID", "SLURM_RESTART_COUNT"
_TIMEOUT = 60.0
_RUNNING = ("RUNNING", "SUSPENDED", "STOPPED")
_ENDING = "COMPLETING"


def is_job(environment: Mapping[str, str] = os.environ) -> bool:
    """Tell whether this is the environment of a job of Slurm."""
    return _ID in environment


def has_left(environment: Mapping[str, str]) -> bool:
    """Tell whether the job of Slurm is known to be over, on whatever machine, that has had this environment.

    It is, too, where it was started again and this is what has come of it.
    """
    if not is_job(environment) or not is_job():
        return False
    if environment[_ID] == os.environ[_ID]:
        return environment.get(_RESTARTS, "0") != os.environ.get(_RESTARTS, "0")
    try:
        state = _shown(environment[_ID])["JobState"]
    except GpuckptError as e:
        return "Invalid job id" in e.why  # Slurm forgets a job some minutes after its end
    return state not in (*_RUNNING, _ENDING)


def requeue() -> bool:
    """Have Slurm start this job again, unless it does so by itself or the job is not to be; return whether we did.

    Raises
    ------
    GpuckptError : Slurm cannot be asked, or has refused it.
    """
    job = os.environ[_ID]
    shown = _shown(job)
    if shown["JobState"] not in _RUNNING and shown.get("Reason") != "TimeLimit":
        return False  # it was cancelled, or is requeued already: by a preemption, say
    if shown.get("Requeue") != "1":
        output.note(f"Slurm job {job} is not requeued: it was submitted without --requeue.")
        return False
    _scontrol("requeue", job)
    return True


def warn_of_deaf_script() -> None:
    """Say so where Slurm's signals go to another process than this one, a shell's that does not pass them on."""
    try:
        parent = Path(f"/proc/{os.getppid()}/comm").read_text().strip()
    except OSError:
        return
    if is_job() and parent != "slurmstepd":
        output.note(
            f"Slurm sends its signals to {parent}, not to this command: nothing will be saved at them. "
            "Write `exec` or `srun` before the command in the script."
        )


def _shown(job: str) -> dict[str, str]:
    """Return what Slurm says of a job, by name. Raises `GpuckptError`."""
    words = _scontrol("show", "job", "--oneliner", job).split()
    return dict(word.partition("=")[::2] for word in words)


def _scontrol(*words: str) -> str:
    command = ["scontrol", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise _failed(command, str(e)) from e
    if done.returncode != 0:
        raise _failed(command, done.stderr.strip() or f"it ended with status {done.returncode}")
    return done.stdout


def _failed(command: list[str], why: str) -> GpuckptError:
    return GpuckptError("Slurm could not be asked.", why, f"Try `{' '.join(command)}`.")
