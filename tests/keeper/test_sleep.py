"""A kernel that sleeps stays as it is, and wakes before it executes anything: the same steps with and without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
from keeper_faults import Asked, Requested, assert_works
from notebooks import Notebook, wait_until

from jupyter_gpuckpt.errors import Busy

pytestmark = pytest.mark.criu


def status(notebook: Notebook) -> dict[str, Any]:
    with notebook.keeper as keeper:
        found: dict[str, Any] = keeper.request("status")
    return found


def ask(notebook: Notebook, op: str, **args: Any) -> Any:
    return Requested(notebook, op, args).outcome()


def is_asleep(notebook: Notebook) -> bool:
    return bool(status(notebook)["state"] == "sleeping")


def test_a_cell_wakes_it_before_its_first_line_and_says_so(notebook: Notebook) -> None:
    notebook.run("x = 1")
    slept = ask(notebook, "sleep")
    assert (slept["already"], slept["freed"]) == (False, 0)
    found = status(notebook)
    assert (found["state"], found["gpu"]) == ("sleeping", {"held": 0, "freed": 0})
    assert found["asleep_since"] > found["started"]
    assert ask(notebook, "sleep")["already"]
    answer = notebook.run("print(x)")
    assert answer.shown[0] == "Waking the kernel …"
    assert answer.shown[1].startswith("Woken in ")
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
    assert "Awake already" in notebook.run("%gpuckpt wake").text
    ask(notebook, "sleep")
    assert "sleeping" in notebook.run("%gpuckpt status").text
    assert is_asleep(notebook)
    assert "Woken in" in notebook.run("%gpuckpt wake").text
    assert not is_asleep(notebook)


def test_it_does_not_fall_asleep_under_a_cell(notebook: Notebook) -> None:
    cell = Asked(notebook, "input()")
    wait_until(lambda: status(notebook)["busy"])
    refused = ask(notebook, "sleep")
    assert isinstance(refused, Busy), refused
    assert "A cell is running" in str(refused)
    notebook.client.input("done")
    assert cell.answer()["status"] == "ok"
    assert not status(notebook)["busy"]
    assert not ask(notebook, "sleep")["already"]
