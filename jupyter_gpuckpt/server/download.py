"""A snapshot on its way to whoever downloads it: written by a thread, sent by the event loop, piece by piece."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from ..store import Manifest, Store
from ..store.transfer.container import export_snapshot
from ..store.transfer.sealing import own_secrets

__all__ = ["Send", "download"]

_PIECE = 1 << 20
"""How much is handed to the event loop at once, in bytes: it copies it, and must not be held by that."""

Send = Callable[[bytes], Coroutine[Any, Any, None]]
"""Sends a piece, and returns when there is room for the next."""


async def download(store: Store, name: str, begin: Callable[[int], None], send: Send) -> None:
    """Send the snapshot `name` as the file that `export` writes; where `send` fails, no more is read.

    `begin` is called in the event loop before the first piece is sent, with how many bytes the file has. What is sent
    is not encrypted.

    Raises
    ------
    BadName, NoSuchSnapshot, Damaged, Untrusted, Incompatible : as `Store.trusted`; maybe after some pieces were sent.
    Exception : what `send` raised.
    """
    loop = asyncio.get_running_loop()
    pieces = _Pieces(loop, send)
    ended: Future[Manifest] = Future()

    def announce(size: int) -> None:
        loop.call_soon_threadsafe(begin, size)

    def work() -> None:
        try:
            ended.set_result(export_snapshot(store, name, pieces, own_secrets(), announce=announce))
        except Exception as e:  # noqa: BLE001 - it is raised where this is waited for
            ended.set_exception(e)

    # A thread of its own: a slow client would keep one of the few in the pool from all others for hours.
    threading.Thread(target=work, name="gpuckpt-export", daemon=True).start()
    await asyncio.wrap_future(ended)


class _Pieces:
    """Gathers what is written by a thread, and has the event loop send it; no more than one piece waits."""

    def __init__(self, loop: asyncio.AbstractEventLoop, send: Send) -> None:
        self._loop, self._send = loop, send
        self._gathered = bytearray()

    def write(self, content: bytes, /) -> None:
        """Take in some bytes; what makes a piece is sent. Raises what `send` raises."""
        view = memoryview(content)
        while len(view):
            room = _PIECE - len(self._gathered)
            self._gathered += view[:room]
            view = view[room:]
            if len(self._gathered) == _PIECE:
                self.flush()

    def flush(self) -> None:
        """Send what has been gathered, and wait until it is on its way. Raises what `send` raises."""
        piece = bytes(self._gathered)
        self._gathered.clear()
        asyncio.run_coroutine_threadsafe(self._send(piece), self._loop).result()
