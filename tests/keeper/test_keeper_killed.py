"""The keeper is killed, at any stage of a save or a restore.

The kernel runs on and gets a new keeper, or a fresh one stands in its place and says so; the cell that asked is
answered within seconds; the store has the old state or the whole new snapshot.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from keeper_faults import (
    Asked,
    Criu,
    Requested,
    assert_nothing_left,
    assert_works,
    keeper_pid,
    kill_keeper,
    names,
    state,
    until_stage,
)
from notebooks import Notebook, wait_until

from jupyter_gpuckpt.client.record import KernelFolder
from jupyter_gpuckpt.errors import KeeperGone
from jupyter_gpuckpt.kernel.requests import _ALIVE_EVERY

pytestmark = pytest.mark.shared_kernel

_HOOKS = """
import os, time, jupyter_gpuckpt
told = []

@jupyter_gpuckpt.after_restore
def after(resumed):
    told.append(str(resumed.error))

def hold(reached, go):
    @jupyter_gpuckpt.before_save
    def before():
        open(reached, "w").close()
        while not os.path.exists(go):
            time.sleep(0.01)

def hold_after(reached, go):
    global times
    times = 0

    @jupyter_gpuckpt.after_restore
    def hold(resumed):
        global times
        if resumed.restored:
            times += 1
            open(reached, "w").close()
            while not os.path.exists(go):
                time.sleep(0.01)
"""


def test_an_idle_kernel_goes_on_under_a_new_keeper(notebook: Notebook) -> None:
    notebook.run("x = 1")
    old = keeper_pid(notebook)
    kill_keeper(notebook)
    assert notebook.manager.is_alive()
    assert keeper_pid(notebook) != old
    assert notebook.value("x") == "1"
    assert_works(notebook)


def test_five_keepers_in_a_row_die(notebook: Notebook) -> None:
    notebook.run("x = 1")
    for _ in range(5):
        kill_keeper(notebook)
        assert notebook.manager.is_alive()
    assert notebook.value("x") == "1"
    assert_works(notebook)


@pytest.mark.shared_kernel(False)
def test_while_the_hooks_run_before_a_save(notebook: Notebook, tmp_path: Path) -> None:
    reached, go = tmp_path / "reached", tmp_path / "go"
    notebook.run(_HOOKS)
    notebook.run(f"hold({str(reached)!r}, {str(go)!r})")
    cell = Asked(notebook, "%gpuckpt save lost")
    wait_until(reached.exists)
    kill_keeper(notebook)
    assert cell.answer()["ename"] == "KeeperGone"
    go.touch()
    assert notebook.manager.is_alive()
    # The after-hooks run once, and hear that the save failed.
    wait_until(lambda: notebook.value("len(told)") == "1")
    assert "was aborted" in notebook.value("told[0]")
    assert not names()
    assert_works(notebook)


@pytest.mark.shared_kernel(False)
@pytest.mark.parametrize("stage", ["start", "pre-dump", "post-dump"])
def test_while_criu_dumps(criu: Criu, notebook: Notebook, stage: str) -> None:
    notebook.run(_HOOKS)
    with criu.held_at("dump", stage) as reached:
        cell = Asked(notebook, "x = 1\n%gpuckpt save lost")
        reached()
        kill_keeper(notebook)
    assert notebook.manager.is_alive()
    answer = cell.answer()
    assert answer["ename"] == "KeeperGone"
    assert "keeps running" in answer["evalue"]
    wait_until(lambda: notebook.value("x, len(told)") == "1 1")
    assert "was aborted" in notebook.value("told[0]")
    assert not names()
    assert_works(notebook)


def test_a_cell_hears_of_it_by_itself_after_a_long_pause(criu: Criu, notebook: Notebook) -> None:
    """Each of its waits is interrupted by a dump, and may be over by the end of one; nobody looks after the keeper."""
    with criu.held_at("dump", "pre-dump") as reached:
        cell = Asked(notebook, "%gpuckpt save lost")
        reached()
        time.sleep(3 * _ALIVE_EVERY)
        kill_keeper(notebook)
    assert cell.answer()["ename"] == "KeeperGone"
    assert notebook.manager.is_alive()
    assert_works(notebook)


def test_while_criu_dumps_and_criu_hangs(criu: Criu, notebook: Notebook) -> None:
    """A criu that does nothing for ten seconds is killed, and the kernel continues."""
    with criu.held_at("dump", "pre-dump") as reached:
        cell = Asked(notebook, "x = 1\n%gpuckpt save lost")
        reached()
        kill_keeper(notebook)
        assert notebook.manager.is_alive()
        assert cell.answer()["ename"] == "KeeperGone"
    assert notebook.value("x") == "1"
    assert_works(notebook)


def test_while_the_snapshot_is_written(notebook: Notebook) -> None:
    notebook.run("import os; x = os.urandom(150_000_000)")
    cell = Asked(notebook, "%gpuckpt save lost")
    until_stage(notebook, "writing", cell)
    kill_keeper(notebook)
    answer = cell.answer()
    assert answer.get("ename", "KeeperGone") == "KeeperGone"
    assert answer["status"] == "error" or names() == {"lost"}
    assert notebook.manager.is_alive()
    assert names() <= {"lost"}
    notebook.run("x = None")
    assert_works(notebook)


@pytest.mark.parametrize("stage", ["checking", "preparing the kernel", "freezing", "writing"])
def test_when_a_save_enters_a_stage(notebook: Notebook, stage: str) -> None:
    def kill(entered: str) -> None:
        if entered == stage:
            kill_keeper(notebook)

    notebook.run("x = 1")
    saved = Requested(notebook, "save", {"name": "lost"}, kill).outcome()
    assert isinstance(saved, KeeperGone) or names() == {"lost"}
    assert notebook.manager.is_alive()
    assert notebook.value("x") == "1"
    if "lost" in names():
        notebook.run("%gpuckpt restore lost")
    assert_works(notebook)


@pytest.mark.parametrize("stage", ["verifying", "checking"])
def test_before_a_restore_has_touched_the_kernel(notebook: Notebook, stage: str) -> None:
    notebook.run("x = 1")
    notebook.run("%gpuckpt save here")
    notebook.run("x = 2")
    killed = []

    def kill(entered: str) -> None:
        if entered == stage and not killed:
            kill_keeper(notebook)
            killed.append(stage)

    outcome = Requested(notebook, "restore", {"name": "here"}, kill).outcome()
    assert notebook.manager.is_alive()
    # It goes on, or its keeper was quick and came to the point of no return, or even to the end.
    went_on = ("2", "False") if isinstance(outcome, KeeperGone) else ("1",)
    assert notebook.run("print('x' in globals() and x)").text in went_on
    notebook.run("%gpuckpt restore here")
    assert notebook.value("x") == "1"
    assert_works(notebook)


@pytest.mark.parametrize("stage", ["start", "pre-restore", "post-resume"])
def test_while_criu_restores(criu: Criu, notebook: Notebook, stage: str) -> None:
    """The kernel before it runs still, and goes on; nothing of the other one is left."""
    notebook.run("x = 1")
    notebook.run("%gpuckpt save here")
    notebook.run("x = 2")
    with criu.held_at("restore", stage) as reached:
        cell = Asked(notebook, "%gpuckpt restore here")
        reached()
        kill_keeper(notebook)
        assert notebook.manager.is_alive()
        answer = cell.answer()
    assert answer["ename"] == "KeeperGone"
    assert "the kernel keeps running" in answer["evalue"]
    assert notebook.value("x") == "2"
    notebook.run("%gpuckpt restore here")
    assert notebook.value("x") == "1"
    assert_works(notebook)


@pytest.mark.parametrize("stage", ["start", "pre-restore", "post-resume"])
def test_while_criu_restores_in_place(criu: Criu, notebook: Notebook, stage: str) -> None:
    """The kernel before it is gone: a fresh one answers the cell, and those behind it are not executed."""
    notebook.run("x = 1")
    notebook.run("%gpuckpt save here")
    with criu.held_at("restore", stage) as reached:
        cell, behind = Asked(notebook, "%gpuckpt restore here --in-place"), Asked(notebook, "print('must not run')")
        reached()
        kill_keeper(notebook)
        assert notebook.manager.is_alive()
        answer = cell.answer()
    assert answer["ename"] == "RestoreFailed"
    assert "a fresh, empty one runs in its place" in answer["evalue"]
    assert behind.answer()["status"] == "aborted"
    assert notebook.value("'x' in globals()") == "False"
    notebook.run("%gpuckpt restore here")
    assert notebook.value("x") == "1"
    assert_works(notebook)


@pytest.mark.shared_kernel(False)
@pytest.mark.parametrize("way", ["", " --in-place"])
def test_as_soon_as_the_other_kernel_is_there(notebook: Notebook, way: str) -> None:
    """It is there, and was not told yet by whom it was asked for: the next keeper tells it."""
    notebook.run(_HOOKS)
    notebook.run("x = 1\n%gpuckpt save here\ngone_on = True")
    notebook.run("x = 2")
    for _ in range(3):  # it is told within a few milliseconds, and may be sooner
        before = state(notebook)["run"]
        cell = Asked(notebook, f"%gpuckpt restore here{way}")
        wait_until(lambda before=before: state(notebook)["run"] != before, every=0.0002)
        kill_keeper(notebook)
        assert notebook.manager.is_alive()
        assert cell.answer()["status"] == "ok"
        assert notebook.value("x, gone_on, told") == "1 True ['None']"
        wait_until(lambda: state(notebook).get("operation") is None)
    assert_works(notebook)


@pytest.mark.shared_kernel(False)
def test_while_the_hooks_run_after_a_restore(notebook: Notebook, tmp_path: Path) -> None:
    """They run once, and the cell is answered by the kernel that it asked for."""
    reached, go = tmp_path / "reached", tmp_path / "go"
    notebook.run(_HOOKS)
    notebook.run(f"hold_after({str(reached)!r}, {str(go)!r})")
    notebook.run("x = 1\n%gpuckpt save here\ngone_on = True")
    cell = Asked(notebook, "%gpuckpt restore here")
    wait_until(reached.exists)
    kill_keeper(notebook)
    assert notebook.manager.is_alive()
    assert not cell.is_answered()
    go.touch()
    assert cell.answer()["status"] == "ok"
    assert notebook.value("x, gone_on, told, times") == "1 True ['None'] 1"
    wait_until(lambda: state(notebook).get("operation") is None)
    assert_works(notebook)


@pytest.mark.parametrize("delay", [0.02, 0.15, 0.4])
@pytest.mark.parametrize("line", ["save again --replace", "restore again"])
def test_at_any_time(notebook: Notebook, line: str, delay: float) -> None:
    notebook.run("x = 1")
    notebook.run("%gpuckpt save again")
    cell = Asked(notebook, f"%gpuckpt {line}")
    time.sleep(delay)  # the moment does not matter, what follows must hold after any
    kill_keeper(notebook)
    assert notebook.manager.is_alive()
    assert cell.answer()["status"] in ("ok", "error")
    assert notebook.value("'alive'") == "alive"
    notebook.run("%gpuckpt restore again")
    assert notebook.value("x") == "1"
    assert_works(notebook)


def test_two_who_find_it_dead_at_once_give_it_one_keeper(notebook: Notebook) -> None:
    kill_keeper(notebook)
    requests = [Requested(notebook, "status", {}) for _ in range(4)]
    assert len({r.outcome()["keeper_pid"] for r in requests}) == 1
    assert notebook.manager.is_alive()


@pytest.mark.shared_kernel(False)
def test_the_kernel_died_with_it(notebook: Notebook, tmp_path: Path) -> None:
    sleeper = KernelFolder(notebook.folder).sleepers()[0]
    kill_keeper(notebook)
    os.kill(sleeper, signal.SIGKILL)
    wait_until(lambda: not notebook.manager.is_alive())
    assert_nothing_left(tmp_path)


@pytest.mark.shared_kernel(False)
def test_then_the_kernel_is_shut_down(notebook: Notebook, tmp_path: Path) -> None:
    kill_keeper(notebook)
    notebook.manager.shutdown_kernel(now=True)
    assert_nothing_left(tmp_path)


def test_then_the_kernel_is_restarted(notebook: Notebook) -> None:
    notebook.run("x = 1")
    kill_keeper(notebook)
    notebook.manager.restart_kernel(now=True)
    notebook.wait_for_ready()
    assert notebook.value("'x' in globals()") == "False"
    assert_works(notebook)
