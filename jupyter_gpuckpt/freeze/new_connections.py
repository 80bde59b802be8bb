"""New TCP connections in the place of those that were inside a saved tree, with what lay unread in them.

Each is made of two sockets of this process, over the loopback device, before anything of the tree runs. criu gets them
one by one while it restores the tree: its images name an end by a number, and the library in it asks here for the
socket of that number (`criu_connections.c`), and puts it where criu has made one. So criu sets its options and flags,
gives it to all processes that share it, and adds it to epoll sets, as with each socket.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import resource
import select
import socket
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import BinaryIO

from ..linux.unix_sockets import short_path
from .images import NewEnd, TcpEnd, unread
from .tcp_connections import NOBODY, Pair

__all__ = ["NewConnections"]

log = logging.getLogger("gpuckpt.keeper")

_NAME = "connections"
"""In the run folder: where criu asks for sockets."""
_PATIENCE = 30.0  # seconds that a connection, or a question of criu's may take
_FULL = 5.0  # seconds without room until there is taken to be none
_ARRIVAL = 1.0  # seconds after which what has not arrived is left to the system
_LOOK = 0.001  # seconds
_QUIET = 20  # looks in which nothing arrives until there is taken to be no room for more
_TRIES = 3
_SPARE = 64  # files that are kept for what else this process does meanwhile
_PART = 1 << 20  # bytes
_SNDBUFFORCE, _RCVBUFFORCE = 32, 33  # asm-generic/socket.h
_LARGE, _LARGEST = 1 << 28, (1 << 31) - 1
_READ, _WRITE = 1, 2  # criu's images/sk-opts.proto


class NewConnections:
    """The sockets of new connections, until criu has them, or until `close`.

    Attributes
    ----------
    ends : what criu's images say of them, by the ids of the files.
    """

    def __init__(self) -> None:
        self.ends: dict[int, NewEnd] = {}
        self._sockets: dict[int, socket.socket] = {}
        self._waiting: socket.socket | None = None
        self._at = Path()
        self._answering: threading.Thread | None = None
        self._limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def make(self, images: Path, pairs: Collection[Pair], port: Callable[[int], int]) -> list[Pair]:
        """Make a connection for each pair, and send what was unread; return those with which that failed.

        The first end of a pair has the port that `port` gives for its own, if that gives one; all others get free
        ones. So no connection is the same as one of a kernel that still runs, or that the system keeps in TIME_WAIT.

        It fails where this process may not have so many files, or the system has no room for what was unread.
        """
        numbers, failed = itertools.count(1), []
        resource.setrlimit(resource.RLIMIT_NOFILE, (self._limits[1], self._limits[1]))  # until `close`
        for pair in pairs:
            try:
                _demand_room_for_files()
                sockets = _connected(images, pair, port)
            except OSError as e:
                log.warning("a connection could not be made again: %s", e)
                failed.append(pair)
                continue
            for end, there, own in zip(pair, reversed(pair), sockets, strict=True):
                if end.id == NOBODY:
                    own.close()
                    continue
                number = next(numbers)
                self._sockets[number] = own
                # What is sent is followed by the end of the stream, where the other end had said that it is over.
                shut = end.shutdown & ~_READ if there.shutdown & _WRITE else end.shutdown
                self.ends[end.id] = NewEnd(number, int(own.getsockname()[1]), shut)
        return failed

    def listen(self, run_dir: Path) -> None:
        """Give the sockets to criu when it asks for them, which is started over this run folder."""
        if not self._sockets:
            return
        self._at = run_dir / _NAME
        self._waiting = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with short_path(self._at) as short:
            self._waiting.bind(short)
        self._at.chmod(0o600)
        self._waiting.listen()
        self._answering = threading.Thread(target=self._answer, args=(self._waiting,), daemon=True)
        self._answering.start()

    def _answer(self, waiting: socket.socket) -> None:
        while True:
            try:
                asking, _ = waiting.accept()
            except OSError:
                return  # it is closed
            with asking, contextlib.suppress(OSError):
                asking.settimeout(_PATIENCE)
                number = int.from_bytes(asking.recv(4), sys.byteorder)
                if (own := self._sockets.pop(number, None)) is not None:
                    with own:
                        socket.send_fds(asking, [b"."], [own.fileno()])

    def close(self) -> None:
        """Give no more, and close what nobody has asked for."""
        if self._waiting is not None and self._answering is not None:
            self._waiting.shutdown(socket.SHUT_RDWR)
            self._answering.join()
            self._waiting.close()
            self._at.unlink(missing_ok=True)
            self._waiting = None
        while self._sockets:
            self._sockets.popitem()[1].close()
        resource.setrlimit(resource.RLIMIT_NOFILE, self._limits)


def _demand_room_for_files() -> None:
    """Raise OSError where this process may hardly open any more files."""
    with contextlib.ExitStack() as opened:
        for _ in range(_SPARE):
            opened.callback(os.close, os.open("/", os.O_PATH))


def _connected(images: Path, pair: Pair, port: Callable[[int], int]) -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a new connection, with what was unread. Raises `OSError`."""
    for last in (False,) * (_TRIES - 1) + (True,):
        with contextlib.ExitStack() as undoing:
            own = undoing.enter_context(socket.socket(pair[0].family))
            own.settimeout(_PATIENCE)
            own_port = port(pair[0].here[1])
            if own_port:
                _share_port(own)  # the tree is going to listen there, and a kernel before it may do so still
            own.bind((_address(pair[0]), own_port))
            try:
                other = undoing.enter_context(_called(own, pair[1]))
            except OSError:
                if last:
                    raise
                continue
            for one in (own, other):
                _share_port(one)  # criu takes it to be so, and sets what it was at last
                one.setblocking(False)
            ends = zip(pair, reversed(pair), (own, other), (other, own), strict=True)
            for end, there, receiver, sender in ends:
                if end.id == NOBODY:
                    continue
                # What one that is closed keeps, it does not send for ever.
                room = _LARGE if there.id == NOBODY else end.room // 2  # the kernel doubles what it is told
                with unread(images, end).open("rb") as content:
                    _fill(receiver, sender, content, room)
            undoing.pop_all()
            return own, other
    raise AssertionError


def _called(caller: socket.socket, end: TcpEnd) -> socket.socket:
    """Connect a socket to a new one at a free port, and return that."""
    with socket.socket(end.family) as waiting:
        waiting.settimeout(_PATIENCE)
        waiting.bind((_address(end), 0))
        waiting.listen()
        port = waiting.getsockname()[1]
        caller.connect((f"::ffff:{end.here[0]}" if _is_mapped(caller.family, end) else end.here[0], port))
        while True:
            found, name = waiting.accept()
            # Anybody on the machine could have connected as well.
            if _plain(name) == _plain(caller.getsockname()):
                return found
            found.close()


def _address(end: TcpEnd) -> str:
    return f"::ffff:{end.here[0]}" if _is_mapped(end.family, end) else end.here[0]


def _is_mapped(family: int, end: TcpEnd) -> bool:
    return family == socket.AF_INET6 and ":" not in end.here[0]


def _plain(name: tuple[str, int]) -> tuple[str, int]:
    return name[0].removeprefix("::ffff:"), name[1]


def _share_port(one: socket.socket) -> None:
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        one.setsockopt(socket.SOL_SOCKET, option, 1)


def _fill(receiver: socket.socket, sender: socket.socket, content: BinaryIO, room: int) -> None:
    """Have all of a file lie unread in a socket; what has no room there waits in the one at the other end.

    The receiver gets no more room than `room` where it need not: as criu is about to set that, it would drop what comes
    next of all that it had said to have room for, and be sent it again only after some time.

    Raises
    ------
    OSError : there is no room for it in both.
    """
    size = 0
    try:
        receiver.setsockopt(socket.SOL_SOCKET, _RCVBUFFORCE, room)
        sender.setsockopt(socket.SOL_SOCKET, _SNDBUFFORCE, _LARGE)
    except PermissionError:  # Without CAP_NET_ADMIN: this, too, makes the buffer large, and it stays so (tcp(7)).
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _LARGEST)
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
    sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while part := content.read(_PART):
        size += len(part)
        while part:
            if not select.select([], [sender], [], _FULL)[1]:
                raise OSError(0, f"there is no room for the {size} bytes and more that lay unread in a connection")
            part = part[sender.send(part) :]
    sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)
    deadline, arrived, quiet = time.monotonic() + _ARRIVAL, 0, 0
    while arrived < size and quiet < _QUIET and time.monotonic() < deadline:
        time.sleep(_LOOK)
        before, arrived = arrived, _waiting_in(receiver)
        quiet = quiet + 1 if arrived == before else 0


def _waiting_in(one: socket.socket) -> int:
    (size,) = struct.unpack("i", fcntl.ioctl(one, termios.FIONREAD, bytes(4)))
    return int(size)
