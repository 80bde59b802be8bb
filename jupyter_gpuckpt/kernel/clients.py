"""Which clients a kernel has, and when they hear it.

A client subscribes to what a kernel says, and tells who it is, when it connects. What is sent earlier is lost to it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import termios
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..linux import tcp_info

__all__ = ["COMING_BACK", "introduced", "until_all_is_sent", "until_zmq_has_acted", "wait_for_peers"]

# ZMTP 3.0: a greeting of 64 bytes, a READY command of at least 27, and on iopub a subscription of at least 3.
_GREETED, _INTRODUCED = 91, 94
# With CurveZMQ: a HELLO of 202, an INITIATE of 285 (iopub) or 301 and more, and on iopub a subscription of at least 45.
_GREETED_BY_CURVE, _INTRODUCED_BY_CURVE = 551, 560
COMING_BACK = 10.0
"""How long clients may take to connect again before they are answered, in seconds."""
_SUBSCRIBING = 2.0  # how long clients whose own threads have greeted may take to say what they want, in seconds
_ACTING = 0.5  # how long zmq's threads may take to act on what they have read, in seconds
_ACTING_UNSEEN = 0.02  # the same where the system does not tell, in seconds
_PASSED_ON = 0.002
"""How long a socket of zmq's may not look at what those threads tell it, in seconds: 3 million ticks of the processor
(`max_command_delay`, libzmq's config.hpp)."""
_THREADS = "ZMQbg/IO/"  # how libzmq 4.3 calls them (src/thread.cpp)
_WAITING = {"x86_64": "232", "aarch64": "22"}.get(os.uname().machine, "")  # epoll_wait, epoll_pwait (asm/unistd.h)


def wait_for_peers(
    expected: Mapping[int, int], *, encrypted: bool, connecting: float, unless: Callable[[], bool] = lambda: False
) -> bool:
    """Wait until as many clients as before are connected again, by local port: what is sent earlier is lost to them.

    On a busy machine they may take seconds to connect and to greet, but `connecting` at most: one that has gone does
    not come back. Two seconds later they have said what they want, except those that do not look at what the kernel
    says. Nor are they waited for any more when `unless` says so. Return whether all are there.
    """
    deadline, all_have_greeted = time.monotonic() + connecting, False
    while time.monotonic() < deadline and not unless():
        greeted, present = _clients(encrypted=encrypted)
        if all(present[port] >= count for port, count in expected.items()):
            until_zmq_has_acted()
            return True
        if not all_have_greeted and all(greeted[port] >= count for port, count in expected.items()):
            all_have_greeted, deadline = True, min(deadline, time.monotonic() + _SUBSCRIBING)
        time.sleep(0.005)
    return False


def until_zmq_has_acted() -> None:
    """Wait until zmq, whose own threads have read what clients said, knows where to send what is for them."""
    deadline = time.monotonic() + _ACTING
    while (waiting := _zmq_waits()) is False and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(_ACTING_UNSEEN if waiting is None else _PASSED_ON)


def until_all_is_sent(ports: Collection[int], seconds: float) -> None:
    """Wait likewise until clients at these local ports have taken all that is for them, for so many seconds at most."""
    deadline = time.monotonic() + seconds
    while True:
        until_zmq_has_acted()  # there is more to send where the system had no room for it
        if (_zmq_waits() is not False and not _unsent(ports)) or time.monotonic() > deadline:
            return
        time.sleep(0.005)


def _zmq_waits() -> bool | None:
    """Tell whether all of zmq's own threads wait for something to come; None where it cannot be seen (proc(5))."""
    calls = []
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended, or the system does not tell
            if (thread / "comm").read_text().startswith(_THREADS):
                calls.append((thread / "syscall").read_text().split()[0])
    return all(call == _WAITING for call in calls) if calls else None


def introduced(*, encrypted: bool) -> Counter[int]:
    """Return how many clients have said who they are and what they want, by local port."""
    return _clients(encrypted=encrypted)[1]


def _clients(*, encrypted: bool) -> tuple[Counter[int], Counter[int]]:
    """Return how many clients have greeted, by local port, and how many of them have introduced themselves.

    The kernel is a client of itself as well, which is no other: nothing that it says is lost to it.
    """
    greeting, least = (_GREETED_BY_CURVE, _INTRODUCED_BY_CURVE) if encrypted else (_GREETED, _INTRODUCED)
    # Between two files of one look, the kernel may connect to itself or end that: the other look has both of its ends.
    before, now = _heard_by_connection(), _heard_by_connection()
    ends = before.keys() | now.keys()
    others = {(here, there): now[here, there] for here, there in before.keys() & now if (there, here) not in ends}

    def having_said(size: int) -> Counter[int]:
        return Counter(here[1] for (here, _), heard in others.items() if heard >= size)

    return having_said(greeting), having_said(least)


def _heard_by_connection() -> dict[tuple[Any, Any], int]:
    """Return how many bytes came on each TCP connection, by both of its ends; none where some were not read yet."""
    heard: dict[tuple[Any, Any], int] = {}  # a socket has another file descriptor while another thread looks at it
    for s in _connections():
        with contextlib.suppress(OSError):
            ends = s.getsockname(), s.getpeername()
            unread = _bytes_left(s, termios.FIONREAD)
            # One that the keeper has half closed is not there any more: nothing can be sent on it.
            if tcp_info.state(s) == tcp_info.ESTABLISHED:
                heard[ends] = 0 if unread else tcp_info.bytes_received(s)
    return heard


def _unsent(ports: Collection[int]) -> int:
    """Return how many bytes have not been taken yet by those that they were sent to from these ports (tcp(7))."""
    total = 0
    for s in _connections():
        with contextlib.suppress(OSError):
            if s.getsockname()[1] in ports and tcp_info.state(s) == tcp_info.ESTABLISHED:
                total += _bytes_left(s, termios.TIOCOUTQ)
    return total


def _bytes_left(s: socket.socket, which: int) -> int:
    return int(struct.unpack("i", fcntl.ioctl(s, which, bytes(4)))[0])


def _connections() -> Iterator[socket.socket]:
    """Give this process's TCP sockets one after another, each for as long as it is looked at."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - file descriptors are not paths
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):  # noqa: PTH115
                with socket.socket(fileno=os.dup(int(name))) as s:
                    if s.type == socket.SOCK_STREAM and s.family in (socket.AF_INET, socket.AF_INET6):
                        yield s
