"""The sleeper: process 1 of a fresh PID and mount namespace, which sleeps, starts what it is told to, and reaps.

Run as a program by the keeper, with the standard library alone (`python -I -S sleeper.py KERNEL_DIR RUN_DIR`), so that
it starts in milliseconds and needs nothing of the environment. (A new kernel's is run by `starter.py`. For users without
root the broker makes the namespaces, and runs it in them without any right, with a listening socket: `sleeper.py FD`.)
Its death ends everything in its namespace. It outlives the keeper: a new keeper finds it by its socket.

Inside the namespace /proc shows its processes alone, /dev/shm is its own, and the run folder stands at
`NAMESPACE_RUN_DIR`; everything else is the machine's. Requests and answers are lines of JSON on a Unix stream socket:

- ``{"spawn": {...}, "tag": t}``   → ``{"spawned": pid, "tag": t}`` or ``{"failed": text, "tag": t}``
- whenever a child that was spawned ends → ``{"exited": pid, "status": s}``, s as `os.waitstatus_to_exitcode` gives it;
  the ends of children are told again to whoever connects later.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import sys
from typing import Any

CLONE_NEWNS, CLONE_NEWPID = 0x00020000, 0x20000000
MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
MS_BIND, MS_REC, MS_SLAVE = 0x1000, 0x4000, 0x80000
PR_SET_CHILD_SUBREAPER = 36
# The same as in settings.py, which this program must not import:
NAMESPACE_RUN_DIR = "/dev/shm/gpuckpt"
NAMESPACE_VRAM_DIR = "/dev/shm/gpuckpt-vram"

LINE_LIMIT = 16 << 20  # bytes: a program's arguments and environment travel in a line

_libc = ctypes.CDLL(None, use_errno=True)


def socket_name(run_dir: str) -> str:
    """Return the name, in the kernel's folder, of the socket of the sleeper over this run folder."""
    return os.path.basename(run_dir) + ".sock"


def check(result: int, doing: str) -> None:
    """Raise OSError unless a C function returned 0."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{doing}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    check(
        _libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode()),
        f"mount {source} on {target}",
    )


def furnish(run_dir: str, uid: int = 0, gid: int = 0) -> None:
    """Give the namespace its own /proc, /dev/shm and run folder; what is made is this user's."""
    owner = f"uid={uid},gid={gid}"
    # Slave: what the machine mounts or unmounts later is seen, what happens here stays here.
    _mount("none", "/", "none", MS_REC | MS_SLAVE)
    _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    _mount("gpuckpt", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, f"mode=1777,{owner}")
    os.mkdir(NAMESPACE_RUN_DIR, 0o700)
    _mount(run_dir, NAMESPACE_RUN_DIR, "none", MS_BIND)
    # Whoever writes here has seen to it that there is memory: the usual half of it may be too little.
    os.mkdir(NAMESPACE_VRAM_DIR, 0o700)
    room = f"mode=0700,{owner},size=100%"
    try:
        _mount("gpuckpt-vram", NAMESPACE_VRAM_DIR, "tmpfs", MS_NOSUID | MS_NODEV, f"{room},huge=always")
    except OSError:  # a kernel without transparent huge pages
        _mount("gpuckpt-vram", NAMESPACE_VRAM_DIR, "tmpfs", MS_NOSUID | MS_NODEV, room)


class Sleeper:
    """The loop of process 1: one listening socket, the children, and who wants to hear of them."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.selector = selectors.DefaultSelector()
        self.clients: dict[socket.socket, bytes] = {}
        self.spawned: set[int] = set()
        self.exits: collections.deque[dict[str, int]] = collections.deque(maxlen=100)
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
        for exited in self.exits:
            self._send(client, exited)

    def _drop(self, client: socket.socket) -> None:
        if self.clients.pop(client, None) is not None:
            self.selector.unregister(client)
            client.close()

    def _send(self, client: socket.socket, message: dict[str, Any]) -> None:
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
            try:
                request = json.loads(line)
                tag, what = request["tag"], request["spawn"]
            except (ValueError, TypeError, KeyError, RecursionError):
                self._drop(client)  # no keeper: the end of this process would be the end of the kernel
                return
            try:
                answer: dict[str, Any] = {"spawned": self.spawn(what)}
            except Exception as e:  # noqa: BLE001 - as above
                answer = {"failed": f"{type(e).__name__}: {e}"}
            self._send(client, {**answer, "tag": tag})

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
                exited = {"exited": pid, "status": os.waitstatus_to_exitcode(status)}
                self.exits.append(exited)
                for client in list(self.clients):
                    self._send(client, exited)

    def spawn(self, what: dict[str, Any]) -> int:
        """Start a program, and return its pid: argv, env, cwd, umask, stdout (a path, appended to), after_pid, subreaper.

        A restored process is adopted by process 1 without having been spawned by it: `adopt` names its pid.
        """
        if "adopt" in what:
            self.spawned.add(int(what["adopt"]))
            return int(what["adopt"])
        if what.get("after_pid"):
            with open("/proc/sys/kernel/ns_last_pid", "w") as f:
                f.write(str(what["after_pid"]))
        if "argv" not in what:
            return 0
        fault_read, fault_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                self._become(what)
            except BaseException as e:  # noqa: BLE001 - the child has no one else to tell
                os.write(fault_write, str(e).encode())
            finally:
                os._exit(127)
        os.close(fault_write)
        with open(fault_read, "rb") as f:
            fault = f.read()
        if fault:
            os.waitpid(pid, 0)
            raise OSError(fault.decode())
        self.spawned.add(pid)
        return pid

    def _become(self, what: dict[str, Any]) -> None:
        """Turn this forked child into the program asked for."""
        os.setsid()
        signal.set_wakeup_fd(-1)
        # What is ignored here would be in the kernel and in all that it starts: none of them could be terminated.
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if what.get("subreaper"):
            # Processes that a cell sends into the background stay in the kernel's tree, and are saved with it.
            become_subreaper()
        os.umask(int(what.get("umask", 0o077)))
        # Standard files are opened here, inside the namespace: criu cannot dump one that was opened outside of it.
        null = os.open("/dev/null", os.O_RDONLY)
        out = os.open(what["stdout"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(null, 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(what["cwd"])
        # All other files are closed by the exec, as Python opens them; the parent hears by one of them if it fails.
        os.execvpe(what["argv"][0], what["argv"], what["env"])


def become_subreaper() -> None:
    """Have what processes below this one leave behind become children of this one; over an exec, too."""
    check(_libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")


def make_namespaces(kernel_dir: str, run_dir: str) -> tuple[str, socket.socket]:
    """Become process 1 of fresh namespaces, and return its pid on the machine and its socket.

    Whoever called this has ended: what returns is a child of it.
    """
    os.chdir(kernel_dir)
    listener = socket.socket(socket.AF_UNIX)
    # The name is relative because a socket's path may have 107 bytes at most.
    name = socket_name(run_dir)
    listener.bind(name)
    os.chmod(name, 0o600)
    os.chdir("/")
    check(_libc.unshare(CLONE_NEWPID | CLONE_NEWNS), "unshare")
    if os.fork():
        # The keeper is a subreaper: process 1 becomes its child, or the machine's when the keeper is gone.
        os._exit(0)
    listener.listen()  # from here on it is found, and ended with what is in it, should the keeper not come to hold it
    pid = os.readlink("/proc/self")  # still the machine's /proc, which knows process 1 by the machine's pid
    furnish(run_dir)
    return pid, listener


def turn_away() -> None:
    """Have nothing to do any more with the terminal, or the files, of whoever started this process."""
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    os.umask(0o077)
    if len(sys.argv) == 2:  # a broker's deputy has made the namespaces, and given up all rights
        os.set_inheritable(int(sys.argv[1]), False)
        listening = socket.socket(fileno=int(sys.argv[1]))
    else:
        pid, listening = make_namespaces(*sys.argv[1:])
        print("asleep", pid, flush=True)
    turn_away()
    Sleeper(listening).run()
