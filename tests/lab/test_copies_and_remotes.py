"""Forks that open in a copy of their notebook, and snapshots that are sent elsewhere and fetched."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from jupyter_servers import Server
from lab_window import OpenWindow, Window
from playwright.sync_api import Route, expect

pytestmark = pytest.mark.criu


@pytest.fixture
def window(lab: Server, open_window: OpenWindow) -> Iterator[Window]:
    """A window at a kernel that was saved with x = 1, and has x = 2 now."""
    window = open_window(lab, "train.ipynb")
    window.run("x = 1")
    window.save("one")
    window.run("x = 2")
    window.show_sidebar()
    yield window
    lab.ask("DELETE", "snapshots/one")
    for session in lab.request("GET", "api/sessions").json():
        lab.request("DELETE", f"api/sessions/{session['id']}")
    for notebook in lab.root.glob("*.ipynb"):
        notebook.unlink()


@pytest.mark.parametrize(("of", "value"), [("kernel", "2"), ("snapshot", "1")])
def test_a_fork_opens_in_a_copy_of_the_notebook(lab: Server, window: Window, of: str, value: str) -> None:
    if of == "kernel":
        window.sidebar.get_by_role("button", name="Fork into a new notebook").click()
    else:
        window.more("one", "Fork Snapshot into a New Notebook")
    expect(window.page.get_by_role("tab", name="train-fork.ipynb")).to_be_visible()
    window.kernel_is_ready()
    assert window.value("x") == value
    window.run("x = 'of the copy'")
    kernels = {session["path"]: session["kernel"]["id"] for session in lab.request("GET", "api/sessions").json()}
    assert len({kernels["train.ipynb"], kernels["train-fork.ipynb"]}) == 2
    window.page.get_by_role("tab", name="train.ipynb").click()
    window.kernel_is_ready()
    assert window.value("x") == "2"


def test_snapshots_are_sent_and_fetched(lab: Server, window: Window, tmp_path: Path) -> None:
    window.more("one", "Share Snapshot…")
    expect(window.dialog).to_contain_text("It holds all of the kernel’s memory")
    assert window.accessibility_faults(".jp-Dialog") == []
    window.dialog.get_by_label("Where to").fill(str(tmp_path / "remote"))
    window.accept("Send")
    window.is_told("Sent one")
    lab.ask("DELETE", "snapshots/one")
    expect(window.line("one")).to_have_count(0)
    window.sidebar.get_by_role("button", name="Fetch a snapshot…").click()
    assert window.accessibility_faults(".jp-Dialog") == []
    expect(window.dialog.get_by_label("Where from")).to_have_value(str(tmp_path / "remote"))
    window.accept("Fetch")
    window.is_told("Fetched one")
    window.restore("one")
    assert window.value("x") == "1"


def test_what_the_server_cannot_do_is_not_offered(lab: Server, open_window: OpenWindow) -> None:
    def name_none(route: Route) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, json={**answer.json(), "features": []})

    window = open_window(lab)
    # JupyterLab ends addresses with a number, so that no answer is an old one.
    window.page.route(re.compile(r"/api/gpuckpt/kernels(\?|$)"), name_none)
    window.open("older.ipynb", "python3-gpuckpt")
    window.save("old")
    window.show_sidebar()
    expect(window.sidebar.get_by_role("button", name=re.compile("Fork|Fetch"))).to_have_count(0)
    window.line("old").hover()
    window.line("old").get_by_role("button", name="More about old").click()
    items = window.page.get_by_role("menuitem")
    expect(items.filter(has_text="Compare Snapshot…")).to_be_visible()
    for absent in ("Fork Snapshot", "Share Snapshot…"):
        expect(items.filter(has_text=absent)).to_have_count(0)
    lab.ask("DELETE", "snapshots/old")
