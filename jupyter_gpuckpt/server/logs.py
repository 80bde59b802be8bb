"""What the logs say of a kernel and of an operation on it: its keeper's, and criu's where criu failed.

Both are written for people who look for a fault, and name files, processes and addresses; what the kernel's own
programs wrote is left out, since it may be anything.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .. import settings
from ..client.record import LOG, QUOTED, KernelFolder
from ..errors import GpuckptError

__all__ = ["criu_log", "keeper_log", "keeper_log_size"]

_MOST = 100_000  # bytes: the end of a log is what matters


def keeper_log_size(folder: KernelFolder) -> int:
    """Return how long the log of a kernel's keeper is now, in bytes; 0 where there is none."""
    try:
        return (folder.path / LOG).stat().st_size
    except OSError:
        return 0


def keeper_log(folder: KernelFolder, since: int = 0) -> list[dict[str, Any]]:
    """Return the log of a kernel's keeper from a place on, as at most one entry: it goes with the kernel."""
    text = _end_of(folder.path / LOG, since)
    return [{"name": "keeper", "text": _without_quotes(text)}] if text else []


def criu_log(error: GpuckptError) -> list[dict[str, Any]]:
    """Return criu's log of a failure, as at most one entry: only the newest ones are kept."""
    path = Path(str(error.data.get("log") or ""))
    if path.parent != settings.logs_dir():
        return []
    text = _end_of(path, 0)
    return [{"name": "criu", "text": text}] if text else []


def _end_of(path: Path, since: int) -> str:
    try:
        with open(path, "rb") as log:
            size = os.fstat(log.fileno()).st_size
            begin = since if since <= size else 0  # it starts again where it had become long
            log.seek(max(begin, size - _MOST))
            if size - _MOST > begin:
                log.readline()  # what is left of a line does not tell whose it is
            return log.read(_MOST).decode("utf-8", "replace")
    except OSError:
        return ""


def _without_quotes(text: str) -> str:
    """Leave out what a keeper quotes of its kernel's own output."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith(QUOTED))
