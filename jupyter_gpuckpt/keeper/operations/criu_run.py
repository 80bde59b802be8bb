"""Running criu among a kernel's processes, and what it said when it failed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from ... import settings
from ...errors import (
    GpuckptError,
)
from ...freeze import criu, processes
from ...freeze.criu_program import CriuProgram
from .. import criu_logs
from ..kernel_start import run_path
from ..namespace import Namespace
from .parts import KERNEL_LOG

log = logging.getLogger("gpuckpt.keeper")

_NO_SPACE = "No space left"
_LOG_ROOM = 1 << 16  # below so much free disk criu's log may have been lost, in bytes
_STALLED = 10.0  # how long the criu of a dead keeper may do nothing before it is killed, in seconds


async def dump(
    space: Namespace,
    program: CriuProgram,
    pid: int,
    images: tuple[Path, str],
    snapshot: Path,
    left: criu.Left,
    failure: GpuckptError,
    started: Callable[[int], None],
) -> None:
    """Have criu dump the tree of `pid` and leave it as asked; its /dev/shm and log are of that instant.

    `images` is the folder for criu's images, as this process names it and as the namespace does; what is packed goes
    into `snapshot`. `started` is told criu's pid in the namespace. When criu fails, `failure` is raised with its words.
    """
    outside, inside = images
    seconds = settings.criu_timeout()
    deputy = space.deputy
    if deputy is None:
        arguments = criu.dump_arguments(pid, inside, criu.AT_POST_DUMP, seconds, left)
        more = {"GPUCKPT_SNAPSHOT": str(snapshot), "GPUCKPT_LOG": run_path(KERNEL_LOG)}
        run = _run(space, program, arguments, more, started)
    else:
        loop = asyncio.get_running_loop()

        def note(criu_pid: int) -> None:
            loop.call_soon_threadsafe(started, criu_pid)

        run = asyncio.to_thread(deputy.dump, pid, outside, snapshot, seconds, note, left)
    await _outcome(run, outside / criu.DUMP_LOG, failure)


async def restore(
    space: Namespace, program: CriuProgram, images: Path, inside: Path, failure: GpuckptError, left: criu.Left
) -> None:
    """Have criu restore the tree in `images` (`inside` to the namespace), and leave it, as asked, to process 1.

    When criu fails, `failure` is raised with its words.
    """
    if space.deputy is None:
        run = _run(space, program, criu.restore_arguments(inside, inside / criu.RESTORE_LOG, left), {})
    else:
        # As the sleeper sees it: the system lets a folder be mounted only where it is mounted already.
        run = asyncio.to_thread(space.deputy.restore, space.path(str(inside)), settings.criu_timeout(), left)
    await _outcome(run, images / criu.RESTORE_LOG, failure)


def _run(
    space: Namespace,
    program: CriuProgram,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    started: Callable[[int], None] | None = None,
) -> Coroutine[Any, Any, int]:
    return space.run(
        [*program.argv, *arguments],
        env={**program.environment(), **environment},
        stdout=run_path("criu.out"),
        timeout=settings.criu_timeout(),
        started=started,
    )


async def _outcome(run: Coroutine[Any, Any, int], log_file: Path, failure: GpuckptError) -> None:
    """Wait for a run of criu; when it fails, raise `failure` with criu's own words, and keep its log."""
    try:
        status, why = await run, ""
    except TimeoutError:
        status, why = 1, f"criu did not finish within {settings.criu_timeout():.0f} s"
    except OSError as e:
        status, why = 1, f"criu could not be started: {e}"
    except GpuckptError as e:  # the broker's
        failure.why, failure.then = f"{e.what} {e.why}", e.then
        raise failure from e
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
