"""Listening at a port that is held for its user (`linux.reserved_ports`), which zmq by itself cannot.

What holds a port shares it with sockets of the same user that have SO_REUSEPORT, and with nobody else. zmq binds with
SO_REUSEADDR alone, so it is given a socket that listens already.
"""

from __future__ import annotations

import errno
import os
import socket

from zmq.constants import SocketOption
from zmq.error import ZMQError
from zmq.sugar.socket import Socket

from . import proc

__all__ = ["is_listened_at", "listen"]

_BACKLOG = 100  # as zmq has it by itself (zmq_setsockopt(3), ZMQ_BACKLOG)
_LISTEN = "0A"  # linux/tcp_states.h


def listen(one: Socket, ip: str, port: int) -> None:
    """Have a socket of zmq's listen at this TCP port, as its own `bind` does.

    Raises
    ------
    ZMQError : as `bind`, such as where somebody listens there, or another user holds it.
    """
    with socket.socket() as listener:
        try:
            if is_listened_at(port):  # SO_REUSEPORT would share it
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
            for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                listener.setsockopt(socket.SOL_SOCKET, option, 1)
            listener.bind(("" if ip == "*" else ip, port))
            listener.listen(_BACKLOG)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 0)
        except OSError as e:
            raise ZMQError(e.errno) from e
        one.setsockopt(SocketOption.USE_FD, listener.fileno())
        try:
            one.bind(f"tcp://{ip}:{port}")
            listener.detach()  # it is zmq's
        finally:
            one.setsockopt(SocketOption.USE_FD, -1)


def is_listened_at(port: int) -> bool:
    """Tell whether somebody listens at a TCP port (proc(5), net/tcp)."""
    for table in ("tcp", "tcp6"):
        try:
            lines = proc.lines(f"/proc/net/{table}")[1:]
        except OSError:
            continue  # a system without IPv6
        for line in lines:
            _, here, _, state, *_ = line.split(maxsplit=4)
            if state == _LISTEN and int(here.rpartition(":")[2], 16) == port:
                return True
    return False
