"""Running criu among a kernel's processes, and what it said when it failed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import settings
from ...errors import (
    GpuckptError,
)
from ...freeze import criu, processes
from ...freeze.criu_program import CriuProgram
from .. import criu_logs
from ..namespace import Namespace, run_path

if TYPE_CHECKING:
    pass

log = logging.getLogger("gpuckpt.keeper")

_NO_SPACE = "No space left"
_LOG_ROOM = 1 << 16  # below so much free disk criu's log may have been lost, in bytes
_STALLED = 10.0  # how long the criu of a dead keeper may do nothing before it is killed, in seconds


async def run_criu(
    space: Namespace,
    program: CriuProgram,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    log_file: Path,
    failure: GpuckptError,
    started: Any = None,
) -> None:
    """Run criu in the namespace; when it fails, raise `failure` with criu's own words, and keep its log."""
    try:
        status = await space.run(
            [*program.argv, *arguments],
            env=environment,
            stdout=run_path("criu.out"),
            timeout=settings.criu_timeout(),
            started=started,
        )
        why = ""
    except TimeoutError:
        status, why = 1, f"criu did not finish within {settings.criu_timeout():.0f} s"
    except OSError as e:
        status, why = 1, f"criu could not be started: {e}"
    if status == 0:
        return
    kept_log = criu_logs.keep(log_file)
    said = criu.first_error(log_file)
    if _NO_SPACE not in said and shutil.disk_usage(log_file.parent).free < _LOG_ROOM:
        # What criu wrote of its error is cut off then, and names what failed, not why.
        said = f"{_NO_SPACE} on the disk, not even for criu's log: {log_file.parent}{said and f' ({said})'}"
    if not why:
        ended = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        why = f"criu says: {said}" if said else f"criu {ended} and named no error"
    failure.why = why
    failure.then = criu.advice(said)
    failure.data.update(criu_status=status, criu_error=said)
    if kept_log is not None:
        failure.then += f" criu's log: {kept_log}"
        failure.data["log"] = str(kept_log)
    raise failure


async def end_criu(space: Namespace, pid: int | None) -> None:
    """Wait for the criu that a dead keeper left running: it lets the processes run on when it is done.

    One that does nothing any more is killed. That is the worse way: it may have put code of its own into a process.
    """
    outer = space.outer(pid) if pid else None
    if outer is None or b"criu" not in Path(f"/proc/{outer}/cmdline").read_bytes():
        return
    done, quiet_since = processes.work_done(outer), time.monotonic()
    while processes.start_time(outer) is not None:
        await asyncio.sleep(0.05)
        if (now := processes.work_done(outer)) != done:
            done, quiet_since = now, time.monotonic()
        elif time.monotonic() - quiet_since > _STALLED:
            with contextlib.suppress(ProcessLookupError):
                os.kill(outer, signal.SIGKILL)
            quiet_since = time.monotonic()
    space.end_session(outer)
