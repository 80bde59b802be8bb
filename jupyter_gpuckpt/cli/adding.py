"""How the commands are added, in groups: the words of each, and which function does it, imported when it runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from typing import Any

from ..kernel.words import Commands
from ..operations.command_line import add_arguments, add_store_option
from ..operations.description import Offered
from ..operations.requests import Auto, AutoSleep, Awake, Long, Request

__all__ = ["KERNEL", "STATUSES", "Group", "run"]

KERNEL = "the kernel: its id or the beginning of it, its notebook, its connection file, or its pid; or a job's name"
_A_KERNEL = "a running kernel"
STATUSES = """\
exit status:
    0  done
    1  it failed or was refused; the message says why and what to do
    2  the command line is wrong
    3  there is no kernel or no snapshot of that name
    4  this machine or this kernel can be neither saved nor restored
  130  interrupted (Ctrl-C)

With --json a command prints one JSON document; an error is {"error": {"kind", "what", "why", "then", "data"}}.
"""


class Group:
    """Commands that stand together in the help, under a title."""

    def __init__(self, title: str, commands: Commands) -> None:
        self.title = title
        self.names: list[str] = []
        self._commands = commands

    def add(self, name: str, does: str, summary: str, description: str = "") -> argparse.ArgumentParser:
        """Add a command; `does` names its function, after the module of this package that has it."""
        added: argparse.ArgumentParser = self._commands.add_parser(
            name,
            help=summary,
            description=description or f"{summary[0].upper()}{summary[1:]}.",
            epilog=STATUSES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.add_argument("--json", action="store_true", help="print the result as JSON")
        added.set_defaults(does=does)
        self.names.append(name)
        return added

    def add_request(
        self, kind: type[Request[Any]], does: str, name: str = "", *, needs_kernel: bool = True
    ) -> argparse.ArgumentParser:
        """Add a command that asks for something which is described; `name` says which, where several ask for it.

        Where it is about a kernel, the kernel is its first argument.
        """
        (command,) = (one for one in kind.commands if name in ("", one.name))
        added = self.add(
            command.name, does, *(text.format(kernel=_A_KERNEL) for text in (command.summary, command.description))
        )
        if issubclass(kind, (Long, Awake, AutoSleep, Auto)):
            added.add_argument("kernel", metavar="KERNEL", nargs=None if needs_kernel else "?", help=KERNEL)
        add_arguments(added, kind, Offered.TERMINAL)
        add_store_option(added, kind)
        added.set_defaults(kind=kind)
        return added


def run(args: argparse.Namespace) -> int:
    """Do what the words ask for: most commands need only the store, and none should wait for what others import."""
    module, _, name = args.does.partition(".")
    do: Callable[[argparse.Namespace], int] = getattr(import_module(f"{__package__}.{module}"), name)
    return do(args)
