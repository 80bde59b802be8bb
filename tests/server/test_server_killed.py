"""A kernel that outlived its server is held by the next one, and its notebook has it back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jupyter_servers import SPEC, Server, running

pytestmark = pytest.mark.criu


def _open(server: Server, path: str) -> dict[str, Any]:
    """Open a notebook's session; return it."""
    wanted = {"path": path, "name": Path(path).name, "type": "notebook", "kernel": {"name": SPEC}}
    session: dict[str, Any] = server.request("POST", "api/sessions", json=wanted).json()
    return session


def _kernels(server: Server) -> dict[str, str | None]:
    """Return which notebook may be reconnected to each kernel."""
    return {kernel["kernel_id"]: kernel["reconnect"] for kernel in server.ask("GET", "kernels")["kernels"]}


def test_the_kernel_of_a_killed_server_is_reconnected_to_its_notebook(tmp_path: Path) -> None:
    path = "deep/train.ipynb"
    (tmp_path / "work" / "deep").mkdir(parents=True)
    with running(tmp_path) as first:
        opened = _open(first, "deep/Untitled.ipynb")
        old = opened["kernel"]["id"]
        first.request("PATCH", f"api/sessions/{opened['id']}", json={"path": path}).raise_for_status()  # a rename
        with first.connected(old) as notebook:
            notebook.run("x = 41")
        assert _kernels(first) == {old: None}
        first.process.kill()
        first.process.wait()
    with running(tmp_path) as second:
        assert _kernels(second) == {old: path}
        session = _open(second, path)
        fresh = session["kernel"]["id"]
        assert _kernels(second) == {old: path, fresh: None}
        with second.connected(fresh) as notebook:
            status = notebook.run("%gpuckpt status").text
        assert "Another kernel of this notebook is still running" in status
        assert f"jupyter gpuckpt stop {old}" in status
        second.ask("POST", f"kernels/{old}/adopt")
        change = {"kernel": {"id": old}}
        second.request("PATCH", f"api/sessions/{session['id']}", json=change).raise_for_status()
        assert [kernel["id"] for kernel in second.request("GET", "api/kernels").json()] == [old]
        assert _kernels(second) == {old: None}
        with second.connected(old) as notebook:
            assert notebook.value("x") == "41"
            assert "still running" not in notebook.run("%gpuckpt status").text
