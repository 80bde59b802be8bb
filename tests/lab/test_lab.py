"""JupyterLab as a user has it: a browser, a notebook on our kernel, a mouse and a keyboard."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import nbformat
import pytest
from command_line import run
from jupyter_servers import Server
from lab_window import OpenWindow
from notebooks import SPEC
from playwright.sync_api import Route, expect
from quick_passphrase import passphrases_are_quick

from jupyter_gpuckpt.store import Store
from jupyter_gpuckpt.store.transfer.container import export_snapshot
from jupyter_gpuckpt.store.transfer.sealing import Secrets
from jupyter_gpuckpt.store.trust import Trust

pytestmark = pytest.mark.criu

_STALE = re.compile("jp-gpuckpt-mod-stale")
_LISTENS_LATE = """() => {
  const listen = EventTarget.prototype.addEventListener;
  EventTarget.prototype.addEventListener = function (type, ...how) {
    if (type === 'd') setTimeout(() => listen.call(this, type, ...how), 5000);
    else listen.call(this, type, ...how);
  };
}"""
"""Has notifications listen too late for that they have slid in, which is an event of theirs named "d"."""


def test_a_kernel_is_saved_changed_and_restored(lab: Server, open_window: OpenWindow) -> None:
    window = open_window(lab, "changed.ipynb")
    kept = window.run("x = 1")
    window.save("before")
    changed = window.run("x = 2")
    assert window.value("x") == "2"
    window.show_sidebar()
    expect(window.line("before")).to_contain_text("here")
    window.restore("before")
    expect(changed).to_have_class(_STALE)
    expect(kept).not_to_have_class(_STALE)
    assert window.value("x") == "1"
    expect(kept).not_to_have_class(_STALE)


def test_a_stale_cell_that_is_run_again_is_no_longer_marked(lab: Server, open_window: OpenWindow) -> None:
    window = open_window(lab, "again.ipynb")
    window.save("start")
    window.run("x = 2")
    window.show_sidebar()
    window.restore("start")
    cell = window.page.locator(".jp-CodeCell").first
    expect(cell).to_have_class(_STALE)
    cell.locator(".cm-content").click()
    window.page.keyboard.press("Shift+Enter")
    expect(cell).not_to_have_class(_STALE)
    assert window.value("x") == "2"


def test_what_is_in_no_snapshot_is_told_before_it_is_lost(lab: Server, open_window: OpenWindow, tmp_path: Path) -> None:
    go = tmp_path / "go"
    window = open_window(lab, "unsaved.ipynb")
    window.run("x = 1")
    window.save("one")
    window.show_sidebar()

    def ask() -> None:
        window.press(window.line("one"), "Restore one")

    ask()
    expect(window.dialog).to_contain_text("when one was saved")
    expect(window.dialog).not_to_contain_text("Not saved yet")
    window.accept("Cancel")
    window.run("x = 2")
    window.run("x = 3")
    window.begin(f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)")
    ask()
    expect(window.dialog).to_contain_text(
        "Not saved yet: 3 cells, run since the last save, restore or start of the kernel (less"
    )
    expect(window.dialog).to_contain_text(re.compile(r"The running cell will be stopped: \[\d+\] import os, time"))
    assert window.accessibility_faults(".jp-Dialog") == []
    window.dialog.screenshot(path=Path(os.environ.get("GPUCKPT_SCREENSHOTS") or tmp_path) / "unsaved.png")
    window.accept("Restore")
    window.is_told("Restored one")
    assert window.value("x") == "1"


def test_what_would_be_lost_can_be_saved_first(lab: Server, open_window: OpenWindow) -> None:
    window = open_window(lab, "first.ipynb")
    window.run("x = 1")
    window.save("one")
    window.run("x = 2")
    window.show_sidebar()
    window.press(window.line("one"), "Restore one")
    window.accept("Save first…")
    window.dialog.get_by_label("Name").fill("two")
    window.accept("Save")
    told = window.is_told("Restored one")
    assert window.value("x") == "1"
    window.answer(told, "Undo")
    window.is_told("Restored two")
    assert window.value("x") == "2"
    # And is, where nobody asks for it.
    window.run("x = 3")
    window.press(window.line("one"), "Restore one")
    expect(window.dialog).to_contain_text("It is saved first if that takes a moment")
    window.accept("Restore")
    told = window.is_told(re.compile("Restored one in .* What the kernel was before is kept as auto-"))
    window.answer(told, "Undo")
    window.is_told("Restored auto-")
    assert window.value("x") == "3"


def test_names_belong_to_notebooks(lab: Server, open_window: OpenWindow) -> None:
    window = open_window(lab, "theirs.ipynb")
    window.run("x = 'theirs'")
    window.save("shared")
    window.open("ours.ipynb", SPEC)
    window.run("x = 'ours'")
    # Another notebook's name is neither taken here nor replaced.
    window.kernel_is_ready()
    window.toolbar("gpuckpt-save").click()
    window.dialog.get_by_label("Name").fill("shared")
    expect(window.dialog).not_to_contain_text("replaces")
    window.accept("Save")
    window.is_told("Saved shared")
    window.show_sidebar()
    others = window.sidebar.get_by_role("tree", name="Other notebooks")
    expect(window.sidebar.get_by_role("tree", name="This notebook")).to_contain_text("ours.ipynb:shared")
    expect(others).to_contain_text("theirs.ipynb:shared")
    # The other one is restored only by somebody who has read whose it is.
    window.press(others.get_by_role("treeitem"), "Restore theirs.ipynb:shared")
    expect(window.dialog).to_contain_text("It does not belong to this notebook: it was saved from")
    expect(window.dialog).to_contain_text("theirs.ipynb")
    assert window.accessibility_faults(".jp-Dialog") == []
    window.accept("Restore")
    window.is_told("Restored shared")
    assert window.value("x") == "'theirs'"
    window.toolbar("gpuckpt-restore").click()
    window.page.get_by_role("menuitem", name="Restore ours.ipynb:shared").click()
    expect(window.dialog).not_to_contain_text("It does not belong to this notebook")
    window.accept("Restore")
    window.is_told_nothing_more()
    assert window.value("x") == "'ours'"


def test_the_toolbar_s_menu_restores(lab: Server, open_window: OpenWindow) -> None:
    window = open_window(lab, "menu.ipynb")
    window.run("x = 1")
    window.save("from-menu")
    window.run("x = 2")
    window.toolbar("gpuckpt-restore").click()
    window.page.get_by_role("menuitem", name="Restore from-menu").click()
    window.accept("Restore")
    window.is_told("Restored from-menu")
    assert window.value("x") == "1"


def test_a_snapshot_is_removed(lab: Server, open_window: OpenWindow) -> None:
    window = open_window(lab, "remove.ipynb")
    window.save("unwanted")
    window.show_sidebar()
    window.line("unwanted").click(button="right")
    window.page.get_by_role("menuitem", name="Remove Snapshot…").click()
    window.accept("Remove")
    window.is_told("Removed unwanted")
    expect(window.line("unwanted")).to_have_count(0)
    expect(window.sidebar).to_contain_text("No snapshots of this notebook yet.")


def test_a_snapshot_is_renamed_and_that_taken_back(lab: Server, open_window: OpenWindow) -> None:
    window = open_window(lab, "rename.ipynb")
    window.save("taken")
    window.save("old")
    window.show_sidebar()
    window.more("old", "Rename Snapshot…")
    window.dialog.get_by_label("Name", exact=True).fill("taken")
    expect(window.dialog).to_contain_text("There is a snapshot of that name.")
    expect(window.dialog.get_by_role("button", name="Rename", exact=True)).to_be_disabled()
    window.dialog.get_by_label("Name", exact=True).fill("new")
    assert window.accessibility_faults(".jp-Dialog") == []
    window.accept("Rename")
    expect(window.line("new")).to_contain_text("here")
    expect(window.sidebar).to_contain_text("Based on new")
    window.answer(window.is_told("old is now new"), "Undo")
    expect(window.line("old")).to_be_visible()
    expect(window.line("new")).to_have_count(0)


def _keep(lab: Server, *names: str) -> Store:
    """Put snapshots into the server's store, and return the store."""
    store = Store(lab.store, Trust(lab.folder / "keys"))
    for name in names:
        with store.writer(name) as writer:
            (writer.directory / "pages").write_bytes(os.urandom(10_000))
            kernel = {"notebook": "elsewhere.ipynb"}
            writer.commit(message="a tpyo", parent=None, kernel=kernel, machine={}, cuda={}, process={})
    return store


def test_a_note_and_tags_are_changed_and_that_taken_back(lab: Server, open_window: OpenWindow) -> None:
    store = _keep(lab, "noted")
    store.tag("noted", ["old"])
    window = open_window(lab)
    window.show_sidebar()
    line = window.line("noted")
    window.more("noted", "Edit Note and Tags…")
    assert window.accessibility_faults(".jp-Dialog") == []
    window.dialog.get_by_label("Tags").fill("best /")
    expect(window.dialog.get_by_role("button", name="Change", exact=True)).to_be_disabled()
    window.dialog.get_by_label("Tags").fill("best v2")
    window.dialog.get_by_label("Note").fill("a typo")
    window.page.keyboard.press("Enter")
    told = window.is_told("Changed noted")
    expect(line.locator("em")).to_have_text(["best", "v2"])
    expect(line).to_contain_text("a typo")
    assert store.trusted("noted").message == "a typo"
    window.answer(told, "Undo")
    expect(line).to_contain_text("a tpyo")
    expect(line.locator("em")).to_have_text(["old"])


def test_a_file_of_somebody_unknown_is_imported_once_they_are_trusted(
    lab: Server, open_window: OpenWindow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passphrases_are_quick(monkeypatch)
    theirs = Store(tmp_path / "theirs", Trust(tmp_path / "their keys"))

    def export(secrets: Secrets) -> Path:
        with theirs.writer("gift", replace=True) as writer:
            (writer.directory / "pages").write_bytes(os.urandom(5_000_000))
            kernel = {"notebook": "b.ipynb"}
            writer.commit(message="for you", parent=None, kernel=kernel, machine={}, cuda={}, process={})
        file = tmp_path / f"gift-{len(list(tmp_path.iterdir()))}.gpuckpt"
        with file.open("wb") as out:
            export_snapshot(theirs, "gift", out, secrets)
        return file

    older = export(Secrets(tmp_path))
    newer = export(Secrets(tmp_path, passphrase=lambda: "öffne dich", with_passphrase=True))
    window = open_window(lab)
    window.show_sidebar()

    def import_it(file: Path = newer) -> None:
        window.sidebar.get_by_role("button", name="Import a file…").click()
        window.dialog.get_by_label("A file written by").set_input_files(file)
        assert window.accessibility_faults(".jp-Dialog") == []
        window.accept("Import")

    def open_it(passphrase: str) -> None:
        window.dialog.get_by_label("Passphrase").fill(passphrase)
        window.accept("Open")

    import_it()
    expect(window.dialog).to_contain_text("is encrypted")
    open_it("open sesame")
    expect(window.dialog.get_by_role("status")).to_have_text("That passphrase does not open it.")
    assert window.accessibility_faults(".jp-Dialog") == []
    open_it("öffne dich")
    expect(window.dialog).to_contain_text(theirs.trust.own())
    assert window.accessibility_faults(".jp-Dialog") == []
    window.accept("Cancel")
    import_it()
    open_it("öffne dich")
    window.dialog.get_by_label("Whose key it is").fill("Bob")
    window.accept("Trust and import")
    window.is_told("Imported gift")
    expect(window.line("gift")).to_contain_text("for you")
    store = Store(lab.store, Trust(lab.folder / "keys"))
    assert [trusted.comment for trusted in store.trust.known().values()] == ["Bob"]
    assert store.check(read_data=True).faults == []
    import_it()
    open_it("öffne dich")
    window.is_told("gift is here already")
    # An older one only where that is wanted.
    newest = store.get("gift").created
    store.remove("gift")
    import_it(older)
    expect(window.dialog).to_contain_text("somebody may be passing off an old state as new")
    assert window.accessibility_faults(".jp-Dialog") == []
    with window.page.expect_response(re.compile(r"gpuckpt/import\?")):
        window.accept("Import the older one")
    assert store.trusted("gift").created < newest
    # What is amiss is told, and nothing of it is there.
    store.remove("gift")
    older.write_bytes(older.read_bytes()[:-1000])
    import_it(older)
    window.is_told("The file cannot be imported")
    assert store.list() == []
    assert len(window.complaints) == 8  # by the browser itself, of each refusal
    window.complaints.clear()


def test_several_snapshots_are_removed_at_once(lab: Server, open_window: OpenWindow) -> None:
    store = _keep(lab, "a", "b", "c", "d", "e")  # the latest is the first in the list
    store.pin("c", True)
    window = open_window(lab)
    window.show_sidebar()
    expect(window.sidebar.get_by_text(re.compile(r"Snapshots: \S+ kB · \S+ .B free"))).to_be_visible()
    chosen = window.sidebar.locator('[role="treeitem"][aria-selected="true"]')
    # By the mouse: a box, and the line with Shift or Ctrl.
    window.line("e").hover()
    window.line("e").get_by_label("Select e").check()
    window.line("c").locator(".jp-gpuckpt-About").click(modifiers=["Shift"])
    expect(chosen).to_have_count(3)
    window.line("d").locator(".jp-gpuckpt-About").click(modifiers=["ControlOrMeta"])
    expect(window.sidebar.get_by_role("status").filter(has_text="2 selected")).to_be_visible()
    assert window.accessibility_faults("#jp-gpuckpt-sidebar") == []
    window.sidebar.get_by_role("button", name="Clear").click()
    expect(chosen).to_have_count(0)
    expect(window.sidebar.get_by_role("button", name="Clear")).to_be_hidden()
    # By the keyboard.
    window.line("d").focus()
    for key in ("Space", "Shift+ArrowDown", "Shift+ArrowDown"):
        window.page.keyboard.press(key)
    expect(chosen).to_have_count(3)
    window.page.keyboard.press("Delete")
    expect(window.dialog.get_by_role("listitem")).to_have_text(["d", "b"])
    expect(window.dialog).to_contain_text("Not removed, because pinned or already gone: c.")
    expect(window.dialog).to_contain_text(re.compile(r"Together that frees 2\d.\d kB"))
    assert window.accessibility_faults(".jp-Dialog") == []
    window.accept("Remove")
    window.is_told("Removed 2 snapshots: 2")
    expect(window.sidebar.locator("[data-snapshot]")).to_have_count(3)
    expect(chosen).to_have_count(1)
    window.line("c").press("Escape")
    expect(chosen).to_have_count(0)
    assert sorted(m.name for m in store.list()) == ["a", "c", "e"]


def test_a_save_that_may_find_no_room_is_warned_of(lab: Server, open_window: OpenWindow) -> None:
    def fill_the_disk(route: Route) -> None:
        answer = route.fetch()
        told = answer.json()
        route.fulfill(response=answer, json={**told, "store": {**told["store"], "free": 10_000_000}})

    window = open_window(lab, "no-room.ipynb", routes={re.compile(r"/api/gpuckpt/snapshots(\?|$)"): fill_the_disk})
    window.show_sidebar()
    expect(window.sidebar.get_by_role("status").filter(has_text="A save may not fit")).to_contain_text(
        "10.0 MB are free"
    )


def test_a_pinned_snapshot_is_not_removed_by_mistake(lab: Server, open_window: OpenWindow) -> None:
    window = open_window(lab, "pin.ipynb")
    window.save("kept")
    window.show_sidebar()
    window.more("kept", "Pin Snapshot")
    expect(window.line("kept")).to_contain_text("pinned")
    window.more("kept", "Remove Snapshot…")
    expect(window.dialog).to_contain_text("It is pinned")
    window.accept("Cancel")
    window.more("kept", "Unpin Snapshot")
    expect(window.line("kept")).not_to_contain_text("pinned")
    window.more("kept", "Pin Snapshot")
    expect(window.line("kept")).to_contain_text("pinned")
    window.line("kept").focus()
    window.page.keyboard.press("Delete")
    window.accept("Unpin and remove")
    expect(window.line("kept")).to_have_count(0)


def test_two_snapshots_are_compared(lab: Server, open_window: OpenWindow) -> None:
    window = open_window(lab, "compare.ipynb")
    window.run("import numpy; weights = numpy.zeros(1_000_000); bias = 0.5; rng = numpy.random.default_rng()")
    for name in ("small", "large"):
        window.save(name)
        window.run("import os; grown = os.urandom(20_000_000); weights += 1; bias = bias / 2")
    window.save("largest")
    window.show_sidebar()
    window.more("large", "Compare Snapshot…")
    expect(window.dialog.get_by_label("With")).to_have_value(_id_of(lab, "small"))
    found = window.dialog.get_by_role("region", name="What differs")
    expect(found.get_by_role("columnheader", name="large")).to_be_visible()
    # What changed is seen first, also where type and shape are the same.
    expect(found.get_by_role("row").nth(1)).to_have_text("weightscontents changedndarray (1000000) float64, 8.0 MB")
    expect(found.get_by_role("row", name="bias")).to_have_text("biasreassignedfloat")
    expect(found.get_by_role("row", name="grown")).to_contain_text("new")
    expect(found.locator("p").first).to_have_text(re.compile(r"^Variables: 2 changed, 2 new, \d+ unchanged\.$"))
    expect(found).to_contain_text(re.compile(r"May have changed: .*rng"))
    expect(found).to_contain_text(re.compile(r"large differs from small by \d+\.\d MB \(\d+\.\d MB of memory\)\."))
    expect(found).not_to_contain_text(".so")
    window.dialog.get_by_label("With").select_option("largest")
    expect(found.get_by_role("columnheader", name="largest")).to_be_visible()
    expect(found.get_by_role("row", name="grown")).to_contain_text("reassigned")
    assert window.accessibility_faults(".jp-Dialog") == []
    window.accept("Close")


def test_a_snapshot_of_a_job_is_told_from_a_kernel_s(lab: Server, open_window: OpenWindow) -> None:
    where = {"GPUCKPT_STORE": str(lab.store), "JUPYTER_RUNTIME_DIR": str(lab.folder / "runtime")}
    where["GPUCKPT_KEYS"] = str(lab.folder / "keys")
    assert run("exec", "train", "--", "sleep", "100", **where).status == 0
    try:
        assert run("save", "train", "of-job", **where).status == 0
        assert run("hibernate", "train", **where).status == 0
        window = open_window(lab)
        window.show_sidebar()
        expect(window.line("of-job")).to_contain_text("job train")
        # It is put back by a command, in a terminal, whatever asks for it; also where its job was hibernated.
        line = window.line("hibernated-train")
        window.press(line, "Restore… hibernated-train as a job")
        expect(window.dialog.locator("code").first).to_have_text("jupyter gpuckpt restore train hibernated-train")
        assert window.accessibility_faults(".jp-Dialog") == []
        window.accept("Close")
        window.line("of-job").focus()
        window.page.keyboard.press("Enter")
        command = window.dialog.locator("code").last.inner_text()
        window.accept("Close")
        window.line("of-job").click(button="right")
        offered = window.page.locator(".lm-Menu").get_by_role("menuitem")
        expect(offered.filter(has_text="Export")).to_be_visible()
        expect(offered.filter(has_text=re.compile("Restore|Resume|Fork"))).to_have_text(["Restore as a Job…"])
        window.page.keyboard.press("Escape")
        # What is to be typed does what it says.
        assert run(*command.split()[2:], **where).status == 0
        assert {job["job"]: job["state"] for job in run("ps", "--json", **where).json["jobs"]} == {
            "train": "ended",
            "train-2": "running",
        }
    finally:
        for job in ("train", "train-2"):
            run("stop", job, "--force", **where)


def _id_of(server: Server, name: str) -> str:
    return str(server.ask("GET", f"snapshots/{name}")["id"])


def test_snapshots_form_a_history_and_are_searched(lab: Server, open_window: OpenWindow) -> None:
    window = open_window(lab, "tree.ipynb")
    window.show_sidebar()
    expect(window.sidebar).to_contain_text("No snapshots of this notebook yet.")
    for name in ("root", "left"):
        window.save(name)
    window.restore("root")
    window.save("right")
    # The newest first, indented at branches only.
    lines = window.sidebar.get_by_role("tree", name="This notebook").get_by_role("treeitem")
    expect(lines.locator(".jp-gpuckpt-Name span")).to_have_text(["right", "left", "root"])
    indents = [int(line.evaluate("it => parseInt(getComputedStyle(it).paddingLeft)")) for line in lines.all()]
    assert indents[0] == indents[2] < indents[1]
    # Said where it is not the one below.
    expect(lines.filter(has_text="from root").locator(".jp-gpuckpt-Name span")).to_have_text(["right"])
    expect(window.line("right")).to_have_attribute("aria-current", "true")
    window.sidebar.get_by_label("Search snapshots").fill("lef")
    expect(window.line("root")).to_have_count(0)
    expect(window.line("left")).to_be_visible()


def test_by_the_keyboard_alone(lab: Server, open_window: OpenWindow) -> None:
    window = open_window(lab, "keyboard.ipynb")
    press = window.page.keyboard.press
    window.run("x = 1")
    window.kernel_is_ready()
    press("Escape")
    press("Control+Alt+s")
    expect(window.dialog.get_by_label("Name")).to_be_focused()
    window.page.keyboard.insert_text("by-hand")
    press("Enter")
    window.is_told("Saved by-hand")
    window.run("x = 2")
    press("Control+Alt+k")
    expect(window.sidebar.locator(":focus")).to_have_count(1)
    expect(window.line("by-hand")).to_be_visible()
    for back in ("Escape", "Control+Alt+k"):
        press(back)
        window.page.locator(".jp-NotebookPanel :focus").wait_for()
        press("Control+Alt+k")
        expect(window.line("by-hand")).to_be_focused()
    window.sidebar.get_by_label("Search snapshots").focus()
    press("Tab")
    expect(window.line("by-hand")).to_be_focused()
    press("Enter")
    expect(window.dialog.get_by_role("button", name="Cancel", exact=True)).to_be_focused()
    press("Enter")
    expect(window.line("by-hand")).to_be_focused()
    press("Enter")
    expect(window.dialog.get_by_role("button", name="Cancel", exact=True)).to_be_focused()
    for _ in ("Save first…", "Restore"):
        press("Tab")
    expect(window.dialog.get_by_role("button", name="Restore", exact=True)).to_be_focused()
    press("Enter")
    window.is_told("Restored by-hand")
    assert window.value("x") == "1"
    window.line("by-hand").focus()
    press("Delete")
    expect(window.dialog.get_by_role("button", name="Cancel", exact=True)).to_be_focused()
    press("Escape")
    expect(window.line("by-hand")).to_be_focused()
    press("F2")
    expect(window.dialog.get_by_label("Name", exact=True)).to_be_focused()
    window.page.keyboard.insert_text("by-key")
    press("Enter")
    expect(window.line("by-key")).to_be_visible()
    window.line("by-key").focus()
    press("Shift+F10")
    window.page.get_by_role("menuitem", name="Pin Snapshot").wait_for()
    press("Escape")
    window.line("by-key").focus()
    for _ in ("Restore", "Remove", "⋯"):
        press("Tab")
    press("Enter")
    window.page.get_by_role("menuitem", name="Pin Snapshot").wait_for()
    press("p")  # goes to the command that begins with it
    press("Enter")
    expect(window.line("by-key")).to_contain_text("pinned")
    window.line("by-key").focus()
    press("Control+Alt+s")
    expect(window.dialog.get_by_label("Name")).to_be_focused()
    press("Escape")
    window.line("by-key").dblclick(position={"x": 40, "y": 12})
    expect(window.dialog.get_by_role("button", name="Cancel", exact=True)).to_be_focused()
    press("Escape")
    # Where it cannot be done, everybody is told why.
    window.command("kernelmenu:shutdown")
    button = window.line("by-key").get_by_role("button", name="Restore by-key")
    window.line("by-key").focus()
    expect(button).to_be_disabled()
    press("Enter")
    window.is_told("Not now: no kernel is open")
    press("Tab")
    expect(button).to_be_focused()
    expect(button).to_have_accessible_description("Not now: no kernel is open")
    expect(window.line("by-key").get_by_text("Not now: no kernel is open")).to_be_visible()


def test_a_failure_says_why_and_what_next(lab: Server, open_window: OpenWindow) -> None:
    window = open_window(lab, "failure.ipynb")
    window.run("import jupyter_gpuckpt; jupyter_gpuckpt.before_save(lambda: 1 / 0)")
    window.toolbar("gpuckpt-save").click()
    window.accept("Save")
    told = window.page.locator(".Toastify__toast--error")
    window.answer(told, "Why, and what next")
    expect(window.dialog).to_contain_text("ZeroDivisionError")
    expect(window.dialog).to_contain_text("Next:")
    assert window.accessibility_faults(".jp-Dialog") == []
    # Where nothing was logged there is nothing to show.
    expect(window.dialog.get_by_role("button", name="Show the log")).to_have_count(0)
    window.accept("Close")
    assert window.value("1 + 1") == "2"


def test_the_log_is_behind_an_error(lab: Server, open_window: OpenWindow) -> None:
    window = open_window(lab, "log.ipynb")
    path = str(lab.folder / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        window.run(f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({path!r})")
        with listener.accept()[0]:
            window.toolbar("gpuckpt-save").click()
            window.accept("Save")
            told = window.page.locator(".Toastify__toast--error")
            window.answer(told, "Why, and what next")
    window.accept("Show the log")
    expect(window.dialog.get_by_role("region", name="CRIU")).to_contain_text("half of stream unix connection")
    assert window.accessibility_faults(".jp-Dialog") == []
    window.accept("Close")


def _hold_if(route: Route, method: str, held: list[Route]) -> None:
    if route.request.method == method:
        held.append(route)
    else:
        route.continue_()


def test_a_save_with_files_is_asked_for_and_is_cancelled(lab: Server, open_window: OpenWindow) -> None:
    window = open_window(lab, "cancel.ipynb")
    window.run("import jupyter_gpuckpt, time; jupyter_gpuckpt.before_save(lambda: time.sleep(60))")
    window.show_sidebar()
    window.toolbar("gpuckpt-save").click()
    window.dialog.get_by_label("Include Python and its packages").check()
    with window.page.expect_request(re.compile("/save")) as asked:
        window.accept("Save")
    assert asked.value.post_data_json["with_files"] is True
    expect(window.sidebar).to_contain_text("preparing the kernel")
    status = window.page.locator(".jp-gpuckpt-Status")
    expect(status).to_be_visible()
    expect(status).to_contain_text("preparing the kernel")
    expect(window.toolbar("gpuckpt-state")).to_have_text("Saving")
    asked_for: list[Route] = []
    window.page.route(re.compile("/operations/"), lambda route: _hold_if(route, "DELETE", asked_for))
    window.sidebar.get_by_role("button", name="Cancel").click()
    for place in (window.sidebar, status, window.page.locator(".Toastify__toast")):
        expect(place).to_contain_text(re.compile("Saving .*: cancelling…"))
    expect(window.toolbar("gpuckpt-state")).to_have_text("Cancelling…")
    expect(window.sidebar.get_by_role("button", name="Cancel")).to_be_disabled()
    asked_for[0].continue_()  # all of that before the server knew of it
    window.is_told("Cancelled; the kernel is as it was.")
    expect(window.toolbar("gpuckpt-state")).to_have_text("")
    expect(status).to_be_hidden()
    assert lab.ask("GET", "snapshots")["snapshots"] == []


def test_what_is_told_goes_by_itself_where_the_page_is_slow(lab: Server, open_window: OpenWindow) -> None:
    window = open_window(lab, "slow.ipynb", fresh=True)
    # It ends while the page is still drawing how far it is.
    window.run("import jupyter_gpuckpt, time; jupyter_gpuckpt.before_save(lambda: time.sleep(0.5))")
    window.kernel_is_ready()
    window.slow_down(20)
    window.page.evaluate(_LISTENS_LATE)
    window.save("meanwhile")
    window.slow_down(1)  # each second of a slow page takes one of the processor
    window.is_told_nothing_more()


def test_a_name_that_cannot_be_is_refused_as_it_is_typed(lab: Server, open_window: OpenWindow) -> None:
    window = open_window(lab, "name.ipynb")
    window.kernel_is_ready()
    window.toolbar("gpuckpt-save").click()
    window.dialog.get_by_label("Name").fill("no good")
    expect(window.dialog).to_contain_text("Use letters, digits")
    expect(window.dialog.get_by_role("button", name="Save", exact=True)).to_be_disabled()
    window.dialog.get_by_label("Name").fill("good")
    expect(window.dialog.get_by_role("button", name="Save", exact=True)).to_be_enabled()
    window.accept("Cancel")


def test_blank_states(lab: Server, open_window: OpenWindow) -> None:
    window = open_window(lab)
    window.show_sidebar()
    expect(window.sidebar).to_contain_text("Open a notebook to save its kernel")
    window.open("plain.ipynb", "plain")
    expect(window.sidebar).to_contain_text("This kernel can be neither saved nor restored.")
    expect(window.sidebar.get_by_role("button", name="Change the kernel…")).to_be_visible()
    assert window.accessibility_faults("#jp-gpuckpt-sidebar") == []
    window.open("none.ipynb", SPEC)
    expect(window.sidebar).to_contain_text("Kernel: running")
    expect(window.sidebar).to_contain_text("No snapshots of this notebook yet. Save its kernel")
    window.run("1")  # what the page asks of the kernel, it has asked then
    window.command("kernelmenu:shutdown")
    expect(window.sidebar).to_contain_text("This notebook has no kernel.")


def test_without_criu_the_sidebar_says_so(bare_lab: Server, open_window: OpenWindow) -> None:
    window = open_window(bare_lab, "bare.ipynb")
    window.show_sidebar()
    expect(window.sidebar).to_contain_text("No CRIU of version")
    window.sidebar.get_by_role("button", name="Check this machine").click()
    expect(window.dialog).to_contain_text("criu", ignore_case=True)
    expect(window.dialog).to_contain_text("Next:")
    assert window.accessibility_faults(".jp-Dialog") == []
    window.accept("Close")
    assert window.value("1 + 1") == "2"


def test_two_windows_see_the_same(lab: Server, open_window: OpenWindow) -> None:
    one, other = open_window(lab, "shared.ipynb"), open_window(lab)
    other.show_sidebar()
    one.save("seen-by-both")
    expect(other.line("seen-by-both")).to_be_visible()
    one.show_sidebar()
    one.line("seen-by-both").focus()
    one.page.keyboard.press("Delete")
    one.accept("Remove")
    expect(other.line("seen-by-both")).to_have_count(0)


_HELD_RESTORE = """
import jupyter_gpuckpt, os, time
@jupyter_gpuckpt.after_restore
def held(resumed):
    while resumed.restored and not os.path.exists({!r}):
        time.sleep(0.01)
"""


def test_a_page_reloaded_in_mid_restore_goes_on_telling(lab: Server, open_window: OpenWindow, tmp_path: Path) -> None:
    go = tmp_path / "go"
    window = open_window(lab, "reload.ipynb", fresh=True)
    window.run(_HELD_RESTORE.format(str(go)))
    window.run("x = 1")
    window.save("slow")
    window.run("x = 2")
    window.command("docmanager:save")
    window.show_sidebar()
    window.line("slow").focus()
    window.page.keyboard.press("Enter")
    window.accept("Restore")
    expect(window.toolbar("gpuckpt-state")).to_have_text("Restoring")
    expect(window.page.locator(".jp-NotebookPanel-toolbar .jp-Notebook-ExecutionIndicator")).to_be_hidden()
    window.page.reload()
    window.loaded()
    window.is_told("Restoring slow")
    expect(window.toolbar("gpuckpt-state")).to_have_text("Restoring")
    go.touch()
    window.is_told("Restored slow")
    expect(window.page.locator(".jp-NotebookPanel-toolbar .jp-Notebook-ExecutionIndicator")).to_be_visible()
    assert window.value("x") == "1"


def test_marks_are_there_after_a_reload_and_in_another_window(lab: Server, open_window: OpenWindow) -> None:
    window = open_window(lab, "marks.ipynb", fresh=True)
    window.run("x = 1")
    window.save("one")
    window.run("x = 2")
    window.show_sidebar()
    window.restore("one")
    window.run("x = 3")
    window.command("docmanager:save")
    window.page.reload()
    window.loaded()
    for each in (window, open_window(lab, "marks.ipynb", fresh=True)):
        cells = each.page.locator(".jp-CodeCell")
        expect(cells.nth(1)).to_have_class(_STALE)
        # The number of the third is that of the second: it ran in its place.
        expect(cells.nth(2).locator(".jp-InputPrompt")).to_have_text("[2]:")
        for place in (0, 2):
            expect(cells.nth(place)).not_to_have_class(_STALE)
    window.choose(markStaleCells=False)
    try:
        window.page.reload()
        window.loaded()
        expect(window.line("one")).to_be_visible()  # what the kernel has run is known by then
        expect(window.page.locator(".jp-CodeCell").nth(1)).not_to_have_class(_STALE)
    finally:
        window.choose()


def test_a_restore_by_a_cell_marks_cells_too(lab: Server, open_window: OpenWindow) -> None:
    window = open_window(lab, "by-cell.ipynb")
    saving = window.run("%gpuckpt save here")
    changed = window.run("x = 2")
    asking = window.run("%gpuckpt restore here")
    expect(changed).to_have_class(_STALE)
    for cell in (saving, asking):
        expect(cell).not_to_have_class(_STALE)
    window.restart_kernel()
    expect(changed).not_to_have_class(_STALE)


def test_run_all_with_a_save_and_a_restore_in_it_ends(lab: Server, open_window: OpenWindow) -> None:
    """What was sent behind the save is not executed again by the restored kernel."""
    cells = ["x = 1", "%gpuckpt save all", "x += 1; print('x is', x)", "%gpuckpt restore all", "x += 10", "x"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    notebook.metadata["kernelspec"] = {"name": SPEC, "display_name": SPEC, "language": "python"}
    nbformat.write(notebook, lab.root / "all.ipynb")
    window = open_window(lab, "all.ipynb")
    window.command("notebook:run-all-cells")
    prompts = window.page.locator(".jp-Notebook .jp-CodeCell .jp-InputArea .jp-InputPrompt")
    expect(prompts).to_have_text([re.compile(r"\[\d+\]:")] * len(cells))
    outputs = [window.page.locator(".jp-Notebook .jp-CodeCell").nth(n).locator(".jp-OutputArea-output") for n in (2, 5)]
    for output, text in zip(outputs, ("x is 2", "11"), strict=True):
        expect(output).to_have_text([text])
