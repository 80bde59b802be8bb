"""Two real GPUs in one process: peer access goes off for a freeze and can be had back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cells import Cells

from jupyter_gpuckpt.errors import Refused
from jupyter_gpuckpt.freeze import cuda
from jupyter_gpuckpt.freeze.cuda import CudaWorker

Start = Callable[..., Cells]
START = """
import torch
from jupyter_gpuckpt.kernel import devices
x = torch.arange(2**20, device='cuda:0', dtype=torch.float64)
y = x.to('cuda:1')
back = y.to('cuda:0')
"""
SUM = 2**19 * (2**20 - 1)
STRIDED = "answer = x.view(1024, 1024)[::2, ::3].to('cuda:1').sum().item()"
WAS_ON = [{"from": 0, "to": 1}, {"from": 1, "to": 0}]


@pytest.fixture(autouse=True)
def two_gpus(worker: CudaWorker) -> list[str]:
    gpus = [gpu.uuid for gpu in worker.gpus()]
    if len(gpus) != 2:
        pytest.skip(f"needs exactly two GPUs, and this machine has {len(gpus)}")
    return gpus


def test_process_of_one_gpu_needs_no_word_on_peers(worker: CudaWorker, cells: Start) -> None:
    process = cells("import torch; x = torch.ones(4, device='cuda:1')")
    cuda.preflight(worker, [process.pid])


def test_peer_access_is_refused_unless_it_is_known_to_be_off(worker: CudaWorker, cells: Start) -> None:
    process = cells(START)
    with pytest.raises(Refused, match="peer access"):
        raise cuda.preflight(worker, [process.pid])[process.pid]  # it may be parked
    assert process.run("answer = devices.disable_peer_access()") == WAS_ON
    assert process.run("answer = devices.disable_peer_access()") == []
    cuda.preflight(worker, [process.pid], {process.pid: {}})
    cuda.preflight(worker, [process.pid], {process.pid: {"total": 0, "largest": 448 << 20}})
    with pytest.raises(Refused, match="expandable_segments"):
        cuda.preflight(worker, [process.pid], {process.pid: {"total": 0, "largest": 512 << 20}})


def test_memory_that_no_allocator_tells_of_counts_as_one_allocation(worker: CudaWorker, cells: Start) -> None:
    process = cells(START + "big = torch.empty(3 << 30, dtype=torch.uint8, device='cuda:0')")
    with pytest.raises(Refused, match="expandable_segments"):
        cuda.preflight(worker, [process.pid], {process.pid: {"total": 0, "largest": 0}})
    cuda.preflight(worker, [process.pid], {process.pid: {"total": 3 << 30, "largest": 0}})


@pytest.mark.parametrize("expandable", [False, True])
def test_a_process_knows_its_large_allocations(cells: Start, expandable: bool) -> None:
    configuration = f"os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'expandable_segments:{expandable}'"
    process = cells(f"import os; {configuration}; import torch")
    process.run(
        "from jupyter_gpuckpt.kernel import devices\n"
        "x = [torch.empty(n << 20, dtype=torch.uint8, device=f'cuda:{n % 2}') for n in (600, 3072, 101)]"
    )
    large = process.run("answer = sorted(size >> 20 for size in devices.allocations().values() if size > 64 << 20)")
    assert large == ([] if expandable else [102, 600, 3072])
    total = process.run("answer = sum(devices.allocations().values()) >> 20")
    assert 3773 <= total < 3900


@pytest.mark.parametrize("swap", [False, True])
def test_peer_access_off_freeze_thaw_and_on_again(
    worker: CudaWorker, cells: Start, two_gpus: list[str], swap: bool
) -> None:
    a, b = two_gpus
    process = cells(START)
    expected = process.run(STRIDED)
    for _ in range(2):
        assert process.run("was_on = devices.disable_peer_access(); answer = was_on") == WAS_ON
        cuda.freeze(worker, [process.pid])
        cuda.thaw(worker, [process.pid], {a: b, b: a} if swap else None)
        process.run("devices.enable_peer_access(was_on)")
        assert process.run("answer = x.to('cuda:1').sum().item(), y.sum().item()") == [SUM, SUM]
        assert process.run(STRIDED) == expected
