"""How a keeper without root has the few things done that need it: by its deputy, a process of the broker's."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from .. import settings
from ..broker.protocol import (
    MESSAGE_LIMIT,
    PROOF,
    Check,
    Criu,
    CriuFound,
    Done,
    Dump,
    Failed,
    Hold,
    NextPid,
    Proof,
    Prove,
    Reply,
    Request,
    Restore,
    Start,
    Started,
    StartInContainer,
    message,
    reply_in,
)
from ..checked import Odd, from_json
from ..errors import GpuckptError, Unavailable
from ..freeze.criu import Left
from ..freeze.criu_program import CriuProgram, find_criu
from ..linux import proc
from ..linux.capabilities import BROKER, missing, to_add
from ..linux.readiness import readable
from ..linux.spawning import SLEEPER
from ..linux.unix_sockets import peer_pid, peer_uid, short_path

__all__ = ["COMES_BACK", "Deputy", "is_needed", "usable_criu"]

T = TypeVar("T")

COMES_BACK = 20.0
"""How long a broker that has ended may be gone, as when it is upgraded in a cluster, in seconds."""
_ANSWER, _CHECK = 30.0, 120.0  # how long a deputy may be silent, in seconds
_BEGINNING = 10.0  # how long a process may take to become another program, in seconds
_LOOKS_AGAIN = 0.2  # seconds
_TIME_TO_END = 30.0  # how much longer than criu itself its deputy may take, in seconds


def is_needed() -> bool:
    """Tell whether this process needs a deputy: it is not root."""
    return os.geteuid() != 0


def usable_criu(patience: float = 0.0) -> CriuProgram:
    """Return the criu that dumps and restores here: the broker's, where this process is not root.

    A broker is waited for with so much `patience`, in seconds.

    Raises
    ------
    Unavailable : there is none.
    """
    if not is_needed():
        return find_criu()
    deputy = Deputy(patience)
    try:
        return deputy.criu()
    finally:
        deputy.close()


class Deputy:
    """A connection to the broker; for code without an event loop.

    A deputy ends with its broker, as when that is upgraded. The next request is another one's, which holds the same
    sleeper; where there is no broker yet, that is waited for, for `COMES_BACK`.

    Parameters
    ----------
    patience : for how long the first one is waited for, in seconds.

    Raises
    ------
    Unavailable : there is no broker, or it does not serve this user.
    """

    def __init__(self, patience: float = 0.0) -> None:
        self._socket = _connect(patience)
        self._sleeper = 0

    def close(self) -> None:
        """Hang up; the sleeper lives on."""
        self._socket.close()

    def criu(self) -> CriuProgram:
        """Return the broker's criu, to tell of: it is not run by this process."""
        found = _value(CriuFound, self._ask(Criu()))
        return CriuProgram((), found.version, found.path, "system", new_connections=bool(found.new_connections))

    def start(self, run_dir: Path, listening_at: Path) -> int:
        """Start a sleeper over a run folder, which listens at this path; return its pid on the machine, or container.

        Raises
        ------
        GpuckptError, OSError : it could not be started.
        """
        folders = [os.open(folder, os.O_RDONLY | os.O_DIRECTORY) for folder in (run_dir, Path(SLEEPER).parent)]
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                with short_path(listening_at) as short:
                    listener.bind(short)
                listening_at.chmod(0o600)
                run, programs = folders
                # A broker that has no pid here is outside of this container.
                asked = (
                    self._ask(Start(), (run, listener.fileno()))
                    if peer_pid(self._socket)
                    else self._ask(StartInContainer(), (run, listener.fileno(), programs))
                )
                self._sleeper = _value(int, asked)
        finally:
            for folder in folders:
                os.close(folder)
        return self._sleeper

    def hold(self, pid: int) -> None:
        """Become the deputy of a sleeper that was started by another one, for this user.

        Raises
        ------
        GpuckptError : there is no such sleeper of this user's.
        """
        self._ask(Hold(pid))
        self._sleeper = pid

    def next_pid(self, after: int) -> None:
        """Make the next process of the sleeper's namespace take the next free pid after this one.

        Raises
        ------
        GpuckptError : the sleeper has ended.
        """
        self._ask(NextPid(after))

    def dump(
        self,
        pid: int,
        images: Path,
        snapshot: Path,
        seconds: float,
        started: Callable[[int], None],
        left: Left = "running",
    ) -> int:
        """Have criu dump the tree of `pid` (as the namespace knows it) and leave it `left`; return its exit status.

        `images` and `snapshot` are the folders for criu's images, and for what is packed during the pause;
        `started` is told criu's pid in the namespace.

        Raises
        ------
        TimeoutError : it took more than `seconds`, and was killed.
        GpuckptError : it was refused.
        """
        return self._run_criu(Dump(pid, left, seconds), (images, snapshot), started)

    def check(self, images: Path) -> None:
        """Refuse images that a restore here would refuse; the folder is named as the sleeper sees it.

        Raises
        ------
        Refused : they would give their processes other rights than this user has.
        """
        folder = os.open(images, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._ask(Check(), [folder], _CHECK)
        finally:
            os.close(folder)

    def restore(self, images: Path, seconds: float, started: Callable[[int], None], left: Left = "running") -> int:
        """Have criu restore a tree into the sleeper and leave it `left`; return its exit status.

        `started` is told its pid, and what is raised is, as by `dump`.
        """
        return self._run_criu(Restore(left, seconds), (images,), started)

    def _run_criu(self, asked: Dump | Restore, folders: Sequence[Path], started: Callable[[int], None]) -> int:
        descriptors = [os.open(folder, os.O_RDONLY | os.O_DIRECTORY) for folder in folders]
        try:
            status = self._ask(asked, descriptors, asked.seconds + _TIME_TO_END, started)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if status is None:
            raise TimeoutError
        return _value(int, status)

    def _ask(
        self,
        asked: Request,
        descriptors: Sequence[int] = (),
        seconds: float = _ANSWER,
        started: Callable[[int], None] = lambda _: None,
    ) -> object:
        if self._is_over():
            self._socket.close()
            self._socket = _connect(COMES_BACK)
            if self._sleeper:
                self._exchange(Hold(self._sleeper))
        return self._exchange(asked, descriptors, seconds, started)

    def _is_over(self) -> bool:
        """Tell whether there is something to read, unasked: the end, or an answer that came too late."""
        return bool(readable(self._socket, seconds=0))

    def _exchange(
        self,
        asked: Request,
        descriptors: Sequence[int] = (),
        seconds: float = _ANSWER,
        started: Callable[[int], None] = lambda _: None,
    ) -> object:
        try:
            self._socket.settimeout(seconds)
            socket.send_fds(self._socket, [message(asked)], descriptors)
            while True:
                match self._reply():
                    case Prove(pid):
                        self._socket.send(message(Proof(_proof(pid))))
                    case Started(pid):
                        started(pid)
                    case Failed(error):
                        raise GpuckptError.from_dict(error)
                    case Done(value):
                        return value
        except OSError as e:
            raise _no_broker(settings.broker_socket(), e.strerror or str(e)) from e

    def _reply(self) -> Reply:
        packet = self._socket.recv(MESSAGE_LIMIT)
        if not packet:
            raise ConnectionResetError(0, "it hung up")
        try:
            return reply_in(packet)
        except (ValueError, RecursionError) as e:
            raise _odd_answer(e) from e


def _proof(pid: int) -> str:
    """Return what stands in the environment of another process; nothing where this one may not look into it."""
    deadline = time.monotonic() + _BEGINNING
    try:
        # It is empty for a moment of the process's beginning (fs/proc/base.c: environ_read).
        while not (content := proc.read(f"/proc/{pid}/environ")) and time.monotonic() < deadline:
            time.sleep(0.001)
    except OSError:
        return ""
    variables = content.split("\0")
    return next((value for name, _, value in (one.partition("=") for one in variables) if name == PROOF), "")


def _connect(patience: float) -> socket.socket:
    deadline = time.monotonic() + patience
    while True:
        try:
            return _connect_now()
        except Unavailable:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_LOOKS_AGAIN)


def _connect_now() -> socket.socket:
    path = settings.broker_socket()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Others may keep the broker busy: connecting waits for its turn, as only a blocking socket does (unix(7)).
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(_ANSWER), 0))
    try:
        with short_path(path) as short:
            connection.connect(short)
        if peer_uid(connection) != 0:
            raise PermissionError(0, "what listens there is not root's")
    except OSError as e:
        connection.close()
        raise _no_broker(path, e.strerror or str(e)) from e
    return connection


def _value(kind: type[T], done: object) -> T:
    try:
        return from_json(kind, done)
    except Odd as e:
        raise _odd_answer(e) from e


def _odd_answer(why: Exception) -> GpuckptError:
    return GpuckptError(
        "The broker gave an answer that this version does not understand.",
        f"{why}.",
        "Upgrade the older of the two: the broker, or jupyter_gpuckpt where the kernel was started.",
    )


def _no_broker(path: Path, why: str) -> Unavailable:
    said = (
        f"This is user {os.geteuid()}, and CRIU needs root; the broker, which does this for users, does not answer "
        f"at {path}: {why}."
    )
    then = (
        "Start the Jupyter server as root, for example in a container of its own; or ask an administrator to run "
        "`sudo jupyter gpuckpt broker install` and to add you to its group."
    )
    if lacking := missing(BROKER, "CapBnd"):  # nobody in a container has more than its bounds: a broker in it has ended
        named = " and ".join(f"CAP_{name}" for name in lacking)
        said = f"{said} None can run in this container, which lacks {named}."
        then = (
            f"{to_add(lacking)} Or have the machine's broker serve containers (`gpuckpt broker install "
            f"--containers` there), and give this container its folder, {path.parent}, and its group."
        )
    return Unavailable("Kernels and jobs cannot be saved on this machine.", said, then)
