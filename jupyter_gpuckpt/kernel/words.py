"""The words of a command: how ``%gpuckpt`` and ``jupyter gpuckpt`` take them apart, and what they say of wrong ones."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Collection, Sequence
from typing import Any, NoReturn, TypeAlias

from ..errors import GpuckptError

__all__ = ["Commands", "Parser", "Usage"]


class Usage(GpuckptError):
    """The words are no command."""


class Parser(argparse.ArgumentParser):
    """A parser that reports wrong words as all other errors are reported, and takes options only in full."""

    def __init__(self, **kwargs: Any) -> None:
        # A beginning would change its meaning with the next option.
        super().__init__(**kwargs, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise a `Usage` that says what is wrong with the words."""
        raise Usage(
            f"`{self.prog}` cannot be run like this.", f"{message[:1].upper()}{message[1:]}.", self.usage_text()
        )

    def usage_text(self) -> str:
        """Return how the command is typed."""
        usage = " ".join(self.format_usage().split()).removeprefix("usage: ")
        return f"Usage: {usage} (--help says more)"

    @property
    def options(self) -> list[str]:
        """Its options, in full."""
        return [option for action in self._actions for option in action.option_strings if option.startswith("--")]

    def parse(self, words: Sequence[str], commands: Commands) -> argparse.Namespace:
        """Return what the words ask for; `commands` are those among which the first of them chooses.

        Raises
        ------
        Usage : they are no command.
        """
        first = next((word for word in words if not word.startswith("-")), None)
        # Python's own message of an argument would show how the whole program is typed, not this command.
        typed: Parser = self if first is None else self.of(first, commands)
        args, more = self.parse_known_args(words)
        if more:
            typed.error(f"unrecognized arguments: {' '.join(more)}{typed.meant_by(more[0])}")
        return args

    def of(self, command: str, commands: Commands) -> Parser:
        """Return what takes the words of this command apart.

        Raises
        ------
        Usage : there is no such command.
        """
        found: Parser | None = commands.choices.get(command)
        if found is None:
            raise _unknown(self.prog, command, commands.choices)
        return found

    def meant_by(self, word: str) -> str:
        """Return the option that may be meant by a word that is none, as a part of a sentence; empty where none is."""
        alike = difflib.get_close_matches(word, self.options, n=1) if word.startswith("--") else []
        return f" (did you mean `{alike[0]}`?)" if alike else ""


Commands: TypeAlias = "argparse._SubParsersAction[Any]"
"""The commands of a program, as `add_subparsers` gives them."""


_ELSEWHERE = {
    "delete": "rm",
    "remove": "rm",
    "del": "rm",
    "rename": "mv",
    "ls": "list",
    "snapshots": "list",
    "load": "restore",
    "checkout": "restore",
    "rollback": "restore",
    "resume": "restore",
    "checkpoint": "save",
    "snapshot": "save",
    "commit": "save",
    "backup": "save",
    "kill": "stop",
    "shutdown": "stop",
    "end": "stop",
    "copy": "fork",
    "clone": "fork",
    "cp": "fork",
    "history": "log",
    "tree": "log",
    "prune": "keep",
    "start": "exec",
    "run": "exec",
    "jobs": "ps",
    "info": "show",
    "inspect": "show",
    "install": "setup",
    "fsck": "check",
    "verify": "check",
    "send": "push",
    "upload": "push",
    "fetch": "pull",
    "download": "pull",
    "suspend": "hibernate",
}
"""What other programs call a command of ours."""


def _unknown(program: str, word: str, commands: Collection[str]) -> Usage:
    """Return the error of a word that is none of these commands."""
    alike = [name for name in (_ELSEWHERE.get(word, ""),) if name in commands]
    alike = alike or difflib.get_close_matches(word, commands, n=2)
    meant = f"Did you mean `{'` or `'.join(alike)}`? " if alike else ""
    return Usage(f"{program} has no command {word!r}.", "", f"{meant}`{program} --help` shows all of them.")
