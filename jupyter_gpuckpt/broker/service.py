"""The broker's own process: it listens, and gives every connection a deputy; it reads nothing that users send."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import grp
import logging
import os
import signal
import socket
import struct
import sys
import time

from .. import installed
from ..errors import Refused, Unavailable
from ..freeze.criu_program import CriuProgram, find_criu, refuse_open_sockets, version_text
from ..linux.capabilities import to_add
from ..linux.readiness import readable
from .changeable import refuse_changeable
from .deputy import Deputy
from .descriptors import close_all
from .lent_criu import refuse_without_own_libraries
from .register import Register
from .rights import act_as, missing

__all__ = ["CONTAINERS", "run"]

log = logging.getLogger("gpuckpt.broker")

CONTAINERS = "--containers"
"""By which the program of a service is asked to serve containers, too."""

_PR_SET_CHILD_SUBREAPER = 36
_HANDED_OVER = 3  # its descriptor: sd_listen_fds(3)
_MOST = 256  # deputies that a user may have at once: one for a kernel, two while it is restored
_BURST, _SECOND = 60, 1.0  # connections of a user in so many seconds
_BACKLOG = 128
_REAPING = 5.0  # seconds between two looks at ended children, at most


def run(group: str, with_containers: bool = False) -> None:
    """Be the broker, for the members of a group, until SIGTERM or SIGINT; kernels that it has started live on.

    With containers, it serves those members who live in one that has no rights, too.

    Its deputies end with it, once they have finished what they do; those of another broker take their places. They are
    waited for, up to a second signal, but where systemd lets them outlive it: a container ends with its first process.

    The socket is systemd's, where it hands one over (``LISTEN_FDS``), else one of its own at `installed.broker_socket`.

    Raises
    ------
    Unavailable : this process is not root or lacks its rights, or users could change what it runs or where its socket
        is, or reach criu's.
    Refused : there is no such group, or another broker listens.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    if os.geteuid() != 0:
        raise Unavailable("The broker was not started.", f"This is user {os.geteuid()}.", "Start it as root.")
    if lacking := missing():
        raise Unavailable(
            "The broker was not started.",
            f"It lacks {' and '.join(f'CAP_{name}' for name in lacking)}, as is usual in a container.",
            to_add(lacking),
        )
    close_all(but=[_HANDED_OVER] if _is_activated() else [])
    program = find_criu()
    refuse_open_sockets(program)
    refuse_changeable(program)
    if with_containers:
        refuse_without_own_libraries(program)
    os.chdir("/")
    os.umask(0o022)  # users find the socket in the folders that are made for it
    register = Register(installed.broker_socket().parent)
    register.make()
    os.umask(0o077)
    # Sleepers and what enters them are orphaned on purpose: they become this process's children, and are reaped by it.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with _listener(group) as listener:
        log.info("the broker listens, with CRIU %s", version_text(program.version))
        _tell_systemd("READY=1")
        _Broker(listener, program, register, with_containers).run()


def _is_activated() -> bool:
    return os.environ.get("LISTEN_PID") == str(os.getpid()) and os.environ.get("LISTEN_FDS") == "1"


def _listener(group: str) -> socket.socket:
    if _is_activated():
        return socket.socket(fileno=_HANDED_OVER)
    try:
        gid = grp.getgrnam(group).gr_gid
    except KeyError:
        raise Refused(
            "The broker was not started.",
            f"There is no group {group!r}, whose members may use it.",
            f"Create it (`groupadd --system {group}`) and add users to it (`usermod -aG {group} USER`).",
        ) from None
    path = installed.broker_socket()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.suppress(OSError):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
            other.connect(str(path))
        raise Refused("The broker was not started.", f"Another broker listens at {path}.", "Use that one, or stop it.")
    made = path.with_name(f".{path.name}")
    made.unlink(missing_ok=True)
    act_as(0, gid)  # it is of that group from the first moment
    listener.bind(str(made))
    act_as(0, 0)
    made.chmod(0o660)
    listener.listen(_BACKLOG)
    made.replace(path)  # whoever finds it is answered
    return listener


_User = tuple[int, int]
"""A uid, and the number of the namespace of pids in which it asks: containers have users of the same uid."""


class _Broker:
    def __init__(
        self, listener: socket.socket, program: CriuProgram, register: Register, with_containers: bool
    ) -> None:
        self._listener, self._program, self._register = listener, program, register
        self._with_containers = with_containers
        self._deputies: dict[int, _User] = {}
        """The user of each, by its pid."""
        self._recent: dict[_User, collections.deque[float]] = {}
        self._complained: dict[_User, float] = {}
        """When the log last said of a user that there was too much."""

    def run(self) -> None:
        ended, told = socket.socketpair()
        for end in (ended, told):
            end.setblocking(False)
        signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
        stopping: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: stopping.append(number))
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._listener.setblocking(False)
        while not stopping:
            ready = readable(self._listener, ended, seconds=_REAPING)
            self._reap(ended)
            if self._listener in ready:
                with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
                    for _ in range(_BACKLOG):
                        self._accept()
        for pid in self._deputies:  # none of them is reaped: each is still the process that it was
            os.kill(pid, signal.SIGTERM)
        self._listener.close()
        while self._deputies and len(stopping) == 1 and not _is_of_systemd():
            readable(ended, seconds=_REAPING)
            self._reap(ended)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            user = _user_at(connection)
            if not self._may_have_one_more(user):
                now = time.monotonic()
                if now - self._complained.get(user, -_SECOND) >= _SECOND:
                    self._complained[user] = now
                    log.warning("user %d sends too many requests, or has too many deputies: disconnected", user[0])
                return
            connection.setblocking(True)
            pid = os.fork()
            if pid == 0:
                self._be_deputy(connection)
            self._deputies[pid] = user

    def _may_have_one_more(self, user: _User) -> bool:
        now = time.monotonic()
        self._recent = {one: times for one, times in self._recent.items() if now - times[-1] < _SECOND}
        self._complained = {one: when for one, when in self._complained.items() if now - when < _SECOND}
        recent = self._recent.setdefault(user, collections.deque(maxlen=_BURST))
        if len(recent) == _BURST and now - recent[0] < _SECOND:
            return False
        recent.append(now)
        return list(self._deputies.values()).count(user) < _MOST

    def _be_deputy(self, connection: socket.socket) -> None:
        try:
            os.setsid()  # what is typed to end the broker in a terminal ends no deputy at what it does
            self._listener.close()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            Deputy(connection, self._program, self._register, self._with_containers).serve()
        except ConnectionError:
            pass
        except BaseException:
            log.exception("a deputy failed")
        finally:
            os._exit(0)

    def _reap(self, ended: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            ended.recv(4096)
        with contextlib.suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                if self._deputies.pop(pid, None) is None:
                    self._register.forget(pid)


def _user_at(connection: socket.socket) -> _User:
    pid, uid, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    with contextlib.suppress(OSError):  # it has ended
        # Namespaces of pids that users make for themselves, as many as they like, are in user namespaces of theirs.
        if os.path.samestat(os.stat(f"/proc/{pid}/ns/user"), os.stat("/proc/self/ns/user")):  # noqa: PTH116
            return uid, os.stat(f"/proc/{pid}/ns/pid").st_ino  # noqa: PTH116
    return uid, 0


def _is_of_systemd() -> bool:
    return "NOTIFY_SOCKET" in os.environ or _is_activated()


def _tell_systemd(what: str) -> None:
    """Tell systemd of this service's state, if it wants to know (sd_notify(3))."""
    if path := os.environ.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
            to.sendto(what.encode(), "\0" + path[1:] if path.startswith("@") else path)
