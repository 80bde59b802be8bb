"""Another process's threads: holding them still, watching their system calls, making others in their place.

This is ptrace(2), for x86-64.

A tracer that ends, however it ends, lets its threads go on: nothing here can keep a process frozen.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..linux import proc

__all__ = ["Call", "Halt", "Tracer", "is_supported", "process_of"]

_CONT, _SYSCALL, _GETREGS, _SETREGS, _DETACH = 7, 24, 12, 13, 17
_SEIZE, _INTERRUPT, _LISTEN, _GET_SYSCALL_INFO = 0x4206, 0x4207, 0x4208, 0x420E
_TRACESYSGOOD, _TRACECLONE = 0x1, 0x8
_EVENT_STOP = 128
_SYSCALL_STOP = signal.SIGTRAP | 0x80
_AT_ENTRY = 1  # PTRACE_SYSCALL_INFO_ENTRY
_WALL = 0x40000000
_SYSCALL_BYTES = 2  # length of the instruction
_NO_CALL = 2**64 - 1
_BETWEEN_LOOKS = 0.0002  # seconds
_GROUP_STOPS = {signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}

# The calls in which a thread sleeps and holds nothing: read, poll, select, accept, recvfrom, recvmsg, wait4, futex,
# nanosleep and their kin, pause, rt_sigtimedwait, epoll_wait, restart_syscall.
_SLEEPING = frozenset({0, 7, 23, 34, 35, 43, 45, 47, 61, 128, 202, 219, 230, 232, 247, 270, 271, 281, 288, 441})

_OPENAT, _LONGEST_PATH = 257, 4096  # bytes, PATH_MAX

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
        """Trace all threads of a process, those included that it starts later, but for those that a sibling of this
        program holds.

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
                    if not _is_ours(tid):
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


class Halt:
    """Threads that are held still, until they are let go or this process ends; to be used by one thread alone."""

    def __init__(self) -> None:
        self._held: set[int] = set()

    def hold(self, threads: Iterable[int], deadline: float) -> bool:
        """Hold threads still; tell whether all of them have stopped by `deadline` (`time.monotonic`).

        A thread that has ended is as good as still.
        """
        waiting = set()
        for tid in threads:
            try:
                if tid not in self._held:
                    _ptrace(_SEIZE, tid)
                elif self._has_stopped(tid):
                    continue  # by itself, as when its process was continued; the next stop would be one too many
                _ptrace(_INTERRUPT, tid)
                waiting.add(tid)
            except ProcessLookupError:
                self._held.discard(tid)
        self._held |= waiting
        while waiting:
            if time.monotonic() > deadline:
                return False
            for tid in list(waiting):
                if self._has_stopped(tid):
                    waiting.discard(tid)
        return True

    def awake(self) -> list[int]:
        """Return those of the held threads that were not asleep in a system call: they may hold locks of any kind."""
        found = []
        for tid in self._held:
            with contextlib.suppress(OSError):
                registers = _get(tid)
                call = ctypes.c_longlong(registers.orig_rax).value
                if call not in _SLEEPING and not (call == _OPENAT and _is_fifo(tid, registers.rsi)):
                    found.append(tid)
        return found

    def let_go(self, threads: Iterable[int]) -> None:
        """Let held threads go on; `hold` can hold them again."""
        for tid in threads:
            with contextlib.suppress(ProcessLookupError):
                _ptrace(_CONT, tid)

    def end(self) -> None:
        """Let all held threads go on, and no longer trace them."""
        for tid in self._held:
            with contextlib.suppress(ProcessLookupError):
                _ptrace(_DETACH, tid)
        self._held.clear()

    def _has_stopped(self, tid: int) -> bool:
        """Look whether a thread has stopped; a signal that comes to it meanwhile stays with it."""
        try:
            changed, status = os.waitpid(tid, _WALL | os.WNOHANG)
        except ChildProcessError:
            changed, status = tid, 0
        if changed == 0:
            time.sleep(_BETWEEN_LOOKS)
            return False
        if not os.WIFSTOPPED(status):
            self._held.discard(tid)
            return True
        if status >> 16 == _EVENT_STOP:
            return True
        _ptrace(_CONT, tid, 0, 0 if status >> 16 else os.WSTOPSIG(status))
        return False


def _is_fifo(tid: int, address: int) -> bool:
    """Tell whether the path at an address is that of a FIFO: who opens one sleeps until another opens its other end."""
    with open(f"/proc/{tid}/mem", "rb", buffering=0) as memory:
        path = os.pread(memory.fileno(), _LONGEST_PATH, address).partition(b"\0")[0]
    return path.startswith(b"/") and Path(f"/proc/{tid}/root{os.fsdecode(path)}").is_fifo()


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
        _libc.tgkill(process_of(tid), tid, number)


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


def process_of(tid: int) -> int:
    """Return the process that a thread belongs to."""
    return _number(tid, "Tgid:")


def _is_ours(tid: int) -> bool:
    """Tell whether a thread is traced by this program, or by another of the same parent; one that has ended is, too."""
    try:
        tracer = _number(tid, "TracerPid:")
        return tracer == os.getpid() or (tracer != 0 and _number(tracer, "PPid:") == os.getppid())
    except OSError:
        return True


def _number(tid: int, key: str) -> int:
    return next(int(line.split()[1]) for line in proc.lines(f"/proc/{tid}/status") if line.startswith(key))
