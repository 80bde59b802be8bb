"""criu is given a list of mappings that was read before a process is paused: only where it is right."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_gpuckpt import installed
from jupyter_gpuckpt.freeze.twin import MappingsChanged, Noted, Void, asked_for

# A process that does with a large area, and with all else, what it is told.
_SAVED = """
import ctypes, mmap, sys
area = mmap.mmap(-1, 4 << 20)
area[:] = bytes(4 << 20)
libc = ctypes.CDLL(None)
start = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(area)))
def lock(): assert libc.mlock(start, ctypes.c_size_t(4 << 20)) == 0
print("there", flush=True)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""
# What criu does: it looks for a file when all is ready, stops the processes, and then reads the list of each.
_READS = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
def opened(folder, name): return libc.openat64(folder, name, os.O_RDONLY)
opened(-100, b"irmap-cache")
print("before", flush=True)
sys.stdin.readline()
fd = opened(os.open("/proc/" + sys.argv[1], os.O_PATH), b"smaps")
print(os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:"), flush=True)
with open(fd, "rb") as file: sys.stdout.buffer.write(file.read())
"""


class _Saved:
    """The process, and criu's part."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SAVED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.said()

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def do(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        assert self.said() == "done\n"

    def list_after(self, line: str) -> tuple[bool, bytes]:
        """Return whether criu was given what was read before this line was executed, and what it was given."""
        pid = str(self.process.pid)
        environment = {
            **os.environ,
            "LD_PRELOAD": str(installed.CRIU_SOCKETS_LIBRARY),
            **asked_for(self.process.pid, "/nowhere", reads_ahead=True),
        }
        reading = [sys.executable, "-c", _READS, pid]
        with subprocess.Popen(reading, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as criu:
            assert criu.stdin is not None
            assert criu.stdout is not None
            assert criu.stdout.readline() == b"before\n"
            self.do(line)
            criu.stdin.write(b"\n")
            criu.stdin.close()
            return criu.stdout.readline() == b"True\n", criu.stdout.read()

    def list_now(self) -> bytes:
        return Path(f"/proc/{self.process.pid}/smaps").read_bytes()


@pytest.fixture
def saved() -> Iterator[_Saved]:
    one = _Saved()
    yield one
    one.process.communicate()


def test_where_nothing_has_changed_it_is_what_was_read_before(saved: _Saved) -> None:
    was_before, given = saved.list_after("pass")
    assert was_before
    assert b"VmFlags:" in given
    assert given.count(b"VmFlags:") == saved.list_now().count(b"VmFlags:")


@pytest.mark.parametrize(
    "line",
    [
        "another = mmap.mmap(-1, 4 << 20)",
        "area.madvise(mmap.MADV_DONTDUMP, 0, 1 << 20)",  # a part, which is a mapping of its own then
        "lock()",
    ],
)
def test_where_the_mappings_differ_criu_reads_them(saved: _Saved, line: str) -> None:
    was_before, given = saved.list_after(line)
    assert not was_before
    assert given.count(b"VmFlags:") == saved.list_now().count(b"VmFlags:")


def test_what_a_twin_does_not_have_is_not_left_to_it(saved: _Saved) -> None:
    saved.do("area.madvise(mmap.MADV_DONTFORK)")
    assert not saved.list_after("pass")[0]


def test_a_flag_that_changes_in_that_moment_voids_the_dump(saved: _Saved, tmp_path: Path) -> None:
    """No other list has it."""
    was_before, given = saved.list_after("area.madvise(mmap.MADV_DONTDUMP)")
    assert was_before
    (tmp_path / "twin-7.regions").touch()
    (noted,) = Noted.all_in(tmp_path)
    path = tmp_path / "twin-7.given"
    path.write_bytes(given)
    with pytest.raises(MappingsChanged):
        noted.check_mappings(saved.process.pid)
    with pytest.raises(Void, match="is gone"):
        noted.check_mappings(None)
    paused = tmp_path / "twin-7.paused"  # where there is no twin
    paused.write_bytes(saved.list_now())
    with pytest.raises(MappingsChanged):
        noted.check_mappings(None)
    for twin in (saved.process.pid, None):
        path.write_bytes(saved.list_now())
        paused.write_bytes(saved.list_now())
        noted.check_mappings(twin)
        assert not path.exists()
        assert not paused.exists()
    noted.check_mappings(saved.process.pid)  # criu has read it itself
