"""What a keeper answers is what the request's description has."""

from __future__ import annotations

from typing import Any

from notebooks import PATIENCE, Notebook

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.client import keepers
from jupyter_gpuckpt.client.record import KernelFolder
from jupyter_gpuckpt.operations.requests import (
    AutoSleep,
    Awake,
    Cancel,
    Diff,
    Executed,
    Fork,
    Hibernate,
    Keep,
    Left,
    List,
    Note,
    Pin,
    Remove,
    Rename,
    Renamed,
    Request,
    Restore,
    Save,
    Show,
    Signal,
    Sleep,
    Status,
    Tag,
    Wake,
)
from jupyter_gpuckpt.operations.results import Forked

_IN_TURN: tuple[Request[Any], ...] = (
    *(Status(), Left(), Executed(), Cancel(operation="of nobody"), Signal(signum=0), Renamed(notebook="a.ipynb")),
    *(Awake(on=True), Awake(on=False), AutoSleep(after=3600.0), AutoSleep(after=None)),
    *(Save(name="a"), Save(name="b", message="later"), List(), Show(name="a"), Diff(old="a", new="b")),
    *(Note(name="a", message="first"), Tag(name="a", tags=["kept"], remove=[]), Pin(name="a", pinned=True)),
    *(Pin(name="a", pinned=False), Rename(name="b", new="c"), Keep(last=1, dry_run=True), Restore(name="a")),
    *(Sleep(), Sleep(), Wake(), Wake(), Hibernate(), Hibernate(), Status(), Wake(), Fork(), Remove(name="c"), Status()),
)


def test_all_that_is_asked_is_answered_as_described(notebook: Notebook) -> None:
    notebook.run("x = 1")
    for asked in _IN_TURN:
        with notebook.keeper as keeper:
            answer = keeper.ask(asked, timeout=PATIENCE)  # which reads it
        for copy in answer.kernels if isinstance(answer, Forked) else ():
            keepers.end(KernelFolder(settings.kernels_dir() / copy.id))
    assert notebook.value("x") == "1"
