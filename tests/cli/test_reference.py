"""What is written about the commands is what the parsers know."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from jupyter_gpuckpt.cli.parsers import program

_ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    """Return what `python docs/command_reference.py` writes by."""
    return runpy.run_path(str(_ROOT / "docs" / "command_reference.py"))


def test_the_page_and_the_manual_are_those_of_the_parsers(made: dict[str, Any]) -> None:
    page = made["PAGE"].read_text()
    assert made["renewed"](page) == page, "run `python docs/command_reference.py`"
    assert made["MANUAL"].read_text() == made["manual"](), "run `python docs/command_reference.py`"


def test_the_manual_names_every_command_and_option_and_the_page_every_command() -> None:
    manual = (_ROOT / "docs" / "jupyter-gpuckpt.1").read_text().replace("\\-", "-")
    page = (_ROOT / "docs" / "command-line.md").read_text()
    of_commands = dict(re.findall(r"^\.TP\n\\fB([a-z]+)\\fR(.*?)(?=^\.TP\n\\fB[a-z]+\\fR|^\.SH )", manual, re.M | re.S))
    for name, parser in program().commands.choices.items():
        assert f"\njupyter gpuckpt {name}" in page
        for action in parser._actions:
            for option in {*action.option_strings} - {"-h", "--help", "--json", "--debug"}:
                assert re.search(rf"{option}\b", of_commands[name]), (name, option)
    for status in ("0  done", "3  there is no kernel", "130  interrupted"):
        assert status in manual


def test_the_page_says_what_json_each_command_prints() -> None:
    page = (_ROOT / "docs" / "command-line.md").read_text()
    rows = re.findall(r"^\| (`[a-z`, ]+) \| .*$", page.partition("## JSON")[2], re.M)
    told = {name for row in rows for name in re.findall(r"`([a-z]+)`", row)}
    assert {*program().commands.choices} - told == set()


def test_a_manual_page_is_shown_without_a_warning() -> None:
    if shutil.which("groff") is None:
        pytest.skip("there is no groff here")
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", _ROOT / "docs" / "jupyter-gpuckpt.1"], capture_output=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, b"")
