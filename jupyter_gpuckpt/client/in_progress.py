"""What a keeper has begun with its kernel, as its record says: the keeper after it undoes it, or brings it to an end.

`operations.recover` has a function for each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal

from ..operations.results import Restored
from ..quick_dataclass import dataclass

__all__ = [
    "Held",
    "InProgress",
    "MoveInProgress",
    "ParkedMemory",
    "RestoreInProgress",
    "SaveInProgress",
    "WakeInProgress",
    "held_of",
]


@dataclass(frozen=True)
class ParkedMemory:
    """Memory of GPUs that a process has given up while it is frozen, or sleeps: as `freeze.parking.Parked` has it."""

    pid: int
    thread: int
    """0 while the process has not given it up yet."""
    places: tuple[tuple[str, int], ...]
    """The UUIDs of the GPUs, with the bytes on each."""
    holder: int | None = None
    """The pid of the program that holds it meanwhile, where one does."""


@dataclass(frozen=True)
class Held:
    """What a process holds on GPUs."""

    pid: int
    used: dict[str, int]
    """Bytes by the GPU's UUID."""


@dataclass
class SaveInProgress:
    """A kernel is being taken: it may stand still, and what it has on GPUs may be off them."""

    name: str = ""
    left: Literal["running", "stopped"] = "running"
    """How it is left once it is taken. One that was to be hibernated runs on, and its snapshot goes."""
    still: list[int] = field(default_factory=list)
    """The processes that were stopped already (SIGSTOP)."""
    cuda: list[int] = field(default_factory=list)
    """The processes with GPU state; none where the kernel sleeps."""
    held: list[Held] = field(default_factory=list)
    parking: list[ParkedMemory] = field(default_factory=list)
    criu: int | None = None
    """The pid of criu in the kernel's namespace."""
    kind: Literal["save"] = "save"


@dataclass
class MoveInProgress:
    """What a kernel has on GPUs is on its way to others: it may be off them."""

    cuda: list[int]
    held: list[Held]
    kind: Literal["move"] = "move"


@dataclass
class RestoreInProgress:
    """The kernel was given up for one from a snapshot."""

    name: str = ""
    asked: dict[str, Any] = field(default_factory=dict)
    """Which cells it has left unanswered (`kernel.cells`)."""
    peers: dict[str, int] = field(default_factory=dict)
    """How many clients it had, by channel."""
    fresh: bool = False
    """Whether a fresh kernel has been started in its place."""
    run: str = ""
    """The name of the run folder that it had: where the kernel's is another one, the snapshot has come up."""
    result: Restored | None = None
    """What the kernel from the snapshot is told; None in records of older versions."""
    asked_at: float = 0.0
    """When the restore was asked for, in seconds since the epoch."""
    kind: Literal["restore"] = "restore"


@dataclass
class WakeInProgress:
    """A hibernated kernel is on its way back from its snapshot."""

    name: str = ""
    kind: Literal["wake"] = "wake"


InProgress = SaveInProgress | MoveInProgress | RestoreInProgress | WakeInProgress


def held_of(described: Mapping[str, Any]) -> list[Held]:
    """Return what `cuda.describe` said that processes hold."""
    return [Held(process["pid"], process["used"]) for process in described.get("processes", [])]
