"""Filters of system calls (seccomp(2)): how they are written and installed, and the one that forbids io_uring.

CRIU cannot dump an io_uring. Libraries that open one (libuv, and so uvloop, Node and torch's TCPStore) do without where
the system answers that it knows none, as it does in most containers. The same is true of sockets of Multipath TCP, by
which servers written in Go listen (since Go 1.24) where the system knows it: else they listen by TCP.

For `spawning.py` and the broker: like the former it imports next to nothing.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

__all__ = [
    "ALLOW",
    "ARCHITECTURE",
    "IF_ANY",
    "IF_EQUAL",
    "KILL",
    "LOAD",
    "NUMBER",
    "RETURN",
    "against_io_uring",
    "are_counted",
    "are_those_of_process_one",
    "forbid_io_uring",
    "in_first_user_namespace",
    "install",
    "is_filtered",
    "machine",
    "step",
]

LOAD, IF_EQUAL, IF_MORE, IF_AT_LEAST, IF_ANY, RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x06
"""Codes of instructions (linux/bpf_common.h)."""
ALLOW, KILL = 0x7FFF0000, 0x80000000
"""What a filter returns (linux/seccomp.h)."""
NUMBER, ARCHITECTURE = 0, 4
"""Where what is judged has the call's number, and the machine's (linux/seccomp.h, struct seccomp_data)."""

_STEP = 8  # bytes of an instruction
_ERRNO = 0x00050000  # linux/seccomp.h
_SET_MODE_FILTER, _SPEC_ALLOW = 1, 4  # linux/seccomp.h
_MACHINES = {"x86_64": (0xC000003E, 317, 41), "aarch64": (0xC00000B7, 277, 198)}
"""audit's name of a machine (linux/audit.h), and the numbers of seccomp and socket there (asm/unistd.h)."""
_PROTOCOL = 32  # linux/seccomp.h, the third argument of a call: its lower half, as both machines have it
_MPTCP = 262  # linux/in.h
_IO_URING_SETUP, _IO_URING_REGISTER = 425, 427  # asm-generic/unistd.h, io_uring_enter between them; everywhere the same
_FIRST_USER_NAMESPACE = 0xEFFFFFFD  # linux/nsfs.h, USER_NS_INIT_INO

_libc = ctypes.CDLL(None, use_errno=True)


def is_filtered() -> bool:
    """Tell whether this process, and so all that it starts, is under a filter."""
    return b"\nSeccomp:\t0\n" not in _status()


def are_counted() -> bool:
    """Tell whether the system says how many filters a process has, as Linux does since 5.9."""
    return _count("self") is not None


def are_those_of_process_one() -> bool:
    """Tell whether this process has no more filters than process 1 of its namespace: a container's alone."""
    return _count("self") == _count("1")


def _count(pid: str) -> bytes | None:
    words = _status(pid).split()
    return words[words.index(b"Seccomp_filters:") + 1] if b"Seccomp_filters:" in words else None


def in_first_user_namespace() -> bool:
    """Tell whether this process's root is the machine's: only that one's rights count for suspending a filter."""
    return os.stat("/proc/self/ns/user").st_ino == _FIRST_USER_NAMESPACE


def _status(pid: str = "self") -> bytes:
    with open(f"/proc/{pid}/status", "rb") as status:
        return status.read()


def machine() -> int:
    """Return what `ARCHITECTURE` is on this machine.

    Raises
    ------
    OSError : filters for it are not known here.
    """
    return _machine()[0]


def _machine() -> tuple[int, int, int]:
    try:
        return _MACHINES[os.uname().machine]
    except KeyError as e:
        raise OSError(errno.ENOSYS, f"no filters of system calls are known for {e}") from None


def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return an instruction; the last two say how many to skip (linux/filter.h, struct sock_filter)."""
    return struct.pack("HBBI", code, if_true, if_false, value)


def install(code: list[bytes], flags: int = 0) -> None:
    """Put this process, and all that it becomes and starts, under a filter, for good.

    It must have ``no_new_privs``, or CAP_SYS_ADMIN in its user namespace.

    Raises
    ------
    OSError : it has neither, or the system does not know such filters.
    """
    joined = b"".join(code)
    raw = ctypes.create_string_buffer(joined)
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(joined) // _STEP, ctypes.addressof(raw)))
    if _libc.syscall(_machine()[1], _SET_MODE_FILTER, flags, program) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"filter system calls: {os.strerror(number)}")


def against_io_uring() -> list[bytes]:
    """Return the filter in which io_uring and Multipath TCP do not exist. Raises as `machine`."""
    return [
        step(LOAD, ARCHITECTURE),
        step(IF_EQUAL, machine(), 0, 8),
        step(LOAD, NUMBER),
        step(IF_EQUAL, _machine()[2], 3),
        step(IF_AT_LEAST, _IO_URING_SETUP, 0, 5),
        step(IF_MORE, _IO_URING_REGISTER, 4, 0),
        step(RETURN, _ERRNO | errno.ENOSYS),
        step(LOAD, _PROTOCOL),
        step(IF_EQUAL, _MPTCP, 0, 1),
        step(RETURN, _ERRNO | errno.EPROTONOSUPPORT),
        step(RETURN, ALLOW),
    ]


def forbid_io_uring() -> None:
    """Have the system tell this process, and all that it becomes and starts, that it knows no io_uring (ENOSYS),
    and no Multipath TCP (EPROTONOSUPPORT).

    Does nothing where that would keep the process from being saved. To dump what has a filter, criu suspends it
    (ptrace(2), PTRACE_O_SUSPEND_SECCOMP), which takes CAP_SYS_ADMIN in the first user namespace: a broker's criu, which
    is its user's, has none. And it takes that criu is under no filter itself: in a container there is the container's,
    and one more would be in its way. Nor does it do anything where the system installs no filter.
    """
    try:
        if is_filtered():
            return
        if os.geteuid() != 0 or not in_first_user_namespace():
            return
        # Without that flag, Linux before 5.16 slows down what has a filter, to mitigate Spectre.
        install(against_io_uring(), _SPEC_ALLOW)
    except OSError:  # the save says what is in its way
        pass
