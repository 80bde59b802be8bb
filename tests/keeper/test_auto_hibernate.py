"""Kernels that sleep go to the disk by themselves: after a set time, and where they have too much host memory."""

from __future__ import annotations

import pytest
from keeper_faults import Requested
from notebooks import Notebook, StartKernel, wait_until

pytestmark = pytest.mark.criu


def _state(notebook: Notebook) -> str:
    with notebook.keeper as keeper:
        return str(keeper.request("status")["state"])


def _sleep(notebook: Notebook) -> None:
    assert isinstance(Requested(notebook, "sleep", {}).outcome(), dict)


def test_one_that_sleeps_for_long_is_hibernated(start: StartKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCKPT_HIBERNATE_AFTER", "1")
    notebook, pinned = start(), start()
    with pinned.keeper as keeper:
        keeper.request("awake", {"on": True})
    for one in (pinned, notebook):
        one.run("x = 41")
        _sleep(one)
    wait_until(lambda: _state(notebook) == "hibernated")
    assert _state(pinned) == "sleeping"
    assert notebook.value("x + 1").endswith("42")


def test_the_one_that_slept_longest_makes_room(start: StartKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCKPT_SLEEP_LIMIT", "400M")
    first, second = start(), start()
    for one in (first, second):
        one.run("import os; x = os.urandom(200_000_000)")
    _sleep(first)
    _sleep(second)
    wait_until(lambda: _state(first) == "hibernated")
    assert _state(second) == "sleeping"
    assert first.value("len(x)").endswith("200000000")
