"""A cell that saves goes on when its kernel has been taken; what happens until it is written harms neither."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from keeper_faults import (
    Asked,
    Requested,
    assert_no_litter,
    assert_nothing_left,
    assert_works,
    keeper_pid,
    names,
    processes_of,
    store,
)
from notebooks import PATIENCE, Notebook, StartKernel, wait_until

from jupyter_gpuckpt.store import Store


@pytest.fixture
def notebook(slow_disk: Path, start: StartKernel, monkeypatch: pytest.MonkeyPatch) -> Notebook:
    """A kernel whose cells do not wait for the disk at all, which is as slow as the test has it."""
    monkeypatch.setenv("GPUCKPT_SAVE_WAIT", "0")
    notebook = start()
    notebook.run("import os; much = os.urandom(2**20); x = 1")
    return notebook


def save(notebook: Notebook, name: str = "x", then: str = "") -> str:
    """Save without waiting, and see that it is so; return what the cell showed, which goes on with `then`."""
    there = store() / "snapshots" / f"{name}.json"
    shown = notebook.run(f"saved = %gpuckpt save {name}\nprint('there:', os.path.exists({str(there)!r}))\n{then}").text
    assert "there: False" in shown
    return shown


def is_there(name: str = "x") -> Callable[[], bool]:
    return lambda: name in names()


def test_a_cell_goes_on_before_the_disk_and_hears_of_the_end(notebook: Notebook, slow_disk: Path) -> None:
    slow_disk.touch()
    told = save(notebook, then="print(saved.name, saved.written, saved.restored, saved.frozen_seconds > 0)")
    assert "x captured (kernel paused " in told
    assert told.endswith("x False False True")
    slow_disk.unlink()
    wait_until(is_there())
    # By what a cell shows it could not be told: what is said of the end may be shown in any cell.
    wait_until(lambda: notebook.look("saved.written") == "True", what="the kernel does not hear of it")
    assert notebook.look("saved.id") == repr(Store(store()).get("x").id)
    assert "Saved x: " in notebook.run("saved").text


@pytest.mark.parametrize(("can_be_asked", "kind"), [(False, "update_display_data"), (True, "display_data")])
def test_the_end_is_shown_in_the_cell_that_asked_and_anew_in_a_terminal(
    notebook: Notebook, slow_disk: Path, can_be_asked: bool, kind: str
) -> None:
    """What tells a terminal from a program that executes notebooks is that it can be asked for input."""
    slow_disk.touch()
    notebook.client.execute("%gpuckpt save x", allow_stdin=can_be_asked)
    told: list[str] = []
    while True:
        message = notebook.client.get_iopub_msg(timeout=PATIENCE)
        text = str(message["content"].get("data", {}).get("text/plain", ""))
        if text.startswith("Saved x: "):
            assert message["msg_type"] == kind
            break
        told += [text] if text else []
        if "; not safe until written." in text:
            slow_disk.unlink(missing_ok=True)
    assert "; not safe until written." in told[-1]


def test_nothing_is_shown_as_the_kernel_is_taken(notebook: Notebook) -> None:
    """It might be on its way then, and would be sent a second time by the restored kernel."""
    notebook.run("import jupyter_gpuckpt.kernel.magics as magics; magics._PROGRESS_AFTER = 0")
    shown = notebook.run("%gpuckpt save x --wait").text
    assert "checking" in shown
    assert "freezing" not in shown


def test_waiting_is_to_be_had(notebook: Notebook) -> None:
    assert "Saved x: " in notebook.run("%gpuckpt save x --wait").text
    assert is_there()()


def test_what_is_asked_for_meanwhile_waits_its_turn(notebook: Notebook, slow_disk: Path) -> None:
    slow_disk.touch()
    assert "x is being written." in save(notebook, then="%gpuckpt list")
    shown = Requested(notebook, "show", {"name": "x"})
    slow_disk.unlink()
    assert isinstance(shown.outcome(), dict), "what is asked for by name is waited for"
    slow_disk.touch()
    notebook.run("x = 2")
    save(notebook, "y")
    slow_disk.unlink()
    notebook.run("x = 3")
    notebook.run("%gpuckpt save z")
    assert is_there("y")()
    notebook.run("x = 4")
    notebook.run("%gpuckpt restore z")
    assert notebook.value("x") == "3"
    notebook.run("%gpuckpt restore x")
    assert notebook.value("x, saved.restored") == "1 True"


def test_a_cell_that_ends_while_another_save_is_written_is_saved_by_itself(notebook: Notebook, slow_disk: Path) -> None:
    slow_disk.touch()
    save(notebook)
    notebook.run("%gpuckpt auto on")
    notebook.run("x = 2")
    time.sleep(1)  # nothing tells when the keeper has looked whether it can be saved
    slow_disk.unlink()
    wait_until(lambda: len(names()) > 1, what="the cell is not followed by a save")


def test_an_interrupt_ends_what_waits_and_not_what_is_written(notebook: Notebook, slow_disk: Path) -> None:
    slow_disk.touch()
    both = Asked(notebook, "%gpuckpt save x\n%gpuckpt save y --wait")
    with notebook.keeper as keeper:
        wait_until(lambda: keeper.request("status")["queued"], what="the second save never waited")
    notebook.manager.interrupt_kernel()
    assert both.answer()["status"] == "error"
    slow_disk.unlink()
    wait_until(is_there())
    assert not is_there("y")()


@pytest.mark.parametrize("end", ["shutdown", "restart", "crash"])
def test_the_kernel_may_end_meanwhile(notebook: Notebook, slow_disk: Path, end: str, tmp_path: Path) -> None:
    slow_disk.touch()
    save(notebook)
    if end == "shutdown":
        notebook.close()
    elif end == "restart":
        notebook.manager.restart_kernel(now=True)
        notebook.wait_for_ready()
        assert notebook.value("'much' in globals()") == "False"
    else:
        notebook.client.execute("import os; os._exit(7)")
        wait_until(lambda: not notebook.manager.is_alive())
    assert not is_there()()
    slow_disk.unlink()
    wait_until(is_there(), what="what was taken was lost")
    if end == "restart":
        notebook.run("%gpuckpt restore x")
        assert notebook.value("x, len(much)") == f"1 {2**20}"
    notebook.close()
    wait_until(lambda: not processes_of(tmp_path))
    assert_no_litter()
    assert_nothing_left(tmp_path)


def test_a_keeper_that_dies_meanwhile_leaves_no_snapshot_and_says_so(notebook: Notebook, slow_disk: Path) -> None:
    slow_disk.touch()
    save(notebook)
    pid = keeper_pid(notebook)
    notebook.kill_keeper()
    assert keeper_pid(notebook) != pid
    slow_disk.unlink()
    assert not is_there()()
    wait_until(lambda: notebook.value("saved.error is not None") == "True", what="the kernel does not hear of it")
    assert "x was NOT saved. " in notebook.run("saved").text
    notebook.run("%env GPUCKPT_SAVE_WAIT=600")
    assert_works(notebook)


def test_a_disk_that_refuses_is_told_of(start: StartKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCKPT_SAVE_WAIT", "0")
    monkeypatch.setenv("GPUCKPT_STORE_QUOTA", "50M")
    notebook = start()
    notebook.run("import os; much = os.urandom(120 * 2**20); x = 1")
    notebook.run("saved = %gpuckpt save x")
    wait_until(lambda: notebook.value("saved.error is not None") == "True", what="the kernel does not hear of it")
    assert "Disk quota exceeded" in notebook.run("saved").text
    assert notebook.value("saved.written, x") == "False 1"
    assert not is_there()()
    notebook.run("del much")
    notebook.run("%gpuckpt save x --wait")
    assert is_there()()
