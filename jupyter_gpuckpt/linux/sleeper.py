"""The sleeper: process 1 of a fresh PID and mount namespace, which sleeps, starts what it is told to, and reaps.

Run as a program by the keeper, with the standard library alone (`python -I -S -B sleeper.py KERNEL_DIR RUN_DIR`), so
that it starts in milliseconds and needs nothing of the environment. A new kernel's is made by `starter.py`; and for
users without root the broker makes the namespaces, and runs it in them without any right, with a listening socket
(`sleeper.py FD [PROOF_FD]`). Its death ends everything in its namespace. It outlives the keeper: a new keeper finds it
by its socket.

Inside the namespace /proc shows its processes alone, /dev/shm is its own, and the run folder stands at
`NAMESPACE_RUN_DIR`; everything else is the machine's. Requests and answers are lines of JSON on a Unix stream socket.
Before all else comes the line that `proof` is about, where the run folder says so; then:

- ``{"spawn": {...}, "tag": t}``   → ``{"spawned": pid, "tag": t}`` or ``{"failed": text, "tag": t}``: a program
  (`spawning.Program`); or ``{"adopt": pid}``, or ``{"after_pid": pid}``, of `client.sleeper_messages`
- whenever a child that was spawned ends → ``{"exited": pid, "status": s}``, s as `os.waitstatus_to_exitcode` gives it;
  the ends of children are told again to whoever connects later.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Iterable

sys.path.append(os.path.dirname(os.path.abspath(__file__)))  # -I leaves it out; nothing else is imported from there
import proof  # type: ignore[import-not-found]
import spawning  # type: ignore[import-not-found]

Message = dict[str, int | str]  # no dataclass, for the time and the memory that these take
LINE_LIMIT = 16 << 20  # bytes: a program's arguments and environment travel in a line


class Sleeper:
    """The loop of process 1: one listening socket, the children, and who wants to hear of them."""

    def __init__(self, listener: socket.socket, secret: str = "", spawned: Iterable[int] = ()) -> None:
        self.listener, self.secret = listener, secret
        self.selector = selectors.DefaultSelector()
        self.clients: dict[socket.socket, bytes] = {}
        self.served: set[socket.socket] = set()
        self.spawned = set(spawned)
        self.exits: collections.deque[Message] = collections.deque(maxlen=100)
        self.wake, wake_write = socket.socketpair()
        self.wake.setblocking(False)
        wake_write.setblocking(False)
        self.wake_write = wake_write
        signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self) -> None:
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.selector.register(self.wake, selectors.EVENT_READ)
        while True:
            for key, _ in self.selector.select():
                source = key.fileobj
                if source is self.listener:
                    self._accept()
                elif source is self.wake:
                    with contextlib.suppress(BlockingIOError):
                        self.wake.recv(4096)
                elif isinstance(source, socket.socket):
                    self._receive(source)
            self._reap()

    def _accept(self) -> None:
        client, _ = self.listener.accept()
        self.clients[client] = b""
        self.selector.register(client, selectors.EVENT_READ)
        if not self.secret:
            self._serve(client)

    def _serve(self, client: socket.socket) -> None:
        self.served.add(client)
        for exited in self.exits:
            self._send(client, exited)

    def _drop(self, client: socket.socket) -> None:
        if self.clients.pop(client, None) is not None:
            self.served.discard(client)
            self.selector.unregister(client)
            client.close()

    def _send(self, client: socket.socket, message: Message) -> None:
        try:
            client.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._drop(client)

    def _receive(self, client: socket.socket) -> None:
        if client not in self.clients:
            return
        try:
            data = client.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._drop(client)
            return
        *lines, rest = (self.clients[client] + data).split(b"\n")
        if len(rest) > LINE_LIMIT:
            self._drop(client)
            return
        self.clients[client] = rest
        for line in lines:
            if client not in self.served:
                if not proof.is_right(line, self.secret):
                    self._drop(client)
                    return
                self._serve(client)
                continue
            try:
                tag, what = request_in(line)
            except (ValueError, RecursionError):
                self._drop(client)  # no keeper: the end of this process would be the end of the kernel
                return
            try:
                answer: Message = {"spawned": self._spawn(what), "tag": tag}
            except Exception as e:  # noqa: BLE001 - as above
                answer = {"failed": f"{type(e).__name__}: {e}", "tag": tag}
            self._send(client, answer)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self.spawned:
                self.spawned.discard(pid)
                exited: Message = {"exited": pid, "status": os.waitstatus_to_exitcode(status)}
                self.exits.append(exited)
                for client in list(self.served):
                    self._send(client, exited)

    def _spawn(self, what: dict[str, object]) -> int:
        """Do what is asked for. What is started is counted among those whose end is told: its pid; else 0.

        A restored process is adopted by process 1 without having been spawned by it.
        """
        match what:
            case {"adopt": int(pid)}:
                self.spawned.add(pid)
                return pid
            case {"argv": _}:
                started: int = spawning.spawn(spawning.program_in(what))
                self.spawned.add(started)
                return started
            case {"after_pid": int(pid)}:
                spawning.set_last_pid(pid)
                return 0
        raise ValueError("this version does not know what is to be spawned")


def request_in(line: bytes) -> tuple[int, dict[str, object]]:
    """Return the tag of a request, and what it asks for.

    Raises
    ------
    ValueError, RecursionError : the line is no request.
    """
    match json.loads(line):
        case {"tag": int(tag), "spawn": dict(what)}:
            return tag, what
    raise ValueError("no request")


def listen(kernel_dir: str, run_dir: str) -> socket.socket:
    """Return a socket where this sleeper is found, by keepers and by whoever ends it, over this run folder."""
    os.chdir(kernel_dir)
    listener = socket.socket(socket.AF_UNIX)
    # The name is relative because a socket's path may have 107 bytes at most.
    name = spawning.socket_name(run_dir)
    listener.bind(name)
    os.chmod(name, 0o600)
    listener.listen()
    os.chdir("/")
    return listener


def demanded() -> str:
    """Return what clients have to say first; nothing where their version knows of nothing."""
    if not os.path.exists(f"{spawning.NAMESPACE_RUN_DIR}/{proof.WANTED}"):
        return ""
    return str(proof.read(proof.make()))


def turn_away() -> None:
    """Have nothing to do any more with the terminal, or the files, of whoever started this process."""
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    os.umask(0o077)
    if sys.argv[1].isdecimal():  # a broker's deputy has made the namespaces, and given up all rights
        for fd in map(int, sys.argv[1:]):
            os.set_inheritable(fd, False)
        listening = socket.socket(fileno=int(sys.argv[1]))
        asked = proof.read(int(sys.argv[2])) if len(sys.argv) > 2 else ""
    else:
        kernel_dir, run_dir = sys.argv[1:]
        pid = spawning.make_namespaces(run_dir)
        asked = demanded()
        listening = listen(kernel_dir, run_dir)
        print("asleep", pid, flush=True)
    turn_away()
    Sleeper(listening, asked).run()
