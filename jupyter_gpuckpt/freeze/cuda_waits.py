"""Which threads wait in the CUDA driver, seen from outside: those that touched a GPU while their process sleeps.

A call of a locked process waits inside the driver, and may hold Python's lock: nothing can be asked of the process
then. But a thread that waits shows where: Linux tells its system call and its stack pointer (proc_pid_syscall(5)), and
near the top of its stack lie the return addresses of the functions that it is in. Where the driver's code is among
them, and was not while the process was idle, the thread has called the driver. An address that an earlier call has left
there can be taken for one: the process is then woken for nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
from collections.abc import Iterable, Sequence

from ..linux import proc
from .driver_threads import is_drivers
from .parking_channel import THREAD

__all__ = ["CudaWaits", "Place"]

_DRIVER = re.compile(r"/(libcuda\.so[.\d]*|((?:\.|lib)gpuckpt-parking\.so))( \(deleted\))?$")
"""Where calls wait: in the driver, or in front of it, at the gate or for the memory that is parked."""
_NEAR = 2048
"""Bytes from the top of the stack in which a driver that waits is found: the frames of libc below it take some 300."""

Place = tuple[int, int, int, int]
"""Process, thread, stack pointer and instruction: where a thread waits."""
_Code = tuple[int, int, bool]
"""From where to where code is mapped, and whether it is that of the library in front of the driver."""


class CudaWaits:
    """The threads of some processes; `known` are the places in which they waited while they were idle."""

    def __init__(self, pids: Iterable[int], known: Iterable[Sequence[int]] = ()) -> None:
        self._code = {pid: _driver_code(pid) for pid in pids}
        self._known = {(int(p), int(t), int(s), int(i)) for p, t, s, i in known}
        self._last: set[Place] = set()

    def places(self) -> set[Place]:
        """Return where threads wait in the driver now."""
        return set(self._waiting())

    def counts(self) -> tuple[int, int]:
        """Return how many threads wait in the driver now, and how many in front of it.

        By what is innermost: an address that an earlier call of the driver has left makes one of the former.
        """
        in_front = [*self._waiting().values()]
        return in_front.count(False), in_front.count(True)

    def _waiting(self) -> dict[Place, bool]:
        """Return where threads wait, and whether that is in front of the driver."""
        return {place: front for pid, code in self._code.items() for place, front in _waiting(pid, code)}

    def new(self) -> bool:
        """Tell whether a thread waits in the driver that did not before, and has not moved since the last look."""
        found = self.places() - self._known
        stays, self._last = found & self._last, found
        return bool(stays)

    @property
    def is_suspicious(self) -> bool:
        """Whether the last look found something, so that the next should come soon."""
        return bool(self._last)


def _driver_code(pid: int) -> list[_Code]:
    found = []
    with contextlib.suppress(OSError):
        for line in proc.lines(f"/proc/{pid}/maps"):
            columns = line.split(maxsplit=5)
            if len(columns) == 6 and "x" in columns[1] and (library := _DRIVER.search(columns[5])):
                first, last = columns[0].split("-")
                found.append((int(first, 16), int(last, 16), library[2] is not None))
    return found


def _waiting(pid: int, code: Sequence[_Code]) -> list[tuple[Place, bool]]:
    found: list[tuple[Place, bool]] = []
    if not code:
        return found
    least, most = min(first for first, _, _ in code), max(last for _, last, _ in code)
    try:
        memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return found
    try:
        for name in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
            task = f"/proc/{pid}/task/{name}"
            with contextlib.suppress(OSError, ValueError, IndexError):
                words = proc.read(f"{task}/syscall").split()
                stack, at = int(words[-2], 16), int(words[-1], 16)  # ValueError or IndexError where it runs
                near = os.pread(memory, _NEAR, stack)
                words_near = struct.unpack(f"={len(near) // 8}Q", near[: len(near) // 8 * 8])
                values = [value for value in (at, *words_near) if least <= value < most]  # most of them lie elsewhere
                fronts = (is_front for value in values for first, last, is_front in code if first <= value < last)
                if (innermost := next(fronts, None)) is None:
                    continue
                # These always wait there: the driver's own, and our library's.
                if not (is_drivers(task) or proc.read(f"{task}/comm").startswith(THREAD)):
                    found.append(((pid, int(name), stack, at), innermost))
    except OSError:  # it has ended
        pass
    finally:
        os.close(memory)
    return found
