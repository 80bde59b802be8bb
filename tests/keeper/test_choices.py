"""What was chosen for a kernel holds for its next start, whoever starts it; for the rest the settings hold."""

from __future__ import annotations

from typing import Any

import pytest
from keeper_faults import names, status
from notebooks import Notebook, StartKernel, wait_until

pytestmark = [pytest.mark.criu, pytest.mark.shared_kernel(False)]


def _chosen(notebook: Notebook) -> dict[str, Any]:
    found = status(notebook)
    return {name: found[name] for name in ("auto", "sleep_after", "pinned")}


def _restart(notebook: Notebook) -> None:
    notebook.manager.restart_kernel(now=True)
    notebook.wait_for_ready()


@pytest.mark.parametrize("crashes", [False, True])
def test_a_restart_leaves_what_was_chosen(start: StartKernel, crashes: bool) -> None:
    notebook = start()
    notebook.run("%gpuckpt auto on --keep 7 --after 1s\n%gpuckpt autosleep 2h\n%gpuckpt awake on")
    chosen = _chosen(notebook)
    assert (chosen["auto"]["keep"], chosen["sleep_after"], chosen["pinned"]) == (7, 7200, True)
    if crashes:
        notebook.client.execute("import os; os._exit(1)")
        wait_until(lambda: not notebook.manager.is_alive())
    for _ in range(2):
        _restart(notebook)
        assert _chosen(notebook) == chosen


def test_what_was_saved_before_a_crash_is_what_a_restore_without_a_name_goes_to(start: StartKernel) -> None:
    notebook = start()
    notebook.run("%gpuckpt auto on")
    notebook.run("x = 1")
    wait_until(lambda: "auto-2" in names())
    notebook.client.execute("import os; os._exit(1)")
    wait_until(lambda: not notebook.manager.is_alive())
    _restart(notebook)
    assert "To go to the latest snapshot: `%gpuckpt restore auto-2`" in notebook.fails("%gpuckpt undo").text
    notebook.run("%gpuckpt restore")
    assert notebook.value("x") == "1"


def test_what_was_switched_off_stays_so_whatever_the_settings_say(
    start: StartKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUCKPT_AUTO", "on")
    monkeypatch.setenv("GPUCKPT_SLEEP_AFTER", "3h")
    notebook = start()
    assert _chosen(notebook)["sleep_after"] == 10800
    notebook.run("%gpuckpt auto off\n%gpuckpt autosleep off")
    chosen = _chosen(notebook)
    _restart(notebook)
    assert _chosen(notebook) == chosen
    assert "not saved by itself" in notebook.run("%gpuckpt auto").text


def test_a_kernel_that_is_shut_down_leaves_the_next_one_nothing(notebook: Notebook) -> None:
    fresh = _chosen(notebook)
    notebook.run("%gpuckpt auto on")
    notebook.manager._created_context = False  # as those of a server, which share one
    notebook.manager.shutdown_kernel(now=True)
    notebook.manager.start_kernel()
    notebook.manager._created_context = True
    notebook.wait_for_ready()
    assert _chosen(notebook) == fresh
