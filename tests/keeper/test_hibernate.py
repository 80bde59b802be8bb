"""A kernel that is hibernated is on the disk alone, and comes back as it was."""

from __future__ import annotations

from keeper_faults import names
from notebooks import Notebook


def test_a_cell_wakes_it(notebook: Notebook) -> None:
    notebook.run("x = 41")
    with notebook.keeper as keeper:
        found = keeper.request("hibernate")
        assert found["name"] in names()
        status = keeper.request("status")
        assert status["state"] == "hibernated"
        assert status["pids"] == []
    assert notebook.value("x + 1") == "42"
    assert not names()
    assert notebook.value("x + 2") == "43"
