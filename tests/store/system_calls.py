"""Run a function in a child process and meet its system calls: watch, kill, cut or fail the Nth.

By ptrace, so that what the child's C code and threads call is met as well. Linux on x86-64.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
import signal
import struct
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SUPPORTED = platform.system() == "Linux" and platform.machine() == "x86_64"

CHANGES = {
    1: "write", 18: "pwrite64", 20: "writev", 296: "pwritev", 328: "pwritev2",
    73: "flock", 74: "fsync", 75: "fdatasync",
    77: "ftruncate", 82: "rename", 83: "mkdir", 84: "rmdir", 86: "link", 87: "unlink",
    90: "chmod", 91: "fchmod", 258: "mkdirat", 263: "unlinkat", 264: "renameat", 265: "linkat",
    268: "fchmodat", 316: "renameat2", 452: "fchmodat2", 257: "creat",
}  # fmt: skip
"""The calls that change a file system or take a lock (`creat`: openat that may create)."""

READS = {0: "read", 17: "pread64", 19: "readv", 295: "preadv", 327: "preadv2", 217: "getdents64"}

_OPENAT = 257
_WRITES = {1, 328}
"""Calls whose third argument says how much is written: bytes, or parts."""
_TRACEME, _POKEUSER, _SYSCALL = 0, 6, 24
_SETOPTIONS, _GET_SYSCALL_INFO = 0x4200, 0x420E
_OPTIONS = 0x1 | 0x8 | 0x100000  # TRACESYSGOOD, TRACECLONE, EXITKILL
_ENTRY, _EXIT = 1, 2
_RDX, _RAX, _ORIG_RAX = 12 * 8, 10 * 8, 15 * 8
_WALL = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


@dataclass(frozen=True)
class Fault:
    """What to do at the call number `at` (from 0) of those that are counted."""

    at: int
    kill: bool = False
    """Before the call."""
    cut: bool = False
    """Let it write half of its bytes, or of its parts, then kill."""
    error: int = 0
    """Do not make the call, fail it with this errno."""
    for_good: bool = False
    """Fail all later ones as well."""


@dataclass
class Run:
    """What became of a child."""

    calls: list[str] = field(default_factory=list)
    synced: list[tuple[int, str]] = field(default_factory=list)
    """For each fsync the number of the call and the path."""
    result: Any = None
    """What the function returned; None where the child was killed."""
    failure: str = ""
    """The kind of exception that it raised."""
    text: str = ""
    """That exception's traceback."""


def run(
    function: Callable[[], Any],
    counted: dict[int, str],
    fault: Fault | None = None,
    after_each: Callable[[str, str], None] | None = None,
) -> Run:
    """Run `function` (it returns JSON) in a forked child, with the fault, and say how it ended.

    `after_each` is called after each counted call with its name, and for an fsync the path, while the thread that made
    it is paused.
    """
    with mmap.mmap(-1, 1 << 20) as page:
        pid = os.fork()
        if pid == 0:
            _child(function, page)
        outcome = Run()
        _trace(pid, counted, fault, after_each, outcome)
        raw = bytes(page[:]).rstrip(b"\0")
    if raw:
        for name, value in json.loads(raw).items():
            setattr(outcome, name, value)
    return outcome


def _child(function: Callable[[], Any], page: mmap.mmap) -> None:
    _libc.ptrace(_TRACEME, 0, None, None)
    os.kill(os.getpid(), signal.SIGSTOP)
    try:
        report = {"result": function()}
    except BaseException as e:
        report = {"failure": type(e).__name__, "text": traceback.format_exc()}
    raw = json.dumps(report).encode()
    page[: len(raw)] = raw  # shared memory: reporting makes no call that would be counted
    os._exit(0)


def _trace(
    pid: int,
    counted: dict[int, str],
    fault: Fault | None,
    after_each: Callable[[str, str], None] | None,
    outcome: Run,
) -> None:
    os.waitpid(pid, _WALL)
    _ptrace(_SETOPTIONS, pid, 0, _OPTIONS)
    _ptrace(_SYSCALL, pid)
    failing: dict[int, int] = {}  # thread: errno to return
    cutting: set[int] = set()
    watched: dict[int, tuple[str, str]] = {}
    while True:
        tid, status = os.waitpid(-1, _WALL)
        if os.WIFEXITED(status) or os.WIFSIGNALED(status):
            if tid == pid:
                return
            continue
        stop = os.WSTOPSIG(status)
        deliver = 0
        if stop == signal.SIGTRAP | 0x80:
            op, number, arguments = _call(tid)
            name = _name(counted, number, arguments) if op == _ENTRY else None
            if name:
                index = len(outcome.calls)
                outcome.calls.append(name)
                path = str(Path(f"/proc/{tid}/fd/{arguments[0]}").readlink()) if name == "fsync" else ""
                watched[tid] = (name, path)
                if path:
                    outcome.synced.append((index, path))
                if fault and fault.error and (
                    index == fault.at or (fault.for_good and index > fault.at)
                ):  # fmt: skip
                    _ptrace(_POKEUSER, tid, _ORIG_RAX, -1)
                    failing[tid] = fault.error
                elif fault and index == fault.at and fault.kill:
                    os.kill(pid, signal.SIGKILL)
                elif fault and index == fault.at and fault.cut and number in _WRITES:
                    _ptrace(_POKEUSER, tid, _RDX, arguments[2] // 2)
                    cutting.add(tid)
            elif op == _EXIT:
                if tid in failing:
                    _ptrace(_POKEUSER, tid, _RAX, -failing.pop(tid))
                if tid in cutting:
                    os.kill(pid, signal.SIGKILL)
                if tid in watched and after_each:
                    after_each(*watched[tid])
                watched.pop(tid, None)
        elif stop not in (signal.SIGTRAP, signal.SIGSTOP):
            deliver = stop
        _ptrace(_SYSCALL, tid, 0, deliver)


def _call(tid: int) -> tuple[int, int, tuple[int, ...]]:
    buffer = ctypes.create_string_buffer(96)
    _ptrace(_GET_SYSCALL_INFO, tid, 96, ctypes.addressof(buffer))
    op = buffer.raw[0]
    if op != _ENTRY:
        return op, -1, ()
    number, *arguments = struct.unpack_from("7Q", buffer.raw, 24)
    return op, number, tuple(arguments)


def _name(counted: dict[int, str], number: int, arguments: tuple[int, ...]) -> str | None:
    if number == _OPENAT and not arguments[2] & os.O_CREAT:
        return None
    return counted.get(number)


def _ptrace(request: int, tid: int, address: int = 0, data: int = 0) -> None:
    # It fails where the thread was killed meanwhile: the next wait tells.
    _libc.ptrace(request, tid, address, data)
