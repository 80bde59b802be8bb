"""What `run` asks of Slurm: the job that it runs in, whether that is to be started again, and to see to it."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import GpuckptError
from . import output

__all__ = ["Kill", "has_left", "is_job", "next_kill", "requeue", "warn_of_deaf_script"]

_ID, _RESTARTS = "SLURM_JOB_ID", "SLURM_RESTART_COUNT"
_TIMEOUT = 60.0
_RUNNING = ("RUNNING", "SUSPENDED", "STOPPED")
_ENDING = "COMPLETING"


@dataclass(frozen=True)
class Kill:
    """When Slurm kills a job (SIGKILL), by the machine's clock (`time.time`), and by which of its settings."""

    at: float
    why: str


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


def requeue() -> Literal["no", "now", "at its end"]:
    """Have Slurm start this job again, unless it does so by itself or the job is not to be.

    Return whether we did, and whether Slurm ends the job for that, or had begun to.

    Raises
    ------
    GpuckptError : Slurm cannot be asked, or has refused it.
    """
    job = os.environ[_ID]
    shown = _shown(job)
    if shown["JobState"] not in _RUNNING and shown.get("Reason") != "TimeLimit":
        return "no"  # it was cancelled, or is requeued already: by a preemption, say
    if shown.get("Requeue") != "1":
        output.note(f"Slurm job {job} is not requeued: it was submitted without --requeue.")
        return "no"
    _scontrol("requeue", job)
    return "now" if shown["JobState"] in _RUNNING else "at its end"


def next_kill(signalled: float) -> Kill | None:
    """Return when Slurm will kill this job, which it has sent a signal at that time; None where it will not.

    Raises
    ------
    GpuckptError : Slurm cannot be asked.
    """
    shown = _shown(os.environ[_ID])
    wait = _seconds_of_config("KillWait")
    if shown["JobState"] not in _RUNNING or shown.get("Reason") == "TimeLimit":
        return Kill(signalled + wait, f"KillWait is {wait:.0f} s")
    try:
        end = time.mktime(time.strptime(shown.get("EndTime", ""), "%Y-%m-%dT%H:%M:%S"))
    except ValueError:  # Unknown
        return None
    if shown.get("PreemptTime", "None") != "None":
        return Kill(end + wait, f"the grace time of its partition, {shown['Partition']}, is over then")
    return Kill(end + wait, f"its time limit is {shown.get('TimeLimit')}, and KillWait is {wait:.0f} s")


def _seconds_of_config(name: str) -> float:
    for line in _scontrol("show", "config").splitlines():
        key, _, value = line.partition("=")
        if key.strip() == name:
            return float(value.split()[0])
    raise _failed(["scontrol", "show", "config"], f"it does not name {name}")


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
