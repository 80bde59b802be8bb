"""A kernel that sleeps stays as it is, and wakes before it executes anything: the same steps with and without a GPU."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from keeper_faults import (
    Asked,
    Criu,
    Requested,
    assert_nothing_left,
    assert_works,
    interrupt_twice,
    is_asleep,
    keeper_pid,
    kill_keeper,
    status,
)
from notebooks import PATIENCE, Notebook, StartKernel, wait_until

from jupyter_gpuckpt.errors import Busy, Cancelled, KeeperGone

pytestmark = [pytest.mark.criu, pytest.mark.shared_kernel]


def ask(notebook: Notebook, op: str, **args: Any) -> Any:
    return Requested(notebook, op, args).outcome()


def test_a_cell_wakes_it_before_its_first_line_and_says_so(notebook: Notebook) -> None:
    notebook.run("x = 1")
    slept = ask(notebook, "sleep")
    assert (slept["already"], slept["freed"]) == (False, 0)
    found = status(notebook)
    assert (found["state"], found["gpu"]) == ("sleeping", {"held": 0, "freed": 0, "host_memory": 0})
    assert found["asleep_since"] > found["started"]
    assert ask(notebook, "sleep")["already"]
    answer = notebook.run("print(x)")
    assert answer.shown[0] == "Waking the kernel …"
    assert answer.shown[1].startswith("Woke in ")
    assert answer.shown[2:] == ["1\n"]
    found = status(notebook)
    assert (found["state"], found["asleep_since"]) == ("running", None)
    assert_works(notebook)


def test_a_cell_puts_it_to_sleep_when_it_has_ended(notebook: Notebook) -> None:
    answer = notebook.run("%gpuckpt sleep\nx = 1")
    assert answer.shown == ["Falling asleep when this cell has ended …"]
    wait_until(lambda: is_asleep(notebook))
    assert notebook.value("x").endswith("1")


def test_a_cell_of_ours_alone_need_not_wake_it(notebook: Notebook) -> None:
    assert "Already awake" in notebook.run("%gpuckpt wake").text
    ask(notebook, "sleep")
    assert "sleeping" in notebook.run("%gpuckpt status").text
    assert is_asleep(notebook)
    assert "Woke in" in notebook.run("%gpuckpt wake").text
    assert not is_asleep(notebook)


def test_it_does_not_fall_asleep_under_a_cell(notebook: Notebook) -> None:
    cell = Asked(notebook, "input()")
    wait_until(lambda: status(notebook)["busy"])
    refused = ask(notebook, "sleep")
    assert isinstance(refused, Busy), refused
    assert "A cell is running" in str(refused)
    notebook.client.get_stdin_msg(timeout=PATIENCE)  # an answer before the question is passed over
    notebook.client.input("done")
    assert cell.answer()["status"] == "ok"
    wait_until(lambda: not status(notebook)["busy"])
    assert not ask(notebook, "sleep")["already"]


def test_others_than_the_person_let_a_kernel_in_use_be(notebook: Notebook) -> None:
    notebook.run("%gpuckpt awake on")
    assert status(notebook)["pinned"]
    assert "kept awake" in str(ask(notebook, "sleep", idle_for=0))
    notebook.run("%gpuckpt awake off")
    assert isinstance(ask(notebook, "sleep", idle_for=600), Busy)
    before = status(notebook)["last_active"]
    notebook.run("1")
    assert status(notebook)["last_active"] > before
    assert not ask(notebook, "sleep", idle_for=0)["already"]


def test_widgets_wake_it_and_completions_do_not(notebook: Notebook) -> None:
    notebook.run(
        "from comm import get_comm_manager\n"
        "told = []\n"
        "get_comm_manager().register_target('t', lambda comm, message: told.append(message['content']['data']))\n"
        "class Touchy:\n    def __dir__(self): told.append('dir'); return []\n"
        "    def __repr__(self): told.append('repr'); return ''\n"
        "touchy = Touchy()"
    )
    ask(notebook, "sleep")
    client = notebook.client
    for request in (client.complete("touchy.", 7), client.inspect("touchy", 3)):
        while (reply := notebook.reply())["parent_header"]["msg_id"] != request:
            pass
        assert reply["content"]["status"] == "ok"
    assert is_asleep(notebook)
    message = client.session.msg("comm_open", {"comm_id": "1", "target_name": "t", "data": {"n": 1}})
    client.shell_channel.send(message)
    wait_until(lambda: not is_asleep(notebook))
    assert notebook.value("told") == "[{'n': 1}]"


def test_a_fork_wakes_it(notebook: Notebook) -> None:
    notebook.run("x = 1")
    ask(notebook, "sleep")
    found = ask(notebook, "fork", adopt=False)
    assert not isinstance(found, Exception), found
    assert not is_asleep(notebook)
    assert notebook.run("print(x)").shown == ["1\n"]


def test_it_is_saved_in_its_sleep_and_restored_awake(notebook: Notebook) -> None:
    notebook.run("x = 1")
    ask(notebook, "sleep")
    saved = ask(notebook, "save", name="here")
    assert not isinstance(saved, Exception), saved
    assert is_asleep(notebook)
    assert notebook.run("x += 1; print(x)").shown[-1] == "2\n"
    ask(notebook, "sleep")
    restored = ask(notebook, "restore", name="here")
    assert not isinstance(restored, Exception), restored
    assert status(notebook)["state"] == "running"
    assert notebook.run("print(x)").shown == ["1\n"]
    # A history session of its own, as after any restore, and all else as in a kernel that never slept.
    assert_works(notebook)


@pytest.mark.shared_kernel(False)
def test_a_cell_need_not_wait_until_a_save_in_its_sleep_is_on_the_disk(slow_disk: Path, start: StartKernel) -> None:
    notebook = start()
    notebook.run("import os; x = 1; much = os.urandom(20 << 20)")
    ask(notebook, "sleep")
    slow_disk.touch()
    saving = Requested(notebook, "save", {"name": "here"})
    wait_until(lambda: status(notebook)["writing"] == "here")
    assert notebook.run("x = 2; print(x)").shown[-1] == "2\n"
    assert (status(notebook)["state"], status(notebook)["writing"]) == ("running", "here")
    slow_disk.unlink()
    assert isinstance(saving.outcome(), dict), saving.outcome()
    assert status(notebook)["writing"] is None
    notebook.run("%gpuckpt restore here")
    assert notebook.value("(x, len(much) == 20 << 20)") == "(1, True)"
    assert_works(notebook)


@pytest.mark.shared_kernel(False)
def test_functions_around_a_save_run_in_a_kernel_that_is_awake(notebook: Notebook) -> None:
    notebook.run("import jupyter_gpuckpt; told = []; jupyter_gpuckpt.before_save(lambda: told.append(1))")
    ask(notebook, "sleep")
    saved = ask(notebook, "save", name="here")
    assert not isinstance(saved, Exception), saved
    assert not is_asleep(notebook)
    assert notebook.value("told") == "[1]"


def test_a_snapshot_is_restored_over_it_by_a_cell(notebook: Notebook) -> None:
    notebook.run("x = 1")
    notebook.run("%gpuckpt save here")
    notebook.run("x = 2")
    ask(notebook, "sleep")
    notebook.run("%gpuckpt restore here")
    assert notebook.value("x") == "1"
    wait_until(lambda: status(notebook)["state"] == "running")


@pytest.mark.shared_kernel(False)
def test_it_is_shut_down_restarted_and_interrupted_in_its_sleep(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run("x = 1")
    ask(notebook, "sleep")
    notebook.manager.interrupt_kernel()
    assert is_asleep(notebook)
    notebook.manager.restart_kernel(now=False)
    notebook.wait_for_ready()
    assert status(notebook)["state"] == "running"
    assert notebook.value("'x' in globals()") == "False"
    ask(notebook, "sleep")
    notebook.manager.shutdown_kernel()
    assert_nothing_left(tmp_path)


def test_cells_behind_the_one_that_wakes_it_and_two_clients_at_once(notebook: Notebook) -> None:
    ask(notebook, "sleep")
    requests = [Requested(notebook, "wake", {}) for _ in range(3)]
    cells = [Asked(notebook, f"x = {n}") for n in range(3)]
    assert all(cell.answer()["status"] == "ok" for cell in cells)
    outcomes = [request.outcome() for request in requests]
    assert not [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    assert notebook.value("x") == "2"


def test_a_wake_ends_a_sleep_that_has_just_begun(notebook: Notebook) -> None:
    for _ in range(5):
        falling = Requested(notebook, "sleep", {})
        assert notebook.value("1").endswith("1")
        outcome = falling.outcome()
        assert isinstance(outcome, (dict, Cancelled, Busy)), outcome
        assert notebook.run("print(2)").shown[-1] == "2\n"
        assert not is_asleep(notebook)


def test_a_cell_that_follows_one_that_asks_for_sleep_is_named_as_what_keeps_it_awake(notebook: Notebook) -> None:
    def said() -> str:
        while True:
            message = notebook.client.get_iopub_msg(timeout=PATIENCE)
            text = str(message["content"].get("data", {}).get("text/plain", ""))
            if text.startswith(("Asleep", "Not asleep")):
                return text

    for _ in range(5):
        notebook.client.execute("%gpuckpt sleep")
        notebook.client.execute("x = 1")
        told = said()
        # It was quicker than the cell, or it was not.
        assert told.startswith("Asleep in ") or told == "Not asleep: another cell was run."
        assert notebook.value("x").endswith("1")


# -- a keeper that is killed


@pytest.mark.parametrize("stage", ["checking", "preparing the kernel", "falling asleep"])
def test_a_keeper_killed_as_it_falls_asleep(notebook: Notebook, stage: str) -> None:
    def kill(entered: str) -> None:
        if entered == stage:
            kill_keeper(notebook)

    notebook.run("x = 1")
    outcome = Requested(notebook, "sleep", {}, kill).outcome()
    assert isinstance(outcome, KeeperGone) or is_asleep(notebook)
    assert notebook.manager.is_alive()
    wait_until(lambda: status(notebook)["state"] in ("running", "sleeping"))
    assert notebook.run("print(x)").shown[-1] == "1\n"
    # The agent, too, knows that it is awake.
    assert notebook.run("print(x)").shown == ["1\n"]
    assert_works(notebook)


def test_a_keeper_killed_while_it_sleeps(notebook: Notebook) -> None:
    notebook.run("x = 1")
    ask(notebook, "sleep")
    since = status(notebook)["asleep_since"]
    kill_keeper(notebook)
    assert status(notebook)["asleep_since"] == since
    assert notebook.run("print(x)").shown[-1] == "1\n"
    assert notebook.run("print(x)").shown == ["1\n"]


@pytest.mark.parametrize("writing", [False, True], ids=["", "while a save is being written"])
def test_a_keeper_killed_as_it_wakes(notebook: Notebook, writing: bool) -> None:
    def kill(entered: str) -> None:
        if entered == "waking":
            kill_keeper(notebook)

    notebook.run("x = 1")
    if writing:
        notebook.run("import os; much = os.urandom(100 << 20)")
    ask(notebook, "sleep")
    if writing:
        saving = Requested(notebook, "save", {"name": "here"})
        while saving.is_alive() and status(notebook)["writing"] is None:
            pass
    outcome = Requested(notebook, "wake", {}, kill).outcome()
    assert isinstance(outcome, (KeeperGone, dict)), outcome
    assert notebook.manager.is_alive()
    assert notebook.run("print(x)").shown[-1] == "1\n"
    assert notebook.run("print(x)").shown == ["1\n"]
    assert_works(notebook)


def test_a_keeper_that_is_gone_when_a_cell_comes_is_waited_for(notebook: Notebook) -> None:
    notebook.run("x = 1")
    ask(notebook, "sleep")
    kill_keeper(notebook)
    cell = Asked(notebook, "x += 1")
    time.sleep(0.2)  # the cell may come before or after: it waits either way
    assert notebook.manager.is_alive()
    assert cell.answer()["status"] == "ok"
    assert notebook.value("x") == "2"


@pytest.mark.parametrize("stage", ["pre-dump", "post-dump"])
def test_a_keeper_killed_as_it_saves_the_kernel_in_its_sleep(criu: Criu, notebook: Notebook, stage: str) -> None:
    notebook.run("x = 1")
    ask(notebook, "sleep")
    with criu.held_at("dump", stage) as reached:
        saving = Requested(notebook, "save", {"name": "lost"})
        reached()
        kill_keeper(notebook)
    assert isinstance(saving.outcome(), KeeperGone)
    assert notebook.manager.is_alive()
    wait_until(lambda: is_asleep(notebook), what="the next keeper does not say that it sleeps")
    assert notebook.run("print(x)").shown[-1] == "1\n"
    assert_works(notebook)


def test_it_is_hibernated_from_its_sleep(notebook: Notebook) -> None:
    notebook.run("x = 1")
    ask(notebook, "sleep")
    gone = ask(notebook, "hibernate")
    assert not isinstance(gone, Exception), gone
    assert status(notebook)["state"] == "hibernated"
    assert notebook.value("x") == "1"
    wait_until(lambda: status(notebook)["state"] == "running")


def test_a_cell_that_waits_for_the_wake_can_be_interrupted_and_is_not_run(notebook: Notebook) -> None:
    notebook.run("x = 1")
    kernel = status(notebook)["pid"]
    ask(notebook, "sleep")
    os.kill(keeper_pid(notebook), signal.SIGSTOP)
    try:
        cell = Asked(notebook, "x = 2")
        interrupt_twice(notebook, kernel, "wake")
        assert cell.answer()["ename"] == "GpuckptError"
    finally:
        os.kill(keeper_pid(notebook), signal.SIGCONT)
    assert notebook.run("print(x)").shown[-1] == "1\n"
    assert_works(notebook)


@pytest.mark.shared_kernel(False)
def test_the_kernel_is_killed_in_its_sleep(notebook: Notebook, tmp_path: Path) -> None:
    ask(notebook, "sleep")
    os.kill(status(notebook)["pid"], signal.SIGKILL)
    wait_until(lambda: not notebook.manager.is_alive())
    notebook.manager.shutdown_kernel(now=True)
    assert_nothing_left(tmp_path)
