"""What `/proc` tells of processes, asked of real ones."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from notebooks import wait_until

from jupyter_gpuckpt.freeze import gpu_processes


def test_process_without_cuda_is_no_candidate() -> None:
    assert gpu_processes.cuda_pids([os.getpid()]) == []
    assert gpu_processes.open_gpus(os.getpid()) == []
    assert not gpu_processes.has_context(os.getpid())


def test_ended_process_is_left_out() -> None:
    with subprocess.Popen(["true"]) as process:
        wait_until(lambda: gpu_processes.ended(process.pid))  # a zombie
        assert gpu_processes.cuda_pids([process.pid]) == []
    assert gpu_processes.ended(process.pid)
    assert gpu_processes.cuda_pids([process.pid]) == []


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("libcuda.so.1", True),
        ("libcuda.so.580.159.04", True),
        ("libcudart.so.13", False),
        ("mylibcuda.so.1", False),
        ("libcuda.so.1.txt", False),
    ],
)
def test_mapping_libcuda_makes_a_candidate(tmp_path: Path, name: str, counts: bool) -> None:
    path = tmp_path / name
    path.write_bytes(bytes(4096))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 4096, access=mmap.ACCESS_READ):
        assert gpu_processes.cuda_pids([os.getpid()]) == ([os.getpid()] if counts else [])


def test_stopped_process_is_told() -> None:
    with subprocess.Popen(["sleep", "100"]) as process:
        assert not gpu_processes.stopped(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: gpu_processes.stopped(process.pid))
        process.kill()
    assert not gpu_processes.stopped(process.pid)


_TOGETHER = """
import mmap, os, socket, sys
rank, file = sys.argv[1:]
connection = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
connection.bind(f"\\0tmp/nccl-socket-{rank}-{os.getpid():x}".ljust(108, "\\0"))  # NCCL's are as long as they can be
shared = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
os.ftruncate(shared, 4096)
memory = mmap.mmap(shared, 4096)
print("there", flush=True)
sys.stdin.readline()
connection.close()
memory.close()
print("apart", flush=True)
sys.stdin.readline()
"""


def test_processes_that_are_connected_by_nccl_or_share_gpu_memory_are_found_until_they_leave() -> None:
    shared = Path(f"/dev/shm/cuda.shm.0.{os.getpid():x}.1")
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", _TOGETHER, str(rank), str(shared)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    first, _ = pids = [program.pid for program in programs]
    try:
        assert [_said(program) for program in programs] == ["there\n"] * 2
        assert gpu_processes.with_communicator([os.getpid(), *pids]) == pids
        assert gpu_processes.sharing_memory([os.getpid(), *pids]) == pids
        assert gpu_processes.with_communicator([first]) == [first]
        assert gpu_processes.sharing_memory([first]) == []
        _tell(programs[1])
        assert _said(programs[1]) == "apart\n"
        assert gpu_processes.with_communicator(pids) == [first]
        assert gpu_processes.sharing_memory(pids) == []
    finally:
        shared.unlink(missing_ok=True)
        for program in programs:
            program.kill()
            program.communicate()


def _said(program: subprocess.Popen[str]) -> str:
    assert program.stdout is not None
    return program.stdout.readline()


def _tell(program: subprocess.Popen[str]) -> None:
    assert program.stdin is not None
    program.stdin.write("go on\n")
    program.stdin.flush()
