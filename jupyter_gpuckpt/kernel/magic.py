"""``%gpuckpt`` in a shell, loaded when it is first used: many kernels are never asked for anything."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .agent import Agent
    from .magics import Gpuckpt

__all__ = ["register"]

_ASSIGNED = re.compile(r"\s*[^%=]+=\s*%gpuckpt\s")
"""The beginning of a line that keeps what the magic returns."""


class _Magic:
    """The magic of one shell; without an agent it says why there is none and what to do."""

    def __init__(self, shell: Any, agent: Agent | None) -> None:
        self._shell, self._agent = shell, agent

    @functools.cached_property
    def _loaded(self) -> Gpuckpt:
        from .magics import Gpuckpt

        return Gpuckpt(self._shell, self._agent)

    def __call__(self, line: str) -> Any:
        return self._loaded(line)

    def complete(self, _: Any, event: Any) -> list[str]:
        """Complete commands, snapshot names and options (called by IPython with the line so far)."""
        return self._loaded.complete(event)


def register(shell: Any, agent: Agent | None = None) -> None:
    """Offer ``%gpuckpt`` and its completion in an IPython shell."""
    if agent is None and "gpuckpt" in shell.magics_manager.magics["line"]:
        return
    magic = _Magic(shell, agent)
    shell.register_magic_function(magic, magic_kind="line", magic_name="gpuckpt")
    for where in ({"str_key": "%gpuckpt"}, {"re_key": _ASSIGNED}):
        shell.set_hook("complete_command", magic.complete, **where)
