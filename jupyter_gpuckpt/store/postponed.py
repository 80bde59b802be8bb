"""Files of a snapshot that are read later than the others, each byte of them verified then."""

from __future__ import annotations

from collections.abc import Callable

from .extracting import ALL, Share
from .parallel import Progress

__all__ = ["Postponed"]


class Postponed:
    """Those files of one snapshot."""

    __slots__ = ("_close", "_read")

    def __init__(self, read: Callable[[Progress | None, Share], None], close: Callable[[], None]) -> None:
        self._read, self._close = read, close

    def read(self, progress: Progress | None = None, share: Share = ALL) -> None:
        """Read them, or a share of them; what `progress` (called with the stage ``verify``) raises ends that.

        Raises
        ------
        Damaged : a byte is not the one that was saved; nothing of the files may be used then.
        StoreError : there is no room for them.
        """
        self._read(progress, share)

    def close(self) -> None:
        """Let the store delete what it wants to; more than once is harmless."""
        self._close()
