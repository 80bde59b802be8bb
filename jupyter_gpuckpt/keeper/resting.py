"""A kernel that sleeps, or is hibernated, as its record says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from .in_progress import ParkedMemory

__all__ = ["ASLEEP", "FALLING_ASLEEP", "WAKING", "HostMemory", "LateSnapshot", "Sleep", "Stage"]

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
