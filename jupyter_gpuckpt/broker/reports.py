"""What a deputy's own child processes tell it, by a pipe that closes when they end or become another program."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

from ..checked import from_json, to_json
from ..linux.readiness import readable
from ..quick_dataclass import dataclass

__all__ = ["Began", "Broke", "Ended", "Led", "Refusal", "Report", "Slept", "report", "reports", "reports_of"]


@dataclass(frozen=True)
class Slept:
    """A sleeper is there, with this pid."""

    sleeper: int


@dataclass(frozen=True)
class Led:
    """The session of what works in the sleeper's namespaces: its leader's pid."""

    leader: int


@dataclass(frozen=True)
class Began:
    """The pid of what works there, as the namespace knows it."""

    inner: int


@dataclass(frozen=True)
class Ended:
    """How that has ended: its exit status; None where it took too long."""

    status: int | None


@dataclass(frozen=True)
class Refusal:
    """A `GpuckptError`, as its `as_dict` has it."""

    error: dict[str, Any]


@dataclass(frozen=True)
class Broke:
    """Any other failure, in words."""

    failed: str


Report = Slept | Led | Began | Ended | Refusal | Broke


def report(to: int, what: Report) -> None:
    """Tell the deputy, if it is still there."""
    with contextlib.suppress(OSError):
        os.write(to, json.dumps(to_json(what)).encode() + b"\n")


def reports_of(child: int, read: int, seconds: float) -> Iterator[Report]:
    """Yield what a child process and those that it starts report, until the last of them has ended or become another.

    Raises
    ------
    TimeoutError : it takes longer.
    """
    try:
        yield from reports(read, seconds)
    except TimeoutError:
        # Its user can have frozen it, with its control group. It is not left behind, to be one of many.
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        os.waitpid(child, 0)


def reports(read: int, seconds: float) -> Iterator[Report]:
    """Yield what comes by a pipe, until it is closed; it is closed here, too.

    Raises
    ------
    TimeoutError : it takes longer.
    """
    deadline, text = time.monotonic() + seconds, b""
    with os.fdopen(read, "rb", buffering=0) as pipe:
        while True:
            if not readable(pipe.fileno(), seconds=deadline - time.monotonic()):
                raise TimeoutError(0, "it hangs inside the system")
            more = pipe.read(1 << 16)
            if not more:
                return
            *lines, text = (text + more).split(b"\n")
            for line in lines:
                yield from_json(Report, json.loads(line))
