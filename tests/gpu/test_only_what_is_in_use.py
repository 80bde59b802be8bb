"""GPU memory that a program has reserved and not used costs nothing, and is zero again afterwards."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from gpu_memory import DIGEST, GIB, leaving_free, used_by_gpu
from notebooks import Notebook, StartKernel
from test_gpu_sleep import ask

from benchmarks.gpu_programs import PROGRAMS
from jupyter_gpuckpt import settings
from jupyter_gpuckpt.linux import memory
from jupyter_gpuckpt.store import Store

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

SPARSE = """
import torch
free = torch.zeros(3 << 27, device='cuda')
few = [torch.randint(0, 2**62, (1 << 20,), device='cuda') for _ in range(40)]
free[-5:] = 7
d = digest(*few)
torch.cuda.synchronize()
"""
SAME = "digest(*few) == d and not free[:-5].any().item() and bool((free[-5:] == 7).all())"


def stored(name: str) -> int:
    return Store(settings.store_dir()).get(name).stored


class Lowest:
    """The lowest that available host memory was while a block ran, below what it was before."""

    def __enter__(self) -> Lowest:
        self._ended = threading.Event()
        self._first = self._least = memory.room().bytes
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._ended.wait(0.01):
            self._least = min(self._least, memory.room().bytes)

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def taken(self) -> int:
        return self._first - self._least


def test_zeros_take_neither_host_memory_nor_disk_space_and_come_back(notebook: Notebook) -> None:
    notebook.run(DIGEST + SPARSE, timeout=120)
    with Lowest() as saving:
        notebook.run("%gpuckpt save here", timeout=120)
    assert stored("here") < GIB
    assert notebook.value(SAME) == "True"
    notebook.run("free.fill_(3); [f.zero_() for f in few]; torch.cuda.synchronize()")
    for _ in range(2):
        with Lowest() as restoring:
            notebook.run("%gpuckpt restore here --discard", timeout=120)
        assert notebook.value(SAME) == "True"
        notebook.run("free.fill_(3); [f.zero_() for f in few]; torch.cuda.synchronize()")
    # The tensor of zeros has 1.5 GiB, and the driver takes 0.6 GiB off the GPU itself.
    assert saving.taken < 2.6 * GIB, saving.taken
    assert restoring.taken < 2.6 * GIB, restoring.taken


def test_jax_with_a_reservation(start: StartKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does by default, which is three quarters of the GPU."""
    if reason := PROGRAMS["jax_default"].lacks(1):
        pytest.skip(reason)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.08")
    notebook = start()
    before = used_by_gpu()
    notebook.run(PROGRAMS["jax_default"].setup(GIB), timeout=120)
    assert max(now - then for now, then in zip(used_by_gpu(), before, strict=True)) > 5 * GIB, "it reserves nothing"
    was = notebook.value("digest()")
    with Lowest() as saving:
        notebook.run("%gpuckpt save here", timeout=120)
    assert notebook.value("digest()") == was
    assert stored("here") < 4 * GIB, "what XLA has written in passing is in use, too"
    assert saving.taken < 6 * GIB
    then = notebook.value("step(), step()")
    for line in ("restore here --discard", "restore here --in-place --discard"):
        notebook.run(f"%gpuckpt {line}", timeout=120)
        assert notebook.value("digest()") == was
        assert notebook.value("step(), step()") == then


def test_memory_that_changes_while_a_save_is_prepared(notebook: Notebook) -> None:
    """The holder has it open by then, and closes it."""
    notebook.run(DIGEST + SPARSE, timeout=120)
    notebook.run(
        """
import threading, time
stop, turns = False, 0
def work():
    global turns
    while not stop:
        big = torch.full((1 << 24,), turns, device='cuda')
        torch.cuda.synchronize()
        del big
        torch.cuda.empty_cache()
        turns += 1
        time.sleep(0.01)
worker = threading.Thread(target=work); worker.start()
"""
    )
    for _ in range(2):
        notebook.run("%gpuckpt save here --replace", timeout=60)
        assert notebook.value(SAME) == "True"
    notebook.run("stop = True; worker.join(60); assert not worker.is_alive(), 'an allocation does not end'", timeout=90)
    notebook.run("free.fill_(3); [f.zero_() for f in few]; torch.cuda.synchronize()")
    notebook.run("%gpuckpt restore here --discard", timeout=60)
    notebook.run("stop = True; worker.join(60); assert not worker.is_alive(), 'an allocation does not end'", timeout=90)
    assert notebook.value(SAME) == "True"


def test_a_cell_has_the_gpu_to_itself_while_a_save_is_prepared(notebook: Notebook) -> None:
    notebook.run(DIGEST + SPARSE, timeout=120)
    notebook.run("y = torch.ones(5 << 28, dtype=torch.uint8, device='cuda')")
    with leaving_free(GIB):
        for n in range(2):
            with ThreadPoolExecutor(1) as beside:
                saving = beside.submit(ask, notebook, "save", name=f"s{n}")
                while not saving.done():
                    notebook.run(
                        "del y; torch.cuda.empty_cache()\n"
                        "y = torch.ones(5 << 28, dtype=torch.uint8, device='cuda'); torch.cuda.synchronize()",
                        timeout=60,
                    )
                saving.result()
        assert notebook.value(f"{SAME} and bool(y.all())") == "True"
