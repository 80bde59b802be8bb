"""What a user sees in a terminal: tables that fit, colours where they are wanted, a pager; scripts get none of it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pexpect
import pytest
from command_line import COMMAND, Cli
from many_snapshots import store_of

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.checked import from_json
from jupyter_gpuckpt.kernel.histories import Histories
from jupyter_gpuckpt.kernel.tables import Listing, Marked
from jupyter_gpuckpt.operations.results import Summary


def seen(*words: str, width: int = 80, **environment: str) -> str:
    """Return what `jupyter gpuckpt` shows in a terminal that is so wide."""
    env = {**os.environ, "TERM": "xterm", "PAGER": "cat", **environment}
    env.pop("NO_COLOR" if "NO_COLOR" not in environment else "", None)
    shown = pexpect.spawn(
        COMMAND[0], [*COMMAND[1:], *words], timeout=60, encoding="utf-8", dimensions=(24, width), env=env
    )
    with shown:
        shown.expect(pexpect.EOF)
        text: str = shown.before
    return text.replace("\r\n", "\n")


@pytest.fixture
def store(folders: None) -> Path:
    store_of(settings.store_dir(), 3)
    return settings.store_dir()


_ROWS = [
    [name, "2026-11-22 20:31:07", "812 MB", "49 B", "", Marked("here pinned best", "here"), "train.ipynb", "m" * 50]
    for name in ("epoch-1", "a-long-name-that-somebody-types")
]
_HEAD = ["name", "saved", "size", "added", "GPU memory", "tags", "notebook", "message"]
_TABLE = Listing(
    _HEAD, _ROWS, "", [], elastic=("tags", "notebook", "message"), spare=("added", "size", "notebook", "message")
)


@pytest.mark.parametrize("width", [200, 120, 100, 80, 70])
def test_a_table_fits_the_terminal_and_names_are_whole(width: int) -> None:
    lines = ["".join(line) for line in _TABLE.lines(width)]
    assert max(map(len, lines)) <= width
    assert [line.split()[0] for line in lines[1:]] == ["epoch-1", "a-long-name-that-somebody-types"]
    assert "GPU memory" not in lines[0], "a column that is empty takes no room"
    assert ("m" * 50 in lines[1]) == (width == 200)
    assert all("2026-11-22 20:31:07" in line for line in lines[1:]), "a time is never cut"
    # What is cut means the same.
    assert any(isinstance(piece, Marked) and piece.meaning == "here" for piece in _TABLE.lines(width)[1])


def test_a_table_for_a_script_is_whole() -> None:
    assert _TABLE.text().count("m" * 50) == 2
    assert "GPU memory" in _TABLE.text()


def test_colours_are_for_terminals_that_want_them(cli: Cli, store: Path) -> None:
    assert seen("show", "nothing").startswith(
        "\x1b[1;31mThere is no snapshot named nothing.\x1b[0m\n\x1b[1mWhy:\x1b[0m "
    )
    assert "\x1b" not in seen("show", "nothing", NO_COLOR="1")
    assert "\x1b" not in seen("show", "nothing", TERM="dumb")
    assert "\x1b" not in seen("show", "nothing", "--json")
    assert "\x1b" not in cli("show", "nothing").err
    assert seen("list", "--format", "{name}", "-n", "2") == "many-0002\nmany-0001\n"


def test_nothing_in_a_snapshot_steers_the_terminal(cli: Cli, store: Path) -> None:
    assert cli("note", "many-0000", "\x1b[31mred\x1b[0m\x07").status == 0
    assert " [31mred [0m " in seen("list")


def test_what_is_long_goes_through_the_pager_on_a_terminal(cli: Cli, store: Path, tmp_path: Path) -> None:
    pager = tmp_path / "pager"
    pager.write_text("#!/bin/sh\necho LESS=$LESS\nsed 's/^/paged: /'\n")
    pager.chmod(0o755)
    names = ["many-0002", "many-0001", "many-0000"]
    first, *lines = seen("log", PAGER=str(pager)).splitlines()
    assert first == "LESS=FRX"
    assert [line.split("  ")[0] for line in lines] == [f"paged: * {name}" for name in names]
    for told in (
        seen("log", "--no-pager", PAGER=str(pager)),
        seen("log", PAGER="/nowhere/pager"),
        cli("log", PAGER=str(pager)).out,
    ):
        assert [line.split("  ")[0] for line in told.splitlines()] == [f"* {name}" for name in names]


def test_the_newest_are_chosen(cli: Cli, store: Path) -> None:
    newest = cli("log", "-n", "2")
    # There is more below.
    assert [line.split("  ")[0] for line in newest.out.splitlines()] == ["* many-0002", "* many-0001", ":"]
    assert [one["name"] for one in cli("log", "--last", "1", "--json").json["snapshots"]] == ["many-0002"]
    assert cli("log", "-n", "3").out == cli("log").out
    assert [line.split()[0] for line in cli("list", "-n", "1").out.splitlines()] == ["name", "many-0002"]


def test_a_history_says_once_whose_it_is() -> None:
    said = {"message": "", "size": 1, "stored": 1, "parent": None, "kernel_id": "k", "execution_count": None}
    said = {**said, "created": "2026-11-22T20:31:07Z", "gpu_memory": 0, "frozen_seconds": 0.1}
    one = from_json(Summary, {**said, "name": "a", "id": "1", "notebook": "", "job": "train"})
    title, line = Histories([one], {"1": ["job train"]}).text().splitlines()
    assert (title, line.split("  ")[0]) == ("job train:", "* a (here)")
    assert "train" not in line
    of_notebook = replace(one, job="", notebook="x/b.ipynb")
    (line,) = Histories([of_notebook], {"1": ["b.ipynb", "other.ipynb"]}).text().splitlines()
    assert line.startswith("* a (here: b.ipynb, other.ipynb)  ")
