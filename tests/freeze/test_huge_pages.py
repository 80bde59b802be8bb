"""Memory that is put into huge pages: what it holds stays, and a fork takes less time."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cgroups import Cgroup, memory_cgroup

from jupyter_gpuckpt.freeze import huge_pages
from jupyter_gpuckpt.freeze.huge_pages import HUGE, HugePages

by_root = pytest.mark.skipif(os.geteuid() != 0, reason="asking for another process's memory takes root")

COUNT = 80
"""Huge pages of the program's memory."""
NOT_WORTH_IT = 32
"""Fewer are left as they are."""
DIVIDED = 20
"""Huge pages that are written to."""
NOT_POSSIBLE = 4
"""The system cannot move a page that is in use by itself in that moment; so many of them are expected at most."""


def always() -> bool:
    return True


_PROGRAM = f"""
import ctypes, hashlib, mmap, sys
HUGE, COUNT = {HUGE}, {COUNT}
area = mmap.mmap(-1, (COUNT + 2) * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
if sys.argv[1:] == ["unwilling"]:
    area.madvise(15)  # MADV_NOHUGEPAGE
first = -(-ctypes.addressof(ctypes.c_char.from_buffer(area)) // HUGE) * HUGE
offset = first - ctypes.addressof(ctypes.c_char.from_buffer(area))
for at in range(offset, offset + COUNT * HUGE, 4096):
    if (at - offset) // HUGE != 5 or at % 8192:  # one of them has holes
        area[at : at + 8] = at.to_bytes(8, "little")
print(first, flush=True)
for line in sys.stdin:
    exec(line)
    print(hashlib.blake2b(area).hexdigest(), flush=True)
"""


class Program:
    """A process with `COUNT` huge pages' worth of small pages from `first` on."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.pid, self._process = process.pid, process
        self.first = int(self._said())

    def do(self, line: str) -> str:
        """Have it execute a line; return the hash of its memory after that."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._said()

    def huge(self) -> int:
        """Return how many huge pages it has."""
        (line,) = re.findall(r"AnonHugePages: +(\d+) kB", Path(f"/proc/{self.pid}/smaps_rollup").read_text())
        return (int(line) << 10) // HUGE

    def _said(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


@contextlib.contextmanager
def program(*arguments: str) -> Iterator[Program]:
    piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", _PROGRAM, *arguments], text=True, **piped) as process:
        try:
            yield Program(process)
        finally:
            process.kill()


@by_root
def test_what_memory_holds_stays_the_same_in_huge_pages() -> None:
    with program() as one:
        before = one.do("pass")
        assert one.huge() == 0
        HugePages().gather([one.pid], always)
        # Not the one that has holes: that would take memory which the program does not use.
        assert COUNT - 1 - NOT_POSSIBLE <= one.huge() <= COUNT - 1
        assert one.do("pass") == before


@by_root
def test_a_huge_page_that_was_written_to_beside_a_fork_is_not_asked_for_again() -> None:
    pages = HugePages()
    with program() as one:
        pages.gather([one.pid], always)
        had = one.huge()
        one.do("import os; child = os.fork() or __import__('signal').pause()")
        one.do(f"for at in range(offset, offset + {DIVIDED} * HUGE, HUGE): area[at] = 33")
        one.do("os.kill(child, 9); os.waitpid(child, 0)")
        divided = had - one.huge()
        assert divided >= DIVIDED - NOT_POSSIBLE
        one.do(f"more = mmap.mmap(-1, {COUNT} * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)")
        one.do(f"for at in range(0, {COUNT} * HUGE, 4096): more[at] = 1")
        pages.gather([one.pid], always)
        assert COUNT - 1 - NOT_POSSIBLE <= one.huge() - (had - divided) <= COUNT  # what is new, and no more


@by_root
def test_it_can_be_broken_off_and_the_next_call_goes_on() -> None:
    pages = HugePages()
    with program() as one:
        assert pages.gather([one.pid], lambda: False) == 0
        had = []
        while COUNT - 1 - one.huge() >= NOT_WORTH_IT + NOT_POSSIBLE:
            had.append(one.huge())
            pages.gather([one.pid], lambda: one.huge() == had[-1])
        assert len(had) > 1
        assert had == sorted(had)


@by_root
@pytest.mark.parametrize("arguments", [(), ("unwilling",)])
def test_a_program_that_wants_none_has_none(arguments: tuple[str, ...]) -> None:
    with program(*arguments) as one:
        before = one.do("pass")
        assert (HugePages().gather([one.pid], always) > 0) == (not arguments)
        assert one.do("pass") == before


@by_root
@pytest.mark.parametrize("setting", ["always madvise [never]\n", None])
def test_where_the_administrator_wants_none_there_is_none(
    setting: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or where the system has none. The system itself would give them all the same."""
    file = tmp_path / "enabled"
    if setting is not None:
        file.write_text(setting)
    with program() as one:
        monkeypatch.setattr(huge_pages, "_SETTING", file)
        assert HugePages().gather([one.pid], always) == 0
        assert one.huge() == 0
        file.write_text("always [madvise] never\n")
        assert HugePages().gather([one.pid], always) > 0


@by_root
def test_a_process_that_has_ended_is_passed_over() -> None:
    with program() as one:
        with program() as other:
            pass
        assert HugePages().gather([other.pid, one.pid], always) > 0


def test_who_may_not_ask_is_told_at_once_that_nothing_was_done() -> None:
    asking = "import sys; from jupyter_gpuckpt.freeze.huge_pages import HugePages as H; pages = H()\n"
    asking += "print(pages.gather([int(sys.argv[1])], lambda: True), sum(map(len, pages._asked.values())))"
    without = ["setpriv", "--bounding-set", "-sys_nice", "--inh-caps", "-sys_nice"] if os.geteuid() == 0 else []
    with program() as one:
        before = one.do("pass")
        done = subprocess.run(
            [*without, sys.executable, "-c", asking, str(one.pid)], capture_output=True, text=True, check=True
        )
        gathered, asked = done.stdout.split()
        assert (gathered, one.huge(), one.do("pass")) == ("0", 0, before)
        assert int(asked) <= 4  # and it was not tried again and again


@contextlib.contextmanager
def in_cgroup() -> Iterator[tuple[Program, Cgroup]]:
    """A program in a cgroup, with as much memory again that counts there: `more`."""
    with memory_cgroup(64 << 30) as group, program() as one:
        group.join(one.pid)
        one.do(f"more = mmap.mmap(-1, {COUNT} * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)")
        one.do(f"for at in range(0, {COUNT} * HUGE, 4096): more[at] = 1")
        yield one, group


@by_root
def test_where_there_is_no_memory_for_a_huge_page_none_is_made_and_nobody_is_killed() -> None:
    with in_cgroup() as (one, group):
        before = one.do("pass")
        group.limit.write_text(str(group.used() + HUGE // 2))
        HugePages().gather([one.pid], always)
        assert group.killed() == 0
        assert one.do("pass") == before


@by_root
def test_what_is_given_back_of_huge_pages_is_there_when_memory_is_short() -> None:
    """The system divides them then, and not before."""
    with in_cgroup() as (one, group):
        HugePages().gather([one.pid], always)
        one.do(f"for at in range(0, {COUNT} * HUGE, 8192): more.madvise(mmap.MADV_DONTNEED, at, 4096)")
        group.limit.write_text(str(group.used() + 4 * HUGE))
        one.do(f"other = mmap.mmap(-1, {COUNT // 3} * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)")
        assert one.do(f"for at in range(0, {COUNT // 3} * HUGE, 4096): other[at] = 1")
        assert group.killed() == 0
