"""The TCP connections of a saved tree: which of them come back."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from .images import TCP_CLOSE, TCP_CLOSE_WAIT, TcpEnd, bound_sockets, tcp_ends, unread

__all__ = ["NOBODY", "Connections", "Pair", "connections"]

NOBODY = 0
"""The id of an end that was closed: all that was sent to the other one is there. criu's ids begin with 1."""
_BOTH = 3  # criu's images/sk-opts.proto

Pair = tuple[TcpEnd, TcpEnd]
"""The two ends of a connection. If one of them is at a port at which the tree listens, it is the
first."""


@dataclass(frozen=True)
class Connections:
    """What becomes of the connections of a saved tree.

    Attributes
    ----------
    kept : inside the tree; they come back. So do ends of which the other one was closed, and nobody has it any more.
    cut : inside the tree; they come back closed.
    alone : ends of those to a listening port of the tree, whose other end no process had: it was not accepted yet.
        They come back closed.
    outside : ends of those to other programs, which come back closed.

    Those that both sides had closed, or one had reset, are in none of them: they were over before the save.
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
    listening = {one.port for one in bound_sockets(images) if one.kind == "tcp"}
    found = Connections([], [], [], [])
    for end in ends:
        other = by_address.get((end.there, end.here))
        if other is None or other is end:
            if end.state == TCP_CLOSE:
                continue
            other = _gone(end)
            if may_keep and end.state == TCP_CLOSE_WAIT and _can_come_back(images, end, other, listening):
                found.kept.append(_ordered(end, other, listening))
            else:
                is_inside = end.there[1] in listening and _is_here(end.there[0])
                (found.alone if is_inside else found.outside).append(end)
        elif end.id < other.id and not end.state == other.state == TCP_CLOSE:
            keep = may_keep and _can_come_back(images, end, other, listening)
            (found.kept if keep else found.cut).append(_ordered(end, other, listening))
    return found


def _ordered(one: TcpEnd, other: TcpEnd, listening: Collection[int]) -> Pair:
    return (other, one) if other.here[1] in listening else (one, other)


def _gone(end: TcpEnd) -> TcpEnd:
    """Return the other end of a connection, which nobody has any more."""
    return replace(end, id=NOBODY, here=end.there, there=end.here, shutdown=_BOTH)


def _can_come_back(images: Path, one: TcpEnd, other: TcpEnd, listening: Collection[int]) -> bool:
    """Tell whether it is known what both ends had not read, and whether both can be where they were."""
    if {one.here[1], other.here[1]} <= set(listening):
        return False
    are_known = unread(images, one).exists() and (other.id == NOBODY or unread(images, other).exists())
    return are_known and _is_here(one.here[0]) and _is_here(other.here[0])


def _is_here(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family) as one:
        one.bind((address, 0))
        return True
    return False
