"""``%gpuckpt panel`` as a user has it in a cell: in JupyterLab and in Notebook, before and after restores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from jupyter_servers import Server
from lab_window import OpenWindow, Window
from playwright.sync_api import Locator, expect

pytestmark = pytest.mark.criu


def _panel(window: Window) -> Locator:
    window.run("%gpuckpt panel")
    panel = window.page.locator(".gpuckpt-panel").last
    panel.wait_for()
    return panel


def _save(panel: Locator, name: str, note: str = "") -> None:
    panel.get_by_label("Note (optional)").fill(note)
    panel.get_by_label("Name", exact=True).fill(name)
    panel.get_by_label("Name", exact=True).press("Enter")
    expect(panel.get_by_role("status")).to_contain_text(f"Saved {name}")


def _press(panel: Locator, button: str, answer: str = "") -> None:
    panel.get_by_role("button", name=button, exact=True).click()
    if answer:
        expect(panel.get_by_role("button", name="Never mind", exact=True)).to_be_focused()
        panel.get_by_role("button", name=answer, exact=True).click()


def _done(panel: Locator, text: str) -> None:
    expect(panel.get_by_role("status")).to_contain_text(text)


def test_all_that_it_can_do(lab: Server, open_window: OpenWindow, tmp_path: Path) -> None:
    window = open_window(lab, "panel.ipynb")
    window.run("x = 1")
    panel = _panel(window)
    expect(panel).to_contain_text("No snapshots of this notebook yet")
    _save(panel, "epoch-1", "loss 0.31")
    window.run("x = 2")
    _save(panel, "epoch-2", "loss 0.42")
    _press(panel, "Restore epoch-1")
    expect(panel).to_contain_text("Variables, threads and GPU memory go back to what they were.")
    expect(panel).not_to_contain_text("Not saved yet")
    window.run("x = 3")  # while the question is open
    expect(panel).to_contain_text(
        "Not saved yet: 1 cell, run since the last save, restore or start of the kernel (less"
    )
    expect(panel).to_contain_text("It is saved first if that takes a moment, and lost otherwise.")
    expect(panel.get_by_role("button", name="Never mind", exact=True)).to_be_focused()
    _press(panel, "Never mind")
    _press(panel, "Restore epoch-1", "Restore")
    _done(panel, "Restored epoch-1")
    assert window.value("x") == "1"
    _press(panel, "Rename epoch-1")
    panel.get_by_label("New name of epoch-1").fill("best")
    window.run("%gpuckpt pin epoch-2")  # while somebody is writing
    expect(panel.get_by_role("button", name="Unpin epoch-2", exact=True)).to_be_visible()
    expect(panel.get_by_label("New name of epoch-1")).to_have_value("best")
    panel.get_by_label("New name of epoch-1").press("Enter")
    _done(panel, "epoch-1 is now best")
    window.run("%gpuckpt unpin epoch-2")
    _press(panel, "Pin best")
    _done(panel, "best is pinned")
    expect(panel.get_by_role("button", name="Remove best")).to_be_disabled()
    folder = Path(os.environ.get("GPUCKPT_SCREENSHOTS") or tmp_path)
    assert window.accessibility_faults(".gpuckpt-panel") == []
    panel.screenshot(path=folder / "panel-light.png")
    window.dark()
    assert window.accessibility_faults(".gpuckpt-panel") == []
    _press(panel, "Unpin best")
    _done(panel, "best is no longer pinned")
    _press(panel, "Remove best", "Remove")
    _done(panel, "Removed best")
    expect(panel.get_by_text("best", exact=True)).to_have_count(0)


def test_a_kernel_saved_before_the_panel_was_there_takes_it_over(lab: Server, open_window: OpenWindow) -> None:
    window = open_window(lab, "older.ipynb", fresh=True)
    window.run("x = 1")
    window.save("older")
    window.run("x = 2")
    panel = _panel(window)
    _press(panel, "Restore older", "Restore")
    _done(panel, "Restored older")
    assert window.value("x") == "1"
    _save(panel, "newer")
    # A page loaded again asks the kernel for the panel; JupyterLab has another subshell made for it.
    window.command("docmanager:save")
    window.page.reload()
    window.loaded()
    window.kernel_is_ready()
    panel = _panel(window)
    _press(panel, "Restore newer", "Restore")
    _done(panel, "Restored newer")
    _press(panel, "Pin newer")
    _done(panel, "newer is pinned")


def test_it_shows_what_others_do_and_what_fails(lab: Server, open_window: OpenWindow) -> None:
    window = open_window(lab, "live.ipynb")
    panel = _panel(window)
    window.save("by-the-sidebar")
    expect(panel.get_by_text("by-the-sidebar", exact=True)).to_be_visible()
    window.run("import jupyter_gpuckpt; jupyter_gpuckpt.before_save(lambda: 1 / 0)")
    panel.get_by_label("Name", exact=True).fill("never")
    _press(panel, "Save")
    expect(panel.get_by_role("alert").first).to_contain_text("ZeroDivisionError")
    assert window.accessibility_faults(".gpuckpt-panel") == []
    window.run("import time; jupyter_gpuckpt.before_save(lambda: time.sleep(60))")
    panel.get_by_label("Name", exact=True).fill("never")
    _press(panel, "Save")
    _done(panel, "Saving never: preparing the kernel")
    _press(panel, "Cancel")
    _done(panel, "Cancelled; the kernel is as it was.")
    panel.get_by_label("Name", exact=True).fill("by-the-sidebar")
    _press(panel, "Save")
    _done(panel, "by-the-sidebar is taken. Replace it?")
    _press(panel, "Never mind")
    window.restart_kernel()
    _press(panel, "Pin by-the-sidebar")
    expect(panel.get_by_role("alert").last).to_contain_text("run %gpuckpt panel again")


def test_it_says_whose_a_snapshot_of_another_notebook_is(lab: Server, open_window: OpenWindow) -> None:
    for path in ("theirs.ipynb", "ours.ipynb"):
        window = open_window(lab, path)
        window.run(f"x = {path!r}")
        panel = _panel(window)
        _save(panel, "same-name")
    _press(panel, "Restore theirs.ipynb:same-name")
    expect(panel.locator(".gpuckpt-question")).to_contain_text("It is not this notebook’s")
    expect(panel.locator(".gpuckpt-question")).to_contain_text("theirs.ipynb saved it")
    _press(panel, "Restore")
    _done(panel, "Restored same-name")
    assert window.value("x") == "'theirs.ipynb'"
    _press(panel, "Remove ours.ipynb:same-name", "Remove")
    _done(panel, "Removed ours.ipynb:same-name")
    _press(panel, "Remove same-name", "Remove")


def test_in_notebook(lab: Server, open_window: OpenWindow) -> None:
    window = open_window(lab, "classic.ipynb", fresh=True)
    window.page.goto(f"{lab.url}notebooks/classic.ipynb")
    window.page.locator(".jp-Notebook .jp-Cell").first.wait_for()
    window.kernel_is_idle()
    panel = _panel(window)
    _save(panel, "classic")
    _press(panel, "Restore classic", "Restore")
    _done(panel, "Restored classic")


def test_a_button_is_not_drawn_anew_while_somebody_may_press_it(lab: Server, open_window: OpenWindow) -> None:
    window = open_window(lab, "pressed.ipynb")
    panel = _panel(window)
    _save(panel, "kept")
    button = panel.get_by_role("button", name="Restore kept", exact=True).element_handle()
    about = panel.locator(".gpuckpt-about")
    before = about.text_content()
    assert before
    window.run("ballast = bytearray(300_000_000)")
    expect(about).not_to_have_text(before)
    assert button.evaluate("node => node.isConnected")
