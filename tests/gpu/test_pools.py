"""Stream-ordered memory (cudaMallocAsync and its pools) leaves the kernel for a save as other memory does."""

from __future__ import annotations

import pytest
from gpu_memory import GIB
from notebooks import Notebook
from test_gpu_programs import small
from test_parking import parked_bytes

from benchmarks.gpu_programs import PROGRAMS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

STREAMS = """
import cupy, random
from cuda.bindings import runtime as rt
SIZES = [512, 5000, 100 << 10, 1 << 20, 3 << 20, 20 << 20, 64 << 20]
streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
big = cupy.zeros(1 << 28, dtype=cupy.uint8)
held, rng = [], random.Random(3)

def done(result):
    assert result[0] == 0, result
    return result[-1]

def allocate():
    s, size, value = rng.choice(streams), rng.choice(SIZES), rng.randrange(256)
    at = done(rt.cudaMallocAsync(size, s.ptr))
    done(rt.cudaMemsetAsync(at, value, size, s.ptr))
    held.append((at, size, value, s.record()))

def look(s, at, size):
    seen = cupy.cuda.UnownedMemory(at, size, None)
    with s: return cupy.ndarray(size, cupy.uint8, cupy.cuda.MemoryPointer(seen, 0)).copy()

def free():
    '''Have what was in it copied in another stream, behind other work, and free it there.'''
    at, size, value, event = held.pop(rng.randrange(len(held)))
    s = rng.choice(streams)
    s.wait_event(event)
    for _ in range(rng.randrange(3)): done(rt.cudaMemsetAsync(big.data.ptr, 1, big.nbytes, s.ptr))
    seen = look(s, at, size)
    done(rt.cudaFreeAsync(at, s.ptr))
    return seen, value

def walk(steps):
    for _ in range(steps):
        freed = [free() for _ in range(4) if len(held) > 20]
        for _ in range(4): allocate()
        for s in streams: s.synchronize()
        for seen, value in freed: assert (seen == value).all()

def is_well(at, size, value):
    seen = look(streams[0], at, size)
    streams[0].synchronize()
    return bool((seen == value).all())

def all_well(): return all(is_well(at, size, value) for at, size, value, _ in held)
"""

GRAPH = """
import torch
from cuda.bindings import runtime as rt
x = torch.arange(1000, device="cuda", dtype=torch.float32)
graph, s = torch.cuda.CUDAGraph(), torch.cuda.Stream()
with torch.cuda.graph(graph): y = (x * 2 + 1).cumsum(0)
def answer(): graph.replay(); torch.cuda.synchronize(); return y[-1].item()
"""


@pytest.mark.parametrize("name", ["torch_async", "cupy_async", "jax_async"])
def test_it_is_parked(notebook: Notebook, name: str) -> None:
    notebook.run(small(PROGRAMS[name]), timeout=200)
    before = notebook.value("digest()")
    notebook.run("%gpuckpt save here", timeout=120)
    assert parked_bytes("here") >= GIB
    assert notebook.value("digest()") == before
    after = notebook.value("step(), step()")
    notebook.run("%gpuckpt restore here", timeout=120)
    assert notebook.value("digest()") == before
    assert notebook.value("step(), step()") == after


def test_blocks_that_go_from_stream_to_stream_are_nobody_elses(notebook: Notebook) -> None:
    notebook.run(STREAMS + "walk(300)", timeout=120)
    notebook.run("%gpuckpt save here", timeout=120)
    assert notebook.value("all_well()") == "True"
    notebook.run("walk(300)", timeout=120)
    assert notebook.value("all_well()") == "True"
    notebook.run("%gpuckpt restore here", timeout=120)
    assert notebook.value("all_well()") == "True"
    notebook.run("walk(300)", timeout=120)
    assert notebook.value("all_well()") == "True"


def test_a_graph_that_allocates_still_works(notebook: Notebook) -> None:
    notebook.run("import os; os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'backend:cudaMallocAsync'" + GRAPH, timeout=120)
    before = notebook.value("answer()")
    notebook.run("%gpuckpt save here", timeout=120)
    notebook.run("x.fill_(3)")
    assert notebook.value("answer()") == "7000.0"
    notebook.run("%gpuckpt restore here", timeout=120)
    assert notebook.value("answer()") == before
