"""How it looks, in light and dark, also to a screen reader, and with a thousand snapshots."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from jupyter_servers import Server
from lab_window import OpenWindow, Window
from many_snapshots import history_after
from notebooks import wait_until
from playwright.sync_api import expect

from jupyter_gpuckpt.store import Store

pytestmark = pytest.mark.criu

_OPENED = 200  # milliseconds
_MOST = 55_000  # bytes of our own JavaScript that a page loads at its start
_LOADED = """() => Object.fromEntries(performance.getEntriesByType("resource")
  .filter(({ name }) => name.includes("/extensions/jupyter_gpuckpt/"))
  .map(({ name, decodedBodySize }) => [name, decodedBodySize]))"""
_SCROLL = """line => {
  line.scrollIntoView({ block: 'nearest' });
  const { top, bottom } = line.getBoundingClientRect();
  return top >= 0 && bottom <= window.innerHeight;
}"""
_OPEN = """async () => {
  const began = performance.now();
  await window.jupyterapp.commands.execute("gpuckpt:show");
  const shown = () => {
    const lines = document.querySelectorAll(".jp-gpuckpt-Line");
    return lines.length >= 100 && lines[0].getBoundingClientRect().height > 0;
  };
  while (!shown()) {
    await new Promise(resolve => requestAnimationFrame(resolve));
  }
  return performance.now() - began;
}"""


def _faults(window: Window) -> list[str]:
    """Open each part of ours and ask axe-core what is amiss with it."""
    faults = window.accessibility_faults("#jp-gpuckpt-sidebar")
    for button in ("Restore epoch-1", "Remove epoch-1", "Save the kernel…"):
        window.line("epoch-1").hover()
        window.sidebar.get_by_role("button", name=button).click()
        window.dialog.wait_for()
        faults += window.accessibility_faults(".jp-Dialog")
        window.accept("Cancel")
    return faults


def test_light_and_dark(lab: Server, open_window: OpenWindow, tmp_path: Path) -> None:
    # `make screenshots` keeps them for the README.
    folder = Path(os.environ.get("GPUCKPT_SCREENSHOTS") or tmp_path)
    window = open_window(lab, "finetune.ipynb")
    window.page.set_viewport_size({"width": 1280, "height": 690})
    window.show_sidebar()
    window.run("weights = list(range(6))")
    for number, note in ((1, "loss 0.42"), (2, "loss 0.31, the best so far")):
        window.run(f"weights = [w * {number} for w in weights]")
        window.save(f"epoch-{number}", note)
    window.more("epoch-2", "Pin Snapshot")
    window.run("weights = None  # by mistake")
    window.restore("epoch-1")
    window.run("weights")
    window.save("other-rate")
    window.is_told_nothing_more()
    for theme in ("light", "dark"):
        if theme == "dark":
            window.dark()
        window.line("epoch-1").hover()
        expect(window.line("epoch-1").get_by_role("button", name="Restore epoch-1")).to_be_visible()
        window.page.screenshot(path=folder / f"jupyterlab-{theme}.png")
        assert (folder / f"jupyterlab-{theme}.png").stat().st_size > 10_000
        assert _faults(window) == []
    # The longest name, as a line of its own and as another's origin, and a note like a page.
    window.save("n" * 100, "many words " * 100)
    window.save("after")
    window.restore("n" * 100)
    window.save("branch")  # with another between it and its origin, which is named then
    about = window.sidebar.locator(".jp-gpuckpt-About")
    expect(about.filter(has_text="nnn")).to_have_count(1)
    assert about.evaluate_all("all => all.every(it => it.scrollWidth <= it.clientWidth)")
    # Where the list is longer than the window it is scrolled; nothing in it is squeezed.
    assert window.sidebar.evaluate("it => it.scrollHeight > it.clientHeight")
    lines = window.sidebar.locator(".jp-gpuckpt-Line")
    assert lines.evaluate_all("all => all.every(it => it.scrollHeight <= it.clientHeight)")
    note = window.line("n" * 100).locator(".jp-gpuckpt-Message")
    assert note.evaluate("it => it.clientHeight / parseFloat(getComputedStyle(it).fontSize)") < 6
    assert "many words" in str(note.get_attribute("title"))


def test_little_is_loaded_at_the_start(lab: Server, open_window: OpenWindow) -> None:
    window = open_window(lab, "start.ipynb", fresh=True)
    window.kernel_is_ready()
    loaded = window.page.evaluate(_LOADED)
    assert any("remoteEntry" in name for name in loaded)
    assert 10_000 < sum(loaded.values()) < _MOST, loaded
    # The rest comes when it is wanted.
    window.toolbar("gpuckpt-save").click()
    window.dialog.wait_for()
    assert len(window.page.evaluate(_LOADED)) > len(loaded)
    window.accept("Cancel")


def test_a_thousand_snapshots_are_shown_at_once(lab: Server, open_window: OpenWindow) -> None:
    with lab.notebook("elsewhere.ipynb") as (kernel_id, _):
        lab.save(kernel_id, "of-another")
    window = open_window(lab, "many.ipynb", fresh=True)
    window.save("base")
    history_after(lab.store, Store(lab.store).get("base"), 999)
    took: list[float] = []
    # What else the machine does can hold up any one of them, but not all.
    while not took or (min(took) >= _OPENED and len(took) < 20):
        window.command("filebrowser:activate")
        expect(window.sidebar).to_be_hidden()
        took.append(window.page.evaluate(_OPEN))
    assert min(took) < _OPENED, took
    # The newest are drawn, and the one that the kernel is based on, which stays in view wherever the list is.
    lines = window.sidebar.get_by_role("tree", name="This notebook").get_by_role("treeitem")
    expect(lines).to_have_count(101)
    expect(lines.first).to_contain_text("many-0999")
    expect(lines.last).to_contain_text("base")
    for place in (lines.first, lines.nth(60), window.line("of-another")):
        # Again: lines have their own height only once they are near.
        wait_until(lambda place=place: place.evaluate(_SCROLL))
        expect(window.line("base")).to_be_in_viewport(ratio=1)
        expect(window.line("base")).to_contain_text("here")
    # Nothing moves when the mouse passes.
    lines.first.scroll_into_view_if_needed()
    stands = lines.nth(2).bounding_box()
    lines.nth(1).hover()
    expect(lines.nth(1).get_by_role("button", name="More about")).to_be_visible()
    assert lines.nth(2).bounding_box() == stands
    # What there is besides is said, and is to be had by the keyboard.
    lines.first.focus()
    window.page.keyboard.press("End")
    expect(window.line("base")).to_be_focused()
    expect(window.line("base")).to_have_attribute("aria-posinset", "1000")
    window.sidebar.get_by_role("button", name="Show 100 older of 899").press("Enter")
    expect(lines).to_have_count(201)
    expect(window.line("many-0899")).to_be_focused()
    window.sidebar.get_by_label("Search snapshots").fill("many-0007")
    expect(window.sidebar.locator(".jp-gpuckpt-Line")).to_have_count(1)
    # As they came: by the server, one after another, it would take longer than all of this.
    for path in (lab.store / "snapshots").glob("many-*.json"):
        path.unlink()
