"""What a keeper may be asked for: each request's arguments, checked where they enter.

Those with an ``operation`` are done one at a time; it is the id by which whoever asked can cancel them, and nobody
else. A member that is not known here is passed over: a later version may ask for more than this one does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..checked import Odd, from_json
from ..errors import GpuckptError, Refused

__all__ = ["Long", "Request", "request_of"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked for; `op` is what it is called."""

    op: ClassVar[str]


@dataclass(frozen=True, kw_only=True)
class Long(Request):
    """An operation: something long, which there is one of at a time."""

    operation: str = ""
    """By this it is cancelled."""


@dataclass(frozen=True, kw_only=True)
class Save(Long):
    op: ClassVar[str] = "save"
    name: str
    message: str | None = None
    replace: bool = False
    with_files: bool = False
    patience: float | None = None
    """After how many seconds it is told what was taken, where that is not on the disk yet."""


@dataclass(frozen=True, kw_only=True)
class Restore(Long):
    """Of the snapshot with this ``key``, or that ``from`` any notebook, or of a ``name`` of its own; or the latest."""

    op: ClassVar[str] = "restore"
    key: str | None = None
    of_any: str | None = field(default=None, metadata={"name": "from"})
    name: str | None = None
    gpus: list[int] = field(default_factory=list)
    lazy: bool = False
    """Whether it runs, and has answered, before what it had on GPUs is read."""
    in_place: bool = False
    stop_here: bool = False
    """Whether the cell that the snapshot was taken in ends; else the rest of it is run."""
    other_ports: bool = False
    """Whether a job may come back at other ports."""
    resume: bool = False
    """Whether it is the snapshot of a hibernated kernel, which goes when that is back."""
    cell: dict[str, Any] | None = None
    """The cell that asked (`kernel.cells`)."""


@dataclass(frozen=True, kw_only=True)
class Fork(Long):
    op: ClassVar[str] = "fork"
    key: str | None = None
    snapshot: str | None = None
    """The snapshot to fork from, as people name it; from the kernel as it is now where there is neither."""
    name: str | None = None
    """To save the kernel under on the way."""
    count: int = 1
    gpus: list[int] = field(default_factory=list)
    reseed: bool = False
    adopt: bool = True
    """Whether the servers that hold the kernel are asked to hold the copies, too."""


@dataclass(frozen=True, kw_only=True)
class Move(Long):
    op: ClassVar[str] = "move"
    gpus: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Sleep(Long):
    op: ClassVar[str] = "sleep"
    idle_for: float | None = None
    """Refused unless it was idle for so many seconds, and may sleep: that is how others than the person ask."""


@dataclass(frozen=True, kw_only=True)
class Hibernate(Long):
    op: ClassVar[str] = "hibernate"
    end: bool = False
    """Whether the keeper ends, too, and the snapshot can be resumed in another kernel."""
    at_once: bool = False
    """Whether a cell that comes meanwhile does not break it off."""


@dataclass(frozen=True, kw_only=True)
class Wake(Long):
    op: ClassVar[str] = "wake"
    gpus: list[int] = field(default_factory=list)


# -- what is done beside the operations


@dataclass(frozen=True, kw_only=True)
class Status(Request):
    op: ClassVar[str] = "status"


@dataclass(frozen=True, kw_only=True)
class Left(Request):
    """Which other kernels of the notebook outlived their server."""

    op: ClassVar[str] = "left"


@dataclass(frozen=True, kw_only=True)
class Renamed(Request):
    op: ClassVar[str] = "renamed"
    notebook: str


@dataclass(frozen=True, kw_only=True)
class Cancel(Request):
    """The ``operation`` of this id; versions without ids name none, and at most the ``kind`` of what they asked for."""

    op: ClassVar[str] = "cancel"
    operation: str = ""
    kind: str = ""


@dataclass(frozen=True, kw_only=True)
class Signal(Request):
    op: ClassVar[str] = "signal"
    signum: int


@dataclass(frozen=True, kw_only=True)
class Awake(Request):
    """Whether nobody but the person may put it to sleep."""

    op: ClassVar[str] = "awake"
    on: bool


@dataclass(frozen=True, kw_only=True)
class AutoSleep(Request):
    op: ClassVar[str] = "autosleep"
    after: float | None
    """Seconds; None or 0 for never."""


@dataclass(frozen=True, kw_only=True)
class Ending(Request):
    """The kernel says that it ends."""

    op: ClassVar[str] = "ending"


@dataclass(frozen=True, kw_only=True)
class Executed(Request):
    op: ClassVar[str] = "executed"


@dataclass(frozen=True, kw_only=True)
class Room(Request):
    """A cell found too little memory of a GPU: its UUID, and how many bytes."""

    op: ClassVar[str] = "room"
    gpu: str
    size: int


@dataclass(frozen=True, kw_only=True)
class Attach(Request):
    """To be told when the kernel ends, which ends so many seconds after this client has, or outlives it with None."""

    op: ClassVar[str] = "attach"
    end_after: float | None = None


@dataclass(frozen=True, kw_only=True)
class Close(Request):
    """The kernel's end, and the keeper's."""

    op: ClassVar[str] = "close"


# -- snapshots


@dataclass(frozen=True, kw_only=True)
class OfSnapshot(Request):
    """About one snapshot: by its ``key``, or by a ``name`` as people say it."""

    key: str | None = None
    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class List(Request):
    op: ClassVar[str] = "list"


@dataclass(frozen=True, kw_only=True)
class Show(OfSnapshot):
    op: ClassVar[str] = "show"


@dataclass(frozen=True, kw_only=True)
class Diff(Request):
    op: ClassVar[str] = "diff"
    old: str
    new: str


@dataclass(frozen=True, kw_only=True)
class Rename(OfSnapshot):
    op: ClassVar[str] = "mv"
    new: str


@dataclass(frozen=True, kw_only=True)
class Note(OfSnapshot):
    op: ClassVar[str] = "note"
    message: str


@dataclass(frozen=True, kw_only=True)
class Pin(OfSnapshot):
    op: ClassVar[str] = "pin"
    pinned: bool


@dataclass(frozen=True, kw_only=True)
class Tag(OfSnapshot):
    op: ClassVar[str] = "tag"
    tags: list[str]
    remove: list[str]


@dataclass(frozen=True, kw_only=True)
class Remove(OfSnapshot):
    op: ClassVar[str] = "rm"


@dataclass(frozen=True, kw_only=True)
class Keep(Request):
    """Old snapshots of this kernel or its notebook go, but the ``last`` so many, or those ``under`` a size in bytes."""

    op: ClassVar[str] = "keep"
    last: int | None = None
    under: int | None = None
    dry_run: bool = False


def _kinds(kind: type[Request]) -> dict[str, type[Request]]:
    found = {kind.op: kind} if "op" in vars(kind) else {}
    for more in kind.__subclasses__():
        found.update(_kinds(more))
    return found


_KINDS = _kinds(Request)


def request_of(op: str, args: Mapping[str, Any]) -> Request:
    """Return what is asked for.

    Raises
    ------
    Refused : an argument is missing, or is not what it has to be.
    GpuckptError : nothing is called so.
    """
    if op not in _KINDS:
        raise GpuckptError(f"The keeper does not know {op!r}.", "", "Upgrade the older of the two.")
    try:
        return from_json(_KINDS[op], args)
    except Odd as e:
        raise Refused(
            f"The keeper did not do {op!r}: nothing was touched.",
            f"It was asked for in another way than this version does: {e}.",
            "Upgrade the older of the two.",
        ) from e
