"""A kernel that sleeps, or is hibernated, as its record says."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal

from ..operations.results import Executed, Summary
from ..quick_dataclass import dataclass
from .in_progress import ParkedMemory

__all__ = [
    "ASLEEP",
    "FALLING_ASLEEP",
    "WAKING",
    "Hibernated",
    "HostMemory",
    "KernelReplies",
    "LateSnapshot",
    "Sleep",
    "Stage",
    "UnconfirmedWake",
]

Stage = Literal["falling asleep", "asleep", "waking"]
FALLING_ASLEEP: Stage = "falling asleep"
ASLEEP: Stage = "asleep"
WAKING: Stage = "waking"


@dataclass
class HostMemory:
    """The bytes of host memory that the GPU memory of a sleeping kernel is in."""

    beside: int
    """In files, and in the program that brings it back."""
    inside: int
    """In the memory of processes whose GPU memory could not be diverted into files."""


@dataclass(frozen=True)
class LateSnapshot:
    """The snapshot that a sleeping kernel's GPU memory is still being read from."""

    name: str
    id: str
    store: str = ""
    """The folder of its store; empty where an earlier version wrote this, for the one of the settings."""


@dataclass
class Sleep:
    """How far the kernel is in falling asleep or waking, and what of it was on a GPU."""

    stage: Stage
    since: str
    """Since when it is in this stage."""
    freed: int = 0
    """Bytes of GPU memory that others can have meanwhile."""
    cuda: list[int] = field(default_factory=list)
    """The processes with GPU state."""
    described: dict[str, Any] = field(default_factory=dict)
    """What `cuda.describe` said of them while they were awake."""
    hooks: bool = False
    """Whether the user's code is to be called after the sleep."""
    waits: list[tuple[int, int, int, int]] = field(default_factory=list)
    """The places in the driver where its threads waited before (`freeze.cuda_waits`)."""
    host: HostMemory | None = None
    parked: ParkedMemory | None = None
    late: LateSnapshot | None = None
    """Where that is not all read yet."""

    def host_memory(self) -> HostMemory:
        """Return what `GpuSleep.host_memory` said when it fell asleep."""
        # Earlier versions did not look, and took as much as was freed.
        return self.host or HostMemory(beside=self.freed, inside=0)


@dataclass(frozen=True)
class KernelReplies:
    """What a kernel said before it was hibernated: others are told that while it is not there."""

    kernel_info: dict[str, Any]
    """The content of its reply, as Jupyter's protocol has it."""
    comms: dict[str, dict[str, Any]]
    """The same of its comms, by their ids."""
    executed: Executed


@dataclass
class Hibernated:
    """There is no kernel but its snapshot."""

    snapshot: Summary
    since: str
    said: KernelReplies
    clients: dict[str, int]
    """How many there were, by channel."""
    requests: list[list[str]] = field(default_factory=list)
    """What clients have sent, to be executed when it wakes: each the frames of a message, in hexadecimal."""


@dataclass(frozen=True)
class UnconfirmedWake:
    """The kernel was woken, and has not answered yet."""

    snapshot: Summary
    """The one that it came from."""
    token: str
    """By this it knows whether it was told before."""
    requests: list[list[str]]
    """What it is to execute: as `Hibernated` has them."""
