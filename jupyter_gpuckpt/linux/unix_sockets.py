"""Unix sockets at long paths, and who is at the other end of one (unix(7))."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

__all__ = ["listener_pid", "peer_pid", "peer_uid", "short_path"]


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Give a name for a socket that fits its 107 bytes (unix(7)), however deep its folder lies."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def peer_uid(connection: socket.socket) -> int:
    """Return the user id of the process at the other end (unix(7), SO_PEERCRED)."""
    return _peer(connection)[1]


def peer_pid(connection: socket.socket) -> int:
    """Return the pid of the process at the other end, as it was when it connected."""
    return _peer(connection)[0]


def listener_pid(path: Path) -> int | None:
    """Return the pid of the process that listens at a Unix socket; None when none does."""
    with socket.socket(socket.AF_UNIX) as s, contextlib.suppress(OSError):
        s.setblocking(False)
        with short_path(path) as short:
            s.connect(short)
        return _peer(s)[0]
    return None


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Return the pid and the user id of the process at the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, uid, _ = struct.unpack("iii", raw)
    return int(pid), int(uid)
