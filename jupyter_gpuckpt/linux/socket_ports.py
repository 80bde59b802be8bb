"""Which ports sockets of this machine have.

The system is asked (sock_diag(7)), which takes it some microseconds. To read /proc/net/tcp it walks a table of all
connections that there could be, for milliseconds; that is for where it cannot be asked.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from . import proc, sock_diag

__all__ = ["Connection", "established", "port_holders", "ports_of_ended_connections"]

_ESTABLISHED, _LISTEN = 1, 10
_ENDED = (4, 5, 6, 9, 11)  # FIN_WAIT1, FIN_WAIT2, TIME_WAIT, LAST_ACK, CLOSING (linux/tcp_states.h)
_ANY = range(12)
_PROTOCOLS = {"tcp": socket.IPPROTO_TCP, "udp": socket.IPPROTO_UDP}


class Connection(NamedTuple):
    """One end of a TCP connection: its port, its socket's inode, and the addresses of this end and of the other one.

    Where both ends are of this machine, the addresses of one are those of the other, the other way round.
    """

    port: int
    inode: int
    here: bytes
    there: bytes


def port_holders(kind: str) -> Iterator[tuple[int, int]]:
    """Yield port and inode of every socket that has its port for itself: listening ``tcp``, or ``udp``."""
    return ((one.port, one.inode) for one in _sockets(kind, _ANY if kind == "udp" else (_LISTEN,)))


def ports_of_ended_connections() -> set[int]:
    """Return the local ports of the TCP connections that nobody has any more, and that the system still keeps."""
    return {one.port for one in _sockets("tcp", _ENDED) if not one.inode}


def established() -> list[Connection]:
    """Return the ends of established TCP connections that are on this machine."""
    return _sockets("tcp", (_ESTABLISHED,))


def _sockets(kind: str, states: Iterable[int]) -> list[Connection]:
    """Return the sockets of IPv4 and IPv6 in these states; `kind`: tcp or udp."""
    try:
        return list(_told(kind, states))
    except OSError:  # a system without it, or a sandbox that forbids it
        return list(_read(kind, states))


def _told(kind: str, states: Iterable[int]) -> Iterator[Connection]:
    wanted = sum(1 << state for state in states)
    with sock_diag.connect() as system:
        for family in (socket.AF_INET, socket.AF_INET6):
            for one in sock_diag.found(system, family, _PROTOCOLS[kind], wanted):
                ports, addresses = one.connection[:4], one.connection[4:36]
                here, there = ports[:2] + addresses[:16], ports[2:] + addresses[16:]
                yield Connection(int.from_bytes(here[:2], "big"), one.inode, here, there)


def _read(kind: str, states: Iterable[int]) -> Iterator[Connection]:
    """Read it from proc(5), net/tcp."""
    for table in (kind, f"{kind}6"):
        try:
            lines = proc.lines(f"/proc/net/{table}")[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if int(fields[3], 16) in states:
                here, there = fields[1].encode(), fields[2].encode()
                yield Connection(int(here.rpartition(b":")[2], 16), int(fields[9]), here, there)
