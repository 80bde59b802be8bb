"""Giving up nearly all system calls: what a process that has to look at a stranger's bytes needs none of."""

from __future__ import annotations

import platform

from ..linux.seccomp import ALLOW, ARCHITECTURE, IF_ANY, IF_EQUAL, KILL, LOAD, NUMBER, RETURN, install, machine, step

__all__ = ["keep_reading"]

_MACHINES = {
    # numbers of calls (asm/unistd.h)
    "x86_64": ((0, 1, 3, 5, 11, 12, 15, 25, 28, 202, 219, 228, 231, 262), 9, 257),
    "aarch64": ((63, 64, 57, 80, 215, 214, 139, 216, 233, 98, 128, 113, 94, 79), 222, 56),
}
"""The calls: read, write, close, fstat, munmap, brk, rt_sigreturn, mremap, madvise, futex, restart_syscall,
clock_gettime, exit_group, newfstatat; then mmap, and openat."""

_THIRD_ARGUMENT = 16 + 2 * 8  # struct seccomp_data; the lower half, as it is laid out here
_PROT_EXEC = 4


def keep_reading(flags: int) -> None:
    """Let this process open files with these flags alone, read, write, and have memory that is no program; for good.

    It is killed for whatever else it asks of the system. It must have ``no_new_privs``.

    Raises
    ------
    OSError : the system does not know such filters.
    """
    plain, mmap, openat = _MACHINES[platform.machine()]
    code = [step(LOAD, ARCHITECTURE), step(IF_EQUAL, machine(), 1, 0), step(RETURN, KILL)]
    code.append(step(LOAD, NUMBER))
    for number in plain:
        code += [step(IF_EQUAL, number, 0, 1), step(RETURN, ALLOW)]
    code += [step(IF_EQUAL, mmap, 0, 3), step(LOAD, _THIRD_ARGUMENT)]
    code += [step(IF_ANY, _PROT_EXEC, 4, 0), step(RETURN, ALLOW)]
    code += [step(IF_EQUAL, openat, 0, 2), step(LOAD, _THIRD_ARGUMENT)]
    code += [step(IF_EQUAL, flags, 1, 0), step(RETURN, KILL), step(RETURN, ALLOW)]
    install(code)
