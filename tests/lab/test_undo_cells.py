"""Cells are undone and redone in JupyterLab, and the kernel is saved by itself after each."""

from __future__ import annotations

import re

import pytest
from jupyter_servers import Server
from lab_window import OpenWindow, Window
from notebooks import wait_until
from playwright.sync_api import Locator, expect

from jupyter_gpuckpt.store import Store

pytestmark = pytest.mark.criu

_STALE = re.compile("jp-gpuckpt-mod-stale")
_LOOK = """async expression => {
  const { kernel } = window.jupyterapp.shell.currentWidget.sessionContext.session;
  const request = { code: '', silent: true, user_expressions: { it: expression } };
  const { content } = await kernel.requestExecute(request).done;
  return content.user_expressions.it.data['text/plain'];
}"""


def _look(window: Window, expression: str) -> str:
    """Return what the kernel has for an expression: without a cell, which would be followed by a save."""
    return str(window.page.evaluate(_LOOK, expression))


def _run_saved(window: Window, code: str) -> Locator:
    """Run a cell, and wait until the kernel was saved after it."""
    (before,) = window.server.ask("GET", "kernels")["kernels"]
    cell = window.run(code)

    def is_saved() -> bool:
        parent = window.server.ask("GET", "kernels")["kernels"][0]["parent"]
        saved = window.server.ask("GET", "snapshots")["snapshots"]
        # What is saved when that is switched on may be written only now.
        return parent != before["parent"] and (parent["id"], code) in {(one["id"], one["message"]) for one in saved}

    wait_until(is_saved)
    return cell


def test_cells_are_undone_and_redone(lab: Server, open_window: OpenWindow) -> None:
    window = open_window(lab, "undo.ipynb")
    window.show_sidebar()
    undo, redo = (window.sidebar.get_by_role("button", name=name) for name in ("Undo cell", "Redo cell"))
    expect(undo).to_have_accessible_description("Not now: the kernel was not saved before its last cell")
    expect(redo).to_have_accessible_description("Not now: nothing was undone since the last save")
    switch = window.sidebar.get_by_role("checkbox", name="Save after each cell")
    switch.click()
    expect(switch).to_be_checked()
    expect(window.sidebar).to_contain_text("keeps 20")
    window.command("filebrowser:activate")  # what is not seen asks for nothing, and yet hears what was saved
    cells = [_run_saved(window, f"x = {number}") for number in (1, 2, 3)]
    window.toolbar("gpuckpt-undo").locator('jp-button[aria-disabled="false"]').click()
    told = window.is_told("The kernel is as it was after “x = 2”")
    expect(cells[2]).to_have_class(_STALE)
    expect(cells[1]).not_to_have_class(_STALE)
    assert _look(window, "x") == "2"
    window.show_sidebar()
    stands = undo.bounding_box()
    undo.click()
    window.is_told("after “x = 1”")
    expect(told).to_have_count(0)
    expect(cells[1]).to_have_class(_STALE)
    expect(undo).to_be_disabled()
    assert undo.bounding_box() == stands
    window.answer(window.is_told("after “x = 1”"), "Redo")
    window.is_told("after “x = 2”")
    cells[0].locator(".cm-content").click()
    window.page.keyboard.press("Control+Alt+y")
    window.is_told("after “x = 3”")
    for cell in cells:
        expect(cell).not_to_have_class(_STALE)
    assert _look(window, "x") == "3"
    expect(redo).to_be_disabled()
    # A cell knows where the kernel was before and after it.
    for number, place, value in ((2, "Before", "1"), (3, "After", "3")):
        cells[number - 1].locator(".jp-InputPrompt").click(button="right")
        window.page.get_by_role("menuitem", name=f"Restore State {place} This Cell…").click()
        window.accept("Restore")
        window.is_told("Restored auto-")
        window.is_told_nothing_more()
        assert _look(window, "x") == value
    cells[2].locator(".cm-content").click()
    before = window.page.locator('.jp-cell-toolbar [data-jp-item-name="gpuckpt-before-cell"] jp-button')
    expect(before).to_have_attribute("aria-label", re.compile("before this cell"))
    before.click()
    window.accept("Restore")
    window.is_told("Restored auto-")
    assert _look(window, "x") == "2"
    window.sidebar.get_by_role("button", name="Redo cell").click()
    window.is_told("after “x = 3”")
    # Of what was saved by itself, only that is there which the kernel is based on.
    lines = window.sidebar.get_by_role("treeitem")
    expect(lines).to_have_text([re.compile("x = 3.*here")])
    window.sidebar.get_by_role("button", name="2 automatic").click()
    expect(lines).to_have_text([re.compile(f"x = {number}") for number in (3, 2, 1)])
    assert window.accessibility_faults("#jp-gpuckpt-sidebar") == []


def test_a_cell_that_asks_for_input_is_undone_and_the_next_one_runs(lab: Server, open_window: OpenWindow) -> None:
    window = open_window(lab, "input.ipynb")
    window.run("x = 1")
    window.save("before")
    asks = window.begin("x = input('How many? ')").locator(".jp-Stdin-input")
    asks.wait_for()
    window.toolbar("gpuckpt-undo").locator('jp-button[aria-disabled="false"]').click()
    window.is_told("Undone in")
    expect(asks).to_have_count(0)
    assert window.value("x") == "1"


def test_a_widget_shows_what_the_kernel_has_after_an_undo(lab: Server, open_window: OpenWindow) -> None:
    window = open_window(lab, "widget.ipynb")
    shows = window.run("import ipywidgets; slider = ipywidgets.IntSlider(3); slider").locator(".widget-readout")
    expect(shows).to_have_text("3")
    window.save("before")
    window.run("slider.value = 5")
    expect(shows).to_have_text("5")
    window.toolbar("gpuckpt-undo").locator('jp-button[aria-disabled="false"]').click()
    expect(shows).to_have_text("3")


def test_what_was_saved_before_a_crash_is_offered(lab: Server, open_window: OpenWindow) -> None:
    window = open_window(lab, "crash.ipynb")
    window.run("%gpuckpt auto on")
    _run_saved(window, "x = 1")
    with Store(lab.store).writer("later", by=str(lab.root / "crash.ipynb")):  # as the dead kernel's keeper goes on
        window.begin("import os; os.kill(os.getpid(), 9)")
        window.accept("Ok")
        window.kernel_is_ready()
        for _ in range(2):
            with window.page.expect_response(re.compile(r"/snapshots(\?|$)")):
                pass
        expect(window.page.locator(".Toastify__toast")).to_have_count(0)
    told = window.is_told("The kernel died, and a fresh one was started. Last saved: auto-2, less than a minute ago.")
    window.answer(told, "Restore auto-2")
    window.is_told("Restored auto-2")
    assert _look(window, "x") == "1"
