"""A kernel with GPU state that is hibernated holds neither GPU nor host memory, and comes back with all of it."""

from __future__ import annotations

import time

import pytest
from gpu_memory import DIGEST, SAME, STATE, used_by_gpu
from keeper_faults import Asked, Criu, Requested, names
from notebooks import StartKernel, wait_until
from test_gpu_sleep import ask, held_by, says, status

from jupyter_gpuckpt.errors import Busy
from jupyter_gpuckpt.freeze.cuda import CudaWorker
from jupyter_gpuckpt.linux import processes

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

_TAKEN = 64 << 20
"""Bytes by which what the driver keeps for itself differs from one look to the next."""
_KEEPER = 200 << 20
"""Bytes of host memory that a keeper has at most."""


@pytest.mark.parametrize("parking", ["on", "off"])
def test_it_holds_nothing_and_a_cell_brings_all_of_it_back(
    criu: Criu, start: StartKernel, worker: CudaWorker, monkeypatch: pytest.MonkeyPatch, parking: str
) -> None:
    monkeypatch.setenv("GPUCKPT_PARKING", parking)
    before = used_by_gpu()
    notebook = start()
    notebook.run("import torch\n" + DIGEST + STATE, timeout=120)

    # A cell that comes meanwhile breaks it off, and nothing is lost.
    with criu.held_at("dump", "post-dump") as reached:
        asked = Requested(notebook, "hibernate", {})
        reached()
        cell = Asked(notebook, "came = 1")
    assert isinstance(asked.outcome(120), Busy), asked.outcome()
    assert cell.answer(60)["status"] == "ok"
    assert says(notebook, SAME) == "True"

    began = time.monotonic()
    done = ask(notebook, "hibernate")
    print(f"\nparking {parking}: hibernated in {time.monotonic() - began:.2f} s, {done['stored'] / 1e9:.2f} GB stored")
    found = status(notebook)
    assert found["state"] == "hibernated"
    assert held_by(notebook, worker) == []
    wait_until(
        lambda: all(now - then <= _TAKEN for now, then in zip(used_by_gpu(), before, strict=True)),
        30,
        f"the GPUs had {before} bytes in use before, and have {used_by_gpu()} now",
    )
    keeper = found["keeper_pid"]
    assert processes.resident_bytes([keeper, *processes.descendants(keeper)]) < _KEEPER

    began = time.monotonic()
    assert says(notebook, SAME) == "True"
    print(f"parking {parking}: woken, and the first cell answered, in {time.monotonic() - began:.2f} s")
    assert says(notebook, "came") == "1"
    notebook.run("graph.replay()")
    assert says(notebook, "digest(b) == digest(a + a)") == "True"
    wait_until(lambda: not names(), 30, f"snapshots are left: {names()}")


def test_one_that_sleeps_is_hibernated(start: StartKernel, worker: CudaWorker) -> None:
    notebook = start()
    notebook.run("import torch\n" + DIGEST + STATE, timeout=120)
    ask(notebook, "sleep")
    ask(notebook, "hibernate")
    assert status(notebook)["state"] == "hibernated"
    assert held_by(notebook, worker) == []
    assert says(notebook, SAME) == "True"
