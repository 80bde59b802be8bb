"""Write what the command line's parsers know: the list in `command-line.md`, and the manual page."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from jupyter_gpuckpt import __version__
from jupyter_gpuckpt.cli.parsers import program
from jupyter_gpuckpt.operations import command_line

DOCS = Path(__file__).parent
PAGE, MANUAL = DOCS / "command-line.md", DOCS / "jupyter-gpuckpt.1"
BEGIN, END = "<!-- commands: docs/command_reference.py writes from here -->\n", "<!-- to here -->\n"
_COMMON = {"-h", "--json", "--debug", "--store"}
"""Options that are described once."""
_WIDTH, _SUMMARY = 110, 4


def arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return what a command takes, but for the options that all have."""
    return command_line.arguments(parser, without=_COMMON)


def syntax(name: str, parser: argparse.ArgumentParser) -> list[str]:
    """Return how a command is typed, in pieces that stay together."""
    if parser.usage:
        return [name, parser.usage.partition("[--json] ")[2].replace("[--debug] ", "")]
    return [name, *command_line.syntax(parser, without=_COMMON)]


def listing() -> str:
    """Return all commands in their groups, for the page."""
    here = program()
    blocks = []
    for group in here.groups:
        lines = [f"# {group.title}"]
        for name in group.names:
            lines += _wrapped(["jupyter gpuckpt", *syntax(name, here.commands.choices[name])])
            lines.append(" " * _SUMMARY + _summaries()[name])
        blocks.append("\n".join(lines))
    return "```\n" + "\n\n".join(blocks) + "\n```\n"


def _wrapped(pieces: list[str]) -> Iterator[str]:
    line = ""
    for piece in pieces:
        if len(line) + len(piece) >= _WIDTH:
            yield line
            line = " " * 2 * _SUMMARY + piece
        else:
            line = f"{line} {piece}" if line else piece
    yield line


def _summaries() -> dict[str, str]:
    return {one.dest: one.help or "" for one in program().commands._choices_actions}


def renewed(text: str) -> str:
    """Return the page with the list between its marks as it has to be."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{listing()}\n{END}{after}"


def manual() -> str:
    """Return the manual page, in roff."""
    here = program()
    about, examples = str(here.parser.description), str(here.parser.epilog)
    shown, _, statuses = examples.partition("exit status:\n")
    lines = [
        f'.TH JUPYTER\\-GPUCKPT 1 "" "jupyter_gpuckpt {__version__}" "User Commands"',
        ".nh",
        ".ad l",
        ".SH NAME",
        r"jupyter\-gpuckpt \- save live GPU notebook kernels under a name, and restore them",
        ".SH SYNOPSIS",
        r".B jupyter gpuckpt",
        r"[\-\-version] [\-\-debug] \fICOMMAND\fR [\fIARGUMENT\fR ...]",
        ".SH DESCRIPTION",
        *_text(about),
        ".SH COMMANDS",
        *_text(
            "Every command takes --help, --json (print the result as JSON) and --debug (with an error's traceback)."
        ),
    ]
    for group in here.groups:
        lines.append(f'.SS "{_escaped(group.title)}"')
        for name in group.names:
            lines += _of_command(name, here.commands.choices[name])
    lines += [".SH EXAMPLES", ".nf", *_verbatim(shown.partition("examples:\n")[2].partition("\n\n")[0]), ".fi"]
    lines += [".SH EXIT STATUS", ".nf", *_verbatim(statuses.partition("\n\n")[0]), ".fi"]
    lines += [".SH ENVIRONMENT"]
    for variable, what in _ENVIRONMENT.items():
        lines += [".TP", f".B {variable}", *_text(what)]
    lines += [".SH SEE ALSO", r".BR jupyter (1),", r".BR criu (8),", r".BR less (1)"]
    return "\n".join(lines) + "\n"


_ENVIRONMENT = {
    "GPUCKPT_STORE": "The folder with the snapshots.",
    "JUPYTER_RUNTIME_DIR": "The folder with what belongs to running kernels.",
    "NO_COLOR": "Where it is set, nothing is coloured.",
    "PAGER": "What shows long output on a terminal; less where it is not set, cat for none.",
}


def _of_command(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    typed = " ".join(syntax(name, parser)[1:])
    yield from (".TP", rf"\fB{_escaped(name)}\fR {_escaped(typed)}".rstrip(), *_text(str(parser.description)))
    taken = [
        action
        for action in parser._actions
        if action.help and not {"-h", "--json", "--debug"} & {*action.option_strings}
    ]
    if taken:
        yield ".RS"
        for action in taken:
            names = ", ".join(action.option_strings) or command_line.typed(action, optional=False)
            value = f" {action.metavar}" if action.option_strings and action.metavar else ""
            yield from (".TP", rf"\fB{_escaped(names)}\fR{_escaped(value)}", *_text(str(action.help)))
        yield ".RE"


def _text(text: str) -> Iterator[str]:
    """Yield a text's lines; a paragraph ends at an empty one."""
    for line in text.strip().splitlines():
        yield _line(line.strip()) if line.strip() else ".PP"


def _verbatim(text: str) -> Iterator[str]:
    return map(_line, text.strip("\n").splitlines())


def _line(text: str) -> str:
    """Return a line of text, which might begin as a request of roff's does."""
    escaped = _escaped(text)
    return rf"\&{escaped}" if escaped[:1] in (".", "'") else escaped


def _escaped(text: str) -> str:
    return text.replace("\\", r"\e").replace("-", r"\-")


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
    MANUAL.write_text(manual())
