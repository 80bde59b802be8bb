"""What holds for every command: usage, exit statuses, and where output goes."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import subprocess
from pathlib import Path

import pytest
from command_line import PROGRAM, Cli

from jupyter_gpuckpt.cli.parsers import program

_COMMANDS = sorted(program().commands.choices)


def test_help_has_every_command_once_on_a_line_of_its_group_and_the_exit_statuses(cli: Cli) -> None:
    told = cli("--help", COLUMNS="80")
    assert told.status == 0
    of_groups = [text.splitlines() for text in told.out.split("\n\n")]
    for group in program().groups:
        (lines,) = (lines[1:] for lines in of_groups if lines[0] == f"{group.title}:")
        assert [line.split()[0] for line in lines] == group.names
    assert sorted(name for group in program().groups for name in group.names) == _COMMANDS
    assert "exit status" in told.out
    assert "130" in told.out
    assert cli("help").out == cli("--help").out


@pytest.mark.parametrize("command", _COMMANDS)
def test_every_command_has_help_and_json_and_something_that_does_it(command: str) -> None:
    about = program().commands.choices[command]
    assert "--json" in about.format_help()
    module, name = about.get_default("does").split(".")
    assert callable(getattr(importlib.import_module(f"jupyter_gpuckpt.cli.{module}"), name))


def test_the_help_of_a_command(cli: Cli) -> None:
    told = cli("fork", "--help")
    assert (told.status, told.err) == (0, "")
    assert "how many copies" in told.out
    assert cli("help", "fork").out == told.out
    assert "Did you mean `restore` or" in cli("help", "resotre").err


def test_version(cli: Cli) -> None:
    version = importlib.metadata.version("jupyter_gpuckpt")
    assert cli("--version").out.split() == cli("version").out.split() == ["jupyter_gpuckpt", version]
    assert cli("version", "--json").json == {"version": version}


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
    assert "Did you mean `rm`?" in cli("delete", "x").err, "as other programs call it"
    assert "(did you mean `--message`?)" in cli("save", "a", "b", "--mesage", "x").err


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
