"""What a server may be able to do or not: forks, and snapshots sent elsewhere. The page offers what the server names.

The server's answers to these requests are given by the test, as `rest-api.yml` describes them; the rest is real.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from jupyter_servers import SPEC, Server
from lab_window import OpenWindow, Window
from playwright.sync_api import Page, Route, expect

pytestmark = pytest.mark.criu


class Features:
    """Answers for a server that can do all that some cannot; `asked` is what it was asked for."""

    def __init__(self, page: Page) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.result: dict[str, Any] = {}
        self._operations: dict[str, dict[str, Any]] = {}
        # JupyterLab ends addresses with a number, so that no answer is an old one.
        page.route(re.compile(r"/api/gpuckpt/kernels(\?|$)"), self._name_features)
        page.route(re.compile(r"/api/gpuckpt/(kernels/[^/]+/fork|snapshots/[^/]+/push|pull)(\?|$)"), self._begin)
        page.route(re.compile(r"/api/gpuckpt/operations/[^/]+(\?|$)"), self._tell)

    def _name_features(self, route: Route) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, json={**answer.json(), "features": ["fork", "push", "pull"]})

    def _begin(self, route: Route) -> None:
        path = _path(route)
        self.asked.append((path, json.loads(route.request.post_data or "{}")))
        operation = {
            "id": uuid.uuid4().hex,
            "kind": path.rpartition("/")[2],
            "kernel_id": "",
            "name": "one",
            "state": "running",
            "stage": "asking",
            "percent": None,
            "result": None,
            "error": None,
        }
        self._operations[operation["id"]] = operation
        route.fulfill(status=202, json=operation)

    def _tell(self, route: Route) -> None:
        operation = self._operations.get(_path(route).rpartition("/")[2])
        if operation is None:
            route.continue_()
        else:
            route.fulfill(json={**operation, "state": "done", "result": self.result})


def _path(route: Route) -> str:
    return urlsplit(route.request.url).path.partition("/api/gpuckpt/")[2]


@pytest.fixture
def window(lab: Server, open_window: OpenWindow) -> Iterator[Window]:
    """A window at a saved kernel, of a server that can do all of it."""
    window = open_window(lab)
    window.features = Features(window.page)  # type: ignore[attr-defined]
    window.open("features.ipynb", SPEC)
    window.run("x = 1")
    window.save("one")
    window.show_sidebar()
    yield window
    lab.ask("DELETE", "snapshots/one")


def test_what_the_server_cannot_do_is_not_offered(lab: Server, open_window: OpenWindow) -> None:
    window = open_window(lab, "bare.ipynb")
    window.save("one")
    window.show_sidebar()
    window.line("one").hover()
    window.line("one").get_by_role("button", name="More about one").click()
    items = window.page.get_by_role("menuitem")
    expect(items.filter(has_text="Compare Snapshot…")).to_be_visible()
    offered = lab.ask("GET", "kernels")["features"]
    for feature, text in (("fork", "Fork Snapshot"), ("push", "Share Snapshot…")):
        expect(items.filter(has_text=text)).to_have_count(int(feature in offered))
    lab.ask("DELETE", "snapshots/one")


@pytest.mark.parametrize("of", ["kernel", "snapshot"])
def test_a_fork_opens_in_a_copy_of_the_notebook(lab: Server, window: Window, of: str) -> None:
    copy = lab.request("POST", "api/kernels", json={"name": SPEC}).json()["id"]
    window.features.result = {"kernels": [{"id": copy}]}  # type: ignore[attr-defined]
    if of == "kernel":
        window.sidebar.get_by_role("button", name="Fork into a new notebook").click()
    else:
        window.more("one", "Fork Snapshot into a New Notebook")
    path = "features-fork.ipynb"
    expect(window.page.get_by_role("tab", name=path)).to_be_visible()
    window.kernel_is_ready()
    ((_, body),) = window.features.asked  # type: ignore[attr-defined]
    assert body == ({} if of == "kernel" else {"snapshot": "one"})
    kernels = {s["path"]: s["kernel"]["id"] for s in lab.request("GET", "api/sessions").json()}
    assert kernels[path] == copy
    assert kernels["features.ipynb"] != copy
    assert "x = 1" in (lab.root / path).read_text()
    session = next(s for s in lab.request("GET", "api/sessions").json() if s["path"] == path)
    lab.request("DELETE", f"api/sessions/{session['id']}")
    (lab.root / path).unlink()


def test_snapshots_are_sent_and_fetched(window: Window) -> None:
    window.more("one", "Share Snapshot…")
    expect(window.dialog).to_contain_text("It holds all of the kernel’s memory")
    assert window.accessibility_faults(".jp-Dialog") == []
    window.dialog.get_by_label("Where to").fill("s3://bucket/snapshots")
    window.accept("Send")
    window.is_told("Sent one")
    window.sidebar.get_by_role("button", name="Fetch a snapshot…").click()
    assert window.accessibility_faults(".jp-Dialog") == []
    expect(window.dialog.get_by_label("Where from")).to_have_value("s3://bucket/snapshots")
    window.dialog.get_by_label("Name").fill("other")
    window.accept("Fetch")
    window.is_told("Fetched one")
    assert window.features.asked == [  # type: ignore[attr-defined]
        ("snapshots/one/push", {"url": "s3://bucket/snapshots"}),
        ("pull", {"url": "s3://bucket/snapshots", "name": "other"}),
    ]
