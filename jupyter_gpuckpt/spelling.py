"""Commands in texts for people: named where the text is written, spelled where it is shown.

Who writes an error does not know whether it will be read in a cell or in a terminal. So it writes the command between
backquotes as ``gpuckpt rm NAME``, with ``@`` for the kernel that the text is about: ``gpuckpt save @ NAME``. Whoever
shows the text has each spelled as it can be typed there.
"""

from __future__ import annotations

import re
from collections.abc import Callable

__all__ = ["Spell", "in_a_cell", "in_a_terminal"]

Spell = Callable[[str], str]

_COMMAND = re.compile(r"`gpuckpt ([a-z]+)( @)?")
_OF_THE_STORE = frozenset({"diff", "keep", "list", "log", "mv", "note", "pin", "rm", "show", "tag", "unpin"})
"""The magic's commands that are about no kernel. All others of its are about its own, which is the `@`."""


def in_a_cell(text: str) -> str:
    """Return a text with its commands as they are typed in a cell of the kernel that it is about."""

    def spelled(command: re.Match[str]) -> str:
        has_magic = command[2] or command[1] in _OF_THE_STORE
        return f"`%gpuckpt {command[1]}" if has_magic else f"`!jupyter gpuckpt {command[1]}"

    return _COMMAND.sub(spelled, text)


def in_a_terminal(text: str, kernel: str = "KERNEL") -> str:
    """Return a text with its commands as they are typed in a terminal; `kernel` is what the one it is about is called.

    It has to be quoted for a shell.
    """
    return _COMMAND.sub(lambda command: f"`jupyter gpuckpt {command[1]}{f' {kernel}' if command[2] else ''}", text)
