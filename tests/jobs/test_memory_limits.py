"""Jobs in a real cgroup with little memory: what would break is found before, and what is killed is told."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cgroups import Cgroup, memory_cgroup
from command_line import PROGRAM, run
from job_programs import Job, program
from keeper_faults import Criu
from notebooks import PATIENCE

MB = 10**6

HOLD = """
import os, sys, time
held = bytearray(os.urandom(1 << 20)) * 180
print("holds", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
print(len(held), flush=True)
"""

# Memory that grows downwards, as a stack does: criu brings it back, where other memory is written straight.
STACK = HOLD.replace(
    "held = bytearray(os.urandom(1 << 20)) * 180",
    "import mmap; flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100  # MAP_GROWSDOWN, mmap(2)\n"
    "held = mmap.mmap(-1, 180 << 20, flags=flags); held[:] = os.urandom(1 << 20) * 180",
)

WRITE = """
import os, sys, time
held = bytearray(os.urandom(1 << 20)) * 330
pages = len(held) // 4096
n = 0
while not os.path.exists(sys.argv[1]):
    n += 1
    held[::4096] = bytes([n % 256]) * pages
    print(n, flush=True)
print(set(held[::4096]) == {n % 256}, flush=True)
"""

EAT = """
held = []
print("eats", flush=True)
while True:
    held.append(bytearray(1 << 22))
"""


@pytest.fixture
def runtime_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Folders of running jobs that lie in memory, as in XDG_RUNTIME_DIR."""
    folder = tmp_path / "in-memory"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "gpuckpt-test", folder], check=True)
    try:
        monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(folder))
        yield
    finally:
        # Sleepers that are ending have a copy of the mount, which goes with them.
        subprocess.run(["umount", "--lazy", folder], check=True)


def _in(group: Cgroup, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command, and what it starts, in a cgroup."""
    return subprocess.run([PROGRAM, *words], capture_output=True, text=True, timeout=PATIENCE, preexec_fn=group.join)


def test_what_a_cgroup_has_no_room_for_is_refused_and_a_save_goes_by_the_disk(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with memory_cgroup(330 * MB) as group:
        job = Job("large")
        started = _in(group, "exec", "large", "--", sys.executable, program(tmp_path, HOLD), str(gate))
        assert started.returncode == 0, started.stderr
        job.wait_for(1)
        job.save("held")
        refused = _in(group, "restore", "large", "held", "--as", "second")
        assert refused.returncode == 1
        said = re.search(
            rf"It needs (\d+) MB of memory, and (\d+) MB are free in the cgroup {group.name}, whose [a-z._]+ is 330 MB",
            refused.stderr,
        )
        assert said, refused.stderr
        assert int(said[1]) > int(said[2])
        # It may come back in place of itself: that gives its memory back first.
        job.restore("held")
        gate.touch()
        assert job.wait_for_end() == 0
        assert job.lines() == ["holds", str(180 << 20)]
        assert group.killed() == 0


def test_one_that_takes_more_than_its_cgroup_has_is_killed_alone_and_that_is_told(tmp_path: Path) -> None:
    beside = Job("beside")
    beside.start("sleep", "100")
    with memory_cgroup(300 * MB) as group:
        job = Job("greedy")
        assert _in(group, "exec", "greedy", "--", sys.executable, program(tmp_path, EAT)).returncode == 0
        assert job.wait_for_end() == -signal.SIGKILL
        assert group.killed() > 0
        assert job.output() == "eats\n"
        assert beside.told()["state"] == "running"
    assert os.kill(beside.told()["pid"], 0) is None


@pytest.mark.parametrize("size", [330, 450])
def test_a_job_is_restored_within_its_limit_where_the_run_folder_lies_in_memory(
    runtime_in_memory: None, tmp_path: Path, size: int
) -> None:
    gate = tmp_path / "gate"
    job = Job("large")
    job.start(sys.executable, program(tmp_path, HOLD.replace("180", str(size))), str(gate))
    job.wait_for(1)
    assert run("hibernate", "large").status == 0
    with memory_cgroup(600 << 20) as group:
        restored = _in(group, "restore", "large", "hibernated-large")
        assert restored.returncode == 0, restored.stderr
        gate.touch()
        assert job.wait_for_end() == 0
        assert job.lines() == ["holds", str(size << 20)]
        assert group.killed() == 0
    # What it was read into is gone.
    assert list(Path(os.environ["GPUCKPT_STORE"], "saving").iterdir()) == []


def test_a_job_that_writes_to_all_of_its_memory_is_saved_within_its_limit(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with memory_cgroup(600 << 20) as group:
        job = Job("writes")
        started = _in(group, "exec", "writes", "--", sys.executable, program(tmp_path, WRITE), str(gate))
        assert started.returncode == 0, started.stderr
        job.wait_for(1)
        for _ in range(3):
            saved = _in(group, "save", "writes", "s", "--replace")
            assert saved.returncode == 0, saved.stderr
        assert group.killed() == 0
        job.restore("s")
        gate.touch()
        assert job.wait_for_end() == 0
        assert job.lines()[-1] == "True"
        assert group.killed() == 0


@pytest.mark.parametrize(("source", "is_killed"), [(STACK, True), (HOLD, False)])
def test_a_restore_for_which_there_is_too_little_memory_at_last_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, is_killed: bool
) -> None:
    criu = Criu(tmp_path / "criu")
    monkeypatch.setenv("GPUCKPT_CRIU", str(criu.program))
    gate = tmp_path / "gate"
    job = Job("large")
    job.start(sys.executable, program(tmp_path, source), str(gate))
    job.wait_for(1)
    job.save("held")
    job.kill()
    with memory_cgroup(600 * MB) as group:
        # There is room when that is looked at, and somebody else takes it. Linux refuses a limit below what is used and
        # cannot be given back yet, such as files that are not on the disk.
        criu.at("restore", "pre-restore", f"until echo 250000000 > {group.limit}; do sleep 0.05; done")
        failed = _in(group, "restore", "large", "held")
        assert failed.returncode == 1
        assert f"here is too little memory in the cgroup {group.name}, whose" in failed.stderr
        assert "is 250 MB" in failed.stderr
        assert "`--mem`" in failed.stderr
        assert (group.killed() > 0) == is_killed
    assert job.told()["state"] == "ended"
    criu.honest()
    job.restore("held")
    gate.touch()
    assert job.wait_for_end() == 0


def test_a_save_into_a_store_in_memory_that_has_no_room_for_it_is_refused(
    runtime_in_memory: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUCKPT_STORE", str(tmp_path / "in-memory" / "store"))
    gate = tmp_path / "gate"
    source = program(
        tmp_path, HOLD.replace("bytearray(os.urandom(1 << 20)) * 180", "[os.urandom(1 << 20) for _ in range(180)]")
    )
    with memory_cgroup(330 * MB) as group:
        job = Job("large")
        assert _in(group, "exec", "large", "--", sys.executable, source, str(gate)).returncode == 0
        job.wait_for(1)
        refused = _in(group, "save", "large", "s")
        assert refused.returncode == 1
        assert "not enough space" in refused.stderr
        assert f"are free in the cgroup {group.name}, whose" in refused.stderr
        assert "lies in memory" in refused.stderr
        gate.touch()
        assert job.wait_for_end() == 0
        assert group.killed() == 0


def test_a_restore_that_has_no_disk_at_all_counts_what_it_is_read_into(
    runtime_in_memory: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUCKPT_STORE", str(tmp_path / "in-memory" / "store"))
    job = Job("large")
    job.start(sys.executable, program(tmp_path, HOLD.replace("180", "330")), str(tmp_path / "gate"))
    job.wait_for(1)
    assert run("hibernate", "large").status == 0
    with memory_cgroup(600 << 20) as group:
        refused = _in(group, "restore", "large", "hibernated-large")
        assert refused.returncode == 1
        said = re.search(r"It needs (\d+) MB of memory", refused.stderr)
        assert said, refused.stderr
        assert int(said[1]) > 2 * 330
        assert group.killed() == 0
