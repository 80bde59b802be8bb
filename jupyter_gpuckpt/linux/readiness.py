"""Waiting until there is something to read, or room to write, whatever number a file has.

select(2) knows none from 1,024 on, and a server may have more files open; epoll(7) is a file itself.
"""

from __future__ import annotations

import math
import select
import socket

__all__ = ["has_room", "readable"]


def readable(*files: int | socket.socket, seconds: float | None) -> list[int | socket.socket]:
    """Return those of the files that can be read without waiting, or have ended, as soon as there is one.

    After so many seconds that is none; with None it is waited for ever.
    """
    return _ready(files, select.POLLIN, seconds)


def has_room(file: int, seconds: float) -> bool:
    """Tell whether something can be written to a file within so many seconds."""
    return bool(_ready((file,), select.POLLOUT, seconds))


def _ready(files: tuple[int | socket.socket, ...], event: int, seconds: float | None) -> list[int | socket.socket]:
    by_number = {file if isinstance(file, int) else file.fileno(): file for file in files}
    poll = select.poll()
    for number in by_number:
        poll.register(number, event)
    found = poll.poll(None if seconds is None else math.ceil(max(0.0, seconds) * 1000))
    return [by_number[number] for number, _ in found]
