"""Checks of what else the system may forbid: tracing (Yama), and whatever SELinux's policy forbids."""

from __future__ import annotations

from pathlib import Path

from jupyter_gpuckpt.linux import yama

from .checks import Check, judge

__all__ = ["apparmor_label", "confinement_checks"]

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
        else "CRIU attaches to the kernel's processes, as their user, which 2 and above forbid. At 1, GPU memory can "
        "only be saved through CRIU, which takes longer and is untested.",
        f"Set kernel.yama.ptrace_scope to {most} or less in /etc/sysctl.d and restart the machine.",
    )


def _selinux(enforce: Path) -> Check:
    enforcing = enforce.read_text().strip() == "1"
    return judge(
        "SELinux",
        not enforcing,
        "enforcing" if enforcing else "permissive",
        "Saves and restores under an enforced policy are untested, and the broker serves only processes with its own "
        "label.",
        "If a save or restore fails with `Permission denied`, look for denials (`ausearch -m avc -ts recent`), and "
        "try again with `setenforce 0`.",
        required=False,
    )


def apparmor_label(attributes: Path = Path("/proc/self/attr/apparmor/current")) -> str:
    """Return the name of AppArmor's profile that confines this process; nothing where none does."""
    try:
        label = attributes.read_text().strip("\0\n ")
    except OSError:  # there is no AppArmor
        return ""
    return "" if label == "unconfined" else label.rpartition(" (")[0] or label
