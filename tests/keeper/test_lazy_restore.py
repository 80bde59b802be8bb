"""`restore --lazy`: what of it needs no GPU. What was on one is read behind the kernel's back, and never lost."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from keeper_faults import Requested, assert_works, store
from notebooks import PATIENCE, Notebook

from jupyter_gpuckpt.client.record import Operation
from jupyter_gpuckpt.errors import Cancelled, Damaged, NoSuchSnapshot
from jupyter_gpuckpt.keeper.gpu.late_vram import LateVram
from jupyter_gpuckpt.keeper.operations.progress import OperationProgress
from jupyter_gpuckpt.store import Manifest, Store

GPU = os.urandom(3 << 20)


@pytest.mark.criu
def test_a_kernel_without_gpu_state_is_simply_restored(notebook: Notebook) -> None:
    notebook.run("x = 1")
    notebook.run("%gpuckpt save here")
    notebook.run("x = 2")
    answer = notebook.run("%gpuckpt restore here --lazy")
    (line,) = [shown for shown in answer.shown if shown.startswith("Restored here")]
    assert "follow" not in line
    assert "waited for" not in line, line
    assert notebook.value("x") == "1"
    found = Requested(notebook, "restore", {"name": "here", "lazy": True}).outcome()
    assert (found["lazy"], found["warnings"], "answered" in found) == (False, [], False)
    assert_works(notebook)


_ON_ITS_WAY = """
sleeping = get_ipython().kernel.agent.sleeping
sleeping.restored(True)
told = []
sleeping._agent.cells.announce = told.append
"""


@pytest.mark.criu
def test_cells_run_while_the_gpu_memory_is_on_its_way_and_wake_the_kernel_when_it_is_not(notebook: Notebook) -> None:
    notebook.run(_ON_ITS_WAY)
    # Nothing is shown of a wake: the cell runs as any.
    assert notebook.run("print(sleeping.is_asleep, told)").shown == ["True []\n"]
    assert notebook.client.complete("tol", reply=True, timeout=PATIENCE)["content"]["matches"] == []
    error = {"type": "Refused", "what": "Not read.", "why": "Damaged.", "then": "Restore another.", "data": {}}
    answer = notebook.run(f"sleeping.not_woken({error})")
    assert "Not read." in answer.text
    assert "Restore another." in answer.text
    assert notebook.run("print(told)").shown[0] == "Waking the kernel …"
    # The keeper knows of no sleep; what it says at the end of one is said by hand.
    notebook.run("%gpuckpt status")
    assert "'asleep', 'waking'" in notebook.run("_ = sleeping.after_sleep(); print(told)").text
    assert_works(notebook)


# -- what is read later


@pytest.fixture
def snapshot(folders: None) -> Iterator[Manifest]:
    """A snapshot with something of a GPU's."""
    about: dict[str, Any] = {"parent": None, "kernel": {}, "machine": {}, "cuda": {}, "process": {}}
    with Store(store()).writer("here") as writer:
        (writer.directory / "vram").mkdir()
        (writer.directory / "vram" / "7-parked").write_bytes(GPU)
        yield writer.commit(message="", **about)


def pack() -> Path:
    (found,) = (store() / "packs").iterdir()
    return found


def in_keeper(
    snapshot: Manifest, folder: Path, steps: Callable[[LateVram, Operation, OperationProgress], Awaitable[None]]
) -> None:
    """Carry out what a keeper does about late memory."""

    async def tell(_: dict[str, Any]) -> None:
        pass

    async def main() -> None:
        operation = Operation("wake", "this kernel")
        late = LateVram(Store(store()), snapshot.name, snapshot.id, "vram", folder)
        try:
            await steps(late, operation, OperationProgress(operation, tell))
        finally:
            await late.close()

    folder.mkdir()
    asyncio.run(main())


def test_it_is_there_when_it_is_waited_for_whatever_the_snapshot_is_called_by_then(
    snapshot: Manifest, tmp_path: Path
) -> None:
    async def steps(late: LateVram, _: Operation, progress: OperationProgress) -> None:
        Store(store()).rename("here", "other")
        await late.whole(progress)  # as a keeper that takes over: nothing was opened before
        assert (tmp_path / "gpu" / "7-parked").read_bytes() == GPU
        Store(store()).remove("other")
        await late.whole(progress)  # it is there already

    in_keeper(snapshot, tmp_path / "gpu", steps)


def test_damage_is_told_and_what_was_mended_is_read_at_the_next_try(snapshot: Manifest, tmp_path: Path) -> None:
    good = pack().read_bytes()

    async def steps(late: LateVram, _: Operation, progress: OperationProgress) -> None:
        await asyncio.to_thread(late.open)
        pack().write_bytes(good[:-9] + bytes(9))
        late.start()
        late.check()  # nothing is known yet
        for _again in range(2):
            with pytest.raises(Damaged):
                await late.whole(progress)
        with pytest.raises(Damaged):
            late.check()
        pack().write_bytes(good)
        await late.whole(progress)
        late.check()
        assert (tmp_path / "gpu" / "7-parked").read_bytes() == GPU

    in_keeper(snapshot, tmp_path / "gpu", steps)


def test_a_snapshot_that_is_gone_or_is_another_is_not_read(snapshot: Manifest, tmp_path: Path) -> None:
    async def steps(late: LateVram, _: Operation, progress: OperationProgress) -> None:
        Store(store()).remove("here")
        with pytest.raises(NoSuchSnapshot):
            await late.whole(progress)
        about: dict[str, Any] = {"parent": None, "kernel": {}, "machine": {}, "cuda": {}, "process": {}}
        with Store(store()).writer("here") as writer:
            (writer.directory / "vram").mkdir()
            (writer.directory / "vram" / "7-parked").write_bytes(b"another")
            writer.commit(message="", **about)
        with pytest.raises(NoSuchSnapshot, match="replaced by another"):
            await late.whole(progress)
        assert list((tmp_path / "gpu").iterdir()) == []

    in_keeper(snapshot, tmp_path / "gpu", steps)


def test_who_does_not_wait_any_longer_does_not_stop_it(snapshot: Manifest, tmp_path: Path) -> None:
    async def steps(late: LateVram, operation: Operation, progress: OperationProgress) -> None:
        await asyncio.to_thread(late.open)
        late.start()
        operation.cancelling.set()
        with pytest.raises(Cancelled):
            await late.whole(progress)
        operation.cancelling.clear()
        Store(store()).remove("here")  # it could not be opened again
        await late.whole(progress)
        assert (tmp_path / "gpu" / "7-parked").read_bytes() == GPU

    in_keeper(snapshot, tmp_path / "gpu", steps)
