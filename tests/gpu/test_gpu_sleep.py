"""Kernels that sleep hold no GPU memory, and have all of it back, bit for bit, when they are used again."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from gpu_memory import BIG, DIGEST, GIB, SAME, STATE, leaving_free, used_by_gpu
from keeper_faults import Asked, Requested, kill_keeper
from notebooks import Notebook, StartKernel, wait_until

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.freeze.cuda import CudaWorker
from jupyter_gpuckpt.linux.processes import descendants

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

_TAKEN = 64 << 20
"""Bytes by which what the driver keeps for itself differs from one look to the next."""


def status(notebook: Notebook) -> dict[str, Any]:
    with notebook.keeper as keeper:
        found: dict[str, Any] = keeper.request("status")
    return found


def ask(notebook: Notebook, op: str, **args: Any) -> dict[str, Any]:
    outcome = Requested(notebook, op, args).outcome(120)
    assert isinstance(outcome, dict), f"{op} gave {outcome!r}\n{_log(notebook)}"
    return outcome


def is_asleep(notebook: Notebook) -> bool:
    return bool(status(notebook)["state"] == "sleeping")


def says(notebook: Notebook, expression: str) -> str:
    """Return what an expression prints, in a kernel that may have to be woken for it."""
    answer = notebook.run(f"print({expression})", timeout=120, allow_error=True)
    assert answer.status == "ok", f"{answer.text}\n{_log(notebook)}"
    return answer.shown[-1].strip()


def _log(notebook: Notebook) -> str:
    return "the keeper's log:\n" + (notebook.folder / "keeper.log").read_text()[-6000:]


def held_by(notebook: Notebook, worker: CudaWorker) -> list[str]:
    """Return who of the kernel's processes, and of those that its keeper has help, holds GPU memory, by NVML."""
    found = status(notebook)
    pids = {*found["pids"], found["keeper_pid"], *descendants(found["keeper_pid"])}
    return [f"{one.pid} holds {one.bytes} of {one.gpu}" for one in worker.usage() if one.pid in pids]


@pytest.mark.parametrize("parking", ["on", "off"])
def test_it_holds_nothing_asleep_and_has_all_of_it_back(
    start: StartKernel, worker: CudaWorker, monkeypatch: pytest.MonkeyPatch, parking: str
) -> None:
    monkeypatch.setenv("GPUCKPT_PARKING", parking)
    before = used_by_gpu()
    notebook = start()
    notebook.run("import torch\n" + DIGEST + STATE, timeout=120)
    for turn in range(3):
        slept = ask(notebook, "sleep")
        assert slept["freed"] > GIB // 2, slept
        print(f"\nparking {parking}, turn {turn}: asleep in {slept['seconds']:.2f} s")
        assert held_by(notebook, worker) == [], _log(notebook)
        assert [now - then for now, then in zip(used_by_gpu(), before, strict=True) if now - then > _TAKEN] == []
        found = status(notebook)
        told = found["gpu"]
        assert (found["state"], told["held"], told["freed"]) == ("sleeping", 0, slept["freed"])
        # All but what the driver keeps for itself on the GPU, and what helps to bring it back.
        assert slept["freed"] - GIB < told["host_memory"] < slept["freed"] + GIB // 2, told
        assert told["host_memory"] > GIB // 2, told
        if turn == 0:
            assert "in host memory for it" in notebook.run("%gpuckpt status").text
            assert is_asleep(notebook)
        answer = notebook.run(f"print({SAME})", timeout=120)
        assert answer.shown[-1] == "True\n", (answer.shown, _log(notebook))
        assert answer.shown[1].startswith("Woke in"), answer.shown
        print(answer.shown[1])
    notebook.run("graph.replay()")
    assert says(notebook, "digest(b) == digest(a + a)") == "True"
    # The files that it slept in are gone, and the memory is torch's own again.
    folder = settings.NAMESPACE_VRAM_DIR
    wait_until(lambda: int(says(notebook, f"__import__('shutil').disk_usage({folder!r}).used")) == 0, 30)
    notebook.run("free = torch.cuda.mem_get_info()[0]; y.clear(); del x; torch.cuda.empty_cache()")
    assert int(says(notebook, "torch.cuda.mem_get_info()[0] - free")) > GIB // 2
    notebook.run("%gpuckpt save here", timeout=120)
    notebook.run("%gpuckpt restore here", timeout=120)
    assert says(notebook, "digest(b) == digest(a + a)") == "True"


TOUCHES = {
    "torch": "n = x[:1].item()",
    "allocating": "z = torch.ones(2**25, device='cuda'); n = z.sum().item()",
    "freeing": "y.clear(); torch.cuda.empty_cache(); n = 1",
    "synchronizing": "torch.cuda.synchronize(); n = 1",
    "copying": "n = x[:4].tolist()",
    "asking a stream": "torch.cuda.current_stream().query(); n = 1",
    "asking an event": "event.query(); n = 1",
    "asking for room": "torch.cuda.mem_get_info(); n = 1",
    "holding Python's lock": "import ctypes; p = ctypes.c_uint64(); "
    "n = ctypes.PyDLL('libcuda.so.1').cuMemAlloc_v2(ctypes.byref(p), ctypes.c_size_t(2**20))",
    "a thread": "import threading; t = threading.Thread(target=lambda: x.sum().item()); t.start(); t.join(); n = 1",
}


def test_a_cell_without_the_gpu_lets_it_sleep_and_a_touch_waits_for_the_wake(
    start: StartKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUCKPT_CELLS_ASLEEP", "on")
    notebook = start()
    notebook.run("import torch, threading, time\n" + DIGEST + STATE, timeout=120)
    notebook.run("x[:4].tolist(); event = torch.cuda.Event(); event.record()")
    wrong = []
    for name, code in TOUCHES.items():
        ask(notebook, "sleep")
        began = time.monotonic()
        assert notebook.run("import time; time.sleep(0.5); print(sum(range(10)))").shown == ["45\n"]
        if not is_asleep(notebook):
            wrong.append(f"before {name}: it was woken for nothing")
        began = time.monotonic()
        cell = Asked(notebook, code)
        try:
            if cell.answer(30)["status"] != "ok":
                wrong.append(f"{name}: {cell.answer()}")
        except Exception as e:
            wrong.append(f"{name}: no answer ({e!r}); {_waits(notebook)}")
            ask(notebook, "wake")
        print(f"{name}: {time.monotonic() - began:.2f} s")
        if is_asleep(notebook):
            wrong.append(f"{name}: it still sleeps; {_waits(notebook)}")
    assert not wrong, "\n".join([*wrong, _log(notebook)])
    assert says(notebook, "digest(x, a, b) and bool(y == [] and x[0].item() == x[:1].item())") == "True"


def _waits(notebook: Notebook) -> str:
    """Return where the threads of a kernel wait, for a failure to tell."""
    pid = status(notebook)["pid"]
    lines = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        lines.append(f"{(task / 'comm').read_text().strip()}: {(task / 'syscall').read_text().strip()}")
    return "threads: " + "; ".join(lines)


_WORK = """
told = []
def work():
    while not os.path.exists({go!r}): time.sleep(0.05)
    told.append(x[:1].item())
threading.Thread(target=work).start()
"""


def test_a_thread_of_the_persons_that_touches_the_gpu_wakes_it(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run("import os, threading, time, torch\n" + DIGEST + STATE, timeout=120)
    notebook.run(_WORK.format(go=str(tmp_path / "go")))
    ask(notebook, "sleep")
    time.sleep(3)  # long enough to be woken for nothing
    assert is_asleep(notebook), _waits(notebook)
    (tmp_path / "go").touch()
    wait_until(lambda: not is_asleep(notebook), 30, _waits(notebook))
    wait_until(lambda: says(notebook, "len(told)") == "1", 30)
    assert says(notebook, SAME) == "True"


def test_a_wake_without_room_leaves_it_asleep_and_it_wakes_later(notebook: Notebook) -> None:
    notebook.run("import torch\n" + DIGEST + STATE, timeout=120)
    ask(notebook, "sleep")
    with leaving_free(GIB // 4):
        for _ in range(2):
            failed = notebook.fails("must_not_run = 1", timeout=120)
            assert failed.ename == "Refused", failed.text
            assert "is still asleep; nothing of it is lost" in failed.text
            assert "process " in failed.text, "it does not say who holds the GPU: " + failed.text
            assert is_asleep(notebook)
    assert says(notebook, f"({SAME}, 'must_not_run' in globals())") == "(True, False)"


@pytest.mark.parametrize("stage", ["preparing the kernel", "falling asleep", "asleep", "waking"])
def test_a_keeper_killed_on_the_way(notebook: Notebook, stage: str) -> None:
    notebook.run("import torch\n" + DIGEST + STATE, timeout=120)

    def kill(entered: str) -> None:
        if entered == stage:
            time.sleep(0.3)  # into the middle of it
            kill_keeper(notebook)

    if stage in ("asleep", "waking"):
        ask(notebook, "sleep")
    if stage == "asleep":
        kill_keeper(notebook)
    else:
        Requested(notebook, "wake" if stage == "waking" else "sleep", {}, kill).outcome(120)
    assert notebook.manager.is_alive()
    assert says(notebook, SAME) == "True"
    ask(notebook, "sleep")
    assert says(notebook, SAME) == "True"


def test_one_that_sleeps_is_saved_and_ended(notebook: Notebook, worker: CudaWorker) -> None:
    notebook.run("import torch\n" + DIGEST + STATE, timeout=120)
    ask(notebook, "sleep")
    ask(notebook, "save", name="here")
    assert is_asleep(notebook), _log(notebook)
    assert held_by(notebook, worker) == []
    assert says(notebook, SAME) == "True"
    notebook.run("x.zero_()")
    ask(notebook, "sleep")
    notebook.run("%gpuckpt restore here", timeout=120)
    assert says(notebook, SAME) == "True"
    ask(notebook, "sleep")
    assert says(notebook, SAME) == "True"
    ask(notebook, "sleep")
    began = time.monotonic()
    notebook.manager.shutdown_kernel()
    assert time.monotonic() - began < 15


def test_a_cell_wakes_it_while_what_was_saved_in_its_sleep_is_being_written(notebook: Notebook) -> None:
    notebook.run(BIG.format(size=4 * GIB), timeout=120)
    ask(notebook, "sleep")
    saving = Requested(notebook, "save", {"name": "here"})
    while saving.is_alive() and status(notebook)["writing"] is None:
        pass
    began = time.monotonic()
    answer = notebook.run("x.zero_(); torch.cuda.synchronize(); print(int(x.count_nonzero()))", timeout=120)
    taken = time.monotonic() - began
    found = status(notebook)
    print(f"\n{answer.shown}; answered after {taken:.2f} s, while {found['writing']} was being written")
    assert answer.shown[-1] == "0\n", (answer.shown, _log(notebook))
    assert (found["state"], found["writing"]) == ("running", "here"), "the cell waited for the disk"
    saved = saving.outcome(120)
    assert isinstance(saved, dict), f"{saved!r}\n{_log(notebook)}"
    # What it slept in is gone, and the snapshot is of the kernel before the cell.
    folder = settings.NAMESPACE_VRAM_DIR
    wait_until(lambda: int(says(notebook, f"__import__('shutil').disk_usage({folder!r}).used")) == 0, 30)
    notebook.run("%gpuckpt restore here", timeout=120)
    assert says(notebook, "check() == c") == "True"


# -- sharing


@pytest.fixture
def quick_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCKPT_SHARE_GRACE", "0.3")


@pytest.mark.usefixtures("quick_turns")
def test_three_kernels_whose_memory_is_two_and_a_half_times_what_is_free_take_turns(start: StartKernel) -> None:
    with leaving_free(7 * GIB):
        kernels = [start() for _ in range(3)]
        needed = 0
        for kernel in kernels:
            kernel.run(BIG.format(size=5 * GIB + 2 * GIB // 5), timeout=120)
            needed += ask(kernel, "sleep")["freed"]
        print(f"\n{needed / 7 / GIB:.2f} times what is free")
        assert needed > 2.4 * 7 * GIB
        choose, began, longest = random.Random(7), time.monotonic(), 0.0
        for turn in range(50):
            kernel = choose.choice(kernels)
            at = time.monotonic()
            same = says(kernel, "check() == c")
            longest = max(longest, time.monotonic() - at)
            assert same == "True", f"turn {turn}: {_log(kernel)}"
            kernel.run(f"x[::4096] += {turn}; c = check()", timeout=60)
        print(f"50 rounds in {time.monotonic() - began:.0f} s, the longest cell {longest:.1f} s")


@pytest.mark.usefixtures("quick_turns")
def test_two_that_wake_at_once_and_one_that_is_kept_awake(start: StartKernel) -> None:
    with leaving_free(4 * GIB):
        one, other = start(), start()
        for kernel in (one, other):
            kernel.run(BIG.format(size=2 * GIB + GIB // 2), timeout=120)
            ask(kernel, "sleep")
        for _ in range(3):
            cells = [Asked(kernel, "assert check() == c") for kernel in (one, other)]
            for kernel, cell in zip((one, other), cells, strict=True):
                assert cell.answer(90)["status"] == "ok", f"{cell.answer()}\n{_log(kernel)}"
        says(one, "check() == c")
        one.run("%gpuckpt awake on")
        failed = other.fails("x", timeout=90)
        assert "kept awake" in failed.text, failed.text
        one.run("%gpuckpt awake off")
        assert says(other, "check() == c") == "True"
        # One whose snapshot needs room gets it as well.
        other.run("%gpuckpt save here", timeout=120)
        assert says(one, "check() == c") == "True"
        other.run("%gpuckpt restore here", timeout=120)
        assert says(other, "check() == c") == "True"
        assert says(one, "check() == c") == "True"


@pytest.mark.usefixtures("quick_turns")
def test_a_cell_that_finds_too_little_can_be_run_again_when_others_sleep(start: StartKernel) -> None:
    with leaving_free(6 * GIB):
        idle, needy = start(), start()
        idle.run(BIG.format(size=4 * GIB), timeout=120)
        needy.run("import torch; torch.ones(1, device='cuda')", timeout=120)
        allocate = "big = torch.empty(3 << 30, dtype=torch.uint8, device='cuda')"
        failed = needy.fails(allocate, timeout=120)
        assert "Run the cell again" in failed.text, f"{failed.text}\n{_log(needy)}"
        assert is_asleep(idle)
        needy.run(allocate, timeout=60)
        failed = needy.fails("torch.empty(100 << 30, dtype=torch.uint8, device='cuda')", timeout=120)
        assert "There is no room on the GPU for what the cell asked for." in failed.text, failed.text
        assert "process " in failed.text, "it does not say who holds the GPU: " + failed.text
        needy.run("del big; torch.cuda.empty_cache()")
        assert says(idle, "check() == c") == "True"


@pytest.mark.parametrize("size", [1, 24])
def test_wake_times(notebook: Notebook, size: int) -> None:
    notebook.run(BIG.format(size=size * GIB), timeout=120)
    for _ in range(3):
        slept = ask(notebook, "sleep")
        began = time.monotonic()
        answer = notebook.run("print(x[:1].item() >= 0)", timeout=120)
        taken = time.monotonic() - began
        print(
            f"\n{size} GiB: asleep in {slept['seconds']:.2f} s; a cell answered after {taken:.2f} s: {answer.shown[1]}"
        )
    assert says(notebook, "check() == c") == "True"
