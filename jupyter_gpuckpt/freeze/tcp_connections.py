"""The TCP connections of a saved tree: which of them come back, and at which ports."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from .images import TCP_CLOSE, TCP_SYN_SENT, Stream, TcpEnd, bound_sockets, tcp_ends, tcp_stream

__all__ = ["Connections", "Pair", "connections", "ports_of"]

Pair = tuple[TcpEnd, TcpEnd]
"""The two ends of a connection inside the tree."""

_FIN = 1  # the end of a stream has a number of its own, and criu does not count it
_HALF = 1 << 31


@dataclass(frozen=True)
class Connections:
    """What becomes of the connections of a saved tree.

    Attributes
    ----------
    kept : inside the tree; they come back.
    cut : inside the tree; they come back closed.
    alone : ends of those to a listening port of the tree, whose other end no process had: it was not accepted yet, or
        closed already. They come back closed.
    outside : ends of those to other programs, which come back closed.
    """

    kept: list[Pair]
    cut: list[Pair]
    alone: list[TcpEnd]
    outside: list[TcpEnd]


def connections(images: Path, but_at: Collection[int], *, may_keep: bool) -> Connections:
    """Return what becomes of the connections of a saved tree on this machine.

    Those with an end at one of the ports `but_at` are made again by who has them, and are in none of the lists.
    `may_keep` tells whether any can come back here.
    """
    ends = [end for end in tcp_ends(images) if not {end.here[1], end.there[1]} & set(but_at)]
    by_address = {(end.here, end.there): end for end in ends}
    listening = _listening(images)
    found = Connections([], [], [], [])
    for end in ends:
        other = by_address.get((end.there, end.here))
        if other is None or other is end:
            is_inside = end.there[1] in listening and _is_here(end.there[0])
            (found.alone if is_inside else found.outside).append(end)
        elif end.id < other.id and not end.state == other.state == TCP_CLOSE:
            keep = may_keep and _can_come_back(images, end, other, listening)
            (found.kept if keep else found.cut).append((end, other))
    return found


def _listening(images: Path) -> set[int]:
    return {one.port for one in bound_sockets(images) if one.kind == "tcp"}


def _can_come_back(images: Path, one: TcpEnd, other: TcpEnd, listening: Collection[int]) -> bool:
    """Tell whether both ends were saved, as of one instant, and can be where they were."""
    if {one.state, other.state} & {TCP_CLOSE, TCP_SYN_SENT} or {one.here[1], other.here[1]} <= set(listening):
        return False
    first, second = tcp_stream(images, one), tcp_stream(images, other)
    if first is None or second is None or not (_fits(first, second) and _fits(second, first)):
        return False
    return _is_here(one.here[0]) and _is_here(other.here[0])


def _fits(sender: Stream, receiver: Stream) -> bool:
    """Tell whether what one end has not received yet is still in the other's queue, and what it has was sent."""
    missing = (receiver.received - (sender.written - sender.queued) + _FIN) % (2 * _HALF)
    beyond = (sender.written - sender.unsent - receiver.received) % (2 * _HALF)
    return missing < _HALF and beyond < _HALF


def _is_here(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family) as one:
        one.bind((address, 0))
        return True
    return False


def ports_of(
    images: Path, kept: Collection[Pair], port: Callable[[int], int], free_port: Callable[[], int]
) -> Mapping[int, tuple[int, int]]:
    """Return the ports of ends that come back, their own and that of their other end, by the ids of their files.

    One that had the port of a listening socket of the tree goes with it (`port`). All others get free ones, so that a
    connection meets neither that of a kernel that still runs nor what the system keeps of one that has ended.
    """
    listening = _listening(images)
    found = {}
    for pair in kept:
        one, other = (port(end.here[1]) if end.here[1] in listening else free_port() for end in pair)
        found[pair[0].id], found[pair[1].id] = (one, other), (other, one)
    return found
