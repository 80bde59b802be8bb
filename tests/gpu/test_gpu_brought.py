"""What a restore reads straight out of the store to the GPU is right, and is read again where it is lost on the way."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from gpu_memory import BIG, GIB, leaving_free
from keeper_faults import Asked, Criu
from notebooks import Notebook, StartKernel
from test_gpu_lazy_restore import flip, last_chunk_on_gpu, make_cold
from test_gpu_sleep import ask

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.client.record import KernelFolder
from jupyter_gpuckpt.freeze.parking import PARKED
from jupyter_gpuckpt.linux.processes import descendants

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SIZE = 6 * GIB
MIXED = "\nz = torch.zeros(2**27, device='cuda'); o = torch.ones(2**27, device='cuda'); torch.cuda.synchronize()\n"
SAME = "check() == c and not z.any().item() and bool((o == 1).all())"
HOLDER = b"jupyter_gpuckpt.freeze.vram_holder"


@pytest.fixture
def saved(start: StartKernel, criu: Criu) -> Notebook:
    """A kernel whose GPU memory was saved as ``here``, and is something else now; the store is in the page cache."""
    notebook = start()
    notebook.run(BIG.format(size=SIZE) + MIXED, timeout=120)
    ask(notebook, "save", name="here")
    notebook.run("x.zero_(); z.fill_(3); o.zero_(); torch.cuda.synchronize()")
    return notebook


def at_criu(notebook: Notebook, criu: Criu, do: Callable[[], None]) -> None:
    """Restore, and do something when all is read and criu is about to begin."""
    with criu.held_at("restore", "start") as until_there:
        asked = Asked(notebook, "%gpuckpt restore here")
        until_there()
        do()
    assert asked.answer(120)["status"] == "ok", log(notebook)
    assert notebook.value(SAME) == "True", log(notebook)


def log(notebook: Notebook) -> str:
    return (notebook.folder / "keeper.log").read_text()[-6000:]


def below_keeper(notebook: Notebook) -> list[int]:
    (keeper, _) = KernelFolder(notebook.folder).state().keeper or (0, 0)
    return descendants(keeper)


def holder(notebook: Notebook) -> int:
    """Return the program that holds GPU memory for a kernel."""
    for pid in below_keeper(notebook):
        if HOLDER in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
            return pid
    raise AssertionError(f"nothing holds GPU memory\n{log(notebook)}")


def in_host_memory(notebook: Notebook) -> int:
    """Return how many bytes the files have from which the process could have its GPU memory."""
    assert holder(notebook)
    found = {}
    for pid in below_keeper(notebook):
        for file in Path(f"/proc/{pid}/root{settings.NAMESPACE_VRAM_DIR}").glob(f"*[0-9]{PARKED}"):
            about = file.stat()
            found[about.st_dev, about.st_ino] = about.st_blocks * 512
    assert found, log(notebook)
    return sum(found.values())


def test_it_goes_to_the_gpu_without_taking_host_memory(saved: Notebook, criu: Criu) -> None:
    in_file: list[int] = []
    for _ in range(2):
        at_criu(saved, criu, lambda: in_file.append(in_host_memory(saved)))
        saved.run("x.zero_(); z.fill_(3); o.zero_(); torch.cuda.synchronize()")
    assert in_file == [0, 0], log(saved)


def test_it_does_so_where_the_gpu_has_no_room_for_a_block_twice(saved: Notebook, criu: Criu) -> None:
    in_file: list[int] = []
    with leaving_free(2 * SIZE + GIB):
        at_criu(saved, criu, lambda: in_file.append(in_host_memory(saved)))
    assert in_file == [0], log(saved)
    assert "WARNING" not in log(saved)


def test_where_the_program_that_holds_it_is_killed_it_is_read_again(saved: Notebook, criu: Criu) -> None:
    at_criu(saved, criu, lambda: os.kill(holder(saved), signal.SIGKILL))
    assert "what was brought to the GPU is lost" in log(saved)
    # And once more, from a store that has to be read from the disk.
    saved.run("x.zero_(); z.fill_(3); o.zero_(); torch.cuda.synchronize()")
    make_cold()
    saved.run("%gpuckpt restore here", timeout=120)
    assert saved.value(SAME) == "True", log(saved)


@pytest.mark.parametrize("free", [4 * GIB, GIB // 4], ids=["and for a helper", "and for no helper"])
def test_where_the_gpu_has_room_for_it_only_once_it_is_right_too(saved: Notebook, free: int) -> None:
    with leaving_free(free):
        saved.run("%gpuckpt restore here", timeout=120)
    assert saved.value(SAME) == "True", log(saved)


def test_a_restore_that_fails_leaves_what_is_on_the_gpu(saved: Notebook, criu: Criu) -> None:
    saved.run("x.random_(); n = check(); z.fill_(3); torch.cuda.synchronize()")
    unchanged = "check() == n and bool((z == 3).all())"
    criu.first("restore", "exit 7")
    assert saved.fails("%gpuckpt restore here", timeout=120).ename == "RestoreFailed"
    assert saved.value(unchanged) == "True", log(saved)
    criu.honest()
    # Damage that is found when criu has brought up the kernel's processes already.
    pack, offset = last_chunk_on_gpu("here")
    flip(pack, offset)
    failed = saved.fails("%gpuckpt restore here", timeout=120)
    assert "Restore another snapshot" in failed.text, failed.text
    assert saved.value(unchanged) == "True", log(saved)
    flip(pack, offset)
    saved.run("%gpuckpt restore here", timeout=120)
    assert saved.value(SAME) == "True", log(saved)
