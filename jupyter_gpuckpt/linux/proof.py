"""Who is served at the socket of a keeper or a sleeper: whoever may look into its process (ptrace(2)).

That a process is the same user's is not enough: it may be confined, as by Landlock, of which nobody else is told, and
what is started for it would not be. So it has to say first what stands in a file without a name that the other process
has open. The way there is /proc/PID/fd, where the system lets nobody in who is confined otherwise, in a user namespace
of its own, or with fewer capabilities.

For programs that begin with `python -I -S -B` (`sleeper.py`), and for the broker: it imports next to nothing.
"""

from __future__ import annotations

import json
import os
import time

__all__ = ["WANTED", "first_line", "is_right", "make", "read"]

WANTED = "proof-wanted"
"""A file of this name in the run folder: its keeper knows of this. One of before may start a sleeper of now."""

_NAME = "gpuckpt-proof"
_BEGINNING, _LOOK = 2.0, 0.01  # for how long a process that begins may be closed to all, and between two looks; seconds


def make() -> int:
    """Make the file, and return its descriptor: it is there for as long as that is open."""
    descriptor = os.memfd_create(_NAME)
    os.write(descriptor, os.urandom(16).hex().encode())
    return descriptor


def read(descriptor: int) -> str:
    """Return what stands in the file."""
    return os.pread(descriptor, 64, 0).decode()


def is_right(line: bytes, secret: str) -> bool:
    """Tell whether what was said first on a connection is what `first_line` returns for this process."""
    import hmac  # only now: a kernel may wait for whoever makes the file

    return hmac.compare_digest(line.strip(), _line(secret).strip())


def first_line(pid: int) -> bytes:
    """Return what is to be said first to the process that listens; nothing where it asks for none.

    Raises
    ------
    PermissionError : this process may not look into that one.
    """
    deadline = time.monotonic() + _BEGINNING
    while True:
        try:
            return _line(_said_by(pid))
        except FileNotFoundError:
            return b""  # of before, or gone
        except PermissionError:  # so it is, too, for a moment of a process's beginning with other ids (execve(2))
            if time.monotonic() > deadline:
                raise
            time.sleep(_LOOK)


def _said_by(pid: int) -> str:
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        try:
            if os.readlink(f"{folder}/{name}") != f"/memfd:{_NAME} (deleted)":
                continue
        except FileNotFoundError:  # it was just closed
            continue
        with open(f"{folder}/{name}") as f:
            return f.read()
    raise FileNotFoundError(folder)


def _line(secret: str) -> bytes:
    return json.dumps({"proof": secret}).encode() + b"\n"
