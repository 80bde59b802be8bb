"""A kernel with a GPU goes to sleep when it is idle, and does not while anything of it works there."""

from __future__ import annotations

import time
from typing import Any

import pytest
from notebooks import Notebook, wait_until

from jupyter_gpuckpt.freeze.cuda import CudaWorker

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

AFTER = 2.0  # seconds

TRAINING = """
import threading, torch
weights = torch.randn(2048, 2048, device="cuda")
stop, steps = threading.Event(), 0

def train():
    global steps
    x = torch.randn(64, 2048, device="cuda")
    while not stop.is_set():
        x = torch.tanh(x @ weights)
        torch.cuda.synchronize()
        steps += 1

training = threading.Thread(target=train)
"""

LONG_WORK = """
# The processor sleeps while the GPU works: only the driver knows of it.
enough = threading.Event()

def spin():
    while not enough.wait(0.2):
        torch.cuda._sleep(300_000_000)  # cycles: more than a tenth of a second

threading.Thread(target=spin).start()
"""


def status(notebook: Notebook) -> dict[str, Any]:
    with notebook.keeper as keeper:
        found: dict[str, Any] = keeper.request("status")
    return found


def why(notebook: Notebook) -> str:
    """Return what a failure has to tell: the kernel's state, and what its keeper logged of it."""
    return f"{status(notebook)}\n{(notebook.folder / 'keeper.log').read_text()}"


def stays_awake(notebook: Notebook) -> None:
    deadline = time.monotonic() + 3 * AFTER
    while time.monotonic() < deadline:
        assert status(notebook)["state"] == "running", why(notebook)
        time.sleep(0.2)


def falls_asleep(notebook: Notebook) -> dict[str, Any]:
    try:
        wait_until(lambda: status(notebook)["state"] == "sleeping", 20)
    except AssertionError:
        raise AssertionError(why(notebook)) from None
    return status(notebook)


def test_an_idle_one_sleeps_and_one_that_works_between_cells_does_not(notebook: Notebook, worker: CudaWorker) -> None:
    notebook.run(TRAINING, timeout=120)
    kernel = status(notebook)["pid"]
    notebook.run(f"%gpuckpt autosleep {AFTER:g}s")
    slept = falls_asleep(notebook)
    assert slept["gpu"]["freed"] > 16 << 20, slept
    assert kernel not in {usage.pid for usage in worker.usage() if usage.bytes}
    # A thread that trains in the background.
    notebook.run("before = weights.sum().item(); training.start()", timeout=60)
    stays_awake(notebook)
    assert int(notebook.value("stop.set() or training.join() or steps")) > 100
    falls_asleep(notebook)
    assert notebook.value("weights.sum().item() == before").endswith("True")
    # Work that needs the GPU for long and the processor hardly at all.
    notebook.run(LONG_WORK)
    stays_awake(notebook)
    notebook.run("enough.set()")
    falls_asleep(notebook)
    assert notebook.value("weights.sum().item() == before").endswith("True")


def test_the_driver_tells_who_was_at_work(notebook: Notebook, worker: CudaWorker) -> None:
    notebook.run(TRAINING, timeout=120)
    time.sleep(2)
    idle_since = time.time()
    time.sleep(2)
    assert worker.at_work(idle_since) == set(), "an idle GPU is said to be at work"
    working_since = time.time()
    notebook.run("training.start()")
    wait_until(lambda: {status(notebook)["pid"], None} & worker.at_work(working_since), 10)
    notebook.run("stop.set(); training.join()")
