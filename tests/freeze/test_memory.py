"""How much memory is left, by the machine and by cgroups of both versions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cgroups import memory_cgroup

from jupyter_gpuckpt.linux import memory

MB = 10**6


def test_it_is_within_the_machine() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < memory.available(os.getpid()) <= total


def test_a_real_cgroup_s_limit_counts_and_is_named() -> None:
    with memory_cgroup(64 * MB) as group:
        program = [sys.executable, "-c", "print('ready', flush=True); input()"]
        process = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, preexec_fn=group.join
        )
        try:
            assert process.stdout is not None
            process.stdout.readline()  # what it takes does not change from now on
            room = memory.room(process.pid)
            assert 0 < room.bytes < 64 * MB
            assert group.name in room.where
            assert "is 64 MB" in room.where
            both = memory.room(os.getpid(), process.pid)
            assert both.where == room.where
            assert abs(both.bytes - room.bytes) < 4 * MB
        finally:
            process.communicate()
    assert memory.room(process.pid).where == memory.room(os.getpid()).where  # it is gone


class Machine:
    """A machine with much memory and 5 MB of swap, on which process 7 is in the cgroup ``/top/own``."""

    def __init__(self, folder: Path, version: int) -> None:
        self.tree, proc = folder / "cgroup", folder / "proc"
        for path in (proc / "7", proc / "self", self.tree / "top" / "own"):
            path.mkdir(parents=True)
        (proc / "meminfo").write_text("MemAvailable: 900000000 kB\nSwapFree: 5000 kB\n")
        names = "" if version == 2 else "hugetlb,memory"
        (proc / "7" / "cgroup").write_text(f"9:cpu:/elsewhere\n4:{names}:/part/top/own\n")
        kind = "cgroup2 cgroup2 rw" if version == 2 else "cgroup cgroup rw,hugetlb,memory"
        # As in a container that sees its own part of the tree.
        mount = f"35 31 0:32 /part {self.tree} rw,relatime shared:9 - {kind}\n"
        (proc / "self" / "mountinfo").write_text(f"22 1 0:20 / /proc rw - proc proc rw\n{mount}")
        self.proc = proc

    def set(self, group: str, **files: str) -> None:
        for name, content in files.items():
            (self.tree / group / name.replace("__", ".")).write_text(f"{content}\n")


def test_version_2_with_its_high_mark_and_its_swap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, 2)
    monkeypatch.setattr(memory, "_PROC", machine.proc)
    for group in ("top", "top/own"):
        stat = f"anon 5\ninactive_file {MB}"
        machine.set(group, memory__current=f"{2 * MB}", memory__stat=stat, memory__max="max", memory__swap__max="0")
    assert memory.room(7) == memory.Room(900_000_000 * 1024)
    machine.set("top", memory__max=f"{50 * MB}")
    assert memory.room(7) == memory.Room(49 * MB, " in the cgroup /top, whose memory.max is 50 MB")
    machine.set("top/own", memory__high=f"{9 * MB}")
    assert memory.room(7) == memory.Room(8 * MB, " in the cgroup /top/own, whose memory.high is 9 MB")
    machine.set("top/own", memory__swap__max="max")
    assert memory.available(7) == 13 * MB + 120_000
    machine.set("top/own", memory__swap__max=f"{3 * MB}", memory__swap__current=f"{MB}")
    assert memory.available(7) == 10 * MB
    machine.set("top/own", memory__current=f"{60 * MB}")
    assert memory.available(7) == 0


def test_version_1_and_its_limit_of_memory_and_swap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, 1)
    monkeypatch.setattr(memory, "_PROC", machine.proc)
    nothing = str((1 << 63) - 4096)
    for group in ("top", "top/own"):
        stat = f"inactive_file 1\ntotal_inactive_file {MB}"
        machine.set(group, memory__usage_in_bytes=f"{2 * MB}", memory__limit_in_bytes=nothing, memory__stat=stat)
    assert memory.room(7).where == ""
    machine.set("top", memory__limit_in_bytes=f"{50 * MB}")
    assert memory.available(7) == 54 * MB + 120_000
    machine.set("top", memory__memsw__limit_in_bytes=f"{20 * MB}", memory__memsw__usage_in_bytes=f"{3 * MB}")
    assert memory.room(7).bytes == 18 * MB
    assert memory.room(7).where == " in the cgroup /top, whose memory.memsw.limit_in_bytes is 20 MB"


@pytest.mark.parametrize(
    ("version", "file", "content"),
    [
        (1, "memory__oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3"),
        (2, "memory__events", "low 0\nhigh 7\nmax 9\noom 4\noom_kill 3\noom_group_kill 0"),
    ],
)
def test_kills_are_those_of_the_process_s_own_cgroup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, file: str, content: str
) -> None:
    machine = Machine(tmp_path, version)
    monkeypatch.setattr(memory, "_PROC", machine.proc)
    assert memory.kills(7) == 0
    machine.set("top/own", **{file: content})
    machine.set("top", **{file: content.replace("3", "5")})
    assert memory.kills(7) == 3


def test_a_folder_lies_in_memory_where_it_or_what_it_would_be_made_in_does() -> None:
    assert memory.is_in_memory(Path("/dev/shm/none/such"))
    assert not memory.is_in_memory(Path("/usr/none/such"))
    assert not memory.is_in_memory(Path("/proc/self"))
