"""Which ports sockets of this machine have.

The system is asked (sock_diag(7)), which takes it some microseconds. To read /proc/net/tcp it walks a table of all
connections that there could be, for milliseconds; that is for where it cannot be asked.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterable, Iterator

from . import proc, sock_diag

__all__ = ["connections", "port_holders", "ports_of_ended_connections"]

_ESTABLISHED, _LISTEN = 1, 10
_ENDED = (4, 5, 6, 9, 11)  # FIN_WAIT1, FIN_WAIT2, TIME_WAIT, LAST_ACK, CLOSING (linux/tcp_states.h)
_ANY = range(12)
_PROTOCOLS = {"tcp": socket.IPPROTO_TCP, "udp": socket.IPPROTO_UDP}


def port_holders(kind: str) -> Iterator[tuple[int, int]]:
    """Yield port and inode of every socket that has its port for itself: listening ``tcp``, or ``udp``."""
    return ((port, inode) for port, inode in _sockets(kind, _ANY if kind == "udp" else (_LISTEN,)))


def ports_of_ended_connections() -> set[int]:
    """Return the local ports of the TCP connections that nobody has any more, and that the system still keeps."""
    return {port for port, inode in _sockets("tcp", _ENDED) if not inode}


def connections() -> Counter[int]:
    """Return how many established TCP connections end at each local port."""
    return Counter(port for port, _ in _sockets("tcp", (_ESTABLISHED,)))


def _sockets(kind: str, states: Iterable[int]) -> list[tuple[int, int]]:
    """Return local port and inode of the sockets of IPv4 and IPv6 in these states; `kind`: tcp or udp."""
    try:
        return list(_told(kind, states))
    except OSError:  # a system without it, or a sandbox that forbids it
        return list(_read(kind, states))


def _told(kind: str, states: Iterable[int]) -> Iterator[tuple[int, int]]:
    wanted = sum(1 << state for state in states)
    with sock_diag.connect() as system:
        for family in (socket.AF_INET, socket.AF_INET6):
            for one in sock_diag.found(system, family, _PROTOCOLS[kind], wanted):
                yield int.from_bytes(one.connection[:2], "big"), one.inode


def _read(kind: str, states: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Read it from proc(5), net/tcp."""
    for table in (kind, f"{kind}6"):
        try:
            lines = proc.lines(f"/proc/net/{table}")[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if int(fields[3], 16) in states:
                yield int(fields[1].rpartition(":")[2], 16), int(fields[9])
