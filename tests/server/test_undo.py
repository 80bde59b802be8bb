"""Automatic saves, undo and redo by way of the REST API, with a real kernel."""

from __future__ import annotations

from typing import Any

import pytest
from jupyter_servers import Server
from notebooks import Notebook, wait_until

pytestmark = pytest.mark.criu


def _kernel(server: Server, kernel_id: str) -> dict[str, Any]:
    (found,) = [k for k in server.ask("GET", "kernels")["kernels"] if k["kernel_id"] == kernel_id]
    return dict(found)


def _run_saved(server: Server, kernel_id: str, notebook: Notebook, cell: str) -> None:
    """Run a cell, and wait until it was followed by a save: not by that which was begun when they were switched on."""
    notebook.run(cell)

    def is_saved() -> bool:
        saved = {one["id"]: one["message"] for one in server.ask("GET", "snapshots")["snapshots"]}
        parent = _kernel(server, kernel_id)["parent"]
        return parent is not None and saved.get(parent["id"]) == cell

    wait_until(is_saved)


def _step(server: Server, kernel_id: str, kind: str, **how: int) -> dict[str, Any]:
    return server.finish(server.ask("POST", f"kernels/{kernel_id}/{kind}", how, 202))


def test_cells_are_undone_and_redone(server: Server) -> None:
    with server.notebook() as (kernel_id, notebook):
        auto = f"kernels/{kernel_id}/auto"
        off = {"after": None, "keep": 20, "under": None, "has_cells": True, "failed": ""}
        assert server.ask("GET", auto) == _kernel(server, kernel_id)["auto"] == off
        nowhere = _step(server, kernel_id, "undo")
        assert (nowhere["state"], nowhere["error"]["kind"]) == ("failed", "Refused")
        assert nowhere["error"]["then"].startswith("`%gpuckpt auto on`")

        limits = {"after": 0, "keep": 9, "under": 10**12}
        on = {**limits, "has_cells": True, "failed": ""}
        assert server.ask("POST", auto, {"on": True, **limits}) == on
        assert server.ask("GET", auto) == _kernel(server, kernel_id)["auto"] == on
        for wrong in ({}, {"on": 1}, {"on": True, "keep": 0}, {"on": True, "under": "5G"}, {"on": True, "every": 0}):
            assert server.ask("POST", auto, wrong, 400)["error"]["kind"] == "BadRequest"
        for x in (0, 1, 2, 3):
            _run_saved(server, kernel_id, notebook, f"x = {x}")
        latest = _kernel(server, kernel_id)["parent"]
        undone = _step(server, kernel_id, "undo")
        assert (undone["kind"], undone["state"], undone["result"]["message"]) == ("undo", "done", "x = 2")
        assert (undone["name"], notebook.look("x")) == (undone["result"]["name"], "2")
        assert _kernel(server, kernel_id)["redo"] == latest["id"]
        redone = _step(server, kernel_id, "redo")
        assert (redone["kind"], redone["name"], notebook.look("x")) == ("redo", latest["name"], "3")
        assert "redo" not in _kernel(server, kernel_id)
        assert _step(server, kernel_id, "redo")["error"]["what"] == "There is nothing to redo."
        for _ in range(3):
            _step(server, kernel_id, "undo")
        too_many = _step(server, kernel_id, "redo", steps=4)["error"]
        assert too_many["what"] == "Nothing was redone."
        assert "redo 3` takes all of them back" in too_many["then"]
        assert too_many["why"] == "There were only 3 undos since the last save; one undo can take back several cells."
        assert (_step(server, kernel_id, "redo", steps=2)["result"]["message"], notebook.look("x")) == ("x = 2", "2")
        assert (_step(server, kernel_id, "redo")["name"], notebook.look("x")) == (latest["name"], "3")
        for steps in (0, 1001):
            for kind in ("undo", "redo"):
                server.ask("POST", f"kernels/{kernel_id}/{kind}", {"steps": steps}, 400)

        # What is in no snapshot is kept first.
        assert server.ask("POST", auto, {"on": False}) == off
        notebook.run("x = 4")
        assert _step(server, kernel_id, "undo", steps=3)["result"]["message"] == "x = 1"
        assert notebook.look("x") == "1"
        assert _step(server, kernel_id, "redo")["result"]["message"] == "x = 4"
        assert notebook.look("x") == "4"
