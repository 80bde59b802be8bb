"""Restores and saves that are refused before anything is touched, and what does not stand in their way."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import run
from keeper_faults import Asked, Criu, assert_no_litter, assert_works, names, small_disk, store
from notebooks import Notebook, StartKernel, wait_until

from jupyter_gpuckpt.store.pack import entries
from jupyter_gpuckpt.store.signatures import split
from jupyter_gpuckpt.store.trust import Trust


def test_pids_that_are_taken_do_not_matter(start: StartKernel) -> None:
    first, second = start(), start()
    first.run("import subprocess, threading, os; child = subprocess.Popen(['sleep', '100'])")
    first.run("%gpuckpt save here")
    pids = first.value("os.getpid(), child.pid, threading.get_native_id()")
    # All of these are taken, by the first itself, when the second becomes its copy.
    second.run("%gpuckpt restore here")
    assert second.value("os.getpid(), child.pid, threading.get_native_id()") == pids
    assert second.value("child.poll()") == first.value("child.poll()") == "None"


def test_a_damaged_newer_or_strange_snapshot_is_refused_before_the_kernel_is_touched(
    notebook: Notebook, tmp_path: Path
) -> None:
    kinds = {"format": "Incompatible", "feature": "Incompatible", "stranger": "UnknownKey"}
    for damage in ("format", "feature", "cut", "byte", "missing", "not JSON", "stranger"):
        shutil.rmtree(store(), ignore_errors=True)
        notebook.run("x = 1")
        notebook.run("%gpuckpt save here")
        notebook.run("x = 2")
        spoil(damage, tmp_path)
        sleepers = list(notebook.folder.glob("run-*"))
        # Without a save first, which would store again what it finds to be cut off, if the kernel has it still.
        answer = notebook.fails("%gpuckpt restore here --discard")
        assert answer.ename == kinds.get(damage, "Damaged"), damage
        assert list(notebook.folder.glob("run-*")) == sleepers
        assert notebook.value("x") == "2"


def spoil(damage: str, tmp_path: Path) -> None:
    """Do this to the snapshot called here."""
    manifest = store() / "snapshots" / "here.json"
    pack = max((store() / "packs").iterdir(), key=lambda path: path.stat().st_size)
    sealed, _ = split(manifest.read_bytes())
    content = json.loads(sealed)
    if damage == "format":
        manifest.write_text(json.dumps({**content, "format": content["format"] + 1}))
    elif damage == "feature":
        manifest.write_text(json.dumps({**content, "features": ["teleport"]}))
    elif damage == "not JSON":
        manifest.write_text("{")
    elif damage == "stranger":
        manifest.write_bytes(Trust(tmp_path / "keys of a stranger").sign(sealed))
    elif damage == "missing":
        pack.unlink()
    else:
        with pack.open("r+b") as f:
            if damage == "cut":
                f.truncate(pack.stat().st_size - 4096)
            else:
                # Not in one of the headers between the chunks: nothing is lost with those.
                chunk = max((at for _, at in entries(pack)), key=lambda at: at.stored)
                f.seek(chunk.offset + chunk.stored // 2)
                byte = f.read(1)
                f.seek(-1, os.SEEK_CUR)
                f.write(bytes([byte[0] ^ 1]))


# -- the disk is full


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file system of its own for the store, with 100 MB."""
    monkeypatch.setenv("GPUCKPT_STORE", str(tmp_path / "disk" / "store"))
    with small_disk(tmp_path / "disk", 100):
        yield tmp_path / "disk"


def fill(disk: Path) -> Path:
    """Leave no room on a disk."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as f:
        try:
            while True:
                f.write(bytes(1 << 16))
        except OSError:
            pass
    return filler


def test_a_save_without_room_is_refused_and_snapshots_can_be_removed(
    disk: Path, notebook: Notebook, tmp_path: Path
) -> None:
    notebook.run("x = 1")
    notebook.run("%gpuckpt save first")
    filler = fill(disk)
    answer = notebook.fails("%gpuckpt save second")
    assert answer.ename in ("Refused", "StoreError")
    assert "Why: " in answer.text
    assert "Next: " in answer.text
    assert notebook.value("x") == "1"
    assert names() == {"first"}
    assert "`%gpuckpt save NAME --to FOLDER`" in answer.text
    elsewhere = tmp_path / "another disk" / "saved"
    assert_saves_elsewhere(notebook, elsewhere)
    assert notebook.fails(f"%gpuckpt save second --to {disk}/x").ename in ("Refused", "StoreError")
    assert names() == {"first"}
    assert "Removed first" in notebook.run("%gpuckpt rm first").text
    filler.unlink()
    assert_works(notebook)


def assert_saves_elsewhere(notebook: Notebook, folder: Path) -> None:
    """What the full store has no room for is saved to another folder once, and found and restored from there."""
    saved = notebook.run(f"r = %gpuckpt save second --wait --to '{folder}'\nprint(r.restored, x)").text
    assert f"Saved second to {folder}: " in saved
    assert {path.stat().st_mode & 0o77 for path in (folder, *folder.rglob("*"))} == {0}
    notebook.run("x = 2")
    there = f"--store '{folder}'"
    assert "second" in notebook.run(f"%gpuckpt list {there}").text
    for change in ("mv second other", "note other 'on another disk'", "tag other far", "pin other", "diff other other"):
        notebook.run(f"%gpuckpt {change} {there}")
    assert "on another disk" in notebook.run(f"%gpuckpt show other {there}").text
    for change in ("unpin other", "mv other second"):
        notebook.run(f"%gpuckpt {change} {there}")
    assert "Nothing has to be removed" in notebook.run(f"%gpuckpt keep --last 3 {there}").text
    assert "second" not in notebook.run("%gpuckpt list").text
    assert notebook.fails("%gpuckpt restore second").ename == "NoSuchSnapshot"
    assert "Restored second" in notebook.run(f"%gpuckpt restore second --store '{folder}'").text
    assert notebook.value("x") == "1"
    kernel = notebook.manager.provisioner.kernel_id
    assert run("save", kernel, "third", "--to", str(folder)).status == 0
    listed = run("list", "--json", "--store", str(folder)).json["snapshots"]
    assert [one["name"] for one in listed] == ["third", "second"]
    notebook.run("x = 3")
    assert run("restore", kernel, "third", "--store", str(folder)).status == 0
    notebook.wait_for_ready()
    assert notebook.value("x") == "1"
    assert run("rm", "third", "--store", str(folder)).status == 0


def test_what_the_store_has_already_needs_no_room(disk: Path, notebook: Notebook) -> None:
    notebook.run("import os; state = os.urandom(50_000_000)")
    assert shutil.disk_usage(disk).free > 90_000_000
    notebook.run("%gpuckpt save first --wait")
    assert shutil.disk_usage(disk).free < 50_000_000  # less than it holds
    notebook.run("%gpuckpt save second --wait")
    notebook.run("state = os.urandom(50_000_000); digest = hash(state)")
    saved = notebook.run(
        "try: get_ipython().run_line_magic('gpuckpt', 'save third --wait')\nexcept Exception as e: print(e)"
    )
    assert "No space left" in saved.text
    assert names() == {"first", "second"}
    assert_no_litter()
    assert notebook.value("hash(state) == digest") == "True"
    notebook.run("%gpuckpt restore second")
    assert notebook.value("len(state)") == "50000000"


def test_a_disk_that_fills_in_mid_save(disk: Path, criu: Criu, start: StartKernel) -> None:
    notebook = start()
    notebook.run("x = 1")
    with criu.held_at("dump", "start") as reached:
        cell = Asked(notebook, "%gpuckpt save never")
        reached()
        filler = fill(disk)
    answer = cell.answer()
    assert answer["ename"] in ("SaveFailed", "StoreError")
    said = "\n".join(answer["traceback"])
    assert "No space left" in said
    assert "Free disk space" in said
    assert not names()
    assert_no_litter()
    assert notebook.value("x") == "1"
    assert "No snapshots yet" in notebook.run("%gpuckpt list").text
    filler.unlink()
    wait_until(lambda: not filler.exists())
    assert_works(notebook)


def test_a_command_of_the_terminal_is_told_as_one(notebook: Notebook) -> None:
    answer = notebook.fails("%gpuckpt push here s3://somewhere")
    assert "!jupyter gpuckpt push" in answer.text
