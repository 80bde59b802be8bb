"""What is said to the process that calls the CUDA driver (`cuda_worker`), and what it answers: lines of JSON."""

from __future__ import annotations

import json
from typing import ClassVar, Literal

from ..checked import from_json, to_json
from ..quick_dataclass import dataclass

__all__ = [
    "Answer",
    "Call",
    "Checkpoint",
    "Fault",
    "Gpu",
    "Gpus",
    "Lock",
    "NotDone",
    "ProcessState",
    "Restore",
    "Unlock",
    "Usage",
    "Usages",
    "Value",
    "Version",
    "Work",
    "Worked",
    "answer_in",
    "call_in",
    "line",
]


@dataclass(frozen=True)
class Gpu:
    """One GPU of this machine, as NVML knows it."""

    index: int
    uuid: str
    """As `nvidia-smi -L` prints it: ``GPU-`` and 32 hexadecimal digits."""
    name: str
    total: int
    """Bytes of memory."""
    free: int
    """Bytes of memory that nobody holds."""
    mig: bool
    """Whether the GPU is split into MIG instances."""
    driver: str
    """The version of the machine's NVIDIA driver, such as ``580.159.04``."""


@dataclass(frozen=True)
class Usage:
    """What one process holds on one GPU."""

    gpu: str
    """The GPU's UUID."""
    pid: int
    bytes: int | None
    """None where the driver does not say."""
    mps: bool
    """Whether the process reaches the GPU through MPS."""


@dataclass(frozen=True)
class Worked:
    """A process that has been at work on a GPU."""

    gpu: str
    """The GPU's UUID."""
    pid: int | None
    """None where the driver does not tell for whom it is at work, or whether it is."""


@dataclass(frozen=True)
class Version:
    """Asks for the newest CUDA that the driver knows: 1000 * major + 10 * minor."""

    pid: ClassVar[None] = None
    """The process that the call is about."""
    call: Literal["version"] = "version"


@dataclass(frozen=True)
class Gpus:
    """Asks for all GPUs: a list of `Gpu`."""

    pid: ClassVar[None] = None
    call: Literal["gpus"] = "gpus"


@dataclass(frozen=True)
class Usages:
    """Asks who holds memory on them: a list of `Usage`."""

    pid: ClassVar[None] = None
    call: Literal["usage"] = "usage"


@dataclass(frozen=True)
class Work:
    """Asks who has been at work on them since a time (seconds since the epoch): a list of `Worked`."""

    since: float
    pid: ClassVar[None] = None
    call: Literal["work"] = "work"


@dataclass(frozen=True)
class ProcessState:
    """Asks for the CUDA state of a process: its name, ``none`` where it has none."""

    pid: int
    call: Literal["state"] = "state"


@dataclass(frozen=True)
class Lock:
    """Has new CUDA calls of a process held back, once its GPU work is done."""

    pid: int
    timeout_ms: int
    call: Literal["lock"] = "lock"


@dataclass(frozen=True)
class Checkpoint:
    """Has a locked process's GPU state moved into its host memory."""

    pid: int
    call: Literal["checkpoint"] = "checkpoint"


@dataclass(frozen=True)
class Restore:
    """Has a checkpointed process's GPU state moved back, to other GPUs where a map names them."""

    pid: int
    gpu_map: dict[str, str] | None = None
    call: Literal["restore"] = "restore"


@dataclass(frozen=True)
class Unlock:
    """Lets a locked process make CUDA calls again."""

    pid: int
    call: Literal["unlock"] = "unlock"


Call = Version | Gpus | Usages | Work | ProcessState | Lock | Checkpoint | Restore | Unlock


@dataclass(frozen=True)
class Value:
    """What a call gave, which is what it says; the worker's first line has its own pid."""

    value: object


@dataclass(frozen=True)
class Fault:
    """Why a call failed."""

    number: int | None
    """The `CUresult`; None where there is none."""
    name: str
    text: str


@dataclass(frozen=True)
class NotDone:
    """A call that failed."""

    error: Fault


Answer = Value | NotDone


def line(said: Call | Answer) -> str:
    """Return the line that says it, without its end."""
    return json.dumps(to_json(said))


def call_in(text: str) -> Call:
    """Return the call that a line asks for.

    Raises
    ------
    ValueError : none.
    """
    call: Call = from_json(Call, json.loads(text))
    return call


def answer_in(text: bytes) -> Answer:
    """Return the answer that a line holds.

    Raises
    ------
    ValueError : none.
    """
    answer: Answer = from_json(Answer, json.loads(text))
    return answer
