"""Faults at every system call of an operation: enumerated, not sampled (faults 1, 2, 4, 6, 10, 32)."""

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
    "hinted save": {"other": "old"},
    "replace": {"other": "old", "it": "old"},
    "import": {"other": "old"},
    "remove": {"other": "old", "it": "old"},
    "collect": {"it": "old"},
}
AFTER = {
    "first save": {"it": "new"},
    "save": {"other": "old", "it": "new"},
    "hinted save": {"other": "old", "it": "new"},
    "replace": {"other": "old", "it": "new"},
    "import": {"other": "old", "it": "new"},
    "remove": {"other": "old"},
    "collect": {"it": "old"},
}
COMMIT = {"first save": "link", "save": "link", "hinted save": "link", "replace": "rename", "import": "link"}


def told(*arguments: object) -> list[dict[str, Any]]:
    """Run the cases and return what each line says."""
    process = python(CASES, *arguments, stderr=subprocess.PIPE)
    output, errors = process.communicate(timeout=500)
    assert process.returncode == 0, errors
    return [json.loads(line) for line in output.splitlines()]


def cases(fault: str, operation: str, folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the operation without a fault, and what became of each case with one."""
    clean, *rest = told(fault, operation, folder)
    assert clean["failure"] == "", clean["text"]
    assert clean["after"] == AFTER.get(operation, clean["after"])
    assert clean["litter"] == []
    return clean, rest


def committed_at(report: dict[str, Any], operation: str) -> int:
    """Return the number of the call that makes a saved snapshot exist."""
    synced = [at for at, path in report["synced"] if path.endswith("/snapshots")]
    calls = report["calls"]
    return max(at for at in range(max(synced[:1])) if calls[at] == COMMIT[operation])


@pytest.mark.parametrize("operation", BEFORE)
@pytest.mark.parametrize("fault", ["kill", "cut"])
def test_a_kill_at_any_step_leaves_the_old_state_or_the_whole_new_one(
    fault: str, operation: str, tmp_path: Path
) -> None:
    clean, found = cases(fault, operation, tmp_path)
    calls = clean["calls"]
    assert len(found) == (len(calls) if fault == "kill" else calls.count("write") + calls.count("pwritev2"))
    for case in found:
        assert case["after"] in (BEFORE[operation], AFTER[operation]), case
        assert case["at last"] == case["after"], case
        assert case["litter"] == [], case


@pytest.mark.parametrize("operation", BEFORE)
@pytest.mark.parametrize("survives", ["nothing", "names"])
def test_a_power_cut_at_any_step_leaves_the_old_state_or_the_whole_new_one(
    survives: str, operation: str, tmp_path: Path
) -> None:
    (report,) = told(f"power: {survives}", operation, tmp_path)
    assert report["failure"] == ""
    states = [case["state"] for case in report["seen"]]
    assert all(state in (BEFORE[operation], AFTER[operation]) for state in states), report["seen"]
    if survives == "nothing":
        assert states[0] == BEFORE[operation]
    assert states[-1] == AFTER[operation]


@pytest.mark.parametrize("operation", BEFORE)
@pytest.mark.parametrize("fault", ["fail once", "fail for good"])
def test_an_input_output_error_at_any_step_is_never_reported_as_success(
    fault: str, operation: str, tmp_path: Path
) -> None:
    clean, found = cases(fault, operation, tmp_path)
    calls = clean["calls"]
    assert len(found) == len(calls)
    if operation in COMMIT:
        # What comes after the commit is on the disk tidies up: the snapshot is safe by then.
        needed = min(at for at, _ in clean["synced"] if at > committed_at(clean, operation))
    else:
        needed = max(i for i, call in enumerate(calls) if call in ("unlink", "unlinkat", "rmdir"))
    for case in found:
        assert case["failure"] in ("", "StoreError", "OSError"), case
        if case["failure"] == "OSError":
            assert ", in fill\n" in case["text"], case  # criu's part, not the store's
        if case["at"] <= needed and case["failure"] == "":
            assert optional(calls, case["at"]) or case["at"] in hinting(clean), case
        if case["failure"] == "":
            assert case["after"] == AFTER[operation], case
        assert case["after"] in (BEFORE[operation], AFTER[operation]), case
        assert case["at last"] == case["after"], case
        assert case["litter"] == [], case


def optional(calls: list[str], at: int) -> bool:
    """Tell whether a call only writes down who holds a lock, or gives one back."""
    return calls[at] in ("pwrite64", "flock")


def hinting(report: dict[str, Any]) -> range:
    """Return the calls that write hints, without which a store can do."""
    for at, path in report["synced"]:
        if "/hints/" in path:
            begin = at - report["calls"][at::-1].index("mkdir")
            return range(begin, at + 2)
    return range(0)


def test_a_read_that_fails_once_is_tried_again(tmp_path: Path) -> None:
    clean, found = cases("read fails once", "open", tmp_path)
    assert {"read", "preadv2", "getdents64"} <= set(clean["calls"])
    assert [case for case in found if case["failure"]] == []


def test_a_read_that_fails_for_good_is_an_error_of_the_store(tmp_path: Path) -> None:
    clean, found = cases("read fails for good", "open", tmp_path)
    calls = clean["calls"]
    # After the last chunk was read, the copy is deleted again.
    for case in found[: len(calls) - calls[::-1].index("preadv2")]:
        assert case["failure"] in ("StoreError", "Damaged"), case
        assert "Input/output error" in case["text"], case
        assert case["after"] == {"other": "old", "it": "old"}, case


@pytest.mark.parametrize("operation", ["save", "replace"])
def test_everything_is_synced_in_order_before_the_commit_and_the_commit_before_success(
    operation: str, tmp_path: Path
) -> None:
    (report,) = told("watch", operation, tmp_path)
    committed = committed_at(report, operation)
    root = tmp_path / "store"
    order = [str(Path(path).relative_to(root)) for at, path in report["synced"]]
    session = next(Path(path).name[:32] for _, path in report["synced"] if "/packs/" in path)
    parts = [f"packs/{session}-000001", "packs", f"index/{session}.tmp", "index", f"contents/{session}", "contents"]
    parts += [f"snapshots/{session}.tmp", "snapshots"]
    assert order[: len(parts)] == parts
    before = [path for at, path in report["synced"] if at < committed]
    assert len(before) == len(parts) - 1


@pytest.mark.parametrize("operation", BEFORE)
def test_with_umask_000_nothing_is_readable_by_others_after_any_step(operation: str) -> None:
    # Under a folder that all may enter, so that only the store's own modes protect it.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        (report,) = told("watch", operation, folder)
    assert report["looks"] == len(report["calls"])
    assert report["seen"] == []
