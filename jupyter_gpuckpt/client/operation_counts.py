"""How many operations the keepers of this user have done and how they ended, for whoever counts them.

One small file in the folder of the logs: a keeper ends with its kernel, and an operation may be asked for by a cell, a
terminal, a server, or nobody.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .. import settings
from ..linux.private_folders import make_private

__all__ = ["RESULTS", "WAKE_BOUNDS", "OperationCounts", "note", "read"]

log = logging.getLogger("gpuckpt.keeper")

RESULTS = ("done", "failed", "cancelled")
WAKE_BOUNDS = (0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""The upper bounds of the classes that wakes are counted in by how long they took, in seconds."""

_NAME = "operations.json"


@dataclass
class OperationCounts:
    """What was counted: operations by kind and result, and how long the wakes took that were done."""

    operations: dict[str, dict[str, int]] = field(default_factory=dict)
    wakes: list[int] = field(default_factory=lambda: [0] * (len(WAKE_BOUNDS) + 1))
    """How many wakes took as long as each class of `WAKE_BOUNDS`; the last class has no bound."""
    wake_seconds: float = 0.0

    def count(self, kind: str, result: str, seconds: float) -> None:
        """Count an operation that has ended."""
        of_kind = self.operations.setdefault(kind, dict.fromkeys(RESULTS, 0))
        of_kind[result] += 1
        if (kind, result) == ("wake", "done"):
            self.wakes[sum(seconds > bound for bound in WAKE_BOUNDS)] += 1
            self.wake_seconds += seconds


def note(kind: str, result: str, seconds: float) -> None:
    """Count an operation; where that cannot be written down, it is only logged: nothing hangs on it."""
    try:
        folder = settings.logs_dir()
        make_private(folder)
        with open(os.open(folder / _NAME, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as f:
            fcntl.flock(f, fcntl.LOCK_EX)  # other keepers count, too
            counts = _parse(f.read())
            counts.count(kind, result, seconds)
            f.seek(0)
            f.truncate()
            f.write(json.dumps(asdict(counts)).encode())
    except OSError as e:
        log.warning("an operation was not counted: %s", e)


def read() -> OperationCounts:
    """Return what has been counted; nothing where nothing was."""
    with contextlib.suppress(OSError), Path(settings.logs_dir(), _NAME).open("rb") as f:
        fcntl.flock(f, fcntl.LOCK_SH)
        return _parse(f.read())
    return OperationCounts()


def _parse(content: bytes) -> OperationCounts:
    """Return the counts as written; empty ones where a machine that stopped left half of it."""
    try:
        counts = OperationCounts(**json.loads(content))
        if len(counts.wakes) == len(WAKE_BOUNDS) + 1:
            return counts
    except (ValueError, TypeError):
        pass
    return OperationCounts()
