"""Which of CRIU's system calls a filter (seccomp) forbids here: each is tried in a way that does nothing."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable

__all__ = ["blocked_calls"]

_NOWHERE = -1  # a descriptor that nobody has
_KCMP = {"x86_64": 312, "aarch64": 272}.get(os.uname().machine, -1)  # asm/unistd.h
_PTRACE_CONT = 7  # linux/ptrace.h


def blocked_calls() -> list[str]:
    """Return the names of those calls that are refused whatever they are asked, in the order of a save and a restore.

    It takes some microseconds, and no right.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    pid = os.getpid()
    calls: dict[str, tuple[Callable[..., int], tuple[int | None, ...]]] = {
        "kcmp": (libc.syscall, (_KCMP, pid, pid, 1, 0, 0)),
        "vmsplice": (libc.vmsplice, (_NOWHERE, None, 0, 0)),
        "ptrace": (libc.ptrace, (_PTRACE_CONT, 0, None, None)),
        "setns": (libc.setns, (_NOWHERE, 0)),
        "unshare": (libc.unshare, (0,)),
        "chroot": (libc.chroot, (None,)),
    }
    refused = (errno.EPERM, errno.ENOSYS)
    return [name for name, (call, asked) in calls.items() if call(*asked) != 0 and ctypes.get_errno() in refused]
