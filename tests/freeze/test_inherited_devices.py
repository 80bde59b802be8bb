"""Device files that children inherited are taken from them, from outside; what is not a real device stands for one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_cuda_fit import Answering

from jupyter_gpuckpt.errors import Refused
from jupyter_gpuckpt.freeze import cuda
from jupyter_gpuckpt.freeze.inherited_devices import has_inherited
from jupyter_gpuckpt.linux.gpu_devices import device_files, device_mappings

DEVICE = Path(f"/dev/nvidia.inherited-{os.getpid()}")

# A program of any language forks without Python's own `os.fork` and its hooks.
PARENT = """
import ctypes, mmap, os, sys, time
device = os.open(sys.argv[1], os.O_RDWR | os.O_CLOEXEC)
page = mmap.mmap(device, 4096)
page[:5] = b"first"
asked, answer = os.pipe(), os.pipe()
child = ctypes.CDLL(None).fork()
if child == 0:
    while os.read(asked[0], 1):
        os.write(answer[1], b"alive, %d" % os.fstat(device).st_size)
    os._exit(0)
print(child, flush=True)
for line in sys.stdin:
    os.write(asked[1], b"?")
    print(os.read(answer[0], 100).decode(), page[:5], flush=True)
"""


class Parent:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = process.pid
        self.child = int(self._heard())

    def asks_its_child(self) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._heard()

    def _heard(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@pytest.fixture
def parent() -> Iterator[Parent]:
    DEVICE.write_bytes(bytes(4096))
    try:
        command = [sys.executable, "-c", PARENT, str(DEVICE)]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True) as process:
            try:
                yield Parent(process)
            finally:
                os.killpg(process.pid, signal.SIGKILL)
    finally:
        DEVICE.unlink()


class Own(Answering):
    """A driver that says which processes have CUDA state."""

    def __init__(self, *pids: int) -> None:
        super().__init__("none")
        self._pids = pids

    def state(self, pid: int) -> cuda.State:
        return "running" if pid in self._pids else "none"


def test_a_child_drops_what_it_inherited_and_goes_on(parent: Parent) -> None:
    assert device_files(parent.child)
    assert list(device_mappings(parent.child))
    assert has_inherited(parent.child, [parent.pid])
    assert cuda.freezable(Own(parent.pid), [parent.pid, parent.child]) == [parent.pid]
    assert (device_files(parent.child), list(device_mappings(parent.child))) == ([], [])
    assert parent.asks_its_child() == "alive, 0 b'first'"
    assert device_files(parent.pid), "its parent keeps its own"


def test_devices_that_no_process_with_cuda_state_opened_are_left_alone(parent: Parent) -> None:
    with pytest.raises(Refused, match="has GPU devices"):
        cuda.freezable(Own(), [parent.pid, parent.child])
    assert device_files(parent.child)
    opened = os.open(DEVICE, os.O_RDONLY)
    try:
        assert not has_inherited(parent.child, [os.getpid()]), "the same file, opened by another"
    finally:
        os.close(opened)
