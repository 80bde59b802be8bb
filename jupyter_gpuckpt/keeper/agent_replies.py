"""What the agent in a kernel answers, checked where it enters: the user's code can write to that channel, too."""

from __future__ import annotations

import logging
from dataclasses import field
from typing import Any, TypeVar

from ..checked import Odd, from_json
from ..client.sleep_record import KernelReplies
from ..errors import GpuckptError
from ..operations.results import RunningCell
from ..quick_dataclass import dataclass

__all__ = [
    "NOTHING",
    "AboutKernel",
    "AfterSave",
    "CellNews",
    "Faults",
    "ReadyForSave",
    "ReadyForSleep",
    "checked_reply",
    "faults_in",
]

log = logging.getLogger("gpuckpt.keeper")

T = TypeVar("T")


@dataclass(frozen=True)
class CellNews:
    """A cell has begun, or ended."""

    busy: bool = False
    """Whether one is being executed."""
    used: bool = False
    """Whether it is the user's."""
    cells: int | None = None
    """How many have begun."""
    cell: RunningCell | None = None
    seconds: float | None = None
    """For how long the one ran that has ended."""
    asked: dict[str, Any] = field(default_factory=dict)
    """The one that runs, to be answered by another kernel (`kernel.cells`)."""


@dataclass(frozen=True)
class ReadyForSave:
    """What it says of a kernel that is about to be saved. What has no agent says nothing."""

    peers: dict[str, int] | None = None
    """What there was of GPU memory when the access of its GPUs to each other was turned off; None where it sleeps, or
    that is left to its library."""
    waits_for_gpu: bool = False
    """Whether each of its calls to CUDA would wait while it has no GPU state."""
    execution_count: int | None = None
    cells: int | None = None
    """How many have begun."""
    cell: str = ""
    """The id of the one that has ended last; empty where one runs, or where its client did not tell it."""
    in_cell: bool = False
    """Whether one runs that does more than it has done by now."""
    waits: bool = False
    """Whether one runs that waits for the save: no other begins before the kernel was taken."""
    python: str | None = None
    ipykernel: str | None = None
    protocol: int | None = None
    """The agent's."""
    is_told_more: bool = False
    """Whether it may be told that a save is automatic, and be asked what has begun since; one of an older version may
    not."""
    rebinds: bool = False
    """Whether it can come back with another transport."""
    environment: dict[str, list[str]] = field(default_factory=dict)
    """As `kernel.environment` describes it."""
    temporary: list[str] = field(default_factory=list)
    """Folders that it has made, and deletes at its end."""
    variables: list[dict[str, Any]] | None = None
    """As `kernel.variables` describes them."""
    left_out: int = 0
    """How many of these are not described."""
    own_ports: list[int] = field(default_factory=list)
    """Those that it listens at beside its channels'."""
    waited: dict[str, bool] | None = None
    """Which requests waited, by their ids: whether each is a cell."""


NOTHING = ReadyForSave()
"""What is said of a program without an agent."""


@dataclass(frozen=True)
class AboutKernel(KernelReplies):
    """What it says of a kernel that is about to be hibernated."""

    idle: bool = True
    """Whether all that clients had asked of it was done. An agent of an older version does not look."""


@dataclass(frozen=True)
class AfterSave:
    """What it says when the kernel keeps running."""

    waited: dict[str, bool] | None = None
    begun: int = 0
    """How many requests have begun to be executed since it was prepared, up to the end of the freeze at least."""


@dataclass(frozen=True)
class ReadyForSleep:
    """As `ReadyForSave`."""

    peers: dict[str, int] | None
    hooks: bool
    """Whether the user's code is to be called before a save."""


@dataclass(frozen=True)
class Faults:
    """What a kernel that was restored, or woken, says of it."""

    faults: list[str]
    """What it could not do."""
    notes: list[str] = field(default_factory=list)


def faults_in(answer: object) -> Faults:
    """Return the faults that a restored kernel reports; an invalid answer is no reason to end the kernel."""
    try:
        return from_json(Faults, answer)
    except Odd as e:
        log.warning("invalid answer of the kernel's agent: %s", e)
        return Faults([])


def checked_reply(kind: type[T], answer: object, not_done: type[GpuckptError], what: str) -> T:
    """Return an answer of the agent's.

    Raises
    ------
    GpuckptError : it is not one: the error is of this type, and says `what` was not done for it.
    """
    try:
        return from_json(kind, answer)
    except Odd as e:
        raise not_done(
            what,
            f"Its agent gave an invalid answer: {e}.",
            "Code in the kernel writes to gpuckpt's channel or has changed gpuckpt's modules: restart the kernel.",
        ) from e
