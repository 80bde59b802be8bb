"""What the system keeps of TCP connections that nobody has any more: it can be ended, and their port is free at once.

Who closed a connection has its port kept for a minute. A server that ended in the middle of its work has nearly always
left some, and unless it had set SO_REUSEADDR, nobody else listens at its port for as long.
"""

from __future__ import annotations

import contextlib
import socket
import struct

from . import sock_diag

__all__ = ["forget"]

_FIN_WAIT2, _TIME_WAIT = 5, 6  # linux/tcp_states.h


def forget(port: int) -> bool:
    """Have the system forget the connections of a local port that nobody has any more; tell whether there were any.

    Only those are ended of which all that was sent has arrived, so that nothing is lost; and none where a process
    listens at the port, or has a connection there.

    Raises
    ------
    OSError : it takes CAP_NET_ADMIN and a system that can do it (CONFIG_INET_DIAG_DESTROY).
    """
    wanted = struct.pack("!H", port)
    with sock_diag.connect() as system:
        found = [
            one
            for family in (socket.AF_INET, socket.AF_INET6)
            for one in sock_diag.found(system, family, socket.IPPROTO_TCP, connection=wanted.ljust(48, b"\0"))
            if one.family == family and one.connection.startswith(wanted)
        ]
        if any(one.inode for one in found):
            return False
        over = [one for one in found if one.state in (_FIN_WAIT2, _TIME_WAIT) and not one.unsent]
        for one in over:
            with contextlib.suppress(FileNotFoundError):  # its time was up
                sock_diag.destroy(system, one.family, one.connection)
    return bool(over)
