"""Watching the system calls of another process's threads, and making others in their place (ptrace(2), x86-64).

A tracer that ends, however it ends, lets its threads go on: nothing here can keep a process frozen.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Call", "Tracer", "is_supported"]

_SYSCALL, _GETREGS, _SETREGS = 24, 12, 13
_SEIZE, _INTERRUPT, _LISTEN, _GET_SYSCALL_INFO = 0x4206, 0x4207, 0x4208, 0x420E
_TRACESYSGOOD, _TRACECLONE = 0x1, 0x8
_EVENT_STOP = 128
_SYSCALL_STOP = signal.SIGTRAP | 0x80
_AT_ENTRY = 1  # PTRACE_SYSCALL_INFO_ENTRY
_WALL = 0x40000000
_SYSCALL_BYTES = 2  # length of the instruction
_NO_CALL = 2**64 - 1
_GROUP_STOPS = {signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


class _Registers(ctypes.Structure):
    """``struct user_regs_struct`` of <sys/user.h>, x86-64."""

    _fields_ = tuple(
        (name, ctypes.c_ulonglong)
        for name in (
            *("r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx", "rsi", "rdi"),
            *("orig_rax", "rip", "cs", "eflags", "rsp", "ss", "fs_base", "gs_base", "ds", "es", "fs", "gs"),
        )
    )


class _SyscallInfo(ctypes.Structure):
    """``struct ptrace_syscall_info`` of <linux/ptrace.h>, as far as the beginning of a call has it."""

    _fields_ = (
        ("op", ctypes.c_uint8),
        ("_", ctypes.c_uint8 * 3),
        ("arch", ctypes.c_uint32),
        ("ip", ctypes.c_uint64),
        ("sp", ctypes.c_uint64),
        ("nr", ctypes.c_uint64),
        ("args", ctypes.c_uint64 * 6),
    )


@dataclass(frozen=True)
class Call:
    """A system call that a thread is about to make: its number, its six arguments, the thread's stack pointer."""

    tid: int
    number: int
    arguments: Sequence[int]
    stack: int


def is_supported() -> bool:
    """Tell whether system calls can be replaced on this kind of machine."""
    return platform.machine() == "x86_64"


class Tracer:
    """The threads of some processes, stopped at every system call that they make.

    To be used by one thread alone, the one that made it: the system demands it.
    """

    def seize(self, pid: int) -> None:
        """Trace all threads of a process, those included that it starts later.

        Raises
        ------
        OSError : there is no such process, or no right to trace it.
        """
        seen: set[int] = set()
        # Threads that start meanwhile are found by a second look.
        while new := {int(name) for name in os.listdir(f"/proc/{pid}/task")} - seen:  # noqa: PTH208
            seen |= new
            for tid in new:
                try:
                    _ptrace(_SEIZE, tid, 0, _TRACESYSGOOD | _TRACECLONE)
                    _ptrace(_INTERRUPT, tid)
                except OSError:
                    if _is_untraced(tid):
                        raise

    def next_call(self) -> Call | None:
        """Wait until a thread is about to make a call, and hold it there; None when no thread is left."""
        while True:
            try:
                tid, status = os.waitpid(-1, _WALL)
            except ChildProcessError:
                return None
            try:
                if call := _look(tid, status):
                    return call
            except ProcessLookupError:
                continue  # killed meanwhile

    def go_on(self, call: Call) -> None:
        """Let a thread make its call."""
        _resume(call.tid)

    def insert(self, call: Call, number: int, *arguments: int) -> int:
        """Have a thread make another call first; it is held before its own again.

        Returns the result as the system gives it: a negative error number for a failure.

        Raises
        ------
        OSError : the thread has ended.
        """
        own = _get(call.tid)
        other = _Registers.from_buffer_copy(own)
        other.orig_rax = number
        for name, value in zip(("rdi", "rsi", "rdx", "r10", "r8", "r9"), arguments, strict=False):
            setattr(other, name, value & (2**64 - 1))
        _set(call.tid, other)
        _to_next_stop(call.tid)
        result = ctypes.c_longlong(_get(call.tid).rax).value
        own.rax, own.rip = call.number, own.rip - _SYSCALL_BYTES
        _set(call.tid, own)
        _to_next_stop(call.tid)
        return result

    def answer(self, call: Call, result: int) -> None:
        """Let a thread go on as if its call, which is not made, had given `result`."""
        registers = _get(call.tid)
        registers.orig_rax = _NO_CALL
        _set(call.tid, registers)
        _to_next_stop(call.tid)
        registers.rax = result & (2**64 - 1)
        _set(call.tid, registers)
        _resume(call.tid)


def _look(tid: int, status: int) -> Call | None:
    """Return what a thread is about to call; from anything else that stopped it, it goes on."""
    if not os.WIFSTOPPED(status):
        return None
    if os.WSTOPSIG(status) == _SYSCALL_STOP:
        info = _SyscallInfo()
        _ptrace(_GET_SYSCALL_INFO, tid, ctypes.sizeof(info), ctypes.addressof(info))
        if info.op == _AT_ENTRY:
            return Call(tid, info.nr, tuple(info.args), info.sp)
        _resume(tid)
        return None
    event, number = status >> 16, os.WSTOPSIG(status)
    if event == _EVENT_STOP and number in _GROUP_STOPS:
        _ptrace(_LISTEN, tid)  # someone else has stopped the process: it stays so
    else:
        _resume(tid, 0 if event else number)
    return None


def _to_next_stop(tid: int) -> None:
    """Have a thread run to the beginning or end of a call; signals that come meanwhile come to it afterwards."""
    late: list[int] = []
    _resume(tid)
    while True:
        _, status = os.waitpid(tid, _WALL)
        if not os.WIFSTOPPED(status):
            raise ProcessLookupError(f"thread {tid} has ended")
        if os.WSTOPSIG(status) == _SYSCALL_STOP:
            break
        if not status >> 16:
            late.append(os.WSTOPSIG(status))
        _resume(tid)
    for number in late:
        _libc.tgkill(_process_of(tid), tid, number)


def _resume(tid: int, number: int = 0) -> None:
    _ptrace(_SYSCALL, tid, 0, number)


def _get(tid: int) -> _Registers:
    registers = _Registers()
    _ptrace(_GETREGS, tid, 0, ctypes.addressof(registers))
    return registers


def _set(tid: int, registers: _Registers) -> None:
    _ptrace(_SETREGS, tid, 0, ctypes.addressof(registers))


def _ptrace(request: int, tid: int, address: int = 0, data: int = 0) -> None:
    if _libc.ptrace(request, tid, address, data) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace {request:#x} of thread {tid}: {os.strerror(number)}")


def _process_of(tid: int) -> int:
    return int(_status(tid).partition("Tgid:")[2].split()[0])


def _is_untraced(tid: int) -> bool:
    """Tell whether a thread lives that nobody traces."""
    try:
        return int(_status(tid).partition("TracerPid:")[2].split()[0]) != os.getpid()
    except OSError:
        return False


def _status(tid: int) -> str:
    return Path(f"/proc/{tid}/status").read_text()
