"""Which capabilities saves and restores as root need: root in a container lacks some."""

from __future__ import annotations

import os

from jupyter_gpuckpt.linux.capabilities import missing

__all__ = ["HELPFUL", "NEEDED", "may_run_criu"]

NEEDED = {
    "SYS_ADMIN": "a kernel's own namespaces and mounts",
    "SYS_PTRACE": "CRIU looks into the kernel's processes",
    "SYS_CHROOT": "entering a kernel's mount namespace",
    "SYS_TIME": "a restored kernel's monotonic clock goes on from its save",
    "NET_ADMIN": "sockets come back with their buffers",
    "SETPCAP": "a restored process has no more capabilities than it had",
}
"""Those that saves and restores as root do not work without, with what each is for."""

HELPFUL = {"SYS_RESOURCE": "processes of other users that the kernel has started"}
"""Those that only some kernels need."""


def may_run_criu() -> bool:
    """Tell whether this process is root with the rights that criu needs."""
    return os.geteuid() == 0 and not missing(NEEDED)
