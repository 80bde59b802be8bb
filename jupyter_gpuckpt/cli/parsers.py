"""All that can be typed after `jupyter gpuckpt`: what reads it, in groups as the help shows them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from .. import __version__
from ..kernel.words import Commands, Parser
from ..operations.command_line import add_store_option
from ..operations.requests import OfSnapshot
from .adding import STATUSES, Group
from .kernel_parsers import add_job_commands, add_kernel_commands, add_memory_commands
from .machine_parsers import add_help_commands, add_machine_commands
from .store_parsers import add_snapshot_commands, add_store_commands
from .transfer_parsers import add_transfer_commands

__all__ = ["Program", "program"]

_ABOUT = """\
Save a live notebook kernel (its variables, threads, open files and GPU memory) under
a name, and put it back later. In a notebook, `%gpuckpt help` says how to do the same.

A kernel can be saved when it was started as "Python 3 (gpuckpt)" (--kernel python3-gpuckpt)
on a machine where `jupyter gpuckpt doctor` finds no problem.
"""

_EXAMPLES = """\
`jupyter gpuckpt help COMMAND` says all about one of them.

examples:
  jupyter gpuckpt kernels                        which kernels are running
  jupyter gpuckpt save train.ipynb epoch-3       save the kernel of that notebook; it runs on
  jupyter gpuckpt list                           what has been saved
  jupyter gpuckpt restore train.ipynb epoch-3    put the notebook's kernel back
  jupyter gpuckpt fork train.ipynb -n 2          two copies of the notebook's kernel, beside it
  jupyter gpuckpt exec train -- python train.py  a job, which can be saved as a kernel can

KERNEL is a kernel's id or the beginning of it, its notebook's name or path, its connection
file, a job's name, or a pid.
"""

_GROUPS = {
    "save and restore": add_kernel_commands,
    "snapshots": add_snapshot_commands,
    "GPU and host memory": add_memory_commands,
    "jobs": add_job_commands,
    "the store": add_store_commands,
    "other machines and people": add_transfer_commands,
    "this machine": add_machine_commands,
    "help": add_help_commands,
}
_OF_A_STORE = ("check", "export", "gc", "push", "repair")
"""What can be done in a terminal alone with the store of a folder that something was saved --to."""


@dataclass(frozen=True)
class Program:
    """What reads the words, its commands, and the groups that these are in."""

    parser: Parser
    commands: Commands
    groups: Sequence[Group]


class _Grouped(Parser):
    """The parser whose help shows the commands in groups."""

    groups: Sequence[Group] = ()

    def format_help(self) -> str:
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        options = [action for action in self._actions if action.option_strings]
        commands = {one.dest: one for action in self._actions for one in getattr(action, "_choices_actions", ())}
        of_groups = [(group.title, [commands[name] for name in group.names]) for group in self.groups]
        for title, actions in (*of_groups, ("options", options)):
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()


def program() -> Program:
    """Return what reads a command line."""
    parser = _Grouped(
        prog="jupyter gpuckpt",
        description=_ABOUT,
        epilog=f"{_EXAMPLES}\n{STATUSES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"jupyter_gpuckpt {__version__}")
    parser.add_argument("--debug", action="store_true", help="print the traceback of an error, too")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    groups = []
    for title, add in _GROUPS.items():
        group = Group(title, commands)
        add(group)
        groups.append(group)
    parser.groups = groups
    for name in _OF_A_STORE:
        add_store_option(commands.choices[name], OfSnapshot)
    for added in commands.choices.values():
        added.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="with an error's traceback")
    return Program(parser, commands, groups)
