"""Memory in huge pages, so that a process is forked in less time: a save forks it while it is paused (`twin.py`).

A fork copies the entries of the page tables: 1 GiB in pages of 4 KiB takes 20 to 25 ms, in pages of 2 MiB half a
millisecond. The system puts memory together by itself, but slowly, or only where a program asks for it. It is asked
here, from outside, while the process runs (process_madvise(2), MADV_COLLAPSE, Linux 6.1): what the memory holds stays
the same, and where it is.

Where the process writes to a huge page that its twin has, too, the system divides it. So none is asked for twice: what
is written to between saves stays in small pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from ..linux import proc, processes
from .pages import Area, joined

__all__ = ["HUGE", "HugePages"]

HUGE = 2 << 20
"""Bytes of a huge page (x86-64)."""

_LEAST = 64 << 20
"""Less memory than this is forked in a millisecond or two."""
_TOGETHER = 4 * HUGE  # what the system is asked for at once
_PART = 256 * HUGE  # what is looked at at once: milliseconds
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_NEVER = "[never]"

_SYS_PROCESS_MADVISE = 440
_MADV_COLLAPSE = 25

# PAGEMAP_SCAN (linux/fs.h, since 6.7): struct pm_scan_arg, of twelve 64-bit numbers, and struct page_region, of three.
_SCAN = 0xC060_6610
_IS_PRESENT, _IS_ZERO, _IS_HUGE = 1 << 3, 1 << 5, 1 << 6
_IS_NOT = _IS_ZERO | _IS_HUGE
_ROOM = 512
_WALK_END = 4

_libc = ctypes.CDLL(None, use_errno=True)


class HugePages:
    """Which memory of a kernel's processes has been put into huge pages, or could not be."""

    def __init__(self) -> None:
        self._asked: dict[tuple[int, int | None], set[int]] = {}

    def gather(self, pids: Sequence[int], goes_on: Callable[[], bool]) -> int:
        """Put what these processes have in small pages into huge ones, while it `goes_on`; return how many bytes.

        Only where all of a huge page is there already. Processes that end meanwhile are passed over, and so is all
        where the administrator has switched huge pages off, or this process may not ask (CAP_SYS_NICE).
        """
        if not _are_allowed():
            return 0
        known = {(pid, processes.start_time(pid)): pid for pid in pids}
        self._asked = {process: self._asked.get(process, set()) for process in known}
        gathered = 0
        for process, pid in known.items():
            with contextlib.suppress(OSError):
                gathered += _gather(pid, self._asked[process], goes_on)
        return gathered


def _are_allowed() -> bool:
    """Tell whether this system has huge pages, and the administrator has not switched them off."""
    return _SETTING.exists() and _NEVER not in _SETTING.read_text()


def _gather(pid: int, asked: set[int], goes_on: Callable[[], bool]) -> int:
    """Do it with one process; `asked` are the huge pages, by their number, that it is not to be done with again."""
    with contextlib.ExitStack() as closing:
        process, pagemap = os.pidfd_open(pid), os.open(f"/proc/{pid}/pagemap", os.O_RDONLY)
        closing.callback(os.close, process)
        closing.callback(os.close, pagemap)
        wanted = (
            number
            for part in itertools.takewhile(lambda _: goes_on(), _parts(pid))
            for number in _small(pagemap, part)
            if number not in asked
        )
        enough = list(itertools.islice(wanted, _LEAST // HUGE))
        if len(enough) * HUGE < _LEAST:
            return 0
        gathered = 0
        for begin, end in _runs(itertools.chain(enough, wanted)):
            if not goes_on():
                break
            asked.update(range(begin // HUGE, end // HUGE))
            gathered += _collapse(process, begin, end)
    return gathered


def _parts(pid: int) -> Iterator[Area]:
    """Yield the room for huge pages in the areas that no file is mapped to, in parts that are looked at soon."""
    for line in proc.lines(f"/proc/{pid}/maps"):
        where, may, _, _, inode, *name = line.split(maxsplit=5)
        begin, end = (int(address, 16) for address in where.split("-"))
        is_ordinary = not name or name[0] == "[heap]" or name[0].startswith("[anon:")
        if may.startswith("rw") and may.endswith("p") and inode == "0" and is_ordinary:
            begin, end = -(-begin // HUGE) * HUGE, end // HUGE * HUGE
            yield from ((part, min(part + _PART, end)) for part in range(begin, end, _PART))


def _small(pagemap: int, part: Area) -> Iterator[int]:
    """Yield the numbers of the huge pages of which a part has all, in small ones."""
    for begin, end in joined(_scanned(pagemap, part)):
        yield from range(-(-begin // HUGE), end // HUGE)


def _scanned(pagemap: int, part: Area) -> Iterator[Area]:
    """Yield the runs of pages that are present, in small pages, and not the one of zeros that takes no memory."""
    found = (ctypes.c_uint64 * (3 * _ROOM))()
    begin, end = part
    while begin < end:
        asked = (ctypes.c_uint64 * 12)(
            *(96, 0, begin, end, 0, ctypes.addressof(found), _ROOM, 0),
            *(_IS_NOT, _IS_NOT | _IS_PRESENT, 0, _IS_PRESENT),
        )
        count = fcntl.ioctl(pagemap, _SCAN, asked)
        for at in range(0, 3 * count, 3):
            yield found[at], found[at + 1]
        if asked[_WALK_END] <= begin:
            break
        begin = asked[_WALK_END]


def _runs(numbers: Iterable[int]) -> Iterator[Area]:
    """Yield huge pages, by their numbers and in order, with those side by side together, some at a time."""
    begin = end = 0
    for number in numbers:
        if number * HUGE != end or end - begin >= _TOGETHER:
            if end > begin:
                yield begin, end
            begin = number * HUGE
        end = (number + 1) * HUGE
    if end > begin:
        yield begin, end


def _collapse(process: int, begin: int, end: int) -> int:
    """Have the system put an area together; return how many bytes of it are, as far as it says.

    Raises
    ------
    PermissionError : this process may not ask for that.
    """
    vector = (ctypes.c_size_t * 2)(begin, end - begin)
    done: int = _libc.syscall(_SYS_PROCESS_MADVISE, process, vector, ctypes.c_size_t(1), _MADV_COLLAPSE, 0)
    if done < 0 and (number := ctypes.get_errno()) == errno.EPERM:
        raise PermissionError(number, os.strerror(number))
    return max(0, done)
