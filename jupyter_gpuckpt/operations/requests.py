"""What can be asked of a keeper, request by request: its arguments, the words for people, and where it is offered.

Requests are checked where they enter. A member that is not known here is passed over: a later version may ask for more
than this one does. Those with an ``operation`` are done one at a time; it is the id by which whoever asked can cancel
them, and nobody else.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from dataclasses import field
from typing import Any, ClassVar, Generic, TypeVar, get_args

from ..checked import Odd, from_json
from ..errors import GpuckptError, Refused
from ..quick_dataclass import dataclass
from ..settings import MOST_COPIES
from . import results
from .description import IN_CELLS, IN_TERMINALS, TYPED, Command, Offered, argument
from .values import duration, gpus, number, size

__all__ = ["Long", "Request", "Restoring", "answer_of", "kind_of", "operations", "request_of"]

R = TypeVar("R")
T = TypeVar("T")

MOST_STEPS = 1000
"""How many steps back or forth the REST API takes at once."""
_GPU = "the GPU to use, by its number in nvidia-smi; several (1,0) for a kernel that uses several"


@dataclass(frozen=True, kw_only=True)
class Request(Generic[R]):
    """What is asked for; `op` is what it is called, and `R` what is answered."""

    op: ClassVar[str]
    commands: ClassVar[tuple[Command, ...]] = ()
    """How people call it, in a cell and a terminal, and what the help says of it; nothing where they do not."""
    doing: ClassVar[str] = ""
    """What is said while it is under way."""
    store_option: ClassVar[str] = ""
    """The option that names a folder in which the snapshot is, in place of the usual store; empty for none."""

    @classmethod
    def progress_of(cls, what: str = "") -> str:
        """Return how a line begins that says how far it is, with `what` it is done."""
        return f"{cls.doing.capitalize()} {what}".rstrip()


@dataclass(frozen=True, kw_only=True)
class Long(Request[R]):
    """An operation: something long, which there is one of at a time."""

    waited_for: ClassVar[bool] = False
    """Whether others wait for it that have not been told of it: who asks for something of a kernel need not know that
    it falls asleep or wakes."""
    beside_writing: ClassVar[bool] = False
    """Whether it may be under way beside a save that is being written."""
    breaks_off: ClassVar[tuple[str, ...]] = ()
    """What it ends that is under way: a kernel that is wanted need not sleep, nor one wake that is given up."""
    needs_awake: ClassVar[bool] = False
    """Whether a kernel that sleeps is woken for it."""
    takes_asleep: ClassVar[bool] = False
    """Whether it takes a kernel that sleeps as it is, where it can."""
    of_hibernated: ClassVar[bool] = False
    """Whether it is for kernels that are on the disk alone, too."""

    operation: str = ""
    """By this it is cancelled."""

    @property
    def waits_for_all(self) -> bool:
        """Whether it waits for whatever is under way, and is not refused for that."""
        return False


@dataclass(frozen=True, kw_only=True)
class Save(Long[results.Saved]):
    op: ClassVar[str] = "save"
    doing = "saving"
    commands = (
        Command(
            "save",
            "save {kernel} under a name; it runs on",
            "Save {kernel} under a name. It is paused for a moment, also in the middle of a cell, and runs on.\n"
            "A job's snapshot is called as the job is where no name is given.",
        ),
    )
    store_option = "--to"
    takes_asleep = True
    name: str = argument(
        metavar="NAME",
        required=True,
        optional_in=IN_TERMINALS,
        help="the snapshot's name: letters, digits, and . _ -, at most 100",
    )
    message: str | None = argument("-m", "--message", metavar="NOTE", default=None, help="a note that listings show")
    replace: bool = argument("--replace", default=False, help="replace a snapshot of that name")
    with_files: bool = argument(
        "--with-files",
        default=False,
        help="keep the files that it needs, Python and its packages, in the snapshot: for machines without them",
    )
    patience: float | None = None
    """After how many seconds it is told what was taken, where that is not on the disk yet."""
    automatic: bool = False
    """Whether nobody has named it: it is removed by the rule of automatic ones."""
    between_cells: bool = False
    """Whether there is to be no snapshot where a cell has begun before the kernel was frozen."""


@dataclass(frozen=True, kw_only=True)
class Restoring(Long[results.Restored]):
    """The kernel is given up for one from a snapshot."""

    breaks_off = ("wake",)
    cell: dict[str, Any] | None = None
    """The cell that asked (`kernel.cells`)."""


@dataclass(frozen=True, kw_only=True)
class Restore(Restoring):
    """Of the snapshot with this ``key``, or that ``from`` any notebook, or of a ``name`` of its own; or the latest."""

    op: ClassVar[str] = "restore"
    doing = "restoring"
    commands = (
        Command(
            "restore",
            "put {kernel} back to a snapshot",
            "Put {kernel} back to a snapshot. Its notebook stays connected. What it has done that is in no snapshot\n"
            "is saved first where that takes two seconds at most.",
        ),
    )
    store_option = "--store"
    key: str | None = None
    name: str | None = argument(
        metavar="NAME",
        default=None,
        optional_in=TYPED,
        alone="which",
        help="the snapshot; without it the latest of this notebook",
    )
    of_any: str | None = argument(
        "--from",
        name="from",
        metavar="NOTEBOOK:NAME",
        default=None,
        alone="which",
        help="a snapshot of another notebook, by that one's name or as much of its path as it takes",
    )
    gpus: list[int] = argument("--gpu", metavar="N", parse=gpus, default=[], member=("gpu", int), help=_GPU)
    lazy: bool = argument(
        "--lazy", default=False, help="answer before all of its GPU memory is loaded; what needs that waits"
    )
    in_place: bool = argument(
        "--in-place",
        default=False,
        help="discard the running kernel before the snapshot is up: memory need not have room for both",
    )
    stop_here: bool = argument(
        "--stop-here", default=False, help="do not run the rest of the cell that the snapshot was taken in"
    )
    other_ports: bool = argument(
        "--other-ports", default=False, offered=IN_TERMINALS, help="of a job: use other ports where its own are taken"
    )
    discard: bool = argument(
        "--discard", default=False, help="do not save first what the running kernel has done that is in no snapshot"
    )
    keep: bool = False
    """Whether that is saved however long it takes; and where it cannot be, nothing is restored."""
    resume: bool = False
    """Whether it is the snapshot of a hibernated kernel, which goes when that is back."""


@dataclass(frozen=True, kw_only=True)
class Fork(Long[results.Forked]):
    op: ClassVar[str] = "fork"
    doing = "forking"
    commands = (
        Command(
            "fork",
            "make copies of {kernel} beside it",
            "Make copies of {kernel}, as it is now or as it was saved; it runs on. Each is a kernel of its\n"
            "own, with its own connection file. Where a Jupyter server holds the kernel, it holds the copies, too.",
        ),
    )
    needs_awake = True
    key: str | None = None
    snapshot: str | None = argument(
        "--snapshot",
        metavar="NAME",
        default=None,
        placed_in=IN_CELLS,
        optional_in=IN_CELLS,
        alone="of what",
        help="copy this snapshot, not the kernel as it is",
    )
    count: int = argument(
        "-n", "--count", metavar="COUNT", parse=number, default=1, most=MOST_COPIES, help="how many copies, 64 at most"
    )
    name: str | None = argument(
        "--save", metavar="NEW", default=None, alone="of what", help="also save the kernel under this name"
    )
    reseed: bool = argument("--reseed", default=False, help="reseed the random number generators of the copies")
    gpus: list[int] = argument("--gpu", metavar="N", parse=gpus, default=[], member=("gpu", int), help=_GPU)
    adopt: bool = True
    """Whether the servers that hold the kernel are asked to hold the copies, too."""


@dataclass(frozen=True, kw_only=True)
class Move(Long[results.Moved]):
    op: ClassVar[str] = "move"
    doing = "moving"
    commands = (
        Command(
            "move",
            "move what {kernel} has on the GPU to another",
            "Move what {kernel} has in GPU memory to another GPU of the same model. The kernel goes on there.",
        ),
    )
    needs_awake = True
    gpus: list[int] = argument(
        "--gpu", metavar="N", parse=gpus, default=[], required=True, member=("gpu", int), help=_GPU
    )


@dataclass(frozen=True, kw_only=True)
class Sleep(Long[results.Slept]):
    op: ClassVar[str] = "sleep"
    doing = "falling asleep"
    commands = (
        Command(
            "sleep",
            "free the GPU memory of {kernel}, which stays as it is",
            "Put an idle kernel to sleep: what it has in GPU memory goes to host memory, and the GPU is free for "
            "others.\nA cell that is run wakes it by itself.",
        ),
    )
    waited_for = True
    idle_for: float | None = None
    """Refused unless it was idle for so many seconds, and may sleep: that is how others than the person ask."""


@dataclass(frozen=True, kw_only=True)
class Hibernate(Long[results.Hibernated]):
    op: ClassVar[str] = "hibernate"
    doing = "hibernating"
    commands = (
        Command(
            "hibernate",
            "write {kernel} to the disk, and free all of its memory",
            "Write a kernel to the disk and end its processes, which then take neither GPU nor host memory.\n"
            "Its notebook stays open, and a cell that is run wakes it.\n"
            "With --all every kernel, those first that have computed most since they were last saved: for a machine "
            "that\ngoes down. What was saved and what was not is written to a file.",
        ),
    )
    takes_asleep = True
    of_hibernated = True
    end: bool = False
    """Whether the keeper ends, too, and the snapshot can be resumed in another kernel."""
    at_once: bool = False
    """Whether a cell that comes meanwhile does not break it off."""
    idle: bool = False
    """Whether a cell that is executed by then breaks it off: nobody would wake the kernel, and the cell would wait."""

    @property
    def waits_for_all(self) -> bool:
        """Whether a server or a machine goes down: a kernel that is not on the disk by then is lost."""
        return self.end or self.at_once


@dataclass(frozen=True, kw_only=True)
class Wake(Long[results.Woken]):
    op: ClassVar[str] = "wake"
    doing = "waking"
    commands = (Command("wake", "wake {kernel} where it sleeps or is hibernated"),)
    waited_for = True
    beside_writing = True
    breaks_off = ("sleep", "hibernate")
    of_hibernated = True
    gpus: list[int] = field(default_factory=list)

    @property
    def waits_for_all(self) -> bool:
        """A cell wants the kernel, whoever is at work on it."""
        return True


# -- what is done beside the operations


@dataclass(frozen=True, kw_only=True)
class Status(Request[results.KernelStatus]):
    op: ClassVar[str] = "status"


@dataclass(frozen=True, kw_only=True)
class Left(Request[list[results.KernelStatus]]):
    """Which other kernels of the notebook outlived their server."""

    op: ClassVar[str] = "left"


@dataclass(frozen=True, kw_only=True)
class Renamed(Request[None]):
    op: ClassVar[str] = "renamed"
    notebook: str


@dataclass(frozen=True, kw_only=True)
class Cancel(Request[bool]):
    """The ``operation`` of this id; versions without ids name none, and at most the ``kind`` of what they asked for."""

    op: ClassVar[str] = "cancel"
    operation: str = ""
    kind: str = ""


@dataclass(frozen=True, kw_only=True)
class Signal(Request[bool]):
    """To be sent to the kernel; whether it could be."""

    op: ClassVar[str] = "signal"
    signum: int


@dataclass(frozen=True, kw_only=True)
class Awake(Request[results.StayingAwake]):
    """Whether nobody but the person may put it to sleep."""

    op: ClassVar[str] = "awake"
    doing = "noting"
    commands = (Command("awake", "keep {kernel} awake when others need the GPU, or not"),)
    on: bool = argument(choices=("on", "off"), help="on: it stays awake; off: it may sleep", offered=TYPED)


@dataclass(frozen=True, kw_only=True)
class AutoSleep(Request[results.AutoSleepSet]):
    op: ClassVar[str] = "autosleep"
    doing = "noting"
    commands = (Command("autosleep", "have {kernel} sleep when it has been idle for a time"),)
    after: float | None = argument(
        metavar="TIME", parse=duration, help="for how long: 45s, 30m, 2h, or off", offered=TYPED
    )
    """Seconds; None or 0 for never."""


@dataclass(frozen=True, kw_only=True)
class Auto(Request[results.AutoSaving]):
    """Without ``switch`` it only says how it stands; ``after``, ``every``, ``keep`` and ``under`` are for ``on``."""

    op: ClassVar[str] = "auto"
    doing = "noting"
    commands = (
        Command(
            "auto",
            "save {kernel} by itself after its cells",
            "Save {kernel} by itself after each cell or every so often, or say whether it is.",
        ),
    )
    switch: str | None = argument(
        metavar="on|off",
        choices=("on", "off"),
        default=None,
        optional_in=TYPED,
        offered=TYPED,
        help="on: after cells from now on; off: no longer",
    )
    after: float | None = argument(
        "--after",
        metavar="TIME",
        parse=duration,
        default=None,
        offered=TYPED,
        alone="when",
        help="only cells that ran for this long: 5s, 1m",
    )
    every: float | None = argument(
        "--every",
        metavar="TIME",
        parse=duration,
        default=None,
        offered=TYPED,
        alone="when",
        help="not after cells, but every 10m, 1h if it has done something, also in the middle of a cell",
    )
    keep: int | None = argument(
        "--keep",
        metavar="N",
        parse=number,
        default=None,
        offered=TYPED,
        help="keep the newest N of these snapshots; default 20",
    )
    under: int | None = argument(
        "--max",
        name="under",
        metavar="SIZE",
        parse=size,
        default=None,
        offered=TYPED,
        help="remove the oldest of them while the store takes more than this, such as 50G",
    )


@dataclass(frozen=True, kw_only=True)
class Undo(Restoring):
    op: ClassVar[str] = "undo"
    doing = "undoing"
    commands = (
        Command(
            "undo",
            "put {kernel} back to its state before the last cells",
            "Put {kernel} back to the last snapshot before its present state, or N snapshots back. The present state\n"
            "is kept first as a snapshot, unless it is in one; `redo` goes back to it.",
        ),
    )
    steps: int = argument(
        metavar="N",
        parse=number,
        default=1,
        optional_in=TYPED,
        most=MOST_STEPS,
        help="how many snapshots back; default 1",
    )


@dataclass(frozen=True, kw_only=True)
class Redo(Restoring):
    op: ClassVar[str] = "redo"
    doing = "redoing"
    commands = (Command("redo", "take back the last undo", "Take back the last undo, or the last N of them."),)
    steps: int = argument(
        metavar="N",
        parse=number,
        default=1,
        optional_in=TYPED,
        most=MOST_STEPS,
        help="how many undos to take back; default 1",
    )


@dataclass(frozen=True, kw_only=True)
class Ending(Request[None]):
    """The kernel says that it ends."""

    op: ClassVar[str] = "ending"


@dataclass(frozen=True, kw_only=True)
class Executed(Request[results.Executed]):
    op: ClassVar[str] = "executed"


@dataclass(frozen=True, kw_only=True)
class Room(Request[results.RoomMade]):
    """A cell found too little memory of a GPU: its UUID, and how many bytes."""

    op: ClassVar[str] = "room"
    gpu: str
    size: int


@dataclass(frozen=True, kw_only=True)
class Attach(Request[None]):
    """To be told when the kernel ends, which ends so many seconds after this client has, or outlives it with None."""

    op: ClassVar[str] = "attach"
    end_after: float | None = None


@dataclass(frozen=True, kw_only=True)
class Close(Request[results.Closing]):
    """The kernel's end, and the keeper's."""

    op: ClassVar[str] = "close"


# -- snapshots


@dataclass(frozen=True, kw_only=True)
class List(Request[results.Snapshots]):
    op: ClassVar[str] = "list"
    commands = (
        Command("list", "list the snapshots, newest first"),
        Command("log", "draw which snapshot came from which"),
    )
    store_option = "--store"


@dataclass(frozen=True, kw_only=True)
class OfSnapshot(Request[R]):
    """About one snapshot: by its ``key``, or by a ``name`` as people say it."""

    store_option = "--store"
    many: ClassVar[frozenset[Offered]] = frozenset()
    """Where several can be named at once."""
    key: str | None = None
    name: str | None = argument(metavar="NAME", default=None, offered=TYPED, help="the snapshot")


@dataclass(frozen=True, kw_only=True)
class Show(OfSnapshot[results.Details]):
    op: ClassVar[str] = "show"
    commands = (Command("show", "show all about one snapshot"),)


@dataclass(frozen=True, kw_only=True)
class Diff(Request[results.Comparison]):
    op: ClassVar[str] = "diff"
    commands = (
        Command(
            "diff",
            "say what differs between two snapshots",
            "Say which variables changed from the first to the second, by how much they differ, and which files they "
            "use.",
        ),
    )
    store_option = "--store"
    old: str = argument(metavar="A", offered=TYPED, help="a snapshot")
    new: str = argument(metavar="B", offered=TYPED, help="another one")


@dataclass(frozen=True, kw_only=True)
class Rename(OfSnapshot[results.Summary]):
    op: ClassVar[str] = "mv"
    commands = (Command("mv", "give a snapshot another name"),)
    new: str = argument(metavar="NEW", offered=TYPED, help="its name from now on")


@dataclass(frozen=True, kw_only=True)
class Note(OfSnapshot[results.Summary]):
    op: ClassVar[str] = "note"
    commands = (Command("note", "give a snapshot another note"),)
    message: str = argument(metavar="TEXT", nargs="+", offered=TYPED, help="its note from now on; '' for none")


@dataclass(frozen=True, kw_only=True)
class Pin(OfSnapshot[results.Labels]):
    op: ClassVar[str] = "pin"
    commands = (
        Command("pin", "keep snapshots from being removed or replaced"),
        Command("unpin", "let snapshots be removed and replaced again"),
    )
    many = IN_TERMINALS
    pinned: bool


@dataclass(frozen=True, kw_only=True)
class Tag(OfSnapshot[results.Labels]):
    op: ClassVar[str] = "tag"
    commands = (Command("tag", "add tags to a snapshot, or take them away"),)
    tags: list[str] = argument(metavar="TAG", nargs="*", offered=TYPED, help="a tag to add: letters, digits, and . _ -")
    remove: list[str] = argument("--remove", metavar="TAG", offered=TYPED, help="a tag to take away")


@dataclass(frozen=True, kw_only=True)
class Remove(OfSnapshot[results.Removed]):
    op: ClassVar[str] = "rm"
    commands = (Command("rm", "remove snapshots"),)
    many = TYPED


@dataclass(frozen=True, kw_only=True)
class Keep(Request[results.Kept]):
    """Old snapshots of this kernel or its notebook go, but the ``last`` so many, or those ``under`` a size in bytes."""

    op: ClassVar[str] = "keep"
    commands = (
        Command(
            "keep",
            "remove old snapshots by a rule, or have an automatic one stay",
            "Remove the oldest snapshots, and keep the newest ones and those that are pinned. With NAME as NEW, "
            "nothing is\nremoved: an automatic snapshot gets a name of your own, and stays.",
        ),
    )
    store_option = "--store"
    last: int | None = argument(
        "--last",
        metavar="N",
        parse=number,
        default=None,
        offered=TYPED,
        required=True,
        alone="rule",
        help="keep the newest N",
    )
    under: int | None = argument(
        "--under",
        metavar="SIZE",
        parse=size,
        default=None,
        offered=TYPED,
        required=True,
        alone="rule",
        help="keep what fits: 500M, 20G, 1.5T",
    )
    dry_run: bool = argument(
        "--dry-run", default=False, offered=TYPED, help="only say what would go, and how much that would free"
    )


def _kinds(kind: type[Request[Any]]) -> dict[str, type[Request[Any]]]:
    found = {kind.op: kind} if "op" in vars(kind) else {}
    for more in kind.__subclasses__():
        found.update(_kinds(more))
    return found


_KINDS = _kinds(Request)


def operations() -> list[type[Long[Any]]]:
    """Return the operations on kernels."""
    return [kind for kind in _KINDS.values() if issubclass(kind, Long)]


def kind_of(op: str) -> type[Long[Any]]:
    """Return what is said of the operation that is called so; of any other, what holds of all."""
    kind = _KINDS.get(op, Long)
    return kind if issubclass(kind, Long) else Long


def request_of(op: str, args: Mapping[str, Any]) -> Request[Any]:
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
            f"The request is not in the form that this version uses: {e}.",
            "Upgrade the older of the two.",
        ) from e


def answer_of(kind: type[Request[R]], raw: object, *others: type[T]) -> R | T:
    """Return what a keeper answered, whose JSON this is; or one of the others, which have tags, in its place.

    Raises
    ------
    GpuckptError : it is not in the form that this version uses.
    """
    (answer,) = get_args(kind.__orig_bases__[0])  # type: ignore[attr-defined]
    try:
        found: R | T = from_json(functools.reduce(operator.or_, (*others, answer)), raw)
    except Odd as e:
        raise GpuckptError(
            f"The keeper's answer to {kind.op!r} cannot be read; what was asked for was done.",
            f"It is not in the form that this version uses: {e}.",
            "Have one version of jupyter_gpuckpt here and where the kernel runs, and restart the kernel.",
        ) from e
    return found
