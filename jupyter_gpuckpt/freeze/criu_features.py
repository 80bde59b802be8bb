"""What CRIU has found out about the system, kept from one run of it to the next (`criu_features.c`)."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping
from pathlib import Path

from ..linux import processes
from ..linux.host import Host
from ..linux.private_folders import make_private
from .criu_program import CriuProgram

__all__ = ["asked_for"]

log = logging.getLogger("gpuckpt.keeper")

_KEPT = 7 * 86400.0  # seconds


def asked_for(program: CriuProgram, folder: Path) -> Mapping[str, str]:
    """Return what CRIU's environment has to have for that; `folder` has what it has found out."""
    try:
        make_private(folder)
        place = folder / f"criu-{_system(program)}"
        if not place.exists():
            _remove_old(folder)
    except OSError as e:
        log.warning("criu will look at the system each time: %s", e)
        return {}
    return {"GPUCKPT_FEATURES": str(place)}


def _system(program: CriuProgram) -> str:
    """Return a name for what the answers are about: this CRIU, on this boot, in this container, with these rights."""
    about = Path(program.path).stat()
    this = Host.this()
    parts = (
        (program.path, about.st_mtime_ns, about.st_ino),
        (this.boot, this.machine, this.names, processes.start_time(1), Path("/proc/self/ns/mnt").stat().st_ino),
        [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(("Cap", "Seccomp"))],
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _remove_old(folder: Path) -> None:
    """Remove what was found out on another boot, some day: whose boot has not ended loses 0.1 s."""
    for kept in folder.glob("criu-*"):
        if kept.stat().st_mtime < time.time() - _KEPT:
            kept.unlink(missing_ok=True)
