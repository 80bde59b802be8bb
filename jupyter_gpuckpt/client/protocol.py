"""How one talks to a keeper: lines of JSON over a Unix stream socket.

A connection begins with the line that `proof` is about. A request is ``{"id": n, "op": name, "args": {...}}``; its
answers are any number of ``{"id": n, "progress": {...}}`` and then ``{"id": n, "result": ...}`` or
``{"id": n, "error": GpuckptError.as_dict()}``. A client that asked for ``attach`` is also told
``{"event": "exited", "status": s}`` once, when the kernel has ended.

An operation can be cancelled by whoever gave it an id when asking for it: ``operation`` in its args, and in those of
``cancel``, as `new_operation_id` makes them.
"""

from __future__ import annotations

import json
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ..checked import from_json, to_json
from ..errors import GpuckptError, KeeperGone, Refused
from ..linux import proof
from ..linux.readiness import readable
from ..linux.unix_sockets import peer_pid, short_path
from ..operations.requests import Request, answer_of
from ..operations.results import Progress

PROTOCOL = 2
"""The number of how one talks to this version's keepers: raised when an older client would be misunderstood."""

OLDEST_PROTOCOL = 1
"""The oldest that this version's clients talk to: 1 asks for no proof."""

LINE_LIMIT = 64 << 20
"""The longest line, in bytes: queued requests of a notebook travel in it."""


REQUEST_LIMIT = 1 << 20
"""The longest line of a client, in bytes; of what is not worked on yet, twice as much is taken in."""


def new_operation_id() -> str:
    """Return an id for an operation that is about to be asked for."""
    return uuid.uuid4().hex


R = TypeVar("R")


class KeeperClient:
    """A connection to a keeper, for code without an event loop.

    Raises
    ------
    KeeperGone : from every method, when nobody answers at the socket.
    Refused : this process is confined, and the keeper is not: it would not answer.
    """

    def __init__(self, path: Path, timeout: float = 10.0) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(timeout)
        try:
            with short_path(path) as short:
                self._socket.connect(short)
            self._socket.sendall(self._first_line())
        except OSError as e:
            self._socket.close()
            raise _gone(str(e)) from e
        except Refused:
            self._socket.close()
            raise
        self._timeout = timeout
        self._buffer = b""
        self._ids = 0
        self.exit_status: int | None = None
        """The kernel's exit code, once the keeper has told it."""

    def _first_line(self) -> bytes:
        keeper = peer_pid(self._socket)
        try:
            return proof.first_line(keeper)
        except PermissionError as e:
            raise Refused(
                "The {kernel}'s keeper does not serve this process; the {kernel} keeps running.",
                f"It may not look into the keeper's process ({keeper}): it is confined (by Landlock or a user "
                "namespace, for example) or has fewer rights.",
                "Try again from outside the sandbox.",
            ) from e

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def __enter__(self) -> KeeperClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _line(self, timeout: float | None) -> dict[str, Any] | None:
        """Return the next message, or None when none has come within `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while b"\n" not in self._buffer:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not readable(self._socket, seconds=left):
                return None
            try:
                data = self._socket.recv(1 << 20)
            except OSError as e:
                raise _gone(str(e)) from e
            if not data:
                raise _gone("it hung up")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        if message.get("event") == "exited":
            self.exit_status = int(message["status"])
        return message

    def listen(self) -> None:
        """Take in what the keeper has told since, without waiting."""
        # Where the kernel has ended, its keeper goes too: that it hung up is no news then.
        while self.exit_status is None and self._line(0) is not None:
            pass

    def ask(
        self,
        asked: Request[R],
        *,
        timeout: float | None = 30.0,
        progress: Callable[[Progress], None] | None = None,
    ) -> R:
        """Ask for something, as `request`."""
        return self.ask_with(type(asked), to_json(asked), timeout=timeout, progress=progress)

    def ask_with(
        self,
        kind: type[Request[R]],
        args: Mapping[str, object],
        *,
        timeout: float | None = 30.0,
        progress: Callable[[Progress], None] | None = None,
    ) -> R:
        """Ask for something whose members are JSON already, as `request`."""
        return answer_of(kind, self.request(kind.op, args, timeout=timeout, progress=progress))

    def request(
        self,
        op: str,
        args: Mapping[str, object] | None = None,
        *,
        timeout: float | None = 30.0,
        progress: Callable[[Progress], None] | None = None,
    ) -> Any:
        """Ask for an operation and return its result as JSON; `timeout` (seconds) is the longest silence borne.

        Raises
        ------
        GpuckptError : whatever the keeper answered.
        """
        self._ids += 1
        line = json.dumps({"id": self._ids, "op": op, "args": dict(args or {})}).encode() + b"\n"
        try:
            self._socket.sendall(line)
        except OSError as e:
            raise _gone(str(e)) from e
        while True:
            message = self._line(timeout)
            if message is None:
                raise KeeperGone(
                    "The {kernel}'s keeper does not answer.",
                    f"{op!r} was asked for {timeout:.0f} s ago and nothing was heard since.",
                    "Ask again; if it stays silent, restart the kernel.",
                )
            if message.get("id") != self._ids:
                continue
            if "progress" in message:
                if progress is not None:
                    progress(from_json(Progress, message["progress"]))
            elif "error" in message:
                raise GpuckptError.from_dict(message["error"])
            else:
                return message.get("result")


def _gone(why: str) -> KeeperGone:
    return KeeperGone(
        "The {kernel}'s keeper is not running.",
        why,
        "Run `{gpuckpt kernels}`: it finds the {kernel} and gives it a new keeper if it still runs.",
    )
