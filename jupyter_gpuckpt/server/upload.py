"""A snapshot on its way from whoever uploads it: taken by the event loop, piece by piece, and read by a thread."""

from __future__ import annotations

import asyncio
import contextlib
import io
import threading
from collections.abc import Callable
from typing import Any, BinaryIO, cast

from ..store import Manifest

__all__ = ["Head", "Upload"]

_WAITING = 16
"""How many pieces wait to be read; where there are more, the client is not read from."""
_PATIENCE = 300.0
"""For how long a client may send nothing, in seconds."""


class Upload:
    """What one client sends, while `work` reads it; it belongs to the event loop."""

    def __init__(self, work: Callable[[BinaryIO], Manifest]) -> None:
        loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue(_WAITING)
        self._ended: asyncio.Future[Manifest] = loop.create_future()
        self._ended.add_done_callback(lambda ended: ended.exception())  # a client that has gone does not ask
        arriving = cast(BinaryIO, io.BufferedReader(_Arriving(loop, self._pieces), 1 << 20))

        def end(manifest: Manifest | None, error: Exception | None) -> None:
            if manifest is not None:
                self._ended.set_result(manifest)
            elif error is not None:
                self._ended.set_exception(error)

        def run() -> None:
            manifest, failed = None, None
            try:
                manifest = work(arriving)
            except Exception as e:  # noqa: BLE001 - it is raised where this is waited for
                failed = e
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
                loop.call_soon_threadsafe(end, manifest, failed)

        # A thread of its own: a slow client would keep one of the few in the pool from all others for hours.
        threading.Thread(target=run, name="gpuckpt-import", daemon=True).start()

    async def take(self, piece: bytes | None) -> None:
        """Pass a piece on as soon as there is room; the empty one is the end, and None that the client has gone.

        What comes when the work has failed is dropped: browsers hear an answer only once they have sent everything.
        """
        passing: asyncio.Future[None] = asyncio.ensure_future(self._pieces.put(piece))
        waiting: set[asyncio.Future[Any]] = {passing, self._ended}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        passing.cancel()

    async def finish(self) -> Manifest:
        """Say that all has come, and return what the work returned. Raises what it raised."""
        await self.take(b"")
        return await self._ended


class _Arriving(io.RawIOBase):
    """What arrives, as a stream to be read by a thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pieces: asyncio.Queue[bytes | None]) -> None:
        self._loop, self._pieces = loop, pieces
        self._rest = memoryview(b"")
        self._over = False

    def readable(self) -> bool:
        return True

    def readinto(self, into: bytearray | memoryview) -> int:  # type: ignore[override]
        """Read some bytes; 0 at the end. Raises `OSError` where no more comes."""
        if not self._rest and not self._over:
            piece = asyncio.run_coroutine_threadsafe(
                asyncio.wait_for(self._pieces.get(), _PATIENCE), self._loop
            ).result()
            if piece is None:
                raise ConnectionResetError("the client has gone")
            self._over = not piece
            self._rest = memoryview(piece)
        size = min(len(into), len(self._rest))
        into[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size


class Head(io.BytesIO):
    """The first bytes of a file, which notes how many of them were `wanted`."""

    wanted = 0

    def read(self, size: int | None = -1, /) -> bytes:
        """Read as any file; a size is a wish."""
        self.wanted = max(self.wanted, self.tell() + (size or 0))
        return super().read(size)
