"""Which capabilities saves and restores as root need, and which of them are missing: root in a container lacks some."""

from __future__ import annotations

import os
from collections.abc import Iterable

from jupyter_gpuckpt.linux import proc

__all__ = ["HELPFUL", "NEEDED", "may_run_criu", "missing", "to_add"]

NEEDED = {
    "SYS_ADMIN": "a kernel's own namespaces and mounts",
    "SYS_PTRACE": "CRIU looks into the kernel's processes",
    "SYS_CHROOT": "entering a kernel's mount namespace",
    "SYS_TIME": "a restored kernel's monotonic clock goes on from its save",
    "NET_ADMIN": "sockets come back with their buffers, and TCP connections inside the kernel",
    "SETPCAP": "a restored process has no more capabilities than it had",
}
"""Those that saves and restores as root do not work without, with what each is for."""

HELPFUL = {"SYS_RESOURCE": "processes of other users that the kernel has started"}
"""Those that only some kernels need."""

_NUMBERS = {"SETPCAP": 8, "NET_ADMIN": 12, "SYS_CHROOT": 18, "SYS_PTRACE": 19, "SYS_ADMIN": 21, "SYS_RESOURCE": 24}
_NUMBERS["SYS_TIME"] = 25
"""linux/capability.h"""


def missing(wanted: Iterable[str]) -> list[str]:
    """Return those of these capabilities, named without ``CAP_``, that this process does not have in effect."""
    status = proc.lines("/proc/self/status")
    effective = next(int(line.split()[1], 16) for line in status if line.startswith("CapEff:"))
    return [name for name in wanted if not effective >> _NUMBERS[name] & 1]


def may_run_criu() -> bool:
    """Tell whether this process is root with the rights that criu needs."""
    return os.geteuid() == 0 and not missing(NEEDED)


def to_add(names: Iterable[str]) -> str:
    """Say what to do in a container that lacks capabilities."""
    options = f"`--cap-add {','.join(names)}`"
    return f"Start the container with {options}; in Kubernetes, name them in securityContext.capabilities.add."
