"""Requests that have come to ipykernel 6, whose main thread reads the shell channel between cells alone.

What waits behind a cell has to be known in the middle of it: a restored kernel does not execute it again, and a kernel
that another one takes the place of hands it over. So the agent reads it, in its own thread, and the main thread takes
it from here. Only one thread at a time may use a socket of zmq's (zmq_socket(3)): both hold a lock meanwhile.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from zmq.constants import Flag
from zmq.error import Again

__all__ = ["ReadAhead"]


class ReadAhead:
    """What has been read of a socket, by whichever thread, and was not taken yet.

    Attributes
    ----------
    requests : each a list of zmq's frames, in the order in which they came.
    """

    def __init__(self, socket: Any) -> None:
        self.requests: deque[list[Any]] = deque()
        self._socket, self._lock = socket, threading.RLock()
        socket.__class__ = _of_one_thread_at_a_time(type(socket), self._lock)

    def read(self) -> None:
        """Read all that has come; from any thread."""
        with self._lock:
            while True:
                try:
                    self.requests.append(self._socket.recv_multipart(Flag.NOBLOCK, copy=False))
                except Again:
                    return


def _of_one_thread_at_a_time(kind: type[Any], lock: threading.RLock) -> type[Any]:
    """Return a class of sockets whose calls that ipykernel and pyzmq's streams make wait for a lock."""

    class Socket(kind):  # type: ignore[misc]
        def recv_multipart(self, *args: Any, **kwargs: Any) -> Any:
            with lock:
                return super().recv_multipart(*args, **kwargs)

        def send_multipart(self, *args: Any, **kwargs: Any) -> Any:
            with lock:
                return super().send_multipart(*args, **kwargs)

        def get(self, option: int) -> Any:
            with lock:
                return super().get(option)

        getsockopt = get

    return Socket
