"""Commands in texts: those who write an error do not know where it is read, so whoever shows it spells them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import jupyter_gpuckpt
from jupyter_gpuckpt.cli.parsers import program
from jupyter_gpuckpt.errors import NameTaken
from jupyter_gpuckpt.kernel.magic_parser import parser_of_lines as of_the_magic
from jupyter_gpuckpt.spelling import in_a_cell, in_a_terminal

_PACKAGE = Path(jupyter_gpuckpt.__file__).parent
_BELOW = ("broker", "client", "freeze", "keeper", "linux", "machine", "server", "snapshots", "store")
"""What does not know whether it is read in a cell or in a terminal."""


def _texts(path: Path) -> Iterator[str]:
    """Yield the texts of a module as it would show them, but for its docstrings."""
    tree = ast.parse(path.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings | parts:
            yield node.value


_ALL = [(path, text) for folder in _BELOW for path in (_PACKAGE / folder).rglob("*.py") for text in _texts(path)]


def test_nobody_who_does_not_know_the_reader_spells_a_command() -> None:
    # But for what would end with the kernel, were it started in a cell.
    spelled = re.compile(r"%gpuckpt|(?<!sudo )(?<!In a terminal, `)jupyter gpuckpt")
    assert [(path.name, text) for path, text in _ALL if spelled.search(text)] == []


@pytest.mark.parametrize("text", sorted({text for _, text in _ALL if "`gpuckpt" in text}))
def test_a_hint_can_be_typed_in_a_terminal_and_in_a_cell(text: str) -> None:
    line, magic = program().commands.choices, of_the_magic()[1].choices
    found = re.findall(r"`gpuckpt ([^`]*)", text)
    assert len(found) == text.count("`gpuckpt"), text
    for command, *words in map(str.split, found):
        assert words[:1] != ["@"] or "KERNEL" in line[command].format_usage()
    for command in re.findall(r"`%gpuckpt (\w+)", in_a_cell(text)):
        assert command in magic


def test_a_command_is_spelled_for_who_reads_it() -> None:
    text = "Use `gpuckpt restore @ --from x`, `gpuckpt rm x` or `gpuckpt stop train`."
    assert in_a_cell(text) == "Use `%gpuckpt restore --from x`, `%gpuckpt rm x` or `!jupyter gpuckpt stop train`."
    assert in_a_terminal(text, "'my b.ipynb'") == (
        "Use `jupyter gpuckpt restore 'my b.ipynb' --from x`, `jupyter gpuckpt rm x` or `jupyter gpuckpt stop train`."
    )
    assert in_a_terminal(in_a_cell(text)) == in_a_cell(text), "what is spelled stays as it is"


def test_an_error_that_nobody_spelled_reads_as_in_a_terminal() -> None:
    error = NameTaken("No.", "", "Rename it: `gpuckpt mv a b`.")
    assert str(error) == "No.\nNext: Rename it: `jupyter gpuckpt mv a b`."
    assert str(error.spelled(in_a_cell)) == "No.\nNext: Rename it: `%gpuckpt mv a b`."
