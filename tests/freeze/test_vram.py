"""Mappings like the one that libcuda makes for VRAM are made of files; `tests/gpu` shows it of libcuda itself."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from notebooks import wait_until

from jupyter_gpuckpt.freeze import ptrace
from jupyter_gpuckpt.freeze.populate import populate
from jupyter_gpuckpt.freeze.vram import VramFiles
from jupyter_gpuckpt.linux import processes

pytestmark = pytest.mark.skipif(not ptrace.is_supported(), reason="needs x86-64: elsewhere VRAM goes through criu")

MIB = 1 << 20
# 0x8022: MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, as libcuda's; a thread of that name makes it, as in libcuda.
PROGRAM = """
import mmap, os, signal, sys, threading
told = []
signal.signal(signal.SIGUSR1, lambda *_: told.append(1))
def copy(size):
    global held
    with open("/proc/thread-self/comm", "w") as name: name.write("cuda00010c00044")
    held = mmap.mmap(-1, size, flags=0x8022)
    held[:5], held[-5:] = b"first", b"final"
def in_thread(size):
    thread = threading.Thread(target=copy, args=(size,)); thread.start(); thread.join()
threading.Thread(target=threading.Event().wait, daemon=True).start()
print("up", flush=True)
for line in sys.stdin:
    print(eval(line), flush=True)
"""


class Process:
    """A process that makes mappings when it is told to."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "up\n"

    def does(self, expression: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(expression + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


@pytest.fixture
def process() -> Iterator[Process]:
    process = Process()
    yield process
    process.close()


@pytest.fixture
def files(tmp_path: Path) -> Iterator[VramFiles]:
    folder = tmp_path / "vram"
    folder.mkdir()
    files = VramFiles(folder, str(folder))
    yield files
    files.discard()


def traced_by(pid: int) -> set[int]:
    found = set()
    for task in tasks(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that Python has joined ends
            found.add(int(Path(task, "status").read_text().split("TracerPid:")[1].split()[0]))
    return found


def tasks(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/task").iterdir())


@pytest.mark.parametrize("prepared", [0, 3 * MIB, 100 * MIB])
def test_the_bytes_are_in_a_file(process: Process, files: VramFiles, prepared: int) -> None:
    files.prepare({process.pid: ("77", prepared)})
    with files.taking(process.pid):
        process.does(f"in_thread({20 * MIB + 123})")
    assert files.taken([process.pid]) == 20 * MIB + 123
    (file,) = files.outside.iterdir()
    assert file.name == "77-0"
    assert file.stat().st_mode & 0o777 == 0o600
    content = file.read_bytes()
    assert (content[:5], content[-5:], len(content)) == (b"first", b"final", 20 * MIB + 123)
    assert process.does("held[:5], held[-5:]") == "(b'first', b'final')"
    assert traced_by(process.pid) == {0}


def test_other_mappings_and_those_of_later_are_left_alone(process: Process, files: VramFiles) -> None:
    files.prepare({process.pid: ("77", 0)})
    with files.taking(process.pid):
        process.does("globals().update(other=mmap.mmap(-1, 5 << 20, flags=0x22))")
        process.does("globals().update(own=mmap.mmap(-1, 6 << 20, flags=0x8022))")  # a thread of the program's
        process.does("[copy(4096), globals().update(first=held), copy(8192)]")
        wait_until(lambda: traced_by(process.pid) == {0}, what="who diverts the mapping still traces the process")
    process.does(f"globals().update(late=mmap.mmap(-1, {MIB}, flags=0x8022))")
    assert files.taken([process.pid]) == 4096
    assert {file.name: file.stat().st_size for file in files.outside.iterdir()} == {"77-0": 4096}
    assert len([path for path in processes.mapped_files(process.pid) if path.startswith(files.inside)]) == 1


def test_a_process_without_such_a_mapping_leaves_no_file(process: Process, files: VramFiles) -> None:
    files.prepare({process.pid: ("77", MIB)})
    assert list(files.outside.iterdir())
    with files.taking(process.pid):
        assert process.does("1 + 1") == "2"
    assert files.taken([process.pid]) == 0
    assert list(files.outside.iterdir()) == []


def test_where_the_file_cannot_be_made_the_mapping_is_memory(process: Process, files: VramFiles) -> None:
    files.prepare({process.pid: ("77", 0)})
    files.outside.joinpath("77-0").unlink(missing_ok=True)
    files.outside.joinpath("77-0").symlink_to("/nonexistent")  # never followed
    with files.taking(process.pid):
        process.does(f"in_thread({MIB})")
    assert process.does("held[:5], held[-5:]") == "(b'first', b'final')"
    assert not [path for path in processes.mapped_files(process.pid) if path.startswith(files.inside)]


def test_signals_reach_the_process_meanwhile(process: Process, files: VramFiles) -> None:
    files.prepare({process.pid: ("77", 0)})
    with files.taking(process.pid):
        os.kill(process.pid, signal.SIGUSR1)
        wait_until(lambda: process.does("told") == "[1]")
        process.does(f"in_thread({MIB})")
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt")
        os.kill(process.pid, signal.SIGCONT)
        assert process.does("1 + 1") == "2"
    assert files.taken([process.pid]) == MIB


def test_a_killed_tracer_lets_the_process_go_on(process: Process, files: VramFiles) -> None:
    files.prepare({process.pid: ("77", 0)})
    with files.taking(process.pid):
        (tracer,) = traced_by(process.pid)
        os.kill(tracer, signal.SIGKILL)
        wait_until(lambda: traced_by(process.pid) == {0})
        process.does(f"in_thread({MIB})")
    assert process.does("held[:5]") == "b'first'"
    assert files.taken([process.pid]) == 0


def test_a_process_that_ends_meanwhile(process: Process, files: VramFiles) -> None:
    files.prepare({process.pid: ("77", 0)})
    with files.taking(process.pid):
        process.close()
    assert files.taken([process.pid]) == 0


def test_a_process_that_someone_else_traces_is_not_diverted(process: Process, files: VramFiles, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    other = VramFiles(folder, str(folder))
    other.prepare({process.pid: ("78", 0)})
    files.prepare({process.pid: ("77", 0)})
    with other.taking(process.pid), files.taking(process.pid):
        process.does(f"in_thread({MIB})")
    assert files.taken([process.pid]) == 0
    assert other.taken([process.pid]) == MIB


def test_a_save_that_does_not_come_to_it_is_not_waited_for(process: Process, tmp_path: Path) -> None:
    """Where the program took any line for the word to begin, it traced the process, and was killed after 5 s."""
    command = [sys.executable, "-m", "jupyter_gpuckpt.freeze.vram_tracer", tmp_path, "/", str(process.pid), "file", "0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as tracer:
        assert tracer.stdin is not None
        assert tracer.stdout is not None
        assert tracer.stdout.readline() == "ready\n"
        tracer.stdin.write("end\n")
        tracer.stdin.flush()
        assert tracer.wait(60) == 0
        assert tracer.stdout.read() == ""


def test_prepared_memory_is_there(tmp_path: Path) -> None:
    file = Path("/dev/shm", f"gpuckpt-test-{os.getpid()}")
    try:
        populate(file, 300 * MIB)
        assert file.stat().st_blocks * 512 == 300 * MIB
    finally:
        file.unlink()


def test_on_another_processor_the_mapping_is_memory(
    process: Process, files: VramFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    files.prepare({process.pid: ("77", MIB)})
    with files.taking(process.pid):
        assert traced_by(process.pid) == {0}
        process.does(f"in_thread({MIB})")
    assert files.taken([process.pid]) == 0
    assert process.does("held[:5], held[-5:]") == "(b'first', b'final')"
    assert list(files.outside.iterdir()) == []
