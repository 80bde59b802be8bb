"""What the system tells of its TCP and UDP sockets, and does with them (sock_diag(7))."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["ANY_STATE", "Found", "connect", "destroy", "found"]

ANY_STATE = 0xFFF  # a bit for each of the states in linux/tcp_states.h

_SOCK_DIAG = 4  # linux/netlink.h
_BY_FAMILY, _DESTROY = 20, 21  # linux/sock_diag.h
_ERROR, _DONE = 2, 3
_REQUESTED, _ANSWERED, _ALL = 0x1, 0x4, 0x300
_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr
_REQUEST = struct.Struct("=BBxxI48s")  # struct inet_diag_req_v2
_FOUND = struct.Struct("=BBxx48s8xI4xI")  # struct inet_diag_msg: family, state, connection, bytes unsent, inode
_PATIENCE = 5.0  # seconds that the system may take to answer
_ROOM = 1 << 16


@dataclass(frozen=True)
class Found:
    """One socket: its family, its state, its struct inet_diag_sockid, bytes unsent, and its inode (0 if nobody's)."""

    family: int
    state: int
    connection: bytes
    unsent: int
    inode: int


def connect() -> socket.socket:
    """Return what the system is asked by. Raises `OSError` where it cannot be."""
    system = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG)
    system.settimeout(_PATIENCE)
    return system


def found(
    system: socket.socket, family: int, protocol: int, states: int = ANY_STATE, connection: bytes = b""
) -> Iterator[Found]:
    """Yield the sockets in these states, and of a port, where `connection` begins with one. Raises `OSError`."""
    _ask(system, _BY_FAMILY, _ALL, _REQUEST.pack(family, protocol, states, connection))
    return (Found(*_FOUND.unpack_from(body)) for body in _answers(system))


def destroy(system: socket.socket, family: int, connection: bytes) -> None:
    """Have a TCP connection ended.

    Raises
    ------
    FileNotFoundError : there is none.
    OSError : it takes CAP_NET_ADMIN and a system that can do it (CONFIG_INET_DIAG_DESTROY).
    """
    _ask(system, _DESTROY, _ANSWERED, _REQUEST.pack(family, socket.IPPROTO_TCP, ANY_STATE, connection))
    list(_answers(system))


def _ask(system: socket.socket, what: int, flags: int, body: bytes) -> None:
    system.send(_HEADER.pack(_HEADER.size + len(body), what, _REQUESTED | flags, 0, 0) + body)


def _answers(system: socket.socket) -> Iterator[bytes]:
    """Yield what the system answers, until it is done. Raises `OSError` where it refuses."""
    while True:
        raw, at = system.recv(_ROOM), 0
        while at < len(raw):
            size, kind, *_ = _HEADER.unpack_from(raw, at)
            if kind == _ERROR:
                (number,) = struct.unpack_from("=i", raw, at + _HEADER.size)
                if number:
                    raise OSError(-number, "sockets could not be asked for, or ended")
            if kind in (_ERROR, _DONE):
                return
            yield raw[at + _HEADER.size : at + size]
            at += size + 3 & ~3
