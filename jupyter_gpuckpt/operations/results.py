"""What a keeper answers: how its kernel is, what operations and questions gave, and how far an operation is.

A member that is None by default is left out of the JSON where it is None. Nothing but the standard library is needed: a
kernel loads this when something is asked of its keeper.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, ClassVar, Literal

from ..quick_dataclass import dataclass

__all__ = [
    "AUTOMATIC",
    "AutoSaving",
    "AutoSleepSet",
    "Closing",
    "Comparison",
    "Copy",
    "Details",
    "EndedJob",
    "Executed",
    "FileChange",
    "Forked",
    "GpuUse",
    "Hibernated",
    "HibernatedKernel",
    "HibernatedSince",
    "Kept",
    "KernelStatus",
    "Labelled",
    "Labels",
    "ListedKernel",
    "MemoryChange",
    "Moved",
    "NewCopy",
    "PartChange",
    "Progress",
    "Removed",
    "Restored",
    "ResumedFrom",
    "RoomMade",
    "RunningCell",
    "RunningJob",
    "Saved",
    "Slept",
    "SnapshotName",
    "Snapshots",
    "StayingAwake",
    "Summary",
    "Taken",
    "Taking",
    "Unsaved",
    "Variable",
    "VariableChange",
    "WakeNote",
    "Woken",
    "WokenLater",
]

AUTOMATIC = "auto-"
"""How the names begin of snapshots that were saved by themselves."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far an operation is."""

    stage: str
    done: int = 0
    total: int = 0
    """Bytes; 0 where the stage is about none."""
    rate: float | None = None
    """Bytes a second; None where nothing can be said."""
    left: float | None = None
    """Seconds that the stage will still take; None where nothing can be said."""
    seconds: float | None = None
    """For how long the operation is under way; None where whoever shows it counts by itself."""
    quiet: bool = False
    """Whether the kernel that asked shows nothing of it: it is about to be taken."""
    cancelling: bool = False
    """Whether it is to be cancelled."""
    taken: Taken | None = None
    """What a save has taken, once the kernel need not wait for the disk."""


@dataclass(frozen=True, kw_only=True)
class Taking(Progress):
    """How far a save is whose kernel need not wait for the disk."""

    taken: Taken


# -- snapshots


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What listings and results say of a snapshot."""

    name: str
    """Its key in the store."""
    label: str = ""
    """What to call it where several are listed: its name, with as much of its notebook's as tells it apart."""
    id: str
    message: str
    created: str
    size: int
    stored: int
    """Bytes that were added to the store for it."""
    parent: str | None
    """The id of the snapshot that the kernel last came from."""
    notebook: str
    kernel_id: str
    job: str = ""
    execution_count: int | None
    gpu_memory: int
    frozen_seconds: float | None
    gpu_seconds: float | None = None
    """For how long it could not use its GPUs; None without GPU state, or where unknown."""
    automatic: bool = False
    """Whether it was saved by itself after a cell, and nobody has given it another name."""
    cell: str = ""
    """The id of the notebook's cell that the kernel had executed last; empty where unknown, or in the middle of one."""
    cells: int | None = None
    """How many cells it had executed, without lines of ``%gpuckpt``; None where unknown."""


@dataclass(frozen=True, kw_only=True)
class Labels:
    """What people have put on a snapshot."""

    pinned: bool = False
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Labelled(Summary):
    """A snapshot in a list."""

    pinned: bool
    tags: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Snapshots:
    """A list of snapshots, newest first."""

    snapshots: list[Labelled]
    faults: list[dict[str, Any]]
    """The errors of those that cannot be read, as `GpuckptError.as_dict` has them."""
    writing: str | None = None
    """The name of the one that is being written."""


@dataclass(frozen=True, kw_only=True)
class Details(Summary):
    """All there is to say of a snapshot; the members are those of its manifest."""

    kernel: Mapping[str, Any]
    machine: Mapping[str, Any]
    cuda: Mapping[str, Any]
    process: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Removed:
    """A snapshot is gone."""

    freed: int
    """Bytes."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What a rule has removed, or would remove."""

    removed: list[str]
    freed: int
    """Bytes."""


# -- what changed from one snapshot to another


@dataclass(frozen=True, kw_only=True)
class Variable:
    """What is known of a variable in one of them; None is what is not known, or what it has not."""

    type: str
    size: int | None = None
    """Bytes of its own, or of an array's elements."""
    length: int | None = None
    shape: list[int] | None = None
    dtype: str | None = None
    device: str | None = None
    holds: int | None = None
    """Bytes of all arrays within it."""
    arrays: int | None = None
    """How many these are."""


@dataclass(frozen=True, kw_only=True)
class VariableChange:
    """What became of a variable, in words (``how``)."""

    name: str
    how: str
    old: Variable | None
    new: Variable | None


@dataclass(frozen=True, kw_only=True)
class MemoryChange:
    """How much of the memory of a process changed, in bytes; a file of GPU memory has no area."""

    process: int | str
    area: str | None = None
    changed: int
    old: int | None
    new: int | None


@dataclass(frozen=True, kw_only=True)
class FileChange:
    """What became of a file that the kernel uses, or that the snapshots keep, in words (``how``)."""

    path: str
    how: str


@dataclass(frozen=True, kw_only=True)
class PartChange:
    """How much of a part of the snapshots, as the store has them, changed: bytes, None where it is not there."""

    path: str
    old: int | None
    new: int | None
    changed: int


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What became of the snapshot `old` in `new`."""

    old: str
    new: str
    """What people call them."""
    variables: list[VariableChange]
    """Those that changed, then those that are new, then those that were deleted, the largest first."""
    unchanged: int | None
    """How many were compared and are the same; None where a snapshot tells of no variables."""
    not_compared: list[str]
    """The names of those that seem to be the same but may hold something else."""
    same_origin: bool
    """Whether both come from one process."""
    memory: list[MemoryChange]
    """By process and kind of area, without programs and libraries."""
    gpu_memory: list[MemoryChange]
    """By file, of which each process has its own."""
    used_files: list[FileChange]
    """Those that the kernel began or ceased to use, libraries apart."""
    kept_files: list[FileChange]
    changed: int
    """Bytes of all parts that `old` has nowhere."""
    files: list[PartChange]
    """The parts of the snapshots."""


# -- how a kernel is


@dataclass(frozen=True, kw_only=True)
class GpuUse:
    """What a kernel has on GPUs, in bytes."""

    held: int | None
    """None where the driver has to be asked."""
    freed: int
    """What others can have while it sleeps."""
    host_memory: int = 0
    """What that takes of host memory."""


@dataclass(frozen=True, kw_only=True)
class RunningCell:
    """The cell that runs: its number, and how it begins."""

    number: int
    begins: str


@dataclass(frozen=True, kw_only=True)
class Unsaved:
    """What a kernel has done that is in no snapshot."""

    since: str
    cells: int | None
    """How many have begun since; None where that is not known."""
    cell: RunningCell | None
    computed: float
    """Seconds of processor time."""


@dataclass(frozen=True, kw_only=True)
class SnapshotName:
    """The snapshot that a kernel last came from or went to."""

    name: str
    id: str


@dataclass(frozen=True, kw_only=True)
class ResumedFrom:
    """Where a kernel comes from that was hibernated: its snapshot, which is gone, and when and where it was saved."""

    name: str
    saved: str
    host: str
    """The machine's name; empty where that is not known."""
    at: str
    """When it was resumed."""


@dataclass(frozen=True, kw_only=True)
class HibernatedSince:
    """The snapshot that a hibernated kernel is."""

    since: str
    name: str
    size: int
    stored: int
    gpu_memory: int


@dataclass(frozen=True, kw_only=True)
class WakeNote:
    """When a kernel was last woken, and how long that took."""

    at: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class AutoSaving:
    """Whether a kernel is saved by itself after cells, and by what rule."""

    after: float | None
    """After those that have run for so many seconds; None for none."""
    keep: int
    """How many such snapshots are kept."""
    under: int | None
    """Bytes of the store beyond which the oldest of them go; None for any."""
    every: float | None = None
    """Not after cells, but every so many seconds, also while a cell runs; None for after cells."""
    has_cells: bool = True
    """Whether it is known when a cell of it runs: not of a job, nor of a kernel without an agent."""
    failed: str = ""
    """Why the last one failed; empty where it did not."""


@dataclass(frozen=True, kw_only=True)
class KernelStatus:
    """How a kernel or job is that a keeper holds."""

    kernel_id: str
    name: str
    """The kernelspec's."""
    notebook: str
    job: str = ""
    connection_file: str
    state: str
    """``running``, ``sleeping``, ``hibernated``, ``ended``, or what is being done with it."""
    writing: str | None
    """The name of the snapshot that is being written while it runs."""
    queued: list[str]
    """The operations that wait."""
    stage: str
    pid: int | None
    keeper_pid: int
    version: str
    pids: list[int]
    memory: int
    """Bytes."""
    started: str
    parent: SnapshotName | None
    copy_of: str
    """The id of the kernel that it was forked from."""
    resumed: ResumedFrom | None = None
    """None where it was not hibernated before, or where its keeper is of an older version."""
    unsaved: Unsaved | None
    computed: float
    """Seconds of processor time since it was last saved or restored."""
    hibernated: HibernatedSince | None
    sleep_after: float | None
    notes: list[str]
    attended: bool
    """Whether a Jupyter server or another program holds it."""
    busy: bool
    last_active: str
    auto: AutoSaving | None = None
    """None where its keeper is of an older version."""
    redo: str | None = None
    """The id of the snapshot that the last undo came from; None where there is nothing to redo."""
    pinned: bool
    """Whether nobody but the user may put it to sleep."""
    asleep_since: str | None
    woken: WakeNote | None
    gpu: GpuUse


@dataclass(frozen=True, kw_only=True)
class ListedKernel(KernelStatus):
    """A kernel or a job that runs, in a list."""

    gpu_memory: int | None
    """What it holds on all GPUs, in bytes; None where the driver does not tell."""


@dataclass(frozen=True, kw_only=True)
class RunningJob(ListedKernel):
    """A job in a list."""

    command: list[str]


@dataclass(frozen=True, kw_only=True)
class EndedJob:
    """A job that has ended, in a list."""

    kernel_id: str
    job: str
    state: Literal["ended"] = "ended"
    exit_status: int | None
    """Its exit code, -N for signal N; None where nobody saw it."""
    ended: str
    hibernated_as: str | None
    """The name of the snapshot that it is in, where it was hibernated."""
    pid: None
    pids: list[int] = field(default_factory=list)
    memory: int = 0
    gpu_memory: int = 0
    started: str
    parent: SnapshotName | None
    command: list[str]


@dataclass(frozen=True, kw_only=True)
class HibernatedKernel(Summary):
    """The snapshot of a hibernated kernel, in a list."""

    kernel_name: str
    """The kernelspec's."""
    held: bool
    """Whether its keeper is there, so that the kernel is woken; any other one is resumed in a new kernel."""
    host: str = ""
    """The machine that it belongs to, where that is not known to be this one."""


@dataclass(frozen=True, kw_only=True)
class Executed:
    """Which cells a kernel has executed: the last number of each, and the numbers of those without an id."""

    restored: str
    """The name of the snapshot that it was last put back to; empty for none."""
    cells: dict[str, int]
    others: list[int]


# -- operations


@dataclass(frozen=True, kw_only=True)
class Saved(Summary):
    """A snapshot was saved."""

    restored: ClassVar[Literal[False]] = False
    seconds: float
    notes: list[str]
    """What the user should know."""
    store: str | None = None
    """The folder of the store, where that is not the usual one."""


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What a save has taken that is not on the disk yet; `size` is what was taken."""

    restored: ClassVar[Literal[False]] = False
    label: ClassVar[str] = ""
    job: ClassVar[str] = ""
    store: ClassVar[None] = None
    seconds: ClassVar[None] = None
    name: str
    id: str
    message: str
    created: str
    size: int
    gpu_memory: int
    frozen_seconds: float
    gpu_seconds: float | None = None
    notes: list[str]


@dataclass(frozen=True, kw_only=True)
class Copy:
    """Which copy a kernel is."""

    index: int
    kernel_id: str
    reseed: bool


@dataclass(frozen=True, kw_only=True)
class Restored(Summary):
    """A snapshot was restored, or a copy came up: also what the kernel that came up is told."""

    restored: Literal[True] = True
    store: ClassVar[None] = None
    notes: ClassVar[tuple[str, ...]] = ()
    warnings: list[str]
    lazy: bool = False
    kept: str = ""
    """The name of the snapshot that was made of the kernel that ran before; empty where none was."""
    given_up: Unsaved | None
    """What of the kernel that ran before is in no snapshot."""
    stop_here: bool = False
    """Whether the rest of the cell that the snapshot was taken in is not run."""
    answered: float | None = None
    """After how many seconds it answered, where its GPU memory came later."""
    seconds: float | None = None
    copy: Copy | None = None


@dataclass(frozen=True, kw_only=True)
class NewCopy:
    """One copy of a kernel."""

    id: str
    index: int
    name: str
    """The kernelspec's."""
    connection_file: str
    pid: int | None
    keeper_pid: int
    ports: dict[str, int]
    """The user's own ports that are others there, by what they are in the kernel."""
    notes: list[str]
    held: bool
    """Whether a Jupyter server holds it."""


@dataclass(frozen=True, kw_only=True)
class Forked:
    """Copies of a kernel came up."""

    restored: ClassVar[Literal[False]] = False
    kernels: list[NewCopy]
    warnings: list[str]
    """What kernel and copies share."""
    snapshot: str
    """The one that they were made from; empty where they were made of the kernel."""
    frozen_seconds: float | None
    gpu_seconds: float | None = None
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Moved:
    """What was on GPUs is on others: a text for each that was left."""

    moves: list[str]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Slept:
    """A kernel was put to sleep, or was asleep already."""

    already: bool
    freed: int
    """Bytes of GPU memory that others can have."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Hibernated(Summary):
    """A kernel was hibernated; `seconds` is 0 where it was already."""

    woken: ClassVar[Literal[False]] = False
    seconds: float


@dataclass(frozen=True, kw_only=True)
class WokenLater:
    """What a kernel that was hibernated is told of that when it is awake again."""

    woken: Literal[True] = True


@dataclass(frozen=True, kw_only=True)
class Woken:
    """A kernel was woken, or was awake already."""

    already: bool
    back: int
    """Bytes that are on GPUs again."""
    seconds: float
    warnings: list[str] = field(default_factory=list)


# -- the rest


@dataclass(frozen=True, kw_only=True)
class StayingAwake:
    """Whether nobody but the user may put a kernel to sleep."""

    pinned: bool


@dataclass(frozen=True, kw_only=True)
class AutoSleepSet:
    """After how many idle seconds a kernel sleeps by itself; None for never."""

    sleep_after: float | None


@dataclass(frozen=True, kw_only=True)
class RoomMade:
    """The kernels that sleep now for one that found too little GPU memory, in words."""

    asleep: list[str]


@dataclass(frozen=True, kw_only=True)
class Closing:
    """A kernel has ended; the name of the snapshot that is still being written, if any."""

    writing: str | None
