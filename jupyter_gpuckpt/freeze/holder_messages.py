"""What a holder of GPU memory (`vram_holder`) and the process whose memory it is tell each other, through a socket."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .held_vram import Item, Piece

__all__ = ["ITEM", "NUMBER", "Batch", "batches", "lend", "socket_of"]

ITEM = struct.Struct("<QQ")
"""What a message has of each part: its offset in the file, and its size. The last is the part that comes after these,
without a descriptor yet; its size is 0 where there is none (parking.c)."""
NUMBER = struct.Struct("<Q")
"""The answer: for how many bytes more there is room. The first one is a greeting: 1 where all that it was shown is open
here, or how many pieces are lent. The last one thanks."""
_BATCH = 64
"""Parts in one message at most."""
_PIDFD_GETFD = 438
_LIMIT = 60.0  # for how long the process may take over one part, in seconds


@dataclass(frozen=True)
class Batch:
    """One message: parts of another process's memory, and the one after them; its size is 0 where there is none."""

    items: list[Item]
    after: Item


@contextlib.contextmanager
def socket_of(pid: int, fd: int, greeting: int, limit: float = _LIMIT) -> Iterator[socket.socket]:
    """Open the same socket as another process has open, and greet it."""
    pidfd = os.pidfd_open(pid)
    try:
        own = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, pidfd, fd, 0)
        if own < 0:
            raise OSError(ctypes.get_errno(), f"socket {fd} of process {pid}")
    finally:
        os.close(pidfd)
    with socket.socket(fileno=own) as there:
        there.settimeout(limit)
        there.send(NUMBER.pack(greeting))  # the process gives its own copy up
        yield there


def batches(there: socket.socket) -> Iterator[Batch]:
    """Yield what comes, but for the end."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(there, (_BATCH + 1) * ITEM.size, _BATCH)
        items = list(ITEM.iter_unpack(data))
        if len(items) != len(descriptors) + 1:
            raise RuntimeError("the process broke off")
        *parts, after = itertools.starmap(
            Item, ((*item, fd) for item, fd in zip(items, [*descriptors, -1], strict=True))
        )
        yield Batch(parts, after)
        if after.size == 0:
            return


def lend(there: socket.socket, pieces: Sequence[Piece]) -> None:
    """Send another process descriptors of pieces, as that one sends its parts."""
    for at in range(0, len(pieces), _BATCH):
        some = pieces[at : at + _BATCH]
        after = pieces[at + _BATCH] if at + _BATCH < len(pieces) else None
        items = [(piece.offset, piece.size) for piece in some] + [(after.offset, after.size) if after else (0, 0)]
        descriptors: list[int] = []
        try:
            descriptors.extend(piece.exported() for piece in some)
            socket.send_fds(there, [b"".join(ITEM.pack(*item) for item in items)], descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
