"""How one talks to a sleeper (`linux.sleeper`): what it is told, and what it answers.

A sleeper lives on when the package is upgraded, and its keeper may be of an earlier or a later version: what a message
means does not change.
"""

from __future__ import annotations

import json

from ..checked import from_json
from ..linux.spawning import Program
from ..quick_dataclass import dataclass

__all__ = ["Adopt", "Exited", "NextPid", "NotSpawned", "Spawned", "Told", "request", "told_in"]


@dataclass(frozen=True)
class Adopt:
    """Has a process, by its pid in the namespace, counted among those whose end is told."""

    adopt: int


@dataclass(frozen=True)
class NextPid:
    """Has the next process take the next free pid after this one."""

    after_pid: int


@dataclass(frozen=True)
class Spawned:
    """It is done; with the pid of what was spawned, if anything was."""

    spawned: int
    tag: int


@dataclass(frozen=True)
class NotSpawned:
    """It failed, for this reason."""

    failed: str
    tag: int


@dataclass(frozen=True)
class Exited:
    """A process that was spawned or adopted has ended: its exit code, -N for signal N."""

    exited: int
    status: int


Told = Spawned | NotSpawned | Exited


def request(what: Program | Adopt | NextPid, tag: int) -> bytes:
    """Return the line that asks for this; its answer has the same tag."""
    return json.dumps({"spawn": vars(what), "tag": tag}).encode() + b"\n"


def told_in(line: bytes) -> Told:
    """Return what a line of a sleeper's says.

    Raises
    ------
    ValueError : nothing that is known.
    """
    told: Told = from_json(Told, json.loads(line))
    return told
