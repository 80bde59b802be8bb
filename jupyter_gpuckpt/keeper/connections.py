"""The connections of clients to a kernel's ports: ending them so that nothing that they have sent is lost.

zmq does not tell a sender what has been read. But a client whose connection is half closed from here closes its own
half as well, and then all that it has ever sent on it has come: it lies unread in the socket, or has been read. What it
sends later waits in the client until somebody listens again.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import socket
import struct
import termios
import time
from collections import Counter
from collections.abc import Collection

from ..linux import proc, processes, socket_ports, tcp_info
from ..linux.foreign_sockets import sockets_of

__all__ = ["Connections", "unread_bytes"]

log = logging.getLogger("gpuckpt.keeper")

_ESTABLISHED = "01"
_POLL = 0.005  # seconds


def unread_bytes(ports: Collection[int]) -> int:
    """Return how many bytes of clients lie unread at these local ports (proc(5), net/tcp)."""
    total = 0
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for row in map(str.split, proc.lines(f"/proc/net/{table}")[1:]):
                if row[3] == _ESTABLISHED and int(row[1].rpartition(":")[2], 16) in ports:
                    total += int(row[4].partition(":")[2], 16)
    return total


def _clients(pid: int, ports: Collection[int]) -> set[str]:
    """Return what the connections that others have to a process at these ports are called in /proc."""
    held = set(processes.open_files(pid))
    ends = {(one.here, one.there): (one.port, f"socket:[{one.inode}]") for one in socket_ports.established()}
    at = {(here, there): name for (here, there), (port, name) in ends.items() if name in held and port in ports}
    return {name for (here, there), name in at.items() if ends.get((there, here), (0, ""))[1] not in held}


class Connections:
    """The connections that clients have to a process at some local ports, held here as well until `close`.

    ipykernel is a client of itself; such connections are left alone.

    Raises
    ------
    OSError : the process is gone, or its files must not be reached.
    """

    def __init__(self, pid: int, ports: Collection[int]) -> None:
        inodes = _clients(pid, ports)
        self._sockets = sockets_of(pid, inodes)
        if len(self._sockets) < len(inodes):
            log.warning("%d connections of clients cannot be ended in order", len(inodes) - len(self._sockets))

    def close(self) -> None:
        """Let go of them."""
        for one in self._sockets:
            one.close()

    def by_port(self) -> Counter[int]:
        """Return how many there are at each port."""
        return Counter(int(one.getsockname()[1]) for one in self._sockets)

    def received(self) -> dict[int, int]:
        """Return how many bytes have ever come on each, read or not, by the inodes of their sockets."""
        return {os.fstat(one.fileno()).st_ino: tcp_info.bytes_received(one) for one in self._sockets}

    def unread(self) -> int:
        """Return how many bytes have come and were not read by anybody."""
        total = 0
        for one in self._sockets:
            with contextlib.suppress(OSError):
                total += struct.unpack("i", fcntl.ioctl(one, termios.FIONREAD, bytes(4)))[0]
        return total

    async def end(self, timeout: float) -> bool:
        """Have the clients close them; return whether all have done so within `timeout` seconds."""
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + timeout
        while not all(map(_is_over, self._sockets)):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_POLL)
        return True

    async def read_out(self, timeout: float) -> bool:
        """Wait until whoever has them has read all that came; return whether it was so within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self.unread():
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_POLL)
        return True


def _is_over(connection: socket.socket) -> bool:
    try:
        return tcp_info.state(connection) == tcp_info.CLOSED
    except OSError:
        return True
