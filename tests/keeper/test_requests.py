"""What a keeper is asked for is checked where it enters, and what nobody asked for is cancelled by nobody."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from jupyter_gpuckpt.checked import to_json
from jupyter_gpuckpt.client.record import KernelFolder, Launch, Operation
from jupyter_gpuckpt.errors import GpuckptError, Refused
from jupyter_gpuckpt.keeper.kernel_life import Keeper
from jupyter_gpuckpt.keeper.operations.progress import to_nobody
from jupyter_gpuckpt.keeper.requests import Requests
from jupyter_gpuckpt.operations.requests import Attach, Diff, List, Pin, Request, Restore, Save, Wake, request_of


@pytest.mark.parametrize(
    "request_",
    [
        Save(name="a", message=None, patience=0.5, operation="1"),
        Restore(of_any="b.ipynb:a", gpus=[1], cell={"header": {}}),
        Pin(name="a", pinned=False),
        Diff(old="a", new="b"),
        List(),
        Attach(end_after=None),
    ],
    ids=lambda request: request.op,
)
def test_a_request_is_taken_as_it_was_made(request_: Request) -> None:
    assert request_of(request_.op, to_json(request_)) == request_


def test_a_snapshot_of_any_notebook_is_asked_for_as_ever() -> None:
    assert to_json(Restore(of_any="b.ipynb:a"))["from"] == "b.ipynb:a"


@pytest.mark.parametrize(
    ("op", "args", "why"),
    [
        ("save", {}, "name is missing"),
        ("save", {"name": 3}, "name is 3, and not str"),
        ("save", {"name": "a", "with_files": "no"}, "with_files is 'no', and not bool"),
        ("restore", {"gpus": ["0"]}, "gpus[0] is '0', and not int"),
        ("signal", {"signum": True}, "signum is True, and not int"),
        ("tag", {"name": "a", "tags": "b", "remove": []}, "tags is 'b', and not list[str]"),
        ("autosleep", {"after": "soon"}, "after is 'soon', and not float"),
    ],
)
def test_what_is_odd_in_a_request_is_named(op: str, args: dict[str, Any], why: str) -> None:
    with pytest.raises(Refused) as caught:
        request_of(op, args)
    assert why in caught.value.why


def test_what_no_keeper_does_is_refused() -> None:
    with pytest.raises(GpuckptError, match="'Request'"):
        request_of("Request", {})


def test_an_operation_that_a_keeper_begins_by_itself_is_cancelled_by_no_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even by one that names no operation, as those of earlier versions do."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("GPUCKPT_STORE", str(tmp_path / "store"))

    async def check() -> None:
        folder, _ = KernelFolder.create(Launch("a", [], {}, "/", 0o077, "", agent=False))
        keeper = Keeper(folder)
        # It may want something before what it can do is loaded.
        waking = asyncio.create_task(keeper.ask(Wake(), to_nobody))
        await asyncio.sleep(0)
        requests = Requests(keeper)
        keeper.held.set()
        with keeper.operations.begin(Operation("restore", "x", "one")) as restore:
            restore.cancellable = False
            while not keeper.operations.queued:
                await asyncio.sleep(0)
            for named in ({}, {"kind": "wake"}, {"operation": "another's"}):
                assert not await requests.do("cancel", named, to_nobody)
            assert not waking.done()
        with pytest.raises(GpuckptError, match="ended"):
            await waking

    asyncio.run(check())
