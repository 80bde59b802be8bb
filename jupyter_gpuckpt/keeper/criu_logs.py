"""The logs of criu's failures: kept in a folder of their own, since a kernel's folder goes with the kernel."""

from __future__ import annotations

import contextlib
import datetime
import os
from pathlib import Path

from .. import settings
from ..linux.private_folders import make_private

KEPT = 20
"""So many logs are kept, the newest."""


def keep(log: Path) -> Path | None:
    """Copy a log of criu's to where it stays, and return the copy; None where that is not possible."""
    folder = settings.logs_dir()
    # In the order of their names, the oldest comes first.
    copy = folder / f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%dT%H-%M-%S.%f}-{os.getpid()}-{log.name}"
    try:
        content = log.read_bytes()
        make_private(folder)
        with open(os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as f:
            f.write(content)
    except OSError:
        with contextlib.suppress(OSError):
            copy.unlink(missing_ok=True)
        return None
    # Not this one, whatever the clock says: it may have been set back.
    for old in sorted(other for other in folder.glob("*.log") if other != copy)[: 1 - KEPT]:
        with contextlib.suppress(OSError):  # another keeper may have removed it
            old.unlink()
    return copy
