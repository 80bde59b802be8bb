"""What `/proc` tells of processes, asked of real ones."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
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
