"""Jobs in a real cgroup with little memory: what would break is found before, and what is killed is told."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from cgroups import Cgroup, memory_cgroup
from command_line import PROGRAM
from job_programs import Job, program

MB = 10**6

HOLD = """
import os, sys, time
held = bytearray(os.urandom(1 << 20)) * 180
print("holds", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
print(len(held), flush=True)
"""

EAT = """
held = []
print("eats", flush=True)
while True:
    held.append(bytearray(1 << 22))
"""


def _in(group: Cgroup, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command, and what it starts, in a cgroup."""
    return subprocess.run([PROGRAM, *words], capture_output=True, text=True, timeout=90, preexec_fn=group.join)


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
