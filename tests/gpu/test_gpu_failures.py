"""Cells that break what a kernel has on the GPU: what was saved before comes back, in the same kernel."""

from __future__ import annotations

import time

import pytest
from notebooks import Notebook, StartKernel, wait_until

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300)]

_STATE = """
import torch
torch.manual_seed(0)
x = torch.rand(2**27, device="cuda")
"""
_ASSERT = "torch.zeros(4, device='cuda')[torch.tensor([9], device='cuda')]; torch.cuda.synchronize()"
_WRONG_ADDRESS = """
import triton
import triton.language as tl

@triton.jit
def wild(p):
    tl.store(p + 2**40, 1)

wild[(1,)](torch.zeros(4, dtype=torch.int32, device="cuda"))
torch.cuda.synchronize()
"""
_NO_MEMORY = "torch.empty(2**44, dtype=torch.uint8, device='cuda')"
_NEXT = "print(float(x.double().sum()), float(torch.rand(1, device='cuda')))"


@pytest.fixture
def saved(start: StartKernel) -> tuple[Notebook, str]:
    return with_snapshot(start())


def with_snapshot(notebook: Notebook) -> tuple[Notebook, str]:
    """Have a kernel saved; return it, and what its next cell says."""
    notebook.run(_STATE, timeout=120)
    notebook.run("%gpuckpt save good", timeout=120)
    return notebook, notebook.run(_NEXT).text


@pytest.mark.parametrize("broken", [_ASSERT, _WRONG_ADDRESS], ids=["an assertion", "a wrong address"])
def test_a_gpu_that_has_failed_for_the_kernel_is_as_it_was_after_a_restore(
    saved: tuple[Notebook, str], broken: str
) -> None:
    notebook, went_on = saved
    for _ in range(2):
        assert "CUDA error" in notebook.fails(broken, timeout=120).text
        failed = notebook.fails("%gpuckpt save broken", timeout=120).text
        assert "the GPU has failed" in failed, failed
        assert "%gpuckpt restore" in failed, failed
        print(notebook.run("%gpuckpt restore good", timeout=120).text)
        assert notebook.run(_NEXT).text == went_on
    notebook.run("%gpuckpt save again", timeout=120)
    assert "broken" not in notebook.run("%gpuckpt list").text


@pytest.mark.parametrize("goes_on", [True, False], ids=["later", "at once"])
def test_a_cell_that_has_broken_the_gpu_is_undone(start: StartKernel, *, goes_on: bool) -> None:
    """What it was before cannot be kept, as another undo would: nothing of it can be saved."""
    notebook = start()
    notebook.run("%gpuckpt auto on")
    notebook.run(_STATE, timeout=120)
    with notebook.keeper as keeper:
        wait_until(lambda: keeper.request("list")["snapshots"] and not keeper.request("status")["stage"], 60)
    assert "CUDA error" in notebook.fails(f"n = 1; {_ASSERT}", timeout=120).text
    if goes_on:
        wait_until(lambda: "the GPU has failed" in notebook.run("%gpuckpt auto").text)
        assert "%gpuckpt undo" in notebook.run("%gpuckpt auto").text
    text = notebook.run("%gpuckpt undo", timeout=120).text
    assert "Discarded, and in no snapshot" in text
    assert "could not be saved first: the GPU has failed" in text
    assert notebook.look("'n' in globals()") == "False"
    assert float(notebook.value("float(x.double().sum())")) > 0
    assert "Nothing was undone since" in notebook.fails("%gpuckpt redo").text


def test_a_cell_that_found_no_memory_is_undone(saved: tuple[Notebook, str]) -> None:
    notebook, went_on = saved
    assert notebook.fails(_NO_MEMORY).ename == "OutOfMemoryError"
    notebook.run("%gpuckpt restore good", timeout=120)
    assert notebook.run(_NEXT).text == went_on


def test_a_kernel_that_waits_for_work_without_end_is_restored_from_outside(
    monkeypatch: pytest.MonkeyPatch, start: StartKernel
) -> None:
    monkeypatch.setenv("GPUCKPT_KEEP_UNSAVED", "2s")  # as it is where nobody has set it
    notebook, went_on = with_snapshot(start())
    # About two minutes; whoever waits for it in C cannot be interrupted.
    notebook.client.execute("print('begun', flush=True); torch.cuda._sleep(200_000_000_000); torch.cuda.synchronize()")
    notebook.until_printed("begun")
    began = time.monotonic()
    with notebook.keeper as keeper:
        keeper.request("restore", {"name": "good"})
    print(f"restored in {time.monotonic() - began:.1f} s")
    notebook.wait_for_ready()
    assert notebook.run(_NEXT).text == went_on
