"""What is known, and done, of processes from outside."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from notebooks import wait_until

from jupyter_gpuckpt.freeze import cpu_affinity
from jupyter_gpuckpt.freeze.ptrace import Halt
from jupyter_gpuckpt.linux import processes

_MANY = 8
_COUNTING = """
import mmap, struct, sys, threading
with open(sys.argv[1], "r+b") as file: counted = mmap.mmap(file.fileno(), 0)
def count(at):
    while True: struct.pack_into("Q", counted, at, struct.unpack_from("Q", counted, at)[0] + 1)
threading.Thread(target=count, args=(int(sys.argv[2]) * 16,), daemon=True).start()
count(int(sys.argv[2]) * 16 + 8)
"""


def test_what_was_killed_executes_nothing_any_more(tmp_path: Path) -> None:
    file = tmp_path / "counted"
    file.write_bytes(bytes(16 * _MANY))
    program = [sys.executable, "-c", _COUNTING, str(file)]
    started = [subprocess.Popen([*program, str(number)]) for number in range(_MANY)]
    try:
        with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as counted:
            wait_until(lambda: all(counted[at : at + 8] != bytes(8) for at in range(0, 16 * _MANY, 8)))
            assert processes.kill([one.pid for one in started], 30)
            then = counted[:]
            for one in started:
                one.wait()
            assert counted[:] == then
    finally:
        for one in started:
            one.kill()
            one.wait()


def test_one_that_has_not_come_to_stop_yet_counts_as_stopped() -> None:
    """It would stop for good, where only those are continued that have: a busy machine takes long to let it."""
    with subprocess.Popen(["sleep", "100"]) as process:
        try:
            assert processes.stopped([process.pid]) == []
            assert Halt().hold({process.pid}, time.monotonic() + 10)
            os.kill(process.pid, signal.SIGSTOP)
            assert processes.status(process.pid)["State"].startswith("t")
            assert processes.stopped([process.pid]) == [process.pid]
            os.kill(process.pid, signal.SIGCONT)
            assert processes.stopped([process.pid]) == []
        finally:
            process.kill()


def test_threads_are_bound_to_what_is_left_of_their_processors() -> None:
    processors = sorted(os.sched_getaffinity(0))
    with subprocess.Popen(["sleep", "100"]) as process:
        try:
            assert cpu_affinity.bound([process.pid], os.getpid()) == []
            only = cpu_affinity.BoundThreads(process.pid, [process.pid], processors[:1])
            gone, elsewhere = replace(only, threads=[1]), replace(only, processors=[-1, 1 << 20])
            assert cpu_affinity.bind([gone, replace(only, pid=0)], {process.pid: process.pid}.get) == []
            (said,) = cpu_affinity.bind([elsewhere], {process.pid: process.pid}.get)
            assert "-1, 1048576" in said
            assert os.sched_getaffinity(process.pid) == set(processors)
            some = replace(only, processors=[*processors[:1], 1 << 20])
            assert cpu_affinity.bind([some], {process.pid: process.pid}.get) == []
            assert os.sched_getaffinity(process.pid) == set(processors[:1])
        finally:
            process.kill()
