"""Managed memory, which the driver does not checkpoint: kernels that use it are saved all the same."""

from __future__ import annotations

import pytest
from notebooks import Notebook, StartKernel
from test_gpu_sleep import says

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]


@pytest.fixture
def notebook(start: StartKernel, monkeypatch: pytest.MonkeyPatch) -> Notebook:
    monkeypatch.setenv("GPUCKPT_MANAGED", "on")
    return start()


# 64 MiB are two stretches of addresses. No more: the processor and the GPU take what they use from each other page by
# page, which is slow in a virtual machine.
PROGRAM = """
import ctypes, hashlib
import cupy, numpy as np
from cuda.bindings import driver
cupy.cuda.set_allocator(cupy.cuda.{pool})
x = cupy.arange(1 << {bits}, dtype=cupy.int64)
y = cupy.random.randint(0, 256, 10_000_007, dtype=cupy.uint8)
small = [cupy.full(1000 + n, n, dtype=cupy.int32) for n in range(12)]
del small[::3]

def arrays(): return [x, y, *small]
def on_host(a): return np.ctypeslib.as_array((ctypes.c_uint8 * a.nbytes).from_address(a.data.ptr))

def digest():
    h = hashlib.blake2b(digest_size=16)
    for a in arrays(): h.update(on_host(a))
    return h.hexdigest()

def is_managed():
    asked = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED
    return all(int(driver.cuPointerGetAttribute(asked, a.data.ptr)[1]) for a in arrays())

def step():
    '''The GPU and the processor change it in turn.'''
    for a in arrays():
        a *= 3
        a += 1
        cupy.cuda.Device().synchronize()
        on_host(a)[-1] ^= 1
    return int(x.sum()), int(y.sum())
"""


@pytest.mark.parametrize(
    "pool", ["MemoryPool(cupy.cuda.malloc_managed).malloc", "malloc_managed"], ids=["pool", "each"]
)
def test_it_is_managed_again_afterwards_and_has_every_byte(notebook: Notebook, pool: str) -> None:
    notebook.run(PROGRAM.format(pool=pool, bits=23), timeout=60)
    before = notebook.run("print(digest())", timeout=60).text
    notebook.run("%gpuckpt save here", timeout=60)
    assert notebook.value("digest(), is_managed()") == f"{before} True"
    after = notebook.value("step(), step()")
    for _ in range(2):
        notebook.run("%gpuckpt restore here", timeout=60)
        assert notebook.value("digest(), is_managed()") == f"{before} True"
        assert notebook.value("step(), step()") == after


def test_a_kernel_that_slept_has_it_again(notebook: Notebook) -> None:
    notebook.run(PROGRAM.format(pool="malloc_managed", bits=20), timeout=60)
    before = notebook.run("print(digest())", timeout=60).text
    notebook.run("%gpuckpt sleep", timeout=60)
    assert says(notebook, "digest(), is_managed()") == f"{before} True"
