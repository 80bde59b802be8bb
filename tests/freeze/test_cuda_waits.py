"""A thread that waits in the CUDA driver is found from outside, and no other is.

The driver here is a library of its name, whose call waits: how CUDA itself waits is seen in `tests/gpu`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from notebooks import wait_until

from jupyter_gpuckpt.freeze.cuda_waits import CudaWaits

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")

_DRIVER = """
#include <unistd.h>
static int wait_here(int fd) { char byte; volatile int got = (int)read(fd, &byte, 1); return got; }
int cuCall(int fd) { volatile int result = wait_here(fd); return result; }
"""

_PROCESS = """
import ctypes, os, sys, threading, time
driver = ctypes.CDLL(sys.argv[1])
free, holding = ctypes.CDLL(sys.argv[1]).cuCall, ctypes.PyDLL(sys.argv[1]).cuCall
read, write = os.pipe()
always, _ = os.pipe()
threading.Thread(target=free, args=(always,), daemon=True).start()
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
threading.Thread(target=lambda: os.read(always, 1), daemon=True).start()
time.sleep(0.1)
print("ready", flush=True)
for line in sys.stdin:
    call = {"free": free, "holding": holding}[line.strip()]
    threading.Thread(target=call, args=(read,), daemon=True).start()
"""


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process with a thread that always waits in the driver; it calls it as it is told."""
    source, library = tmp_path / "driver.c", tmp_path / "libcuda.so.1"
    source.write_text(_DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    started = subprocess.Popen([sys.executable, "-c", _PROCESS, library], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert started.stdout is not None
    assert started.stdin is not None
    assert started.stdout.readline() == b"ready\n"
    yield started
    started.kill()
    started.wait()
    started.stdin.close()
    started.stdout.close()


@pytest.mark.parametrize("how", ["free", "holding"])
def test_a_call_is_found_also_while_it_holds_pythons_lock(process: subprocess.Popen[bytes], how: str) -> None:
    known = wait_until(lambda: CudaWaits([process.pid]).places())
    assert len(known) == 1
    waits = CudaWaits([process.pid], known)
    assert not waits.new()
    assert not waits.new()
    assert process.stdin is not None
    process.stdin.write(how.encode() + b"\n")
    process.stdin.flush()
    wait_until(waits.new)


def test_a_process_that_has_ended_waits_for_nothing(process: subprocess.Popen[bytes]) -> None:
    waits = CudaWaits([process.pid])
    process.kill()
    process.wait()
    assert waits.places() == set()
