"""What reads the lines of ``%gpuckpt``, and its help: both by the operations' descriptions.

The descriptions are imported when they are needed, not at a kernel's start, which would take longer: many kernels are
never asked for anything.
"""

from __future__ import annotations

import argparse
import textwrap
from typing import Any

from . import chosen
from .words import Commands, Parser

__all__ = ["help_of", "help_of_all", "parser_of_lines"]

_PLAIN = {
    "panel": "show the snapshots with buttons, in the cell",
    "status": "tell about this kernel, and the snapshot that it came from or went to",
    "help": "show this text, or all about a command",
}
"""Commands that ask a keeper for nothing of their own."""
_KERNEL = "this kernel"
_SAID_FROM, _GIVEN_UPTO = 48, 28
"""The columns in which it is said what a command does, and what an argument is."""
_WIDTH = 110
_ENDS = """\
`%gpuckpt help COMMAND` says all about one of them.

`r = %gpuckpt save x` returns twice, like fork: r.restored is False now, and True after a restore of x.
`f = %gpuckpt fork -n 3` returns in each: f.copy is None here, and 0, 1, 2 in the copies.
Functions of your own around a save: jupyter_gpuckpt.before_save(fn), jupyter_gpuckpt.after_restore(fn)."""


class _Parser(Parser):
    """A parser whose help is that of ``%gpuckpt help``."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, add_help=False)

    def usage_text(self) -> str:
        command = self.prog.partition(" ")[2]
        return f"Type it as follows.\n{help_of(command)}" if command else "`%gpuckpt help` lists all commands."


def parser_of_lines() -> tuple[Parser, Commands]:
    """Return what reads a line, and its commands."""
    from ..operations.command_line import add_arguments, add_store_option, commands
    from ..operations.description import Offered

    parser: Parser = _Parser(prog="%gpuckpt")
    typed = parser.add_subparsers(dest="command", parser_class=_Parser)
    for command, kind in commands():
        added = typed.add_parser(command.name, help=command.summary.format(kernel=_KERNEL))
        added.set_defaults(kind=kind)
        if command.name == "list":
            chosen.add_options(added)
        elif command.name == "log":
            chosen.add_last(added)
        add_arguments(added, kind, Offered.CELL)
        if command.name == "keep":
            chosen.add_new_name(added)
        if command.name == "save":
            added.add_argument("--wait", action="store_true", help="wait until it is on the disk")
        add_store_option(added, kind)
    for name, summary in _PLAIN.items():
        typed.add_parser(name, help=summary)
    typed.choices["help"].add_argument("about", metavar="COMMAND", nargs="?")
    return parser, typed


def help_of_all() -> str:
    """Return a line for each command, and what else there is to know."""
    from ..operations.command_line import syntax

    _, typed = parser_of_lines()
    rows = []
    for name, summary in _summaries(typed).items():
        parser = typed.choices[name]
        options = {option for action in parser._actions for option in action.option_strings[:1] if not action.required}
        more = ["..."] if options - {"--store"} else []
        rows.append(f"{' '.join(['%gpuckpt', name, *syntax(parser, without=options), *more]):<{_SAID_FROM}}{summary}")
    return "\n".join([*rows, "", _ENDS])


def help_of(command: str) -> str:
    """Return how a command is typed, what it does, and all that can be given; nothing of what is none."""
    from ..operations.command_line import syntax

    _, typed = parser_of_lines()
    if command not in typed.choices:
        return ""
    parser = typed.choices[command]
    # What stands together stays on a line.
    pieces = [piece.replace(" ", "\0") for piece in syntax(parser)]
    line = textwrap.fill(" ".join(["%gpuckpt", command, *pieces]), _WIDTH, subsequent_indent=" " * 8)
    rows = [line.replace("\0", " "), f"    {_summaries(typed)[command]}"]
    for action in parser._actions:
        if action.help:
            given = " ".join([", ".join(action.option_strings), *_value(action)]).strip()
            rows.append(f"    {given:<{_GIVEN_UPTO - 4}}{action.help}")
    return "\n".join(rows)


def _value(action: argparse.Action) -> list[str]:
    return [str(action.metavar or "|".join(action.choices or ()) or action.dest.upper())] if action.nargs != 0 else []


def _summaries(typed: Commands) -> dict[str, str]:
    return {one.dest: one.help or "" for one in typed._choices_actions}
