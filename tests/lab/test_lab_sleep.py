"""Kernels that sleep, as JupyterLab shows them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

import nbformat
import pytest
import requests
from jupyter_servers import SPEC, Server, running
from lab_window import CONFIG, OpenWindow, Window, prepare
from notebooks import wait_until
from playwright.sync_api import expect

pytestmark = pytest.mark.criu


def _put_to_sleep(window: Window) -> None:
    window.sidebar.locator(".jp-gpuckpt-Kernel").get_by_role("button", name="Sleep", exact=True).click()
    expect(window.toolbar("gpuckpt-state")).to_have_text("Asleep")


def test_a_kernel_is_put_to_sleep_and_a_cell_wakes_it(lab: Server, open_window: OpenWindow, tmp_path: Path) -> None:
    folder = Path(os.environ.get("GPUCKPT_SCREENSHOTS") or tmp_path)
    window = open_window(lab, "asleep.ipynb")
    window.page.set_viewport_size({"width": 1280, "height": 560})
    window.run("x = 1")
    window.show_sidebar()
    box, indicator = window.sidebar.locator(".jp-gpuckpt-Kernel"), window.toolbar("gpuckpt-state")
    _put_to_sleep(window)
    window.is_told("Asleep")
    expect(box).to_contain_text("Kernel: asleep")
    expect(box).to_contain_text("the next cell wakes it")
    window.is_told_nothing_more()
    for theme in ("light", "dark"):
        if theme == "dark":
            window.dark()
            window.loaded()
        window.page.screenshot(path=folder / f"asleep-{theme}.png")
        assert window.accessibility_faults("#jp-gpuckpt-sidebar") == []
        assert window.accessibility_faults('[data-jp-item-name="gpuckpt-state"]') == []
    cell = window.page.locator(".jp-Notebook .jp-CodeCell").nth(1)
    cell.locator(".cm-content").click()
    window.page.keyboard.insert_text("x")
    # So long as its keeper stands still, the wake takes.
    keeper = int(str(_kernel(lab, "asleep.ipynb")["keeper_pid"]))
    os.kill(keeper, signal.SIGSTOP)
    try:
        window.page.keyboard.press("Shift+Enter")
        expect(indicator).to_have_text(re.compile(r"Waking… \d+\.\d s"))
        window.page.screenshot(path=folder / "waking-dark.png")
    finally:
        os.kill(keeper, signal.SIGCONT)
    expect(cell).to_contain_text(re.compile(r"Woke in .*"))
    expect(cell.locator(".jp-OutputArea-executeResult")).to_contain_text("1")
    expect(indicator).to_have_text("")
    expect(box).to_contain_text(re.compile(r"Woke .*, in \d"))
    expect(box.get_by_role("button", name="Sleep", exact=True)).to_be_visible()


def test_when_it_sleeps_is_chosen_in_the_sidebar_and_others_are_woken_there(
    lab: Server, open_window: OpenWindow
) -> None:
    window = open_window(lab, "chosen.ipynb")
    window.run("y = 1")
    window.show_sidebar()
    box = window.sidebar.locator(".jp-gpuckpt-Kernel")
    box.get_by_label("Sleeps when idle").select_option("after 30 minutes")
    wait_until(lambda: _kernel(lab, "chosen.ipynb")["sleep_after"] == 1800)
    box.get_by_label("Keep awake").click()
    wait_until(lambda: _kernel(lab, "chosen.ipynb")["pinned"])
    # Its person still may.
    _put_to_sleep(window)
    other = open_window(lab, "other.ipynb")
    other.kernel_is_ready()
    other.show_sidebar()
    line = other.sidebar.locator(".jp-gpuckpt-Kernels li", has_text="chosen.ipynb")
    expect(line).to_contain_text("asleep")
    line.get_by_role("button", name="Wake").click()
    expect(line).to_contain_text("running")
    expect(window.toolbar("gpuckpt-state")).to_have_text("")
    expect(box.get_by_label("Keep awake")).to_be_checked()
    assert window.value("y").endswith("1")


def _kernel(server: Server, notebook: str) -> dict[str, object]:
    found = server.ask("GET", "kernels")["kernels"]
    return dict(next(kernel for kernel in found if Path(kernel["notebook"]).name == notebook))


def test_a_notebook_whose_kernel_was_hibernated_is_resumed(tmp_path: Path, open_window: OpenWindow) -> None:
    folder = Path(os.environ.get("GPUCKPT_SCREENSHOTS") or tmp_path)
    environment = {**prepare(tmp_path), "GPUCKPT_HIBERNATE_ON": "stop"}
    # The session is closed when its server is gone.
    with (
        contextlib.suppress(requests.ConnectionError),
        running(tmp_path, CONFIG, "lab", **environment) as server,
        server.notebook("left.ipynb") as (_, notebook),
    ):
        new = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": SPEC, "display_name": SPEC}})
        nbformat.write(new, server.root / "left.ipynb")
        notebook.run("z = 41")
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(60)
    with running(tmp_path, CONFIG, "lab", **environment) as server:
        # From another notebook it is opened, with a fresh kernel.
        window = open_window(server, "other.ipynb")
        window.kernel_is_ready()
        assert window.dialog.count() == 0
        window.show_sidebar()
        line = window.sidebar.locator("[data-snapshot^=hibernated]")
        window.press(line, "Resume")
        expect(window.dialog).to_contain_text("Resume the kernel of this notebook?")
        assert window.accessibility_faults(".jp-Dialog") == []
        window.page.screenshot(path=folder / "resume-light.png")
        window.accept("Resume")
        window.is_told("Restored")
        expect(line).to_have_count(0)
        assert window.value("z + 1") == "42"
