"""How much is asked of a server at once: what is beyond that is sent away for a while, and costs nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..errors import GpuckptError

__all__ = ["Limit", "TooMany"]


class TooMany(GpuckptError):
    """The server is at as much already as it does at once; ``data["retry_after"]`` is in seconds."""


class Limit:
    """Lets `most` in at once; whoever comes beyond that is to ask again after so many seconds.

    It belongs to the server's event loop.
    """

    def __init__(self, most: int, what: str, retry_after: int) -> None:
        self._most, self._what, self._retry_after = most, what, retry_after
        self._inside = 0

    @contextlib.contextmanager
    def one_more(self) -> Iterator[None]:
        """Let one in for as long as this is entered.

        Raises
        ------
        TooMany : there are as many already.
        """
        self.check(self._inside)
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def check(self, inside: int) -> None:
        """Refuse one more where so many are there already. Raises `TooMany`."""
        if inside >= self._most:
            raise TooMany(
                "Too many requests at once; nothing was done.",
                f"{inside} {self._what} are under way, and no more are started.",
                f"Try again in {self._retry_after} s.",
                retry_after=self._retry_after,
            )
