"""Who is put to sleep for whom: real kernels and keepers, on a GPU that there is only in figures.

What NVML would say is made up here (`_Figures`): each kernel holds so much while it is awake. That memory really moves
is seen in `tests/gpu`.
"""

from __future__ import annotations

import asyncio
import time
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from keeper_faults import Asked, status
from notebooks import PATIENCE, Notebook, StartKernel, wait_until

from jupyter_gpuckpt.client.record import Operation
from jupyter_gpuckpt.errors import Busy, Cancelled, Refused
from jupyter_gpuckpt.freeze.cuda_calls import Gpu, Usage
from jupyter_gpuckpt.keeper.gpu import sharing
from jupyter_gpuckpt.keeper.operations.progress import OperationProgress
from jupyter_gpuckpt.operations.results import Progress

pytestmark = pytest.mark.criu

_GPU = "GPU-1"
_GIB = 1 << 30


class _Figures:
    """A GPU of 10 GiB: 4 for each kernel that is awake, and `stranger` for somebody else."""

    def __init__(self, kernels: list[Notebook], stranger: int = 0) -> None:
        self._kernels, self._stranger = kernels, stranger

    def usage(self) -> list[Usage]:
        statuses = [status(kernel) for kernel in self._kernels]
        held = [Usage(_GPU, s["pid"], 4 * _GIB, False) for s in statuses if s["state"] == "running"]
        return [*held, *([Usage(_GPU, 1, self._stranger, False)] if self._stranger else [])]

    def gpus(self) -> list[Gpu]:
        free = 10 * _GIB - sum(one.bytes or 0 for one in self.usage())
        return [Gpu(0, _GPU, "NVIDIA Figure", 10 * _GIB, free, False, "580")]


def _asking(figures: _Figures) -> Any:
    return SimpleNamespace(worker=figures, folder=SimpleNamespace(path=Path("/nobody")))


def _make_room(figures: _Figures, gib: int, told: list[str] | None = None, operation: Operation | None = None) -> None:
    async def tell(progress: Progress) -> None:
        if told is not None:
            told.append(progress.stage)

    async def make() -> None:
        progress = OperationProgress(operation or Operation("wake", "this kernel"), tell)
        await sharing.make_room(_asking(figures), {_GPU: gib * _GIB}, progress, "It was not woken.")

    asyncio.run(make())


@pytest.fixture
def grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCKPT_SHARE_GRACE", "0.2")


@pytest.fixture
def two(start: StartKernel, grace: None) -> list[Notebook]:
    """Two kernels, the second of which was used last."""
    kernels = [start(), start()]
    for kernel in kernels:
        _use(kernel)
    return kernels


def _use(kernel: Notebook) -> None:
    """Run a cell, and wait until the kernel's keeper has heard of its begin and of its end."""
    before = _last_active(kernel)
    kernel.run("1")
    wait_until(lambda: _last_active(kernel) > before and not status(kernel)["busy"])


def _last_active(kernel: Notebook) -> datetime:
    return datetime.fromisoformat(status(kernel)["last_active"])


def _states(kernels: list[Notebook]) -> list[str]:
    return [status(kernel)["state"] for kernel in kernels]


def test_the_longest_idle_one_sleeps_and_no_more_than_it_takes(two: list[Notebook]) -> None:
    figures = _Figures(two)
    _make_room(figures, 2)
    assert _states(two) == ["running", "running"]
    told: list[str] = []
    _make_room(figures, 6, told)
    assert _states(two) == ["sleeping", "running"]
    assert any(stage.startswith("putting kernel") for stage in told), told
    _make_room(figures, 10)
    assert _states(two) == ["sleeping", "sleeping"]


def test_nobody_sleeps_for_nothing_and_who_holds_what_is_named(two: list[Notebook]) -> None:
    two[0].run("%gpuckpt awake on")
    with pytest.raises(Refused) as refused:
        _make_room(_Figures(two, stranger=_GIB), 8)
    assert _states(two) == ["running", "running"]
    said = str(refused.value)
    ids = [status(kernel)["kernel_id"][:8] for kernel in two]
    assert said.startswith("It was not woken.")
    assert f"kernel {ids[0]}: 4.0 GiB, kept awake" in said
    assert f"kernel {ids[1]}: 4.0 GiB, running" in said
    assert "process 1 (" in said
    assert "1.0 GiB free, and 8.0 GiB are needed" in said


def test_one_that_works_is_waited_for(two: list[Notebook]) -> None:
    cell = Asked(two[0], "input()")
    wait_until(lambda: status(two[0])["busy"])
    told: list[str] = []

    async def both() -> None:
        making = asyncio.create_task(asyncio.to_thread(_make_room, _Figures(two), 10, told))
        while "waiting for free GPU memory" not in told:
            await asyncio.sleep(0.01)
        # The other one is left in peace until it helps.
        assert (await asyncio.to_thread(_states, two)) == ["running", "running"]
        two[0].client.get_stdin_msg(timeout=PATIENCE)  # an answer before the question is passed over
        two[0].client.input("done")
        await making

    asyncio.run(both())
    assert cell.answer()["status"] == "ok"
    assert _states(two) == ["sleeping", "sleeping"]


def test_it_is_not_waited_for_longer_than_is_set(two: list[Notebook], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCKPT_SHARE_TIMEOUT", "0.5")
    cell = Asked(two[0], "input()")
    wait_until(lambda: status(two[0])["busy"])
    with pytest.raises(Refused, match="a cell runs"):
        _make_room(_Figures(two), 10)
    operation = Operation("wake", "this kernel")
    operation.cancelling.set()
    with pytest.raises(Cancelled):
        _make_room(_Figures(two), 10, operation=operation)
    assert _states(two) == ["running", "running"]
    two[0].client.get_stdin_msg(timeout=PATIENCE)  # an answer before the question is passed over
    two[0].client.input("done")
    assert cell.answer()["status"] == "ok"


def test_turns_are_one_at_a_time_whatever_the_order_and_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def tell(_: Progress) -> None:
        pass

    inside = 0

    async def take(gpus: list[str], stay: float) -> None:
        nonlocal inside
        async with sharing.turn(gpus, OperationProgress(Operation("wake", ""), tell)):
            assert inside == 0
            inside += 1
            await asyncio.sleep(stay)
            inside -= 1

    async def crowd() -> None:
        await asyncio.gather(*(take(gpus, 0.05) for gpus in [["a", "b"], ["b", "a"], ["b"], ["a", "b"]]))

    asyncio.run(crowd())
    monkeypatch.setenv("GPUCKPT_SHARE_TIMEOUT", "0.2")

    async def too_long() -> None:
        holding = asyncio.create_task(take(["a"], 30))
        await asyncio.sleep(0)
        began = time.monotonic()
        with pytest.raises(Busy):
            await take(["a"], 0)
        assert time.monotonic() - began < 20
        holding.cancel()

    asyncio.run(too_long())


_NVML = """
import sys
if any("cuda_worker" in argument for argument in sys.orig_argv):
    import json
    from pathlib import Path
    import jupyter_gpuckpt.freeze.nvml as nvml
    from jupyter_gpuckpt.freeze.cuda_messages import Gpu, Usage

    class Nvml:
        def usage(self):
            states = [json.loads(path.read_text()) for path in Path({kernels!r}).glob("*/state.json")]
            held = [Path(f"/proc/{{state['sleeper'][0]}}/task/{{state['sleeper'][0]}}/children").read_text()
                    for state in states if state.get("sleep") is None]
            return [Usage(gpu={gpu!r}, pid=int(pid.split()[0]), bytes=4 << 30, mps=False) for pid in held]

        def gpus(self):
            free = (10 << 30) - sum(one.bytes for one in self.usage())
            return [Gpu(index=0, uuid={gpu!r}, name="NVIDIA Figure", total=10 << 30, free=free, mig=False, driver="")]

    nvml.Nvml = Nvml
"""

_TORCH = """
import sys
from types import SimpleNamespace as Of
class OutOfMemoryError(RuntimeError): pass
gpu = Of(uuid={uuid!r})
sys.modules["torch"] = Of(cuda=Of(get_device_properties=lambda number: [gpu][number], current_device=lambda: 0))
def need(size):
    raise OutOfMemoryError(f"CUDA out of memory. Tried to allocate {{size}}. GPU 0 has a total capacity of 10.00 GiB.")
"""


def test_a_cell_that_finds_too_little_has_others_fall_asleep_so_that_it_can_be_run_again(
    start: StartKernel, grace: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uuid = "00010203-0405-0607-0809-0a0b0c0d0e0f"
    path = tmp_path / "python"
    path.mkdir()
    kernels = str(tmp_path / "runtime" / "gpuckpt")
    (path / "sitecustomize.py").write_text(_NVML.format(kernels=kernels, gpu=f"GPU-{uuid}"))
    monkeypatch.setenv("PYTHONPATH", str(path))
    idle, needy = start(), start()
    name = status(idle)["kernel_id"][:8]
    needy.run(_TORCH.format(uuid=uuid))
    failed = needy.fails("need('20.00 GiB')")
    assert failed.ename == "OutOfMemoryError"
    assert "There is no room on the GPU for what the cell asked for." in failed.text
    assert f"kernel {name}: 4.0 GiB" in failed.text
    assert _states([idle, needy]) == ["running", "running"]
    assert "Run the cell again" in needy.fails("need('6.00 GiB')").text
    assert _states([idle, needy]) == ["sleeping", "running"]
    # Nothing is said where there is room by now, nor of what has nothing to do with GPUs.
    for code in ("need('6.00 GiB')", "raise OutOfMemoryError('of another kind')", "1 / 0"):
        assert "has been freed" not in needy.fails(code).text
