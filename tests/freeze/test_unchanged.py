"""Which memory of a process has not changed between two of its forks, whatever it did in between."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from notebooks import PATIENCE

from jupyter_gpuckpt.freeze.pages import PAGE, Area, pieces
from jupyter_gpuckpt.freeze.unchanged import Part, parts, plan, shared

PAGES = 48
HUGE = 2 << 20
HOLE = bytes(32)

_PROGRAM = """
import ctypes, json, mmap, os, signal, sys
PAGE, PAGES, HUGE = 4096, {pages}, {huge}
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
FIXED, ANONYMOUS = 16, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
def new(size, at=None): return libc.mmap(at, size, 3, ANONYMOUS | (FIXED if at else 0), -1, 0)
def write(at, value, size=PAGE): ctypes.memset(at, value, size)
def stop():
    pid = os.fork()
    if not pid:
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    os.waitpid(pid, os.WUNTRACED)
    return pid
def begin():
    global small, huge, spare, children
    children = []
    small, spare, apart = new(PAGES * PAGE), new(PAGE), new(2 * HUGE)
    huge = -(-apart // HUGE) * HUGE
    libc.madvise(huge, HUGE, 14)
    for n in range(PAGES):
        write(small + n * PAGE, n + 1)
    write(huge, 7, HUGE)
    return small, huge
def do(what, page, other):
    at = small + page * PAGE
    if what == "write": write(at, other)
    elif what == "same": ctypes.memmove(at, ctypes.string_at(at, 8), 8)
    elif what == "huge": write(huge + other * PAGE, page, 8)
    elif what == "drop": libc.madvise(at, PAGE, 4)
    elif what == "free": libc.madvise(at, PAGE, 8)
    elif what == "drop huge": libc.madvise(huge + other * PAGE, PAGE, 4)
    elif what == "map": new(PAGE, at); write(at, other)
    elif what == "map again": new(PAGE, at); ctypes.memset(at, page + 1, PAGE)
    elif what == "protect": libc.mprotect(at, PAGE, 1); libc.mprotect(at, PAGE, 3)
    elif what == "swap":
        there = small + other % PAGES * PAGE
        if there != at:
            libc.mremap(at, PAGE, PAGE, 3, spare)
            libc.mremap(there, PAGE, PAGE, 3, at)
            libc.mremap(spare, PAGE, PAGE, 3, there)
            new(PAGE, spare)
    elif what == "read into":
        ends = os.pipe()
        os.write(ends[1], bytes([other]) * 64)
        os.readv(ends[0], [(ctypes.c_char * 64).from_address(at)])
        os.close(ends[0]); os.close(ends[1])
    elif what == "child":
        children.append(stop())
    elif what == "child writes":
        pid = os.fork()
        if not pid:
            write(at, other)
            os._exit(0)
        os.waitpid(pid, 0)
    elif what == "collapse": libc.madvise(huge, HUGE, 25)
    elif what == "unmerge": libc.madvise(huge, HUGE, 15)
def end():
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    libc.munmap(ctypes.c_void_p(small), ctypes.c_size_t(PAGES * PAGE))
    libc.munmap(ctypes.c_void_p(huge), ctypes.c_size_t(HUGE))
for line in sys.stdin:
    name, *arguments = json.loads(line)
    print(json.dumps(globals()[name](*arguments)), flush=True)
"""
_DOES = (
    *("write", "same", "huge", "drop", "free", "drop huge", "map", "map again", "protect", "swap", "read into"),
    *("child", "child writes", "collapse", "unmerge", "written from outside"),
)


class Program:
    """A process that does what it is told with memory of its own."""

    def __init__(self) -> None:
        text = _PROGRAM.format(pages=PAGES, huge=HUGE)
        command = [sys.executable, "-c", text]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid

    def ask(self, *what: object) -> object:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def fork(self) -> int:
        pid = self.ask("stop")
        assert isinstance(pid, int)
        return pid

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    program = Program()
    yield program
    program.end()


@contextlib.contextmanager
def opened(pid: int, name: str) -> Iterator[int]:
    fd = os.open(f"/proc/{pid}/{name}", os.O_RDWR if name == "mem" else os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def found(first: int, second: int, areas: list[Area]) -> dict[Area, bool]:
    with opened(first, "pagemap") as before, opened(second, "pagemap") as now:
        return dict(shared(before, now, areas))


def content(pid: int, area: Area) -> bytes:
    with opened(pid, "mem") as fd:
        return os.pread(fd, area[1] - area[0], area[0])


def kill(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


_DEED = st.tuples(st.sampled_from(_DOES), st.integers(0, PAGES - 1), st.integers(0, 255))


@pytest.mark.skipif(os.geteuid() != 0, reason="the system tells the numbers of pages to root alone")
@settings(deadline=None, max_examples=300, suppress_health_check=list(HealthCheck))
@given(deeds=st.lists(_DEED, max_size=12), cuts=st.sets(st.integers(1, PAGES - 1), max_size=PAGES))
def test_what_is_shared_has_the_same_bytes_whatever_happens(
    program: Program, deeds: list[tuple[str, int, int]], cuts: set[int]
) -> None:
    small, huge = program.ask("begin")  # type: ignore[misc]
    areas = [(small + a * PAGE, small + b * PAGE) for a, b in pairwise([0, *sorted(cuts), PAGES])]
    areas += [(huge + n * PAGE * 64, huge + (n + 1) * PAGE * 64) for n in range(8)]
    first = program.fork()
    touched = set()
    for what, page, other in deeds:
        if what == "written from outside":
            with opened(program.pid, "mem") as fd:
                os.pwrite(fd, bytes([other]) * 16, small + page * PAGE + 5)
        else:
            program.ask("do", what, page, other)
        touched |= {page, other % PAGES}
    second = program.fork()
    try:
        same = found(first, second, areas)
        for area in areas:
            assert not same[area] or content(first, area) == content(second, area)
        for area in areas[:-8]:  # a page of the others may have been copied with its neighbours
            if touched.isdisjoint(range((area[0] - small) // PAGE, (area[1] - small) // PAGE)):
                assert same[area]
    finally:
        kill(first, second)
        program.ask("end")


@pytest.mark.skipif(os.geteuid() != 0, reason="the system tells the numbers of pages to root alone")
def test_pages_that_move_in_the_machines_memory_are_never_taken_for_others(program: Program) -> None:
    """The system moves pages to make room for huge ones; those of both are looked at meanwhile."""
    small, _ = program.ask("begin")  # type: ignore[misc]
    areas = [(small + n * PAGE, small + (n + 1) * PAGE) for n in range(PAGES)]
    first = program.fork()
    for page in range(0, PAGES, 2):
        program.ask("do", "write", page, 200)
    second = program.fork()
    compacting = subprocess.Popen(
        ["/bin/sh", "-c", "for n in $(seq 20); do echo 1 > /proc/sys/vm/compact_memory; done"],
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(50):
            same = found(first, second, areas)
            assert not any(same[area] for area in areas[::2])
        compacting.wait()
        assert all(found(first, second, areas)[area] for area in areas[1::2])
    finally:
        compacting.kill()
        compacting.wait()
        kill(first, second)
        program.ask("end")


def test_nothing_is_unchanged_where_a_process_has_ended_or_the_numbers_are_not_told(
    program: Program,
) -> None:
    small, _ = program.ask("begin")  # type: ignore[misc]
    area = (small, small + PAGES * PAGE)
    first, second = program.fork(), program.fork()
    with opened(first, "pagemap") as before, opened(second, "pagemap") as now:
        assert shared(before, now, [area]) == {area: os.geteuid() == 0}
        held = os.pidfd_open(first)
        kill(first)
        select.select([held], [], [], PATIENCE)
        os.close(held)
        assert shared(before, now, [area]) == shared(now, before, [area]) == {area: False}
    kill(second)
    untold = b"\0\0\0\0\0\0\0\x80" * PAGES
    with open(os.memfd_create("pagemap"), "r+b", buffering=0) as pagemap:
        os.pwrite(pagemap.fileno(), untold, 0)
        assert shared(pagemap.fileno(), pagemap.fileno(), [(0, PAGES * PAGE)]) == {(0, PAGES * PAGE): False}
    program.ask("end")


_RUNS = st.lists(st.tuples(st.integers(0, 900), st.integers(1, 2000)), min_size=1, max_size=8)


@settings(deadline=None, max_examples=25)
@given(runs=_RUNS, data=st.data())
def test_parts_are_found_again_where_they_were(runs: list[tuple[int, int]], data: st.DataObject) -> None:
    """An image is stored, and cut again with what was known of it: whatever was left out, it is the same."""
    at, areas = 0, []
    for gap, length in runs:
        at += gap * PAGE
        areas.append((at, at + length * PAGE))
        at += length * PAGE
    chunks = []
    for piece in pieces(areas):
        left = sum(end - begin for begin, end in piece)
        while left:
            size = left if left <= HUGE else min(left, data.draw(st.integers(64, 512)) * PAGE)
            chunks.append((HOLE if data.draw(st.booleans()) else str(len(chunks)).encode(), size))
            left -= size
    joined: list[tuple[bytes, int]] = []
    for key, size in chunks:  # as the store does with holes
        if joined and key == joined[-1][0] == HOLE:
            joined[-1] = HOLE, joined[-1][1] + size
        else:
            joined.append((key, size))
    all_parts = list(parts(areas, areas, joined, HOLE, HUGE))
    assert sum(part.chunk[1] for part in all_parts) == sum(end - begin for begin, end in areas)
    assert plan(areas, all_parts) == all_parts
    known = [part for part in all_parts if data.draw(st.booleans())]
    at = 0
    where = {part.where: part for part in all_parts}
    offset_of, offset = {}, 0
    for part in all_parts:
        offset_of[part.where] = offset
        offset += part.chunk[1]
    for piece in plan(areas, known):
        if isinstance(piece, Part):
            assert piece in known
            assert where[piece.where] is piece
            assert offset_of[piece.where] == at
        at += piece if isinstance(piece, int) else piece.chunk[1]
    assert at == offset
    assert {piece for piece in plan(areas, known) if isinstance(piece, Part)} == set(known)
