"""Checks of a Slurm cluster, on a machine from which its `scontrol` can ask: what it does to jobs that it stops."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping

from .checks import Check, judge
from .place_checks import locks_check, run_folder_check, shared_store_check

__all__ = ["config_checks", "fields", "partition_checks", "slurm_checks"]

_TIMEOUT = 60.0
_SHORT = 60
"""Seconds to save a job in that are few."""
_SERVED = ("", "(null)", "job_container/none", "job_container/tmpfs")
_RECIPE = "`gpuckpt recipe slurm.conf` has the lines for slurm.conf."


def slurm_checks() -> list[Check]:
    """Return the checks: of Slurm's configuration, its partitions, the job that this runs in, and the folders."""
    places = [run_folder_check(), shared_store_check(), *locks_check()]
    if shutil.which("scontrol") is None:
        mend = "Install Slurm's client programs on the nodes, with their slurm.conf, and munge."
        return [_asked("scontrol is not installed here", mend), *places]
    try:
        config = fields(_scontrol("show", "config"))
        partitions = _scontrol("show", "partition", "--oneliner")
    except (OSError, subprocess.SubprocessError) as e:
        mend = "Run this on a machine of the cluster, which has its slurm.conf and munge, when slurmctld runs."
        return [_asked(_why(e), mend), *places]
    version = config.get("SLURM_VERSION", "of an unknown version")
    return [_asked(f"Slurm {version} answers"), *config_checks(config), *partition_checks(partitions), *places]


def _asked(found: str, mend: str = "") -> Check:
    told = "`gpuckpt run` asks Slurm how much time a job has, and to queue it again."
    return judge("scontrol", not mend, found, told, mend, required=False)


def _why(error: Exception) -> str:
    """Return why scontrol did not answer: of the lines that it wrote, the last one says it."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"scontrol has not answered for {_TIMEOUT:.0f} s"
    said = getattr(error, "stderr", None) or str(error)
    return str(said).strip().rpartition("\n")[2]


def config_checks(config: Mapping[str, str]) -> list[Check]:
    """Return what the fields of `scontrol show config` mean."""
    proctrack, container = config.get("ProctrackType", ""), config.get("JobContainerType", "(null)")
    wait = _seconds(config.get("KillWait", ""))
    requeues = config.get("JobRequeue") == "1"
    return [
        judge(
            "proctrack",
            proctrack == "proctrack/cgroup",
            proctrack or "unknown",
            "Slurm finds a job's processes by it. With others than control groups it misses what the broker started: "
            "that ends some seconds after its job, when Slurm may have given the node to the next one.",
            f"Set ProctrackType=proctrack/cgroup. {_RECIPE}",
            required=False,
        ),
        judge(
            "job_container",
            container in _SERVED,
            "none" if container in ("", "(null)") else container,
            "It gives each job a mount namespace of its own. The broker serves those that differ in folders for data "
            "only: the check `rights`, run in a job, tells.",
            "Run `gpuckpt doctor --for slurm` in a job (srun). If the broker refuses, set job_container/none.",
            required=False,
        ),
        judge(
            "KillWait",
            wait is None or wait >= _SHORT,
            "unknown" if wait is None else f"{wait} s",
            "At a time limit, scancel and scontrol requeue, a job has so long from SIGTERM to SIGKILL. What is not on "
            "the disk then is lost.",
            f"Set KillWait to what a save of the largest jobs takes, such as 120. {_RECIPE}",
            required=False,
        ),
        judge(
            "requeue",
            requeues,
            "JobRequeue=1" if requeues else f"JobRequeue={config.get('JobRequeue', 'unknown')}",
            "A job that was hibernated goes on only when it is started again.",
            f"Set JobRequeue=1, or submit jobs with --requeue. {_RECIPE}",
            required=False,
        ),
        *_preemption(config),
    ]


def _preemption(config: Mapping[str, str]) -> list[Check]:
    mode = config.get("PreemptMode", "OFF")
    if mode == "OFF" or config.get("PreemptType", "preempt/none") == "preempt/none":
        return []
    return [
        judge(
            "preemption",
            "REQUEUE" in mode or "SUSPEND" in mode,
            f"PreemptMode={mode}",
            "A job that is preempted is cancelled, and not started again.",
            f"Set PreemptMode=REQUEUE. {_RECIPE}",
            required=False,
        ),
        judge(
            "signal before",
            "preempt_send_user_signal" in config.get("SlurmctldParameters", ""),
            f"SlurmctldParameters={config.get('SlurmctldParameters', '(null)')}",
            "A job that is preempted gets the signal of `sbatch --signal` only with preempt_send_user_signal; else it "
            "gets SIGTERM when its grace time is over.",
            f"Set SlurmctldParameters=preempt_send_user_signal. {_RECIPE}",
            required=False,
        ),
    ]


def partition_checks(shown: str) -> list[Check]:
    """Return what the lines of `scontrol show partition --oneliner` mean: which ones preempt jobs too fast."""
    lines = (line.split() for line in shown.splitlines())
    partitions = [dict(word.partition("=")[::2] for word in words) for words in lines if words]
    hasty = [
        one.get("PartitionName", "a partition")
        for one in partitions
        if one.get("PreemptMode", "OFF") not in ("OFF", "SUSPEND")
        and (_seconds(one.get("GraceTime", "")) or 0) < _SHORT
    ]
    ours = os.environ.get("SLURM_JOB_PARTITION", "")
    return [
        judge(
            "GraceTime",
            not hasty,
            f"less than {_SHORT} s in {', '.join(hasty)}" if hasty else "none is short",
            f"A preempted job has its partition's GraceTime to be saved.{f' This one is in {ours}.' if ours else ''}",
            f"Set GraceTime of these partitions, such as 120. {_RECIPE}",
            required=False,
        )
    ]


def fields(shown: str) -> dict[str, str]:
    """Return what `scontrol show config` says, by name."""
    parted = (line.partition("=") for line in shown.splitlines())
    return {name.strip(): value.strip() for name, equals, value in parted if equals}


def _seconds(told: str) -> int | None:
    first = told.partition(" ")[0]
    return int(first) if first.isdecimal() else None


def _scontrol(*words: str) -> str:
    done = subprocess.run(["scontrol", *words], capture_output=True, text=True, timeout=_TIMEOUT, check=True)
    return done.stdout
