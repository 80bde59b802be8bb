"""What holds for every command: usage, exit statuses, and where output goes."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
from pathlib import Path

import pytest
from command_line import PROGRAM, Cli

_COMMANDS = ("list", "show", "save", "restore", "hibernate", "rm", "kernels", "stop", "doctor", "setup")


def test_help_names_every_command_and_exit_status(cli: Cli) -> None:
    told = cli("--help")
    assert told.status == 0
    for word in (*_COMMANDS, "exit status", "130"):
        assert word in told.out


@pytest.mark.parametrize("command", _COMMANDS)
def test_every_command_has_help_and_json(cli: Cli, command: str) -> None:
    told = cli(command, "--help")
    assert told.status == 0
    assert "--json" in told.out


def test_version(cli: Cli) -> None:
    assert cli("--version").out.split() == ["jupyter_gpuckpt", importlib.metadata.version("jupyter_gpuckpt")]


def test_jupyter_finds_the_command() -> None:
    jupyter = str(Path(PROGRAM).with_name("jupyter"))
    done = subprocess.run([jupyter, "gpuckpt", "list"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_command_at_all_shows_the_help(cli: Cli) -> None:
    told = cli()
    assert (told.status, told.out) == (2, "")
    assert "usage: jupyter gpuckpt" in told.err


@pytest.mark.parametrize(
    "words", [["show"], ["save", "kernel"], ["list", "--nonsense"], ["list", "--js"], ["rm"], ["fork", "x", "-n", "0"]]
)
def test_wrong_usage(cli: Cli, words: list[str]) -> None:
    told = cli(*words)
    assert (told.status, told.out) == (2, "")
    # How that command is typed, not just any.
    assert f"Usage: jupyter gpuckpt {words[0]}" in told.err
    assert cli(*words, "--json").json["error"]["kind"] == "Usage"


def test_exec_says_where_the_command_stands(cli: Cli) -> None:
    typed = "jupyter gpuckpt exec [-h] [--json] [--replace] [--debug] NAME -- COMMAND [ARGUMENT ...]"
    assert f"usage: {typed}\n" in cli("exec", "--help").out
    assert f"Usage: {typed}" in cli("exec").err


def test_a_misspelt_command_is_told_what_may_be_meant(cli: Cli) -> None:
    told = cli("lisst")
    assert (told.status, told.out) == (2, "")
    assert "has no command 'lisst'" in told.err
    assert "Did you mean `list`?" in told.err
    assert cli("lisst", "--json").json["error"]["kind"] == "Usage"


def test_a_reader_that_has_read_enough_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as closed:
        done = subprocess.run([PROGRAM, "--help"], stdout=closed, stderr=subprocess.PIPE, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        done = subprocess.run([PROGRAM, "list"], stdout=closed, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("words", [["list"], ["list", "--json"], ["show", "nothing", "--json"]])
def test_output_that_cannot_be_written_is_told(words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([PROGRAM, *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode != 0
    assert "Next: " in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_a_traceback_is_shown_only_to_who_asks(cli: Cli) -> None:
    assert "Traceback" not in cli("show", "nothing").err
    done = subprocess.run([PROGRAM, "show", "nothing", "--debug"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    assert "Traceback" in done.stderr
