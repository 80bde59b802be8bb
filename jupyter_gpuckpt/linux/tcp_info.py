"""What the system knows of a TCP connection (tcp(7), ``TCP_INFO``).

linux/tcp.h has the structure, and tcp_states.h the states. Each of these may raise `OSError`.
"""

from __future__ import annotations

import socket
import struct

__all__ = ["CLOSED", "ESTABLISHED", "bytes_received", "state"]

ESTABLISHED = 1
"""It is open in both directions."""
CLOSED = 7
"""It is closed in both."""
_BYTES_RECEIVED = struct.Struct("=128xQ")  # tcpi_bytes_received


def state(connection: socket.socket) -> int:
    """Return its state."""
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[0]


def bytes_received(connection: socket.socket) -> int:
    """Return how many bytes have ever come on it, read or not; 0 on a system that does not count them (gVisor)."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size)
    return int(_BYTES_RECEIVED.unpack(info)[0]) if len(info) == _BYTES_RECEIVED.size else 0
