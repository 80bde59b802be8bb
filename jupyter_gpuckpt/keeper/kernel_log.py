"""The kernel's log, what it writes to its standard output: kept short, and quoted when the kernel has died."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

from ..client.record import QUOTED

log = logging.getLogger("gpuckpt.keeper")

KERNEL_LOG_LIMIT = 10 << 20
"""So long a kernel's log may become, in bytes, before its beginning is cut off. A job's is its output, and stays."""
_KEPT = 1 << 20
_TRIM = 60.0  # how often that is looked at, in seconds
_LAST_WORDS = 40  # lines


async def keep_short(find: Callable[[], Path | None]) -> None:
    """Cut the log's beginning off now and then, where it has become long; never returns.

    `find` says which file that is; None while it is to be left alone.
    """
    while True:
        await asyncio.sleep(_TRIM)
        kernel_log = find()
        if kernel_log is not None:
            with contextlib.suppress(OSError):
                cut(kernel_log)


def cut(kernel_log: Path) -> None:
    """Leave only the end of a log that is too long; who writes to it has it open for appending.

    Raises
    ------
    OSError : it could not be read or written.
    """
    if kernel_log.stat().st_size <= KERNEL_LOG_LIMIT:
        return
    with kernel_log.open("rb") as file:
        file.seek(-_KEPT, os.SEEK_END)
        end = file.read()
    os.truncate(kernel_log, 0)
    with kernel_log.open("ab") as file:
        file.write(b"[cut off here: the log had become too long]\n" + end.partition(b"\n")[2])


def quote(kernel_log: Path) -> None:
    """Write the last lines of it into the keeper's own log."""
    with contextlib.suppress(OSError):
        tail = kernel_log.read_text("utf-8", "replace").splitlines()[-_LAST_WORDS:]
        if tail:
            log.warning("the kernel's last words:\n%s", "\n".join(f"{QUOTED}{line}" for line in tail))
