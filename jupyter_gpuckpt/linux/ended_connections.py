"""What the system keeps of TCP connections that nobody has any more: it can be ended, and their port is free at once.

Who closed a connection has its port kept for a minute. A server that ended in the middle of its work has nearly always
left some, and unless it had set SO_REUSEADDR, nobody else listens at its port for as long.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator

__all__ = ["forget"]

_SOCK_DIAG = 4  # linux/netlink.h
_BY_FAMILY, _DESTROY = 20, 21  # linux/sock_diag.h
_ERROR, _DONE = 2, 3
_REQUESTED, _ANSWERED, _ALL = 0x1, 0x4, 0x300
_FIN_WAIT2, _TIME_WAIT, _ANY_STATE = 5, 6, 0xFFF  # linux/tcp_states.h
_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr
_REQUEST = struct.Struct("=BBxxI48s")  # struct inet_diag_req_v2
_FOUND = struct.Struct("=BBxx48s8xI4xI")  # struct inet_diag_msg: family, state, connection, bytes unsent, inode
_PATIENCE = 5.0  # seconds that the system may take to answer
_ROOM = 1 << 16


def forget(port: int) -> bool:
    """Have the system forget the connections of a local port that nobody has any more; tell whether there were any.

    Only those are ended of which all that was sent has arrived, so that nothing is lost; and none where a process
    listens at the port, or has a connection there.

    Raises
    ------
    OSError : it takes CAP_NET_ADMIN and a system that can do it (CONFIG_INET_DIAG_DESTROY).
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as system:
        system.settimeout(_PATIENCE)
        found = [(family, *one) for family in (socket.AF_INET, socket.AF_INET6) for one in _at(system, family, port)]
        if any(inode for *_, inode in found):
            return False
        over = [(family, connection) for family, connection, is_over, _ in found if is_over]
        for family, connection in over:
            _ask(system, _DESTROY, _ANSWERED, family, connection)
            with contextlib.suppress(FileNotFoundError):  # its time was up
                list(_answers(system))
    return bool(over)


def _at(system: socket.socket, family: int, port: int) -> list[tuple[bytes, bool, int]]:
    """Return what there is at a port: struct inet_diag_sockid, whether it is over, the inode of who has it (or 0)."""
    wanted = struct.pack("!H", port)
    _ask(system, _BY_FAMILY, _ALL, family, wanted.ljust(48, b"\0"))
    found = []
    for body in _answers(system):
        of, state, connection, unsent, inode = _FOUND.unpack_from(body)
        if of == family and connection.startswith(wanted):
            found.append((connection, state in (_FIN_WAIT2, _TIME_WAIT) and not unsent, inode))
    return found


def _ask(system: socket.socket, what: int, flags: int, family: int, connection: bytes) -> None:
    body = _REQUEST.pack(family, socket.IPPROTO_TCP, _ANY_STATE, connection)
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
                    raise OSError(-number, "a closed connection could not be discarded")
            if kind in (_ERROR, _DONE):
                return
            yield raw[at + _HEADER.size : at + size]
            at += size + 3 & ~3
