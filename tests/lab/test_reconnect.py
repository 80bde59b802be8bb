"""A kernel that outlived its server is offered where its notebook is opened, or is open still."""

from __future__ import annotations

from pathlib import Path

import pytest
from jupyter_servers import Server, running
from lab_window import CONFIG, OpenWindow, Window, prepare
from playwright.sync_api import expect

pytestmark = pytest.mark.criu

_OFFER = "The kernel of this notebook is still running. Reconnect?"


def _kill(server: Server) -> None:
    server.process.kill()
    server.process.wait()


def _has_its_kernel_back(window: Window) -> None:
    expect(window.dialog.filter(has_text=_OFFER)).to_be_visible()
    assert window.accessibility_faults(".jp-Dialog") == []
    window.accept("Reconnect")
    window.is_told("Reconnected")
    window.kernel_is_ready()
    assert window.value("x") == "41"
    kernels = window.server.request("GET", "api/kernels").json()
    sessions = window.server.request("GET", "api/sessions").json()
    assert {session["kernel"]["id"] for session in sessions} == {kernel["id"] for kernel in kernels}


def test_it_is_offered_where_its_notebook_is_opened(open_window: OpenWindow, tmp_path: Path) -> None:
    environment = prepare(tmp_path)
    with running(tmp_path, CONFIG, "lab", **environment) as first:
        window = open_window(first, "work.ipynb")
        window.run("x = 41")
        window.command("docmanager:save")
        _kill(first)
        window.close()
    with running(tmp_path, CONFIG, "lab", **environment) as second:
        window = open_window(second, "work.ipynb")
        expect(window.dialog).to_contain_text(_OFFER)
        window.accept("Use a new kernel")
        expect(window.run("%gpuckpt status")).to_contain_text("Another kernel of this notebook is still running")
        other = open_window(second, "other.ipynb")
        other.kernel_is_ready()
        expect(other.dialog).to_have_count(0)
        other.close()
        window.restart_kernel()
        window.page.reload()
        window.loaded()
        _has_its_kernel_back(window)


def test_it_is_offered_where_its_notebook_is_open(open_window: OpenWindow, tmp_path: Path) -> None:
    environment = prepare(tmp_path)
    with running(tmp_path, CONFIG, "lab", **environment) as first:
        window = open_window(first, "work.ipynb")
        window.run("x = 41")
        _kill(first)
        lost = window.dialog.filter(has_text="Server Connection Error")  # which JupyterLab may say more than once
        window.page.add_locator_handler(lost, lambda dialog: dialog.get_by_role("button", name="Close").click())
    port = int(first.url.rpartition(":")[2].strip("/"))
    with running(tmp_path, CONFIG, "lab", port, **environment):
        _has_its_kernel_back(window)
