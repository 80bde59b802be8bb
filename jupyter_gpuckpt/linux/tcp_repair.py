"""TCP connections that are saved and made again at their two ends (TCP_REPAIR)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Collection

from . import processes
from .foreign_sockets import sockets_of

__all__ = ["give_back", "is_allowed"]

_TCP_REPAIR = 19  # linux/tcp.h
_GET_FILTER, _DETACH_FILTER = 26, 27  # asm-generic/socket.h
_LONGEST = 4096  # instructions of a filter (linux/bpf_common.h, BPF_MAXINSNS)
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""The filter that criu's library attaches (`criu_connections.c`)."""


def is_allowed() -> bool:
    """Tell whether this process may do that (CAP_NET_ADMIN), half closed ones included (CAP_NET_RAW)."""
    try:
        with socket.socket() as one, socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW):
            one.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 1)
    except OSError:
        return False
    return True


def give_back(pids: Collection[int]) -> None:
    """Have the connections of these processes go on that a criu was saving when it was killed."""
    for pid in pids:
        with contextlib.suppress(OSError):
            for one in sockets_of(pid, {f"socket:[{inode}]" for inode in processes.sockets([pid])}):
                with one, contextlib.suppress(OSError):
                    if one.getsockopt(socket.IPPROTO_TCP, _TCP_REPAIR):
                        one.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 0)
                    if _filter(one) == _DROP_ALL:
                        one.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)


def _filter(one: socket.socket) -> bytes:
    """Return the filter of a socket; nothing where it has none. Raises `OSError`."""
    # Its length is told in instructions: Python would reserve bytes.
    libc, found, count = ctypes.CDLL(None, use_errno=True), (ctypes.c_uint64 * _LONGEST)(), ctypes.c_uint(_LONGEST)
    if libc.getsockopt(one.fileno(), socket.SOL_SOCKET, _GET_FILTER, found, ctypes.byref(count)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return bytes(found)[: 8 * count.value]
