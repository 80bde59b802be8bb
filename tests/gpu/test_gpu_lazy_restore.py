"""`restore --lazy`: the kernel answers before its GPU memory is back, and no byte of that is missing or wrong later."""

from __future__ import annotations

import contextlib
import os
import queue
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpu_memory import BIG, DIGEST, GIB, SAME, STATE, leaving_free
from keeper_faults import Asked, Requested, kill_keeper
from notebooks import Notebook, StartKernel, wait_until
from test_gpu_sleep import ask, is_asleep, says, status

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.store import Store
from jupyter_gpuckpt.store.index import read_part

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.shared_kernel]

READING = "reading what it had on the GPU"


def saved(notebook: Notebook, setup: str = "import torch\n" + DIGEST + STATE) -> None:
    """Give a kernel GPU memory, save that as ``here``, and ruin it."""
    notebook.run(setup, timeout=120)
    notebook.run("marker = 'saved'")
    ask(notebook, "save", name="here")
    notebook.run("x.zero_(); marker = 'not restored'")


def log(notebook: Notebook) -> str:
    return (notebook.folder / "keeper.log").read_text()[-6000:]


def packs() -> list[Path]:
    return list((settings.store_dir() / "packs").iterdir())


def make_cold() -> None:
    """Take the store out of the page cache: reading it takes a while."""
    for pack in packs():
        fd = os.open(pack, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def last_chunk_on_gpu(name: str) -> tuple[Path, int]:
    """Return the pack with the last bytes of a snapshot's GPU memory, and where they are in it."""
    store = Store(settings.store_dir())
    manifest = store.get(name)
    contents = store.contents(manifest)
    path = max((path for path in contents.files if path.startswith("vram/")), key=contents.size_of)
    index = read_part(store._layout, manifest.id)
    chunk = next(chunk for chunk in reversed(contents.files[path]) if chunk.hash in index)
    at = index[chunk.hash]
    return settings.store_dir() / "packs" / at.pack, at.offset


def flip(pack: Path, offset: int) -> None:
    with pack.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def restored_in(notebook: Notebook, *when: tuple[str, Callable[[], None]]) -> Any:
    """Restore ``here`` lazily from outside, and do something when the keeper is at a stage; return what it answered."""
    at = dict(when)
    return Requested(notebook, "restore", {"name": "here", "lazy": True}, lambda s: at.get(s, lambda: None)()).outcome(
        120
    )


@pytest.mark.parametrize("size", [1, 8])
def test_a_cell_is_answered_before_the_gpu_memory_is_there_and_one_that_needs_it_gets_it(
    notebook: Notebook, size: int
) -> None:
    saved(notebook, BIG.format(size=size * GIB))
    make_cold()
    began = time.monotonic()
    answer = notebook.run("%gpuckpt restore here --lazy", timeout=120)
    assert "of GPU memory are still loading; what needs them waits." in answer.text, answer.text
    assert notebook.value("marker") == "saved"
    cpu = time.monotonic() - began
    state, stage = status(notebook)["state"], status(notebook)["stage"]
    notebook.run("first = x[:1].item()", timeout=120)
    gpu = time.monotonic() - began
    assert says(notebook, "check() == c") == "True"
    print(f"\n{size} GiB, cold: a cell after {cpu:.2f} s ({state}, {stage}), one that needs the GPU after {gpu:.2f} s")
    if size > 1:
        assert state == "waking", f"it was not on its way any more: {log(notebook)}"
        assert cpu < gpu / 2, f"the first cell took {cpu:.2f} of {gpu:.2f} s: {log(notebook)}"
    # All is as after any other restore.
    wait_until(lambda: status(notebook)["state"] == "running", 30)
    folder = settings.NAMESPACE_VRAM_DIR
    wait_until(lambda: int(says(notebook, f"__import__('shutil').disk_usage({folder!r}).used")) == 0, 30)
    ask(notebook, "sleep")
    assert says(notebook, "check() == c") == "True"
    ask(notebook, "save", name="again")
    found = Requested(notebook, "restore", {"name": "again", "lazy": True}).outcome(120)
    assert isinstance(found, dict), f"{found!r}\n{log(notebook)}"
    assert found["lazy"]
    assert found["answered"] < found["seconds"], found
    assert status(notebook)["state"] == "running", "it was said to be done before it was awake"
    assert says(notebook, "check() == c") == "True"


MUCH = """
big = torch.randint(0, 2**62, (2**29,), device='cuda'); event = torch.cuda.Event(); event.record()
def mixed(*tensors): return [int((t.view(torch.int32) ^ (t.view(torch.int32) >> 7)).sum()) for t in tensors]
e, f = mixed(a, b), mixed(x, *y, big); torch.cuda.empty_cache()
"""
"""4 GiB: reading it takes long enough for a touch to come before."""
TOUCHES = {
    "one number": "n = x[:1].item()",
    "copying": "n = x[:4].tolist()",
    "computing": "n = x.sum().item()",
    "allocating": "z = torch.ones(2**25, device='cuda'); n = z.sum().item()",
    "freeing": "del b; torch.cuda.empty_cache(); b = a + 1",
    "synchronizing": "torch.cuda.synchronize()",
    "asking a stream": "torch.cuda.current_stream().query()",
    "asking an event": "event.query()",
    "asking for room": "torch.cuda.mem_get_info()",
    "replaying a graph": "graph.replay(); torch.cuda.synchronize()",
    "a thread": "import threading; t = threading.Thread(target=lambda: x.sum().item()); t.start(); t.join()",
}


def test_every_touch_waits_for_the_memory(notebook: Notebook) -> None:
    saved(notebook, "import torch\n" + DIGEST + STATE + MUCH)
    wrong = []
    for name, code in TOUCHES.items():
        began = time.monotonic()
        make_cold()
        notebook.run("%gpuckpt restore here --lazy", timeout=120)
        early = status(notebook)["state"] == "waking"
        reply = Asked(notebook, code).answer(60)
        if reply["status"] != "ok" or not early:
            wrong.append(f"{name}: {reply} (before its memory was there: {early})\n{log(notebook)}")
        same = "(mixed(x, *y, big) == f, marker, mixed(a) == e[:1], mixed(b) == e[1:])"
        changed = name in ("freeing", "replaying a graph")
        if says(notebook, same) != f"(True, 'saved', True, {not changed})":
            wrong.append(f"{name}: what came back is not what was saved")
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
    assert not wrong, "\n".join(wrong)


def test_one_whose_memory_is_not_parked_is_right_too(start: StartKernel) -> None:
    """Less than what is worth parking: the driver brings it back from the files that criu maps."""
    notebook = start()
    notebook.run("import torch\n" + DIGEST + "x = torch.randint(0, 2**62, (2**20,), device='cuda'); d = digest(x)")
    ask(notebook, "save", name="here")
    notebook.run("x.zero_()")
    assert "still loading" in notebook.run("%gpuckpt restore here --lazy", timeout=120).text
    notebook.run("torch.cuda.synchronize()")
    assert says(notebook, "digest(x) == d") == "True"


def test_one_without_a_gate_is_waited_for(start: StartKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCKPT_PARKING", "off")
    notebook = start()
    notebook.run("import torch\n" + DIGEST + "x = torch.randint(0, 2**62, (2**20,), device='cuda'); d = digest(x)")
    ask(notebook, "save", name="here")
    notebook.run("x.zero_()")
    answer = notebook.run("%gpuckpt restore here --lazy", timeout=120)
    assert "The restore was not lazy: some of its CUDA calls" in answer.text, answer.text
    assert says(notebook, "digest(x) == d") == "True"


def test_damage_that_is_found_late_is_told_and_nothing_of_it_is_used(notebook: Notebook) -> None:
    saved(notebook, BIG.format(size=4 * GIB))
    pack, offset = last_chunk_on_gpu("here")
    flip(pack, offset)
    make_cold()  # it takes seconds to get to that chunk
    failed = restored_in(notebook)
    assert isinstance(failed, Exception), failed
    assert "could not be read" in str(failed), failed
    assert "Restore another snapshot" in str(failed), failed
    assert is_asleep(notebook), log(notebook)
    cell = notebook.fails("must_not_run = 1", timeout=60)
    assert "Restore another snapshot" in cell.text, cell.text
    refused = Requested(notebook, "save", {"name": "next"}).outcome(60)
    assert isinstance(refused, Exception), "unverified GPU memory was saved"
    flip(pack, offset)  # mended
    assert says(notebook, "(check() == c, marker, 'must_not_run' in globals())") == "(True, 'saved', False)"


@pytest.mark.shared_kernel(False)
def test_damage_that_is_found_early_leaves_the_kernel_as_it_is(notebook: Notebook) -> None:
    saved(notebook)
    notebook.run("d = digest(a, b)")
    for pack in packs():
        pack.rename(pack.with_suffix(".away"))
    failed = notebook.fails("%gpuckpt restore here --lazy", timeout=60)
    assert "Restore another snapshot" in failed.text, failed.text
    assert says(notebook, "(digest(a, b) == d, marker)") == "(True, 'not restored')"


def test_a_cell_that_waits_when_damage_is_found_says_so_and_another_snapshot_helps(notebook: Notebook) -> None:
    notebook.run(BIG.format(size=4 * GIB), timeout=120)
    ask(notebook, "save", name="good")
    notebook.run("x.add_(1)")
    ask(notebook, "save", name="here")
    pack, offset = last_chunk_on_gpu("here")
    flip(pack, offset)
    make_cold()
    notebook.run("%gpuckpt restore here --lazy", timeout=120)
    cell = Asked(notebook, "n = x[:1].item()")
    wait_until(lambda: is_asleep(notebook), 60, log(notebook))
    shown = []

    def is_told() -> bool:
        with contextlib.suppress(queue.Empty):
            message = notebook.client.get_iopub_msg(timeout=0.1)
            shown.append((message["msg_type"], message["content"].get("data", message["content"])))
        return "This cell waits for the GPU." in str(shown[-1:])

    wait_until(is_told, 30, f"the cell does not say why it waits: {shown}, {log(notebook)}")
    assert not cell.is_answered()
    flip(pack, offset)
    assert isinstance(Requested(notebook, "restore", {"name": "good"}).outcome(60), dict)
    assert cell.answer(20)["status"] == "error"
    assert says(notebook, "check() == c") == "True"


@pytest.mark.parametrize("stage", [READING, "waking"])
def test_a_keeper_killed_on_the_way(notebook: Notebook, stage: str) -> None:
    saved(notebook)
    make_cold()
    restored_in(notebook, (stage, lambda: kill_keeper(notebook)))
    assert notebook.manager.is_alive()
    assert says(notebook, "marker") == "saved"
    notebook.run("torch.cuda.synchronize()", timeout=120)
    assert says(notebook, SAME) == "True", log(notebook)
    wait_until(lambda: status(notebook)["state"] == "running", 30)
    ask(notebook, "sleep")
    assert says(notebook, SAME) == "True"


def test_one_that_finds_no_room_sleeps_and_wakes_when_there_is(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(notebook)
    notebook.run("del x, a, b, graph; torch.cuda.empty_cache()")
    with leaving_free(GIB // 4):
        failed = restored_in(notebook)
        assert isinstance(failed, Exception), failed
        assert "are needed" in str(failed), failed
        assert is_asleep(notebook), log(notebook)
        assert "process " in notebook.fails("must_not_run = 1", timeout=120).text
    assert says(notebook, f"({SAME}, marker, 'must_not_run' in globals())") == "(True, 'saved', False)"


def test_what_comes_meanwhile_waits_or_replaces_it(notebook: Notebook) -> None:
    saved(notebook)
    for op, arguments in (("save", {"name": "next"}), ("sleep", {}), ("restore", {"name": "here"}), ("hibernate", {})):
        make_cold()
        notebook.run("%gpuckpt restore here --lazy", timeout=120)
        ask(notebook, op, **arguments)
        assert says(notebook, f"({SAME}, marker)") == "(True, 'saved')", f"{op}: {log(notebook)}"
    make_cold()
    notebook.run("%gpuckpt restore here --lazy", timeout=120)
    began = time.monotonic()
    notebook.manager.shutdown_kernel()
    assert time.monotonic() - began < 15
