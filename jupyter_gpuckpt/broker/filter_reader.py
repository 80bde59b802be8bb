"""Reading the filter of system calls that another process is under: by ptrace(2), PTRACE_SECCOMP_GET_FILTER."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time

from ..linux import processes

__all__ = ["filter_of"]

_SEIZE, _INTERRUPT, _DETACH, _GET_FILTER = 0x4206, 0x4207, 17, 0x420C  # linux/ptrace.h
_WALL = 0x40000000
_TIMEOUT, _LOOK = 5.0, 0.0005  # seconds
_UNTRACED = 30
"""How many tries in a row fail, without a tracer to be seen, until it is clear that it was not another one's turn.

Each time one may have had its turn that had ended when it was looked for.
"""
_INSTRUCTION = 8  # bytes, struct sock_filter

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def filter_of(pid: int) -> bytes:
    """Return the instructions of the newest filter of a process, which stands still for less than a millisecond.

    It takes CAP_SYS_ADMIN, and no filter of this process's own.

    Raises
    ------
    OSError : it has none, has ended, or is traced by another for seconds.
    TimeoutError : it did not stop. It is traced until this process ends.
    """
    _seize(pid)
    _ptrace(_INTERRUPT, pid)
    _wait_for_stop(pid)
    try:
        code = ctypes.create_string_buffer(_ptrace(_GET_FILTER, pid) * _INSTRUCTION)
        _ptrace(_GET_FILTER, pid, 0, ctypes.addressof(code))
        return code.raw
    finally:
        with contextlib.suppress(ProcessLookupError):
            _ptrace(_DETACH, pid)


def _seize(pid: int) -> None:
    """Trace a process, which only one can at a time: several requests of one client are served at once."""
    deadline, untraced = time.monotonic() + _TIMEOUT, 0
    while True:
        try:
            _ptrace(_SEIZE, pid)
        except PermissionError as e:
            tracer = processes.status(pid)["TracerPid"]
            untraced = untraced + 1 if tracer == "0" else 0
            if untraced >= _UNTRACED:
                raise
            if time.monotonic() > deadline:
                raise PermissionError(e.errno, f"process {tracer} traces it, such as a debugger or strace") from None
        else:
            return
        time.sleep(_LOOK)


def _wait_for_stop(pid: int) -> None:
    deadline = time.monotonic() + _TIMEOUT
    while True:
        changed, status = os.waitpid(pid, os.WNOHANG | _WALL)
        if changed and not os.WIFSTOPPED(status):
            raise ProcessLookupError(3, "it has ended")
        if changed:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(0, "it does not stop to be looked at")
        time.sleep(_LOOK)


def _ptrace(request: int, pid: int, address: int = 0, data: int = 0) -> int:
    result: int = _libc.ptrace(request, pid, address, data)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace {request:#x}: {os.strerror(number)}")
    return result
