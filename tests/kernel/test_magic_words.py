"""What ``%gpuckpt`` says of a line that is no command of its own, without a kernel that it could do something to."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from jupyter_gpuckpt.cli.parsers import program
from jupyter_gpuckpt.errors import GpuckptError, Unavailable
from jupyter_gpuckpt.kernel.magic_parser import help_of, help_of_all
from jupyter_gpuckpt.kernel.magics import Gpuckpt
from jupyter_gpuckpt.kernel.words import Usage


def refused(line: str) -> GpuckptError:
    with pytest.raises(GpuckptError) as caught:
        Gpuckpt(None, None)(line)
    return caught.value


def test_every_command_of_the_terminal_is_one_here_or_said_to_be_the_terminals() -> None:
    for name in set(program().commands.choices) - {"help"}:
        error = refused(f"{name} --nonsense")
        assert isinstance(error, Usage)
        assert error.what in (
            f"`%gpuckpt {name}` cannot be run like this.",
            f"%gpuckpt has no {name}: it is a terminal command.",
        )


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("save", "required: NAME"),
        ("save a b", "arguments: b"),
        ("save a --nonsense", "arguments: --nonsense"),
        ("save a --rep", "arguments: --rep"),
        ("fork -n 0", "'0' is not a number of at least 1"),
        ("fork -n two", "'two' is not a number of at least 1"),
        ("restore --gpu one", "'one' is not a GPU number"),
        ("autosleep 3x", "'3x' is neither a time such as"),
        ("awake maybe", "'maybe'"),
        ("mv a", "required: NEW"),
    ],
)
def test_a_line_that_is_wrong_is_told_what_is_wrong_and_how_it_is_typed(line: str, why: str) -> None:
    error = refused(line)
    name = line.split()[0]
    assert error.what == f"`%gpuckpt {name}` cannot be run like this."
    assert why in error.why
    first, typed = error.then.split("\n", 1)
    assert first == "Type it as follows."
    assert typed.startswith(f"%gpuckpt {name} ")
    assert typed == help_of(name)
    # Nothing of another command.
    assert typed.count("%gpuckpt") == 1


def test_what_cannot_be_run_in_a_cell_either_is_not_advised() -> None:
    assert "`!jupyter gpuckpt push …` in a cell" in refused("push it there").then
    assert "cell" not in refused("exec train -- true").then


def test_a_misspelt_command_is_told_what_may_be_meant() -> None:
    error = refused("resotre before")
    assert error.what == "%gpuckpt has no command 'resotre'."
    assert "Did you mean `restore`?" in error.then
    assert "Did you mean" not in refused("zzz").then
    assert "Did you mean `rm`?" in refused("delete before").then, "as other programs call it"
    assert "(did you mean `--message`?)" in refused("save before --mesage x").why


@pytest.mark.parametrize("line", ["", "help", "-h", "--help"])
def test_help_is_printed_for_who_asks(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    Gpuckpt(None, None)(line)
    assert capsys.readouterr().out == help_of_all() + "\n"


@pytest.mark.parametrize("line", ["unpin --help", "unpin x -h"])
def test_help_of_one_command_is_about_that_one(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    Gpuckpt(None, None)(line)
    assert capsys.readouterr().out.startswith("%gpuckpt unpin NAME [--store FOLDER]\n")


def test_help_and_a_command_is_the_help_of_that_one(capsys: pytest.CaptureFixture[str]) -> None:
    Gpuckpt(None, None)("help unpin")
    assert capsys.readouterr().out.startswith("%gpuckpt unpin NAME [--store FOLDER]\n")
    assert "Did you mean `restore`?" in refused("help resotre").then


def completed(line: str) -> list[str]:
    return Gpuckpt(None, None).complete(SimpleNamespace(text_until_cursor=line, symbol=line.split(" ")[-1]))


def test_commands_options_and_states_are_completed() -> None:
    assert {"save", "restore", "unpin"} <= set(completed("%gpuckpt "))
    assert completed("%gpuckpt save x --") == ["--message", "--replace", "--with-files", "--wait", "--to"]
    assert completed("r = %gpuckpt save x --replace --w") == ["--with-files", "--wait"]
    assert completed("%gpuckpt save x --to ") == [], "those are folders, which IPython completes"
    assert completed("%gpuckpt fork --r") == ["--reseed"]
    assert completed("%gpuckpt awake o") == ["on", "off"]
    assert completed("%gpuckpt nonsense ") == []


def test_the_help_of_every_command_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    for name in completed("%gpuckpt "):
        Gpuckpt(None, None)(f"{name} --help")
        assert "%gpuckpt" in capsys.readouterr().out, name


def test_a_right_line_in_a_kernel_that_was_not_started_by_us_is_told_which_kernel_to_choose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GPUCKPT_UNAVAILABLE", raising=False)
    error = refused("save a")
    assert isinstance(error, Unavailable)
    assert "Python 3 (gpuckpt)" in error.then


def test_a_kernel_that_found_no_criu_when_it_started_is_to_be_restarted_once_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = Unavailable("No CRIU was found.", "It is not installed.", "Run `jupyter gpuckpt setup`.")
    monkeypatch.setenv("GPUCKPT_UNAVAILABLE", json.dumps(found.as_dict()))
    error = refused("list")
    assert isinstance(error, Unavailable)
    assert error.then == "Run `jupyter gpuckpt setup`. Then restart this kernel."
