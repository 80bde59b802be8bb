"""A kernel that is saved by itself after its cells, and put back and forward among these snapshots."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from keeper_faults import Asked, Criu
from notebooks import Notebook, StartKernel, start_kernel, wait_until

from jupyter_gpuckpt.errors import StoreError
from jupyter_gpuckpt.operations.results import Labelled
from jupyter_gpuckpt.store import Store

pytestmark = [pytest.mark.criu, pytest.mark.shared_kernel]


def snapshots(notebook: Notebook) -> Sequence[Labelled]:
    with notebook.keeper as keeper:
        return [Labelled(**one) for one in keeper.request("list")["snapshots"]]


def names(notebook: Notebook) -> list[str]:
    """Return the names of the automatic snapshots, oldest first."""
    return [one.label for one in reversed(snapshots(notebook)) if one.automatic]


def run_saved(notebook: Notebook, cell: str) -> None:
    """Run a cell, and wait until it was followed by a save."""
    before = {one.id for one in snapshots(notebook)}
    notebook.run(cell)
    wait_until(lambda: {one.id for one in snapshots(notebook)} - before)
    with notebook.keeper as keeper:  # it has noted what it saved, when nothing is under way
        wait_until(lambda: not keeper.request("status")["stage"])


_LENGTH = int(os.environ.get("WALK_STEPS", "8"))
"""How many steps a walk has; more of them take a few seconds each."""
_STEPS = st.lists(
    st.sampled_from(["cell", "cell that is not saved", "undo", "undo 2", "redo", "the keeper is killed"]),
    min_size=_LENGTH,
    max_size=_LENGTH,
)
_BEGIN = """
import random, threading
x, trail, stop = 0, [], threading.Event()
ticker = threading.Thread(target=stop.wait, daemon=True)
ticker.start()
"""
_STATE = "repr((x, trail, random.getstate()[2], hash(random.getstate()), ticker.is_alive()))"


@pytest.mark.shared_kernel(False)
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=_STEPS)
def test_every_state_of_a_walk_back_and_forth_is_the_right_one(steps: list[str]) -> None:
    notebook = start_kernel()
    parents: dict[int, int] = {}
    undone: list[int] = []
    seen: dict[int, str] = {}
    try:
        notebook.run("%gpuckpt auto on --keep 1000")
        run_saved(notebook, _BEGIN)
        here, saved, latest = 0, True, 0
        for step in ["cell", *steps]:
            if step == "the keeper is killed":
                notebook.kill_keeper()
            elif step.startswith("cell"):
                # Cells that were not saved are one step with the next that is.
                parents[latest + 1] = here if saved else parents[here]
                latest = here = latest + 1
                cell = f"x = {here}; trail.append(x); random.random()"
                if step == "cell":
                    run_saved(notebook, cell)
                    saved, undone = True, []
                else:
                    notebook.run("%gpuckpt auto off")
                    notebook.run(cell)
                    notebook.run("%gpuckpt auto on --keep 1000")
                    saved = False
            elif step == "redo":
                target = undone[-1] if undone else None
                if target is None:
                    notebook.fails("%gpuckpt redo")
                else:
                    notebook.run("%gpuckpt redo")
                    undone = undone[:-1] if saved else []
                    here, saved = target, True
            else:
                target = here
                for _ in range(int(step[4:] or "1")):
                    target = parents.get(target, -1)
                if target < 0:
                    notebook.fails(f"%gpuckpt {step}")
                else:
                    notebook.run(f"%gpuckpt {step}")
                    undone = [*(undone if saved else []), here]
                    here, saved = target, True
            state = notebook.look(_STATE)
            assert state.startswith(f"'({here}, "), f"after {step}"
            assert state == seen.setdefault(here, state), f"after {step}"
    finally:
        notebook.close()


def test_what_is_saved_by_itself_goes_by_a_rule_and_what_was_named_stays(notebook: Notebook) -> None:
    assert "not saved by itself" in notebook.run("%gpuckpt auto").text
    notebook.run("%gpuckpt save mine")
    assert "the newest 2 are kept" in notebook.run("%gpuckpt auto on --keep 2").text
    run_saved(notebook, "x = 1")
    (first,) = names(notebook)
    no_rule = notebook.fails(f"%gpuckpt keep {first} as auto-mine").text
    assert "Names that begin with auto- are those of snapshots that go by themselves." in no_rule
    renamed = notebook.run(f"%gpuckpt keep {first.replace('-', '/', 1)} as before_it").text
    assert renamed.endswith(" is now before_it.")
    for x in range(2, 5):
        run_saved(notebook, f"x = {x}")
    wait_until(lambda: len(names(notebook)) == 2)
    assert [one.message for one in snapshots(notebook) if one.automatic] == ["x = 4", "x = 3"]
    assert "before_it" in (listed := notebook.run("%gpuckpt list").text)
    assert "mine" in listed
    assert "auto-" not in listed
    assert "auto-" in notebook.run("%gpuckpt list --auto").text
    notebook.run("%gpuckpt keep --last 1")
    assert len(names(notebook)) == 2
    notebook.run("%gpuckpt restore")  # the latest that somebody saved
    assert notebook.look("x") == "1"
    notebook.run("%gpuckpt auto off")
    notebook.run("x = 5")
    assert "not saved by itself" in notebook.run("%gpuckpt auto").text
    assert len(names(notebook)) == 2


def test_what_removed_snapshots_leave_behind_does_not_fill_the_store(notebook: Notebook) -> None:
    """Each save has much that the next does not need, and a little that all later ones do."""
    notebook.run("import random; kept = []")
    notebook.run("%gpuckpt auto on --keep 2")
    for _ in range(12):
        run_saved(notebook, "kept.append(random.randbytes(100_000)); passing = random.randbytes(12_000_000)")
    store = Store(Path(os.environ["GPUCKPT_STORE"]))

    def is_small() -> bool:
        run_saved(notebook, "pass")  # what a compaction could not delete during a save goes with a later one
        with contextlib.suppress(StoreError):  # old snapshots are being removed at this moment
            return store.would_compact().freed < 90_000_000  # of 120
        return False

    wait_until(is_small)
    state = notebook.look("hash(tuple(kept)), hash(passing)")
    notebook.run("kept, passing = [], b''")
    notebook.run("%gpuckpt undo")
    assert notebook.look("hash(tuple(kept)), hash(passing)") == state
    notebook.run("%gpuckpt auto off")


def test_only_cells_that_ran_for_long_are_followed_by_a_save(notebook: Notebook) -> None:
    notebook.run("import time; x = 0")
    notebook.run("%gpuckpt auto on --after 0.5s")
    notebook.run("x = 1")
    run_saved(notebook, "x = 2; time.sleep(0.6)")
    notebook.run("%gpuckpt status")
    (name,) = names(notebook)
    with notebook.keeper as keeper:
        after = keeper.request("show", {"name": name})["kernel"]["after"]
    assert after["begins"] == "x = 2; time.sleep(0.6)"
    assert after["seconds"] >= 0.5  # as the keeper sees it, which is told of its beginning a moment later
    notebook.run("%gpuckpt auto off")


def test_a_kernel_is_saved_every_so_often_also_in_the_middle_of_a_cell(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run("import time; from pathlib import Path; steps = 0")
    assert "every 1 s in which it does something" in notebook.run("%gpuckpt auto on --every 1s").text
    go_on = tmp_path / "go_on"
    asked = Asked(notebook, f"while not Path({str(go_on)!r}).exists(): steps += 1; time.sleep(0.01)")
    (name,) = wait_until(lambda: names(notebook))
    with notebook.keeper as keeper:
        wait_until(lambda: keeper.request("status")["state"] == "saving")
        keeper.request("save", {"name": "mine"})  # waits for the save that nobody asked for
        keeper.request("auto", {"switch": "off"})
    go_on.touch()
    assert asked.answer()["status"] == "ok"
    saved = next(one for one in snapshots(notebook) if one.label == name)
    assert saved.message.startswith("in the middle of: while not Path(")
    notebook.run("steps = -10**9")
    notebook.run(f"%gpuckpt restore {name}")  # which has the rest of that loop run
    assert int(notebook.look("steps")) > 0


def test_what_undos_have_kept_goes_by_the_rule_too_also_when_the_keeper_has_seen_no_cell(notebook: Notebook) -> None:
    notebook.run("%gpuckpt auto on --keep 1 --after 1h")
    notebook.run("%gpuckpt save mine")
    for x in range(3):
        notebook.run(f"x = {x}")
        notebook.kill_keeper()
        notebook.run("%gpuckpt undo")
    assert "auto-" not in notebook.run("%gpuckpt list").text
    assert len(names(notebook)) == 1
    notebook.run("%gpuckpt auto off")


@pytest.mark.shared_kernel(False)
def test_no_snapshot_is_of_the_middle_of_a_cell(notebook: Notebook) -> None:
    """A cell begins when the save that follows the one before has begun, and before the freeze."""
    notebook.run("import time; ended = 0")
    notebook.run("%gpuckpt auto on")
    for n in range(4):
        notebook.run(f"n = {n}")
        with notebook.keeper as keeper:
            wait_until(lambda keeper=keeper: keeper.request("status")["state"] == "saving")
        notebook.run("time.sleep(0.5); ended += 1")
    notebook.run("%gpuckpt auto off")
    for one in snapshots(notebook):
        if one.message.startswith("n = "):
            notebook.run(f"%gpuckpt restore {one.label}")
            assert f"n = {notebook.look('ended')}" == one.message


@pytest.mark.shared_kernel(False)
def test_the_rule_outlives_the_keeper_and_a_restore(start: StartKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCKPT_AUTO", "on")
    notebook = start()
    assert "saved after each cell" in notebook.run("%gpuckpt auto").text
    run_saved(notebook, "x = 1")
    notebook.kill_keeper()
    run_saved(notebook, "x = 2")
    notebook.run("%gpuckpt undo")
    notebook.kill_keeper()  # as soon as the cell has its answer
    assert notebook.look("x") == "1"
    notebook.run("%gpuckpt redo")
    assert notebook.look("x") == "2"
    run_saved(notebook, "x = 3")


@pytest.mark.shared_kernel(False)
@pytest.mark.parametrize(
    ("chosen", "rule"),
    [("2s", "after each cell that ran for 2 s or longer"), ("every 10m", "every 10 m")],
)
def test_the_rule_of_all_kernels_is_a_setting(
    start: StartKernel, monkeypatch: pytest.MonkeyPatch, chosen: str, rule: str
) -> None:
    monkeypatch.setenv("GPUCKPT_AUTO", chosen)
    assert rule in start().run("%gpuckpt auto").text


@pytest.mark.shared_kernel(False)
def test_why_a_save_failed_is_told_where_somebody_asks(start: StartKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCKPT_STORE_QUOTA", "1M")
    notebook = start()
    notebook.run("%gpuckpt auto on")
    notebook.run("x = 2")
    with notebook.keeper as keeper:
        wait_until(lambda: keeper.request("auto")["failed"])
    assert "could not be stored" in notebook.run("%gpuckpt auto").text
    assert names(notebook) == []


@pytest.mark.shared_kernel(False)
def test_an_undo_to_a_damaged_snapshot_is_refused_and_the_kernel_goes_on(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run("%gpuckpt auto on")
    run_saved(notebook, "import os; x = os.urandom(10**6)")
    damaged = [path for path in (tmp_path / "store").rglob("*") if path.is_file() and path.stat().st_size > 10**5]
    run_saved(notebook, "x = 2")
    for path in damaged:
        path.write_bytes(bytes(path.stat().st_size))
    answer = notebook.fails("%gpuckpt undo")
    assert answer.ename == "Damaged"
    assert notebook.look("x") == "2"


def test_a_restore_keeps_what_was_not_saved_and_says_how_to_get_it_back(notebook: Notebook) -> None:
    notebook.run("x = 1")
    notebook.run("%gpuckpt save base")
    assert "kept" not in notebook.run("%gpuckpt restore base").text  # there was nothing to keep
    notebook.run("x = 2")
    text = notebook.run("%gpuckpt restore base\nx = 'the rest of the cell'").text
    assert notebook.look("x") == "1"
    (kept,) = names(notebook)
    assert f"What it was before is kept as {kept}: `%gpuckpt restore {kept}`." in text
    assert "Discarded" not in text
    text = notebook.run(f"%gpuckpt restore {kept}").text
    assert (f"Restored {kept}" in text, "kept" in text.partition(kept)[2]) == (True, False)
    assert notebook.look("x") == "2"  # and the rest of the cell that asked for the restore is not run
    notebook.run("x = 3")
    assert "Discarded, and in no snapshot: 1 cell " in notebook.run("%gpuckpt restore base --discard").text
    assert names(notebook) == [kept]
    notebook.run("%gpuckpt save in_a_cell\nx = 'the rest of the cell'")
    assert "Stopped here" in notebook.run("%gpuckpt undo").text
    assert notebook.look("x") == "1"


def test_what_cannot_be_kept_in_a_moment_does_not_stand_in_the_way_of_a_restore(
    criu: Criu, start: StartKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUCKPT_KEEP_UNSAVED", "2s")
    notebook = start()
    notebook.run("x = 1")
    notebook.run("%gpuckpt save base")
    notebook.run("x = 2")
    criu.first("dump", "sleep 600")
    assert "Discarded, and in no snapshot: 1 cell" in notebook.run("%gpuckpt restore base").text
    assert notebook.look("x") == "1"
    criu.first("dump", "echo 'nothing is dumped today' >&2; exit 1")
    notebook.run("x = 2")
    undone = notebook.run("%gpuckpt undo", allow_error=True).text  # which would keep it in any case
    assert "Nothing was restored: the present state of the kernel could not be saved first." in undone
    assert notebook.look("x") == "2"
    text = notebook.run("%gpuckpt restore base").text
    assert "That could not be saved first: criu ended with status 1" in text
    assert notebook.look("x") == "1"
    criu.honest()
    notebook.run("large = bytearray(b'1') * 2_100_000_000")
    assert "Discarded" in notebook.run("%gpuckpt restore base").text
    assert names(notebook) == []
