"""Where forked children of the kernel send what they print: to the kernel that they are children of.

ipykernel's children print through a port of the kernel's, which they know as a number from the moment of the fork. In
a copy of the kernel that number is the original's port: what they print would come out there. So the number lies in
memory that kernel and children share, and a restored kernel puts its own there.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping
from typing import Any

_LAYOUT = struct.Struct("=H16s")


class ChildOutput:
    """The port, and the word by which the kernel knows its children, of one kernel's `IOPubThread`.

    Attributes
    ----------
    port : where children send to; None where they cannot print.
    """

    def __init__(self, thread: Any) -> None:
        self._thread = thread
        self.port: int | None = getattr(thread, "_pipe_port", None)
        if self.port is None or not hasattr(thread, "_pipe_uuid"):
            return
        self._shared = mmap.mmap(-1, mmap.PAGESIZE)  # shared with the children, and with nobody else
        self._write(self.port, thread._pipe_uuid)
        connect = thread._setup_pipe_out

        def setup_pipe_out() -> Any:
            thread._pipe_port, thread._pipe_uuid = _LAYOUT.unpack_from(self._shared)
            return connect()

        thread._setup_pipe_out = setup_pipe_out

    def _write(self, port: int, word: bytes) -> None:
        _LAYOUT.pack_into(self._shared, 0, port, word)

    def moved(self, ports: Mapping[int, int]) -> None:
        """Take in the ports that a restored kernel has, by those that it had."""
        if self.port is None:
            return
        self.port = self._thread._pipe_port = ports.get(self.port, self.port)
        self._thread._pipe_uuid = os.urandom(16)
        self._write(self.port, self._thread._pipe_uuid)
