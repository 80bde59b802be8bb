"""Ports that only processes of this user can listen at, whether one does yet or not.

Whoever listens at a kernel's port is sent its clients' cells. So a port is held from when it is chosen: by a socket
that is bound, does not listen, and has SO_REUSEPORT without SO_REUSEADDR. Beside it the system lets nobody bind, and
gives the port to nobody, but for sockets of the same user that have SO_REUSEPORT too (socket(7)), as our kernels'
(`listening`) and criu's. With SO_REUSEADDR it would let every user.
"""

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
    s = _socket()
    try:
        _bind(s, port)
        with socket.socket(s.family, socket.SOCK_DGRAM) as datagrams:
            datagrams.bind(("", s.getsockname()[1]))
    except BaseException:
        s.close()
        raise
    return s


def _socket() -> socket.socket:
    """Return one for all addresses."""
    s = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
    if s.family == socket.AF_INET6:
        s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    return s


def _bind(s: socket.socket, port: int) -> None:
    """Bind a socket to a port, also to one that the system keeps for connections that nobody has any more."""
    try:
        s.bind(("", port))
        return
    except OSError as e:
        if not port or e.errno != errno.EADDRINUSE:
            raise
    # Only now: for as long as nobody else has the port, the system remembers how the first one bound it.
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        s.bind(("", port))
    except OSError as e:
        if e.errno != errno.EADDRINUSE or not _is_left_over(port):
            raise
        s.bind(("", port))
    finally:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)


def _is_left_over(port: int) -> bool:
    """Tell whether the system gives a port free that it had kept; without the right to ask for that, it does not."""
    try:
        return forget(port)
    except OSError:
        return False


class Reserved:
    """Ports for kernels that are about to come up: each is given out once, and held until `close`."""

    def __init__(self) -> None:
        self._held: dict[int, socket.socket] = {}

    def hold(self, port: int) -> None:
        """Hold this port, also where other sockets of this user that have SO_REUSEPORT do.

        Raises
        ------
        OSError : somebody else has it, or listens there.
        """
        if port in self._held:
            return
        s = _socket()
        try:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            _bind(s, port)
        except BaseException:
            s.close()
            raise
        self._held[port] = s

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
        # Only now: before, it would have been bound also to what another process holds.
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        port = int(s.getsockname()[1])
        self._held[port] = s
        return port

    def close(self) -> None:
        """Let go of the ports; whoever listens at one keeps it."""
        for s in self._held.values():
            s.close()
        self._held.clear()
