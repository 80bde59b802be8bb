"""The parts of root's rights (capabilities(7)), and which of them this process lacks."""

from __future__ import annotations

from collections.abc import Iterable

from . import proc

__all__ = ["BROKER", "missing", "to_add"]

_NUMBERS = {
    "SETGID": 6,
    "SETUID": 7,
    "SETPCAP": 8,
    "NET_ADMIN": 12,
    "SYS_CHROOT": 18,
    "SYS_PTRACE": 19,
    "SYS_ADMIN": 21,
    "SYS_RESOURCE": 24,
    "SYS_TIME": 25,
    "CHECKPOINT_RESTORE": 40,
}
"""linux/capability.h"""

BROKER = (
    "SYS_ADMIN",  # namespaces and mounts
    "SYS_CHROOT",  # entering a mount namespace
    "SYS_PTRACE",  # looking at users' processes
    "SETUID",
    "SETGID",
    "SETPCAP",  # dropping capabilities for good
    "CHECKPOINT_RESTORE",
)
"""What the broker does not work without."""


def missing(names: Iterable[str], of: str = "CapEff") -> list[str]:
    """Return those of these capabilities, named without ``CAP_``, that this process does not have.

    `of` is the set that is looked at, as /proc names it: those in effect, or ``CapBnd``, which nobody in a container
    can have more of.
    """
    status = proc.lines("/proc/self/status")
    had = next(int(line.split()[1], 16) for line in status if line.startswith(f"{of}:"))
    return [name for name in names if not had >> _NUMBERS[name] & 1]


def to_add(names: Iterable[str]) -> str:
    """Say what to do in a container that lacks capabilities."""
    options = f"`--cap-add {','.join(names)}`"
    return f"Start the container with {options}; in Kubernetes, name them in securityContext.capabilities.add."
