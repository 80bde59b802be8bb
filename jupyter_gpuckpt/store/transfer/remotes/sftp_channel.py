"""A channel of SFTP on which no answer is longer, or takes longer, than what was asked for allows.

paramiko waits for each piece of an answer, and takes what a server says of how long it is: a server that sends a byte
now and then, or a list that never ends, would be listened to forever.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import paramiko

from . import attempts

__all__ = ["LimitedSftp"]


class LimitedSftp(paramiko.SFTPClient):  # type: ignore[misc]  # it is not typed
    """A channel of which each use has limits."""

    _seconds = 0.0
    _until: float | None = None
    _room = 1 << 20

    @contextmanager
    def limited(self, size: int) -> Iterator[None]:
        """Have all that is asked for inside take at most as long as so many bytes do, and not much more of them."""
        self._seconds = attempts.time_limit(size)
        self._until, self._room = time.monotonic() + self._seconds, 2 * size + (1 << 20)
        try:
            yield
        finally:
            self._until = None

    def _read_all(self, n: int) -> bytes:
        self._room -= n
        if self._room < 0:
            raise paramiko.SFTPError("it sent more than was requested")
        found = bytearray()
        while len(found) < n:
            self._wait_at_most()
            more = self.sock.recv(n - len(found))
            if not more:
                raise EOFError
            found += more
        return bytes(found)

    def _write_all(self, out: bytes) -> None:
        left = memoryview(out)
        while left:
            self._wait_at_most()
            sent = self.sock.send(left)
            if sent <= 0:
                raise ConnectionResetError("the connection broke")  # an EOFError is the end of a file to paramiko
            left = left[sent:]

    def _wait_at_most(self) -> None:
        left = attempts.PATIENCE if self._until is None else self._until - time.monotonic()
        if left <= 0:
            raise attempts.TooSlowError(self._seconds)
        self.sock.settimeout(min(left, attempts.PATIENCE))
