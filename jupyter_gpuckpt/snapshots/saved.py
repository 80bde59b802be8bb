"""What a manifest says of the kernel in a snapshot: who it is, what machine it was on, which processes it has.

Versions add members; those that earlier ones did not write have defaults. Listings do not need any of this to be as it
should (`summary`); a restore does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..checked import Odd, from_json
from ..errors import Damaged
from ..freeze.cpu_affinity import BoundThreads
from ..operations.choices import Choices
from ..store import Manifest

__all__ = ["OwnFiles", "SavedKernel", "SavedMachine", "SavedProcesses", "kernel_of", "machine_of", "processes_of"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class SavedCell:
    """A cell that has ended: its number, how it begins, and for how many seconds it ran."""

    number: int
    begins: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class SavedKernel:
    """Which kernel or job was saved, and what its agent said of it."""

    kernel_id: str
    name: str = ""
    """The kernelspec's."""
    notebook: str = ""
    agent: bool
    """Whether it has one."""
    connection: dict[str, int] = field(default_factory=dict)
    """The ports of its five channels."""
    endpoint: dict[str, str] = field(default_factory=dict)
    """How clients reached it beside these: as `keeper.ports.endpoint` has it."""
    rebinds: bool = False
    """Whether it can come back with another transport."""
    execution_count: int | None = None
    cells: int | None = None
    """How many had begun."""
    cell: str = ""
    """The id of the one that had ended last; empty where one ran, or where its client did not tell it."""
    in_cell: bool = False
    """Whether one ran that did more afterwards, as it does when it is restored."""
    saved_at: str = ""
    saved_cells: int | None = None
    """When a snapshot was made of it, or it was started, before this, and how many cells had begun by then."""
    python: str | None = None
    ipykernel: str | None = None
    protocol: int | None = None
    """The agent's."""
    version: str = ""
    """Of jupyter_gpuckpt."""
    waits_for_gpu: bool = False
    """Whether each of its calls to CUDA would wait while it has no GPU state."""
    own_ports: list[int] = field(default_factory=list)
    """Those that it listens at beside its channels'."""
    waited: dict[str, bool] | None = None
    """Which requests waited, that it was to answer, by their ids: whether each is a cell."""
    after: SavedCell | None = None
    """The cell after which it was saved by itself; None where somebody saved it."""
    choices: Choices = field(default_factory=Choices)
    """For a kernel that comes back from this after it was hibernated; what a restore takes the place of has its own."""
    job: str | None = None
    program: str | None = None
    """A job's; not its arguments: there may be a password among them, and manifests travel."""


@dataclass(frozen=True, kw_only=True)
class SavedMachine:
    """The machine that it was saved on."""

    arch: str
    kernel: str
    """Linux's release."""
    criu: str
    """The version of CRIU."""
    cpu_flags: list[str]
    host: str = ""
    """Its name."""


@dataclass(frozen=True, kw_only=True)
class OwnFiles:
    """The files that a snapshot keeps for machines without them: how many, and their bytes."""

    count: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class SavedProcesses:
    """The processes in it; their pids are those of the kernel's namespace."""

    pid: int
    """The kernel's."""
    processes: list[int]
    cuda: list[int]
    """Those with GPU state."""
    private_bytes: int
    frozen_seconds: float
    """For how long they were paused."""
    gpu_seconds: float | None = None
    """For how long they could not use their GPUs; None without GPU state."""
    files: OwnFiles | None = None
    shared_files: dict[str, int] = field(default_factory=dict)
    """By the device of each /dev/shm that they have had, the number that the next file there was to get."""
    bound: list[BoundThreads] = field(default_factory=list)
    """Which of their threads may not run on all processors that the kernel's others may run on."""


def kernel_of(manifest: Manifest) -> SavedKernel:
    """Return which kernel is in a snapshot. Raises `Damaged`."""
    return _read(SavedKernel, manifest, manifest.kernel)


def machine_of(manifest: Manifest) -> SavedMachine:
    """Return the machine that a snapshot was saved on. Raises `Damaged`."""
    return _read(SavedMachine, manifest, manifest.machine)


def processes_of(manifest: Manifest) -> SavedProcesses:
    """Return the processes in a snapshot. Raises `Damaged`."""
    return _read(SavedProcesses, manifest, manifest.process)


def _read(kind: type[T], manifest: Manifest, said: Any) -> T:
    try:
        return from_json(kind, said)
    except Odd as e:
        raise Damaged(
            f"The snapshot {manifest.name} cannot be used.",
            f"Its manifest is not in the form that this version reads: {e}.",
            "Restore another snapshot.",
            name=manifest.name,
        ) from e
