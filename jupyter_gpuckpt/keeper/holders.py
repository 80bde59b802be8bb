"""The programs that hold the kernel: those that have attached to the keeper's socket, Jupyter servers as a rule."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping

from ..linux.unix_sockets import peer_pid

log = logging.getLogger("gpuckpt.keeper")

_SLOW_READER = 30.0  # how long a client may let its answers pile up, in seconds


class Holders:
    """The connections of one kernel's; true while there are any."""

    def __init__(self) -> None:
        self._writers: set[asyncio.StreamWriter] = set()
        self._first_is_to_come = False
        self.changed = asyncio.Event()
        """Set when one has come or gone."""

    def __bool__(self) -> bool:
        return bool(self._writers)

    def expect_first(self) -> None:
        """Take note that the program which had the kernel started is on its way."""
        self._first_is_to_come = True

    @property
    def want_to_know(self) -> bool:
        """Whether anybody is to be told of the kernel's end."""
        return self._first_is_to_come or bool(self._writers)

    def add(self, writer: asyncio.StreamWriter) -> None:
        """Take note that this client holds the kernel."""
        self._first_is_to_come = False
        self._writers.add(writer)
        self.changed.set()

    def discard(self, writer: asyncio.StreamWriter) -> None:
        """Take note that this client has gone, whether it held the kernel or not."""
        self._writers.discard(writer)
        self.changed.set()

    def pids(self) -> list[int]:
        """Return their pids."""
        return [peer_pid(writer.get_extra_info("socket")) for writer in self._writers]

    async def tell(self, message: Mapping[str, object]) -> None:
        """Send all of them a message."""
        # Together: one that does not read must not keep the others waiting.
        await asyncio.gather(*(send(one, message) for one in self._writers))


async def send(writer: asyncio.StreamWriter, message: Mapping[str, object]) -> None:
    """Send a client of the socket a message; one that does not read is cut off, and one that has gone is left."""
    try:
        writer.write(json.dumps(message).encode() + b"\n")
        await asyncio.wait_for(writer.drain(), _SLOW_READER)
    except (TimeoutError, asyncio.TimeoutError):
        # It may have been stopped; when it goes on, it finds the connection closed and makes another.
        log.warning("a client was disconnected: it has not read for %.0f s", _SLOW_READER)
        writer.transport.abort()
    except ConnectionError:
        pass
