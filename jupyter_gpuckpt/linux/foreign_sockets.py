"""Sockets that other processes have open, held here as well."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Collection

from . import processes, socket_ports
from .reserved_ports import Reserved

__all__ = ["ClosedPorts", "SharedPorts", "hold", "sockets_of"]

_PIDFD_GETFD = 438  # the same on every architecture (asm-generic/unistd.h)

_ATTACH_FILTER, _DETACH_FILTER, _ATTACH_REUSEPORT_CBPF, _DETACH_REUSEPORT_BPF = 26, 27, 51, 68  # asm-generic/socket.h
_RETURN_0, _RETURN_1 = 0x06, 0x06 | 1 << 32
"""Filters of one instruction (linux/filter.h: BPF_RET | BPF_K, with the value behind it). Of the sockets at a port the
second one chooses the second; where there is only one, the system chooses that. The first one lets no packet in."""


class _FilterProgram(ctypes.Structure):
    """``struct sock_fprog`` of <linux/filter.h>."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def _attach(one: socket.socket, option: int, instruction: int) -> None:
    filter_ = (ctypes.c_uint64 * 1)(instruction)
    with contextlib.suppress(OSError):  # nobody listens there
        one.setsockopt(socket.SOL_SOCKET, option, bytes(_FilterProgram(1, ctypes.addressof(filter_))))


def sockets_of(pid: int, names: Collection[str]) -> list[socket.socket]:
    """Return those sockets of a process that /proc has under these names (``socket:[INODE]``), once each.

    Those that must not be reached are left out.

    Raises
    ------
    OSError : the process is gone, or its files must not be reached.
    """
    found: dict[str, socket.socket] = {}
    pidfd = os.pidfd_open(pid)
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208 - file descriptors are not paths
            with contextlib.suppress(OSError):
                name = os.readlink(f"/proc/{pid}/fd/{fd}")  # noqa: PTH115
                if name in names and name not in found:
                    found[name] = socket.socket(fileno=_same_file(pidfd, int(fd)))
    finally:
        os.close(pidfd)
    return list(found.values())


def _same_file(pidfd: int, fd: int) -> int:
    """Return a descriptor here of a file that another process has open (pidfd_getfd(2)). Raises `OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    own = int(libc.syscall(_PIDFD_GETFD, pidfd, fd, 0))
    if own < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return own


def _try_to_bind(like: socket.socket) -> None:
    """Bind another socket to where this one is bound, as criu will. Raises `OSError`."""
    with socket.socket(like.family) as one:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            one.setsockopt(socket.SOL_SOCKET, option, 1)
        if like.family == socket.AF_INET6:
            only = like.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
        one.bind(like.getsockname())


class SharedPorts:
    """The TCP ports at which some processes listen, where another one of the same user can listen too until `close`.

    That one binds with SO_REUSEPORT, as criu does, and so does whoever was there first, as the system sees it from now
    on (socket(7)). Whoever connects comes to one of the two, until `turn`.

    Raises
    ------
    OSError : a socket of theirs cannot be reached, or its port still belongs to connections that share it with nobody.
    """

    def __init__(self, pids: Collection[int]) -> None:
        self.ports: set[int] = set()
        self._sockets: list[tuple[socket.socket, int]] = []
        listening = {inode: port for port, inode in socket_ports.port_holders("tcp")}
        try:
            for pid in pids:
                wanted = {inode for inode in processes.sockets([pid]) if inode in listening}
                found = sockets_of(pid, {f"socket:[{inode}]" for inode in wanted})
                for one in found:
                    self._sockets.append((one, one.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT)))
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                    _try_to_bind(one)
                if len(found) < len(wanted):
                    raise OSError(0, f"a port of process {pid} cannot be shared")
                self.ports |= {listening[inode] for inode in wanted}
        except BaseException:
            self.close()
            raise

    def turn(self) -> None:
        """Have whoever connects from now on come to the one that listens second."""
        for one, _ in self._sockets:
            _attach(one, _ATTACH_REUSEPORT_CBPF, _RETURN_1)

    def turn_back(self) -> None:
        """Have whoever connects from now on come to any of the two, as before `turn`."""
        for one, _ in self._sockets:
            with contextlib.suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, _DETACH_REUSEPORT_BPF, 0)

    def close(self) -> None:
        """Let nobody else listen there from now on; who does already goes on."""
        while self._sockets:
            one, before = self._sockets.pop()
            with contextlib.suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, before)
            one.close()


class ClosedPorts:
    """The TCP ports at which a process listens, of these: nobody's connection is accepted there until `open`.

    Who tries tries again a second later, as with a lost packet (RFC 6298), and comes to whoever listens then.

    Raises
    ------
    OSError : the process is gone, or its files must not be reached.
    """

    def __init__(self, pid: int, ports: Collection[int]) -> None:
        names = {f"socket:[{inode}]" for port, inode in socket_ports.port_holders("tcp") if port in ports}
        self._sockets = sockets_of(pid, names)
        for one in self._sockets:
            _attach(one, _ATTACH_FILTER, _RETURN_0)

    def open(self) -> None:
        """Have whoever connects come to the process again."""
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
        self.close()

    def close(self) -> None:
        """Leave them closed for as long as the process listens there."""
        while self._sockets:
            self._sockets.pop().close()


def hold(reserved: Reserved, ports: Collection[int], pids: Collection[int]) -> None:
    """Hold ports at which these processes may listen, or begin to.

    Raises
    ------
    OSError : somebody else has one, or a socket of theirs cannot be reached; the others are held.
    """
    taken = []
    for port in ports:
        try:
            reserved.hold(port)
        except OSError:
            taken.append(port)
    if taken:
        with contextlib.closing(SharedPorts(pids)):
            for port in taken:
                reserved.hold(port)
