"""A process's threads are held still, but for one, and always go on again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from notebooks import wait_until

from jupyter_gpuckpt.freeze import ptrace
from jupyter_gpuckpt.freeze.line_program import LineProgram

pytestmark = pytest.mark.skipif(not ptrace.is_supported(), reason="needs x86-64: elsewhere nothing is parked")

# The main thread waits for input. `PR_SET_NAME` is 15.
PROGRAM = """
import ctypes, hashlib, mmap, sys, threading
def wait_at(fifo):
    ready.wait(); open(fifo)
def sleep(name):
    ctypes.CDLL(None).prctl(15, name.encode()); ready.wait(); threading.Event().wait()
def work():
    ready.wait()
    while True: hashlib.blake2b(bytes(1 << 24)).digest()
def work_until(path):
    with open(path, "r+b") as file: told = mmap.mmap(file.fileno(), 1)
    ready.wait()
    while not told[0]: pass
    threading.Event().wait()
ready = threading.Barrier(1 + len(sys.argv[1:]))
for name in sys.argv[1:]:
    target, args = (work, ()) if name == "works" else (work_until if "/" in name else sleep, (name,))
    if name.endswith(".fifo"): target = wait_at
    threading.Thread(target=target, args=args, daemon=True).start()
ready.wait()
print("up", flush=True)
sys.stdin.read()
"""


class Process:
    """A process with one thread for every name: it sleeps, or works where it is called ``works``.

    One that is called as a file is works until the first byte of that is not 0.
    """

    def __init__(self, *names: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *names], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "up\n"

    def threads(self, name: str = "") -> list[int]:
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return sorted(int(task.name) for task in tasks if not name or (task / "comm").read_text().strip() == name)

    def held(self) -> set[int]:
        """Return the threads that a tracer holds (`proc_pid_stat(5)`, state t)."""
        return {tid for tid in self.threads() if _state(self.pid, tid) == "t"}

    def close(self) -> None:
        self._process.communicate("", timeout=60)


def _state(pid: int, tid: int) -> str:
    return Path(f"/proc/{pid}/task/{tid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in started:
        process.close()


def hold(process: Process, how: str, left_over: int, seconds: float = 0.5) -> tuple[LineProgram, bytes]:
    program = LineProgram("jupyter_gpuckpt.freeze.thread_stopper")
    assert program.hear(30) == b"ready"
    program.tell(f"{how} {process.pid} {left_over} {seconds}".encode())
    return program, program.hear(30)


def test_all_threads_stand_still_but_for_one_and_the_drivers(processes: list[Process]) -> None:
    process = Process("first", "second", "cuda-EvtHandlr", "left over")
    processes.append(process)
    (left_over,), (driver,) = process.threads("left over"), process.threads("cuda-EvtHandlr")
    program, said = hold(process, "hold", left_over)
    assert said == b"still"
    assert process.held() == set(process.threads()) - {left_over, driver}
    program.tell(b"end")
    program.wait(30)
    program.close()
    assert process.held() == set()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_threads_go_on_when_the_program_that_holds_them_is_killed(
    processes: list[Process], end: signal.Signals
) -> None:
    process = Process("first", "left over")
    processes.append(process)
    program, said = hold(process, "hold", process.threads("left over")[0])
    assert said == b"still"
    assert program.pid is not None
    os.kill(program.pid, end)
    program.wait(30)
    program.close()
    wait_until(lambda: process.held() == set())


def test_a_thread_that_works_on_is_waited_for_and_held_only_where_all_must_be(processes: list[Process]) -> None:
    process = Process("works", "left over")
    processes.append(process)
    (left_over,) = process.threads("left over")
    program, said = hold(process, "hold", left_over)
    assert said == b"restless"
    program.wait(30)
    program.close()
    assert process.held() == set()
    program, said = hold(process, "hold-all", left_over)
    assert said == b"still"
    assert process.held() == set(process.threads()) - {left_over}
    program.close()
    program.wait(30)
    wait_until(lambda: process.held() == set())


def test_a_thread_that_waits_at_a_fifo_sleeps(processes: list[Process], tmp_path: Path) -> None:
    fifo = tmp_path / "a.fifo"
    os.mkfifo(fifo)
    process = Process(str(fifo), "left over")
    processes.append(process)
    program, said = hold(process, "hold", process.threads("left over")[0])
    assert said == b"still"
    program.close()
    program.wait(30)
    wait_until(lambda: process.held() == set())


def stop(process: Process) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    wait_until(lambda: all(_state(process.pid, tid) == "T" for tid in process.threads()))


def test_of_a_stopped_process_all_but_what_is_held_goes_on(processes: list[Process]) -> None:
    process = Process("first", "second", "cuda-EvtHandlr", "left over")
    processes.append(process)
    (left_over,), (driver,) = process.threads("left over"), process.threads("cuda-EvtHandlr")
    stop(process)
    program, said = hold(process, "hold-stopped", left_over)
    assert said == b"still"
    assert process.held() == set(process.threads()) - {left_over, driver}
    wait_until(lambda: _state(process.pid, left_over) == _state(process.pid, driver) == "S")
    program.tell(b"end")
    program.wait(30)
    program.close()
    wait_until(lambda: {_state(process.pid, tid) for tid in process.threads()} == {"S"})


def test_a_thread_that_was_stopped_at_work_is_let_come_to_rest(processes: list[Process], tmp_path: Path) -> None:
    told = tmp_path / "told"
    told.write_bytes(b"\0")
    process = Process(str(told), "left over")
    processes.append(process)
    stop(process)
    told.write_bytes(b"\1")
    (left_over,) = process.threads("left over")
    # One that did not come to rest would be held all the same, but only when the time is up.
    began = time.monotonic()
    program, said = hold(process, "hold-stopped", left_over, seconds=20.0)
    assert said == b"still"
    assert time.monotonic() - began < 15
    program.close()
    program.wait(30)
