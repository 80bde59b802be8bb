"""Faults at every system call of an operation: enumerated, not sampled (faults 1, 4, 6, 10, 32)."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from store_helpers import python
from system_calls import SUPPORTED

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="the fault layer is for Linux on x86-64")

CASES = Path(__file__).with_name("fault_cases.py")
BEFORE = {
    "first save": {},
    "save": {"other": "old"},
    "replace": {"other": "old", "it": "old"},
    "remove": {"other": "old", "it": "old"},
    "collect": {"it": "old"},
}
AFTER = {
    "first save": {"it": "new"},
    "save": {"other": "old", "it": "new"},
    "replace": {"other": "old", "it": "new"},
    "remove": {"other": "old"},
    "collect": {"it": "old"},
}


def cases(fault: str, operation: str, folder: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the calls of the operation without a fault, and what became of each case with one."""
    process = python(CASES, fault, operation, folder)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    clean, *rest = map(json.loads, output.splitlines())
    assert clean["failure"] == ""
    assert clean["after"] == AFTER.get(operation, clean["after"])
    return clean["calls"], rest


@pytest.mark.parametrize("operation", BEFORE)
@pytest.mark.parametrize("fault", ["kill", "cut"])
def test_a_kill_at_any_step_leaves_the_old_state_or_the_whole_new_one(
    fault: str, operation: str, tmp_path: Path
) -> None:
    calls, found = cases(fault, operation, tmp_path)
    assert len(found) == (len(calls) if fault == "kill" else calls.count("write"))
    for case in found:
        assert case["after"] in (BEFORE[operation], AFTER[operation]), case
        assert case["at last"] == case["after"], case
        assert case["litter"] == [], case


@pytest.mark.parametrize("operation", BEFORE)
@pytest.mark.parametrize("fault", ["fail once", "fail for good"])
def test_an_input_output_error_at_any_step_is_never_reported_as_success(
    fault: str, operation: str, tmp_path: Path
) -> None:
    calls, found = cases(fault, operation, tmp_path)
    assert len(found) == len(calls)
    # What comes after the last sync of a save tidies up: the snapshot is safe by then. The
    # last call of all gives back a lock.
    needed = len(calls) - 1 - calls[::-1].index("fsync") if "fsync" in calls else 0
    if operation in ("remove", "collect"):
        needed = max(i for i, call in enumerate(calls) if call in ("unlink", "unlinkat", "rmdir"))
    for case in found:
        assert case["failure"] in ("", "StoreError", "OSError"), case
        if case["failure"] == "OSError":
            assert ", in fill\n" in case["text"], case  # criu's part, not the store's
        if case["at"] <= needed:
            assert case["failure"] != "", case
        if case["failure"] == "":
            assert case["after"] == AFTER[operation], case
        assert case["after"] in (BEFORE[operation], AFTER[operation]), case
        assert case["at last"] == case["after"], case
        assert case["litter"] == [], case


def test_a_read_that_fails_once_is_tried_again(tmp_path: Path) -> None:
    calls, found = cases("read fails once", "open", tmp_path)
    assert {"read", "readv", "getdents64"} <= set(calls)
    assert [case for case in found if case["failure"]] == []


def test_a_read_that_fails_for_good_is_an_error_of_the_store(tmp_path: Path) -> None:
    _, found = cases("read fails for good", "open", tmp_path)
    for case in found:
        assert case["failure"] in ("StoreError", "Damaged"), case
        assert "Input/output error" in case["text"], case
        assert case["after"] == {"other": "old", "it": "old"}, case


@pytest.mark.parametrize(("operation", "commit"), [("save", "link"), ("replace", "rename")])
def test_every_file_and_folder_is_synced_before_the_commit_and_the_commit_before_success(
    operation: str, commit: str, tmp_path: Path
) -> None:
    process = python(CASES, "watch", operation, tmp_path)
    output, _ = process.communicate(timeout=60)
    report = json.loads(output)
    committed = report["calls"].index(commit)
    written = max(i for i, call in enumerate(report["calls"][:committed]) if call == "write")
    synced = {path: at for at, path in report["synced"]}
    root = tmp_path / "store"
    (folder,) = {p.parent for p in map(Path, synced) if p.name == "core-1.img"}
    for path in [folder.parent, folder, *folder.rglob("*")]:
        assert synced[str(path)] < committed, path
    assert written < synced[str(root / "snapshots" / f"{folder.name}.tmp")] < committed
    assert committed < synced[str(root / "snapshots")]


@pytest.mark.parametrize("operation", BEFORE)
def test_with_umask_000_nothing_is_readable_by_others_after_any_step(operation: str) -> None:
    # Under a folder that all may enter, so that only the store's own modes protect it.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        process = python(CASES, "watch", operation, folder, stderr=subprocess.PIPE)
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        report = json.loads(output)
    assert report["looks"] == len(report["calls"])
    assert report["seen"] == []
