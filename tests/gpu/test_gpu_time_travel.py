"""Saves of a kernel whose GPU memory changes a little from one to the next, and the way back and forth between them."""

from __future__ import annotations

import re

import pytest
from gpu_memory import GIB
from notebooks import Notebook, wait_until

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.snapshots.saved import processes_of
from jupyter_gpuckpt.store import Store

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

STATE = """
import torch
torch.manual_seed(1)
blocks = [torch.randint(0, 2**62, (20 << 17,), device='cuda') for _ in range(100)]
weights = torch.randint(0, 2**62, (20 << 17,), device='cuda')
free = torch.zeros(2 << 27, device='cuda')
seen = []
def digest(*blocks): return [int((b * weights).sum()) for b in blocks]
"""


def new_chunks(notebook: Notebook) -> list[tuple[int, int]]:
    """Return, of each save, how many chunks were new, and how many there are."""
    log = (notebook.folder / "keeper.log").read_text()
    return [(int(new), int(all_)) for new, all_ in re.findall(r"(\d+) of (\d+) chunks of GPU memory are new", log)]


def saved_after(n: int) -> bool:
    """Tell whether there is a snapshot that is called by the cell which changed a block."""
    return any(f"blocks[{n}].mul_" in manifest.message for manifest in Store(settings.store_dir()).list())


def stored(name: str) -> int:
    return Store(settings.store_dir()).get(name).stored


def test_what_has_not_changed_stays_on_the_gpu_and_every_snapshot_is_whole(notebook: Notebook) -> None:
    notebook.run(STATE, timeout=120)
    for n in range(5):
        notebook.run(f"blocks[{n}].add_({n + 1}); seen.append(digest(*blocks)); d = seen[-1]")
        notebook.run(f"%gpuckpt save s{n}", timeout=120)
    (first, every), *later = new_chunks(notebook)
    # What is zero is never new; a block is ten chunks, and it may share its first and last with others.
    assert 1000 <= first < every - 400
    assert all(10 <= new <= 24 and every == all_ for new, all_ in later)
    assert all(stored(f"s{n}") < 200 << 20 for n in range(1, 5))
    # Much is new where little was expected: the kernel is paused for longer, and nothing else.
    notebook.run("[b.add_(7) for b in blocks]; d = digest(*blocks)")
    notebook.run("%gpuckpt save much", timeout=120)
    assert new_chunks(notebook)[-1][0] >= 1000
    for n in (2, 4, 0):
        notebook.run(f"%gpuckpt restore s{n} --discard", timeout=120)
        assert notebook.value(f"digest(*blocks) == d == seen[{n}] and not free.any().item()") == "True"
    notebook.run("%gpuckpt restore much", timeout=120)
    assert notebook.value("digest(*blocks) == d") == "True"


def test_cells_that_use_the_gpu_are_undone_and_redone(notebook: Notebook) -> None:
    notebook.run(STATE, timeout=120)
    notebook.run("%gpuckpt auto on")

    for n in range(3):
        notebook.run(f"blocks[{n}].mul_(3); seen.append(digest(*blocks))")
        # Not only frozen: a save is given up where the next cell begins before its freeze is over.
        wait_until(lambda n=n: saved_after(n), 60)  # type: ignore[misc]
    for left in (2, 1):
        notebook.run("%gpuckpt undo", timeout=120)
        assert notebook.look(f"len(seen) == {left} and digest(*blocks) == seen[-1]") == "True"
    log = (notebook.folder / "keeper.log").read_text()
    found = [(int(there), int(all_)) for there, all_ in re.findall(r"(\d+) of (\d+) MB of GPU memory were there", log)]
    # A third of it is zeros, which nobody copies.
    assert [there > all_ // 2 for there, all_ in found] == [True, True], "what was there is not read"
    for there in (2, 3):
        notebook.run("%gpuckpt redo", timeout=120)
        assert notebook.look(f"len(seen) == {there} and digest(*blocks) == seen[-1]") == "True"


def test_a_snapshot_that_is_gone_meanwhile_is_not_relied_on(notebook: Notebook) -> None:
    notebook.run(STATE, timeout=120)
    notebook.run("%gpuckpt save here", timeout=120)
    notebook.run("blocks[0].add_(1); d = digest(*blocks)")
    notebook.run("%gpuckpt save here --replace", timeout=120)
    notebook.run("%gpuckpt save there", timeout=120)
    notebook.run("%gpuckpt rm here")
    notebook.run("%gpuckpt save last", timeout=120)
    notebook.run("%gpuckpt rm there")
    notebook.run("[b.zero_() for b in blocks]")
    notebook.run("%gpuckpt restore last --discard", timeout=120)
    assert notebook.value("digest(*blocks) == d") == "True"
    assert stored("last") < GIB // 4


AT_WORK = """
import ctypes, threading, time
import numpy as np
def pinned(flags):  # as a cell that knows CUDA asks for it
    address = ctypes.c_void_p()
    assert ctypes.CDLL("libcuda.so.1").cuMemHostAlloc(ctypes.byref(address), ctypes.c_size_t(4 << 20), flags) == 0
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_int64)), (512 << 10,))
memory = {"ordinary": np.zeros(512 << 10, np.int64)}
memory["torch's"] = torch.zeros(512 << 10, dtype=torch.int64).pin_memory().numpy()
for flags in (0, 4, 7):
    memory[f"flags {flags}"] = pinned(flags)
    memory[f"flags {flags}"][:] = 0
lost, rounds, faults = [], dict.fromkeys(memory, 0), []
def write(name):
    its, n = memory[name], 0
    while True:
        if not (its == n).all(): lost.append(name)
        n += 1
        its[:] = n
        rounds[name] += 1
        time.sleep(0.001)
def train():  # on the GPU, by a rule that shows whether a step was lost or done twice
    state, n = torch.zeros(1 << 20, dtype=torch.int64, device="cuda"), 0
    while True:
        state = state * 3 + 1
        n += 1
        if n % 10 == 0 and int(state[7]) != ctypes.c_int64((pow(3, n, 2**65) - 1) // 2).value: faults.append(n)
        trained[0] = n
        time.sleep(0.002)
trained = [0]
for name in memory: threading.Thread(target=write, args=(name,), daemon=True).start()
"""


@pytest.mark.parametrize("trains", [False, True], ids=["", "training"])
def test_threads_go_on_while_the_kernel_is_saved_after_a_cell(notebook: Notebook, trains: bool) -> None:
    """They write to memory of every kind, pinned memory too, while the driver takes the GPU state and brings it back.

    One that is in a call of the driver's is not let run: it may be about to use the GPU.
    """
    notebook.run(STATE, timeout=120)
    notebook.run(AT_WORK)
    if trains:
        notebook.run("threading.Thread(target=train, daemon=True).start()")
    notebook.run("%gpuckpt auto on")
    for n in range(3):
        notebook.run(f"blocks[{n}].mul_(3); seen.append(digest(*blocks))")
        wait_until(lambda n=n: saved_after(n), 60)  # type: ignore[misc]
        assert notebook.look("lost, faults") == "([], [])"
    paused = [
        (found.frozen_seconds, found.gpu_seconds)
        for found in (processes_of(manifest) for manifest in Store(settings.store_dir()).list())
    ]
    assert trains or all(gpu is not None and seconds < gpu / 2 for seconds, gpu in paused), paused
    notebook.run("%gpuckpt undo", timeout=120)
    assert notebook.look("len(seen) == 2 and digest(*blocks) == seen[-1] and not lost and not faults") == "True"
    before = notebook.look("min(rounds.values()), trained[0]")
    wait_until(lambda: notebook.look("min(rounds.values()), trained[0]") != before)
    assert notebook.look("lost, faults") == "([], [])"


def test_write_combined_memory_can_be_touched_while_a_kernel_sleeps(notebook: Notebook) -> None:
    notebook.run(STATE, timeout=120)
    notebook.run(AT_WORK)
    notebook.run("d = digest(*blocks)")
    notebook.run("%gpuckpt sleep", timeout=120)
    before = notebook.look("min(rounds.values())")
    wait_until(lambda: notebook.look("min(rounds.values())") != before)
    assert notebook.look("lost") == "[]"
    assert notebook.value("digest(*blocks) == d and not lost") == "True"
