"""Checks of the kernel, the rights and the memory."""

from __future__ import annotations

import platform
from pathlib import Path

import psutil

from .capability import ARCHITECTURES, HELPFUL_CAPABILITIES, NEEDED_CAPABILITIES, missing_capabilities, why_filtered
from .checks import Check, judge
from .confinement_checks import confinement_checks
from .trials import Outcome, try_namespaces

__all__ = ["system_checks"]

_GIB = 1 << 30
_LITTLE_MEMORY = _GIB // 2
_NOT_TRIED = "not tried, because namespaces cannot be created"


def system_checks(served: Check | None = None) -> list[Check]:
    """Return the checks of what the system itself offers; on another system than Linux, only that.

    `served` is, for a user without root, the check of the broker: what only that, or root, can make is not tried here.
    """
    system = _platform()
    if not system.ok:
        return [system]
    if served is not None:
        return [system, served, _shared_memory(), *confinement_checks(with_root=False), _memory()]
    namespaces = try_namespaces()
    return [
        system,
        _rights(),
        _rights_over_others(),
        _filter(),
        _namespaces(namespaces),
        _pids(namespaces),
        _shared_memory(),
        *confinement_checks(with_root=True),
        _memory(),
    ]


def _platform() -> Check:
    return judge(
        "system",
        platform.system() == "Linux" and platform.machine() in ARCHITECTURES,
        f"{platform.system()} {platform.release()} on {platform.machine()}",
        f"CRIU, which saves the processes, needs Linux on {' and '.join(ARCHITECTURES)}.",
        "Run the Jupyter server on such a machine.",
    )


def _rights() -> Check:
    missing = missing_capabilities(NEEDED_CAPABILITIES)
    return judge(
        "rights",
        not missing,
        f"root without {' and '.join(missing)}" if missing else "root",
        "CRIU needs root to read and recreate whole processes.",
        "Start the container privileged.",
    )


def _rights_over_others() -> Check:
    missing = missing_capabilities(HELPFUL_CAPABILITIES)
    return judge(
        "other users' processes",
        not missing,
        f"root without {' and '.join(missing)}" if missing else "can be saved",
        "A kernel is not saved while a process that it has started runs as another user (a database server, say): CRIU "
        "may not read that one's limits (\"Can't get rlimit\").",
        "Start the container with `--cap-add SYS_RESOURCE`, or stop such processes before you save.",
        required=False,
    )


def _filter() -> Check:
    filtered = why_filtered()
    return judge(
        "seccomp filter",
        filtered is None,
        "none" if filtered is None else filtered.why,
        "CRIU cannot save from under a filter of system calls.",
        "" if filtered is None else filtered.then,
    )


def _namespaces(outcome: Outcome) -> Check:
    ok = outcome.failed in ("", "choose a pid")
    return judge(
        "namespaces",
        ok,
        f"created in {outcome.seconds * 1000:.0f} ms" if ok else f"cannot {outcome.failed}: {outcome.why}",
        "Every kernel has its own process and mount namespaces, so that it comes back with the same process ids.",
        "Run as root; in a container, start it privileged; else raise /proc/sys/user/max_pid_namespaces "
        "and max_mnt_namespaces.",
    )


def _pids(outcome: Outcome) -> Check:
    ok = outcome.failed == ""
    return judge(
        "process ids",
        ok,
        "can be chosen" if ok else outcome.why if outcome.failed == "choose a pid" else _NOT_TRIED,
        "A restored process needs its old process id.",
        "Fix the namespaces first."
        if outcome.failed != "choose a pid"
        else "The kernel needs CONFIG_CHECKPOINT_RESTORE; in a container, start it privileged.",
    )


def _shared_memory() -> Check:
    there = Path("/dev/shm").is_dir()  # noqa: S108 - nothing is made in it
    return judge(
        "shared memory",
        there,
        "there" if there else "no folder /dev/shm",
        "Every kernel has its own /dev/shm, which is saved with it.",
        "Create the folder /dev/shm and mount a tmpfs on it.",
    )


def _memory() -> Check:
    memory = psutil.virtual_memory()
    return judge(
        "memory",
        memory.available >= _LITTLE_MEMORY,
        f"{memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB available",
        "During a save, a kernel's GPU memory is also held in host memory.",
        "End programs that use much memory.",
        required=False,
    )
