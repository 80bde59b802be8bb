"""The record of a kernel, which the next keeper goes by: what is written is read as it was, and what is odd is seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jupyter_gpuckpt.checked import Odd, from_json, to_json
from jupyter_gpuckpt.client.in_progress import (
    Held,
    InProgress,
    MoveInProgress,
    ParkedMemory,
    RestoreInProgress,
    SaveInProgress,
    WakeInProgress,
)
from jupyter_gpuckpt.client.record import FORMAT, Ended, KernelFolder, Launch, Parent, Saved, State
from jupyter_gpuckpt.client.sleep_record import (
    ASLEEP,
    Hibernated,
    HostMemory,
    KernelReplies,
    LateSnapshot,
    Sleep,
    UnconfirmedWake,
)
from jupyter_gpuckpt.operations.results import Executed, Restored, Summary

_HELD = [Held(7, {"GPU-1": 1 << 30})]
_PARKED = ParkedMemory(pid=10007, thread=0, places=(("GPU-1", 1 << 30), ("GPU-2", 0)), holder=12)
_SNAPSHOT = Summary(
    name="a",
    label="a",
    id="0" * 32,
    message="",
    created="now",
    size=1,
    stored=1,
    parent=None,
    notebook="n.ipynb",
    kernel_id="k",
    execution_count=None,
    gpu_memory=0,
    frozen_seconds=0.5,
)
_RESTORED = Restored(**vars(_SNAPSHOT), warnings=["w"], given_up=None)


@pytest.mark.parametrize(
    "operation",
    [
        SaveInProgress("a", "stopped", still=[3], cuda=[7], held=_HELD, parking=[_PARKED], criu=31),
        MoveInProgress(cuda=[7], held=_HELD),
        RestoreInProgress("a", asked={"cell": {"header": {}}}, peers={"shell_port": 2}, fresh=True),
        RestoreInProgress("a", run="run-1", result=_RESTORED, asked_at=1.5),
        WakeInProgress("a"),
    ],
    ids=lambda operation: operation.kind,
)
def test_what_was_begun_is_read_as_it_was_written(operation: InProgress, tmp_path: Path) -> None:
    late = LateSnapshot("a", "0" * 32, "/store")
    sleep = Sleep(ASLEEP, "now", 5, [7], {"processes": []}, True, [(1, 2, 3, 4)], HostMemory(5, 0), _PARKED, late)
    folder = KernelFolder(tmp_path)
    folder.write_state(State(keeper=(1, 2), operation=operation, sleep=sleep))
    found = folder.state()
    assert (found.operation, found.sleep, found.keeper, found.sleeper) == (operation, sleep, (1, 2), None)
    assert found.format == FORMAT


def test_a_hibernated_kernel_and_a_job_that_ended_are_read_as_they_were_written(tmp_path: Path) -> None:
    said = KernelReplies({"status": "ok"}, {"id": {"target_name": "t"}}, Executed(restored="", cells={}, others=[]))
    hibernated = Hibernated(_SNAPSHOT, "now", said, {"shell_port": 1}, [["ab", "cd"]])
    untold, ended = UnconfirmedWake(_SNAPSHOT, "token", [["ab"]]), Ended(None, "now", "a")
    state = State(hibernated=hibernated, untold=untold, ended=ended, parent=Parent("a", "b"), saved=Saved("now", None))
    folder = KernelFolder(tmp_path)
    folder.write_state(state)
    assert folder.state() == state


def test_records_of_earlier_versions_are_read() -> None:
    """As they wrote them: fewer members, and a move as a save."""
    moving = {"kind": "save", "name": "", "cuda": [7], "held": [{"pid": 7, "used": {"GPU-1": 1}}]}
    found = from_json(State, {"keeper": [1, 2], "sleeper": None, "worked": 3, "operation": moving})
    assert found.operation == SaveInProgress(cuda=[7], held=[Held(7, {"GPU-1": 1})])
    assert (found.worked, found.format) == (3.0, 1)
    falling_asleep = {"stage": "falling asleep", "since": "now", "freed": 0, "cuda": [], "described": {}}
    assert from_json(State, {"sleep": falling_asleep}).sleep == Sleep("falling asleep", "now")
    asleep = {**falling_asleep, "stage": "asleep", "freed": 9, "late": {"name": "a", "id": "b"}}
    sleep = from_json(State, {"sleep": asleep}).sleep
    assert sleep is not None
    assert (sleep.host_memory(), sleep.late) == (HostMemory(9, 0), LateSnapshot("a", "b"))
    assert from_json(State, {"ended": {"status": None, "at": "now"}}).ended == Ended(None, "now")
    assert from_json(State, {"saved": {"at": "now", "cells": None}, "parent": None}).saved == Saved("now", None)


def test_what_is_none_is_left_out_as_earlier_versions_did() -> None:
    """They take memory for parked where it is mentioned at all."""
    assert "parked" not in to_json(SaveInProgress("a"))


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        ([], "it is [], and not an object"),
        ({"worked": "3"}, "worked is '3', and not float"),
        ({"kernel_pid": True}, "kernel_pid is True, and not int"),
        ({"keeper": [1]}, "keeper is [1], and not tuple[int, int]"),
        ({"operation": {"kind": "merge"}}, "operation is {'kind': 'merge'}, and none of: SaveInProgress"),
        ({"operation": {"kind": "save", "left": "hanging"}}, "operation.left is 'hanging', and not one of: running"),
        ({"operation": {"kind": "move", "cuda": [1, None]}}, "operation.cuda[1] is None, and not int"),
        ({"operation": {"kind": "move", "cuda": []}}, "operation.held is missing"),
        ({"operation": {"kind": "restore", "peers": {"shell_port": "2"}}}, "operation.peers.shell_port is '2'"),
        ({"sleep": {"stage": "asleep"}}, "sleep.since is missing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_odd_in_a_record_is_named(raw: Any, why: str) -> None:
    with pytest.raises(Odd) as caught:
        from_json(State, json.loads(json.dumps(raw)))
    assert str(caught.value).startswith(why)


def test_a_launch_without_what_starts_a_kernel_is_none() -> None:
    with pytest.raises(Odd, match=r"^argv is missing$"):
        from_json(Launch, {"kernel_id": "a"})
