"""The kernel's end of the FIFOs by which it and its keeper talk, in lines of JSON (`keeper/agent_channel.py`)."""

from __future__ import annotations

import json
import os
import select
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import KeeperGone
from ..linux.readiness import has_room

__all__ = ["Channel"]


class Channel:
    """Both FIFOs, open for as long as the kernel lives.

    Attributes
    ----------
    sending : held while a line is sent, and by whoever must not have others between two.
    """

    def __init__(self, run_dir: Path) -> None:
        self.sending = threading.RLock()
        self._is_cut = False
        """Whether the last line was left off in its middle: the next one ends it."""
        self._in = os.open(run_dir / "to-kernel", os.O_RDWR)
        self._out = os.open(run_dir / "from-kernel", os.O_RDWR | os.O_NONBLOCK)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, waiting for room. Raises `KeeperGone` where the keeper reads nothing."""
        with self.sending:
            data = memoryview(self._line(message))
            while data:
                try:
                    data = data[os.write(self._out, data) :]
                    self._is_cut = bool(data)
                except BlockingIOError:
                    if not has_room(self._out, 5.0):
                        raise KeeperGone(
                            "The kernel's keeper does not respond.",
                            "It has not read the kernel's messages for 5 s.",
                            "Try again in a few seconds.",
                        ) from None

    def send_if_room(self, message: dict[str, Any], shorter: dict[str, Any]) -> None:
        """Send a message, or a `shorter` one where it is long; where nobody reads, nothing is sent or waited for."""
        with self.sending:
            line = self._line(message)
            if len(line) > select.PIPE_BUF:
                line = self._line(shorter)
            try:
                os.write(self._out, line)  # whole or not at all, since it is no longer than that
            except BlockingIOError:
                return
            self._is_cut = False

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield what the keeper says, for ever."""
        begun = bytearray()
        while True:
            *ends, rest = os.read(self._in, 1 << 20).split(b"\n")
            for end in ends:
                line = begun + end
                begun.clear()
                try:
                    message = json.loads(line)
                except ValueError:
                    continue  # a keeper was killed in the middle of a line
                yield message
            begun += rest

    def _line(self, message: dict[str, Any]) -> bytes:
        return b"\n" * self._is_cut + json.dumps(message, default=str).encode() + b"\n"
