"""Forks that open in a copy of their notebook, and snapshots that are sent elsewhere, fetched and downloaded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jupyter_servers import Server
from lab_window import OpenWindow, Window
from notebooks import StartKernel
from playwright.sync_api import Route, expect

from jupyter_gpuckpt.store import Store
from jupyter_gpuckpt.store.transfer.container import import_snapshot
from jupyter_gpuckpt.store.transfer.sealing import Secrets
from jupyter_gpuckpt.store.trust import Trust

pytestmark = pytest.mark.criu


@pytest.fixture
def window(lab: Server, open_window: OpenWindow) -> Window:
    """A window at a kernel that was saved with x = 1, and has x = 2 now."""
    window = open_window(lab, "train.ipynb")
    window.run("x = 1")
    window.save("one")
    window.run("x = 2")
    window.show_sidebar()
    return window


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
    # It knows where it comes from, and its snapshots are its notebook's: a branch of the history.
    expect(window.sidebar).to_contain_text("Based on one")
    window.save("branch")
    expect(window.sidebar).to_contain_text("Based on branch")
    snapshots = {snapshot["name"]: snapshot for snapshot in lab.ask("GET", "snapshots")["snapshots"]}
    assert snapshots["branch"]["parent"] == snapshots["one"]["id"]
    assert snapshots["branch"]["notebook"] == str(lab.root / "train-fork.ipynb")
    expect(window.run("%gpuckpt status").locator("tr", has_text="based on")).to_contain_text("branch")
    window.restart_kernel()
    expect(window.sidebar).to_contain_text("Fresh kernel")
    window.run("%gpuckpt restore branch")
    assert window.value("x") == "'of the copy'"
    lab.ask("DELETE", "snapshots/branch")
    window.page.get_by_role("tab", name="train.ipynb").click()
    window.kernel_is_ready()
    assert window.value("x") == "2"


def test_a_notebook_has_its_snapshots_under_another_name_and_in_another_folder(lab: Server, window: Window) -> None:
    own = window.sidebar.get_by_role("tree", name="This notebook")

    def has_its_snapshot() -> None:
        expect(own.locator('[data-snapshot="one"]')).to_be_visible()
        window.run("%gpuckpt restore")
        assert window.value("x") == "1"

    # As the file browser asks for it.
    window.page.evaluate("() => window.jupyterapp.serviceManager.contents.rename('train.ipynb', 'renamed.ipynb')")
    expect(window.page.get_by_role("tab", name="renamed.ipynb")).to_be_visible()
    window.run("%gpuckpt save two")
    window.restart_kernel()
    window.run("%gpuckpt restore two")
    assert window.value("x") == "2"
    # With the next kernel, which knows nothing of the one before; and where it was moved while it had none.
    (session,) = lab.request("GET", "api/sessions").json()
    lab.ask("DELETE", "snapshots/two")
    lab.request("DELETE", f"api/sessions/{session['id']}")
    window.page.goto("about:blank")  # as where it is closed
    (lab.root / "deep").mkdir()
    moved = lab.request("PATCH", "api/contents/renamed.ipynb", json={"path": "deep/moved.ipynb"})
    assert moved.status_code == 200
    window.load("deep/moved.ipynb", "")
    window.kernel_is_ready()
    has_its_snapshot()
    assert lab.request("PATCH", "api/contents/deep", json={"path": "deeper"}).status_code == 200
    window.load("deeper/moved.ipynb", "")
    window.kernel_is_ready()
    has_its_snapshot()


def test_snapshots_are_sent_and_fetched(lab: Server, window: Window, tmp_path: Path) -> None:
    window.more("one", "Push Snapshot…")
    expect(window.dialog).to_contain_text("It contains all of the kernel’s memory")
    assert window.accessibility_faults(".jp-Dialog") == []
    window.dialog.get_by_label("Where to").fill(str(tmp_path / "remote"))
    window.accept("Push")
    window.is_told("Pushed one, not encrypted")
    # Another of that name goes there only where that is asked for.
    (session,) = lab.request("GET", "api/sessions").json()
    again = lab.ask("POST", f"kernels/{session['kernel']['id']}/save", {"name": "one", "replace": True}, 202)
    assert lab.finish(again)["state"] == "done"
    window.more("one", "Push Snapshot…")
    window.accept("Push")
    told = window.is_told("Another snapshot named one is at")
    window.answer(told, "Why, and what next")
    window.accept("Close")
    window.more("one", "Push Snapshot…")
    window.dialog.get_by_label("Replace another snapshot of that name there").check()
    with window.page.expect_response(re.compile("/push")) as pushing:
        window.accept("Push")
    assert lab.finish(pushing.value.json())["state"] == "done"
    lab.ask("DELETE", "snapshots/one")
    expect(window.line("one")).to_have_count(0)
    window.sidebar.get_by_role("button", name="Pull a snapshot…").click()
    assert window.accessibility_faults(".jp-Dialog") == []
    expect(window.dialog.get_by_label("Where from")).to_have_value(str(tmp_path / "remote"))
    window.accept("Pull")
    window.is_told("Pulled one")
    window.run("x = 3")
    window.restore("one")
    assert window.value("x") == "2"


def test_a_snapshot_is_downloaded(lab: Server, window: Window, tmp_path: Path) -> None:
    window.more("one", "Export Snapshot…")
    expect(window.dialog).to_contain_text("It contains all of the kernel’s memory")
    assert window.accessibility_faults(".jp-Dialog") == []
    with window.page.expect_download() as downloading:
        window.accept("Download")
    assert downloading.value.suggested_filename == "one.gpuckpt"
    other = Store(tmp_path / "store", Trust(lab.folder / "keys"))
    with downloading.value.path().open("rb") as file:
        import_snapshot(other, file, "the file", Secrets(tmp_path))
    assert other.check(read_data=True).faults == []
    # What cannot be downloaded is no file, but told.
    window.more("one", "Export Snapshot…")
    lab.ask("POST", "snapshots/one/rename", {"name": "elsewhere"})
    with window.page.expect_console_message(lambda message: "404" in message.text):  # by the browser itself
        window.accept("Download")
    window.is_told("There is no snapshot named one")
    assert len(window.complaints) == 1
    window.complaints.clear()
    lab.ask("POST", "snapshots/elsewhere/rename", {"name": "one"})


def test_a_kernel_that_nobody_holds_is_adopted(
    lab: Server, open_window: OpenWindow, start: StartKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(lab.folder / "runtime"))
    with start().keeper as keeper:
        (copy,) = keeper.request("fork", {})["kernels"]
    window = open_window(lab)
    window.show_sidebar()
    adopt = window.sidebar.get_by_role("button", name="Adopt")
    expect(adopt).to_have_count(1)  # the other one is held by this test
    assert window.accessibility_faults("#jp-gpuckpt-sidebar") == []
    adopt.click()
    expect(adopt).to_have_count(0)
    assert copy["id"] in {kernel["id"] for kernel in lab.request("GET", "api/kernels").json()}
    assert lab.request("DELETE", f"api/kernels/{copy['id']}").status_code == 204


def test_what_the_server_cannot_do_is_not_offered(lab: Server, open_window: OpenWindow) -> None:
    def name_none(route: Route) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, json={**answer.json(), "features": []})

    # JupyterLab ends addresses with a number, so that no answer is an old one.
    window = open_window(lab, "older.ipynb", routes={re.compile(r"/api/gpuckpt/kernels(\?|$)"): name_none})
    window.save("old")
    window.show_sidebar()
    expect(window.sidebar.get_by_role("button", name=re.compile("Fork|Pull"))).to_have_count(0)
    window.press(window.line("old"), "More about old")
    items = window.page.get_by_role("menuitem")
    expect(items.filter(has_text="Compare Snapshot…")).to_be_visible()
    for absent in ("Fork Snapshot", "Push Snapshot…", "Export Snapshot…"):
        expect(items.filter(has_text=absent)).to_have_count(0)
