"""Ports that nobody else is given, whether anybody listens there yet or not."""

from __future__ import annotations

import contextlib
import errno
import socket

from .ended_connections import forget

__all__ = ["Reserved", "bound"]

_TRIES = 100  # for a port that is free in UDP as well


def bound(port: int) -> socket.socket:
    """Return a TCP socket that is bound to a port (0: to any), which nobody has otherwise: neither in IPv6 nor by UDP.

    Raises
    ------
    OSError : somebody has it.
    """
    s = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
    try:
        if s.family == socket.AF_INET6:
            s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        if port:  # what has just been closed is free; the system itself only gives out what nobody has in any way
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _bind(s, port)
        with socket.socket(s.family, socket.SOCK_DGRAM) as datagrams:
            datagrams.bind(("", s.getsockname()[1]))
    except BaseException:
        s.close()
        raise
    return s


def _bind(s: socket.socket, port: int) -> None:
    """Bind a socket to a port, also to one that the system keeps for connections that nobody has any more."""
    try:
        s.bind(("", port))
    except OSError as e:
        if not port or e.errno != errno.EADDRINUSE or not _is_left_over(port):
            raise
        s.bind(("", port))


def _is_left_over(port: int) -> bool:
    """Tell whether the system gives a port free that it had kept; without the right to ask for that, it does not."""
    try:
        return forget(port)
    except OSError:
        return False


class Reserved:
    """Ports for kernels that are about to come up: each is given out once, until `close`.

    A reserved port is bound by a socket of ours that does not listen. Nobody else is given it by the system, and
    criu and zmq, which bind with SO_REUSEADDR as we do, get it all the same (socket(7)).
    """

    def __init__(self) -> None:
        self._held: dict[int, socket.socket] = {}

    def hold(self, port: int) -> None:
        """Reserve this port, if it is free."""
        with contextlib.suppress(OSError):
            self._hold(bound(port))

    def free(self) -> int:
        """Return a free port.

        Raises
        ------
        OSError : there is none, or this process has too many files open.
        """
        tried = 0
        while True:
            try:
                return self._hold(bound(0))
            except OSError as e:
                tried += 1
                if e.errno != errno.EADDRINUSE or tried == _TRIES:
                    raise

    def same_or_free(self, port: int) -> int:
        """Return this port, where it is free, and else one that is. Raises as `free`."""
        if port not in self._held:
            with contextlib.suppress(OSError):
                return self._hold(bound(port))
        return self.free()

    def _hold(self, s: socket.socket) -> int:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port = int(s.getsockname()[1])
        self._held[port] = s
        return port

    def close(self) -> None:
        """Let go of the ports; whoever listens at one keeps it."""
        for s in self._held.values():
            s.close()
        self._held.clear()
