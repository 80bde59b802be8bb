"""What is said at the broker's socket.

Every connection to the broker's socket is a deputy of its own, for one sleeper. Messages are JSON, one a packet
(``SOCK_SEQPACKET``), and files travel as descriptors, which the caller has opened with the caller's own rights. There
is no way to name a path, an option or a program. A `Request` is answered with `Done` or `Failed`, before which there
may be `Started`, or `Prove`, which is answered with `Proof`.

The two ends can be of different versions: a broker is upgraded while kernels run. There is no version number: what a
message means does not change. Something new is a new request or a new member, and a broker that does not know it
refuses it, with the advice to upgrade.
"""

from __future__ import annotations

import json
import math
from typing import Any, ClassVar, Literal

from ..checked import Odd, from_json, to_json
from ..freeze.criu import Left
from ..quick_dataclass import dataclass

__all__ = [
    "MESSAGE_LIMIT",
    "PROOF",
    "Check",
    "Criu",
    "CriuFound",
    "Done",
    "Dump",
    "Failed",
    "Hold",
    "NextPid",
    "Proof",
    "Prove",
    "Reply",
    "Request",
    "Restore",
    "Start",
    "StartInContainer",
    "Started",
    "message",
    "reply_in",
    "request_in",
]

MESSAGE_LIMIT = 64 << 10
"""The longest message, in bytes."""
PROOF = "GPUCKPT_PROOF"
"""The variable, in a process's environment, that proves whose it is."""
_MOST_PIDS = 1 << 22  # proc(5), pid_max


@dataclass(frozen=True)
class Criu:
    """Asks which criu is used: `CriuFound`."""

    descriptors: ClassVar[int] = 0
    """How many come with it."""
    do: Literal["criu"] = "criu"


@dataclass(frozen=True)
class Start:
    """Asks for a new sleeper: its pid. With it come the run folder, and a bound socket."""

    descriptors: ClassVar[int] = 2
    do: Literal["start"] = "start"


@dataclass(frozen=True)
class StartInContainer:
    """Asks for the same in a container, of which the broker runs nothing as root: its pid there. With it come the run
    folder, a bound socket, and the folder of the sleeper's program, which is run as the container's user."""

    descriptors: ClassVar[int] = 3
    do: Literal["start_in_container"] = "start_in_container"


@dataclass(frozen=True)
class Hold:
    """Asks to be the deputy of a sleeper that an earlier one has started: true."""

    pid: int
    descriptors: ClassVar[int] = 0
    do: Literal["hold"] = "hold"

    def __post_init__(self) -> None:
        _check_pid(self.pid)


@dataclass(frozen=True)
class NextPid:
    """Asks that the sleeper's next process has the next free pid after this one: true."""

    after: int
    descriptors: ClassVar[int] = 0
    do: Literal["next_pid"] = "next_pid"

    def __post_init__(self) -> None:
        _check_pid(self.after)


@dataclass(frozen=True)
class Dump:
    """Asks for a dump: criu's exit status, None after that many `seconds`. With it come two folders, for criu's images
    and for the snapshot."""

    pid: int
    left: Left
    seconds: float
    descriptors: ClassVar[int] = 2
    do: Literal["dump"] = "dump"

    def __post_init__(self) -> None:
        _check_pid(self.pid)
        _check_seconds(self.seconds)


@dataclass(frozen=True)
class Check:
    """Asks whether a restore of the images in this folder would not be refused: true."""

    descriptors: ClassVar[int] = 1
    do: Literal["check"] = "check"


@dataclass(frozen=True)
class Restore:
    """Asks for a restore: as `Dump`. With it comes the folder of the images."""

    left: Left
    seconds: float
    descriptors: ClassVar[int] = 1
    do: Literal["restore"] = "restore"

    def __post_init__(self) -> None:
        _check_seconds(self.seconds)


Request = Criu | Start | StartInContainer | Hold | NextPid | Dump | Check | Restore


@dataclass(frozen=True)
class CriuFound:
    """The criu that is used."""

    version: tuple[int, int, int]
    path: str
    new_connections: bool | None = None
    """Whether the library in it puts new TCP connections in the place of saved ones; earlier brokers do not say."""


@dataclass(frozen=True)
class Done:
    """What was asked for is done; the value is what the request says."""

    done: object


@dataclass(frozen=True)
class Failed:
    """It was refused, or failed."""

    error: dict[str, Any]
    """`GpuckptError.as_dict`."""


@dataclass(frozen=True)
class Started:
    """criu runs, with this pid in the sleeper's namespace."""

    started: int


@dataclass(frozen=True)
class Prove:
    """Asks for what stands as `PROOF` in the environment of this process of the same user."""

    prove: int


Reply = Done | Failed | Started | Prove


@dataclass(frozen=True)
class Proof:
    """That; empty where it cannot be read."""

    proof: str


def message(said: Request | Reply | Proof) -> bytes:
    """Return a message as it is sent."""
    return json.dumps(to_json(said)).encode()


def request_in(packet: bytes) -> Request:
    """Return the request that a packet holds. Nothing in it is passed over: who asked may rely on it.

    Raises
    ------
    ValueError, RecursionError : it is none.
    """
    raw = json.loads(packet)
    request: Request = from_json(Request, raw)
    if to_json(request) != raw:
        raise Odd("it has members that are not known")
    return request


def reply_in(packet: bytes) -> Reply:
    """Return what a packet of the broker's says.

    Raises
    ------
    ValueError, RecursionError : nothing that this version knows.
    """
    reply: Reply = from_json(Reply, json.loads(packet))
    return reply


def _check_pid(value: int) -> None:
    if not 1 <= value < _MOST_PIDS:
        raise Odd("it names no pid")


def _check_seconds(value: float) -> None:
    if not math.isfinite(value) or value < 1:
        raise Odd("it names no time")
