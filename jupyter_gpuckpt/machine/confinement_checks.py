"""Checks of what else the system may forbid: tracing (Yama), and whatever SELinux's policy forbids."""

from __future__ import annotations

from pathlib import Path

from jupyter_gpuckpt.linux import yama

from .checks import Check, judge

__all__ = ["confinement_checks"]

_ENFORCE = Path("/sys/fs/selinux/enforce")


def confinement_checks(with_root: bool, scope: Path = yama.SCOPE, enforce: Path = _ENFORCE) -> list[Check]:
    """Return the checks; without root, of what the broker and its users may do.

    Parameters
    ----------
    scope, enforce : where the system says how far it restricts tracing, and whether SELinux enforces its policy.
    """
    found = [_ptrace_scope(with_root, scope)]
    if enforce.exists():
        found.append(_selinux(enforce))
    return found


def _ptrace_scope(with_root: bool, scope: Path) -> Check:
    value, most = yama.ptrace_scope(scope), yama.CAPABLE if with_root else yama.ANCESTORS
    return judge(
        "ptrace scope",
        value <= most,
        f"{value}" if scope.exists() else "not restricted",
        "CRIU attaches to the kernel's processes; 3 forbids that even to root."
        if with_root
        else "CRIU attaches to the kernel's processes, as their user; from 2 on that is forbidden to users. At 1, GPU "
        "memory can only be saved by way of CRIU, which takes longer; that was not tried.",
        f"Set kernel.yama.ptrace_scope to {most} or less in /etc/sysctl.d and restart the machine.",
    )


def _selinux(enforce: Path) -> Check:
    enforcing = enforce.read_text().strip() == "1"
    return judge(
        "SELinux",
        not enforcing,
        "enforcing" if enforcing else "permissive",
        "Saves and restores were never tried under an enforced policy, and the broker serves nobody who has another "
        "label than itself.",
        "If a save or restore fails with `Permission denied`, see what was denied (`ausearch -m avc -ts recent`), and "
        "whether it works with `setenforce 0`.",
        required=False,
    )
