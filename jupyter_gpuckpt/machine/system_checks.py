"""Checks of the kernel, the rights and the memory."""

from __future__ import annotations

import platform
from pathlib import Path

import psutil

from jupyter_gpuckpt.errors import Unavailable
from jupyter_gpuckpt.freeze.criu_program import find_criu
from jupyter_gpuckpt.linux import seccomp
from jupyter_gpuckpt.linux.capabilities import missing, to_add

from .capabilities import HELPFUL, NEEDED
from .capability import ARCHITECTURES, why_filtered
from .checks import Check, judge
from .confinement_checks import apparmor_label, confinement_checks
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
        return [system, served, _filter(), _shared_memory(), *confinement_checks(with_root=False), _memory()]
    namespaces = try_namespaces()
    return [
        system,
        _rights(),
        _rights_over_others(),
        _user_namespace(),
        _filter(_criu_works_filtered()),
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
    lacking = missing(NEEDED)
    told = "; ".join(f"CAP_{name}: {NEEDED[name]}" for name in lacking)
    return judge(
        "rights",
        not lacking,
        f"root without {' and '.join(f'CAP_{name}' for name in lacking)}" if lacking else "root",
        f"Saves and restores need root, with these rights. What is missing is for ({told})."
        if lacking
        else "CRIU needs root to read and recreate whole processes.",
        to_add(lacking),
    )


def _rights_over_others() -> Check:
    lacking = missing(HELPFUL)
    return judge(
        "other users' processes",
        not lacking,
        f"root without {' and '.join(f'CAP_{name}' for name in lacking)}" if lacking else "can be saved",
        "A kernel is not saved while a process that it has started runs as another user (a database server, say): CRIU "
        "may not read that one's limits (\"Can't get rlimit\").",
        f"{to_add(lacking)} Or stop such processes before you save.",
        required=False,
    )


def _filter(works_filtered: bool = True) -> Check:
    filtered = why_filtered(works_filtered)
    found = "one that allows what CRIU needs" if seccomp.is_filtered() else "none"
    return judge(
        "seccomp filter",
        filtered is None,
        found if filtered is None else filtered.why,
        "What is saved under a container's filter of system calls comes back under that of the container in which it "
        "is restored.",
        "" if filtered is None else filtered.then,
    )


def _criu_works_filtered() -> bool:
    try:
        return find_criu().works_filtered
    except Unavailable:
        return True  # there is no criu, which is a check of its own


def _user_namespace() -> Check:
    first = seccomp.in_first_user_namespace()
    return judge(
        "user namespace",
        first,
        "the machine's" if first else "another than the machine's, as in rootless podman or with hostUsers: false",
        "CRIU needs rights that count for the whole machine. Root of another user namespace has none.",
        "Start the container as root and without a user namespace (no --userns, no --uidmap; in Kubernetes, without "
        "hostUsers: false).",
    )


def _namespaces(outcome: Outcome) -> Check:
    ok = outcome.failed in ("", "choose a pid")
    return judge(
        "namespaces",
        ok,
        f"created in {outcome.seconds * 1000:.0f} ms" if ok else f"cannot {outcome.failed}: {outcome.why}",
        "Every kernel has its own process and mount namespaces, so that it comes back with the same process ids.",
        _mend_of_namespaces(outcome),
    )


def _mend_of_namespaces(outcome: Outcome) -> str:
    label = apparmor_label()
    if outcome.failed == "make mounts" and label:
        return (
            f"AppArmor's profile {label} forbids it. Start the container with `--security-opt apparmor=unconfined`; in "
            "Kubernetes, set securityContext.appArmorProfile.type to Unconfined."
        )
    return (
        "Run as root; in a container, mend the rights and the filter above first. Otherwise raise "
        "/proc/sys/user/max_pid_namespaces and max_mnt_namespaces."
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
        else "The kernel needs CONFIG_CHECKPOINT_RESTORE. In a container, mend the rights and the filter above first.",
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
