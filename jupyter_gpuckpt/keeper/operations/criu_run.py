"""Running criu among a kernel's processes, and what it said when it failed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from ... import installed, settings
from ...client.kernel_start import run_path
from ...client.record import KERNEL_LOG
from ...errors import GpuckptError, SaveFailed
from ...freeze import criu, criu_errors, criu_features, mapped_locks, shared_memory, twin
from ...freeze.criu_program import CriuProgram
from ...linux import memory, proc, processes
from .. import criu_logs
from ..namespace import Namespace

log = logging.getLogger("gpuckpt.keeper")

_LOG_ROOM = 1 << 16  # below so much free disk criu's log may have been lost, in bytes
_DUMPS = 3  # how often criu is run where a child that ends at the wrong moment makes it give up, and the like
_ACCEPT = 0.1  # how long a program has then to accept a connection, in seconds
_LET_GO = 10.0  # how long processes may stay held when their criu has ended, in seconds
_LOOK = 0.002  # seconds
_KILLED = 30.0  # how long the criu of a dead keeper may take to end when it was killed, in seconds
_STALLED = 10.0  # how long the criu of a dead keeper may do nothing before it is killed, in seconds


class _NotAccepted(Exception):
    """The tree has connections to itself that it has not accepted yet."""


async def dump(
    space: Namespace,
    program: CriuProgram,
    pid: int,
    images: tuple[Path, str],
    rest: tuple[Path, str],
    left: criu.Left,
    size: int,
    failure: SaveFailed,
    started: Callable[[int], None],
    *,
    has_twins: bool = False,
    reads_ahead: bool = False,
) -> None:
    """Have criu dump the tree of `pid` and leave it as asked; its /dev/shm and log are of that instant.

    `images` is the folder for criu's images, as this process names it and as the namespace does; what is packed goes
    into `rest`. `size` is how many bytes that is. `started` is told criu's pid in the namespace. With `has_twins`,
    memory is copied afterwards, by `memory_copy.copy`, and with `reads_ahead` the first process's mappings are
    read before. When criu fails, `failure` is raised with its words. It may be cancelled.
    """
    outside, inside = images
    log_file = outside / criu.DUMP_LOG
    seconds = settings.criu_timeout(size)
    deputy = space.deputy

    def run() -> Coroutine[Any, Any, int]:
        if deputy is not None:
            by_deputy = functools.partial(deputy.dump, pid, outside, rest[0], seconds, left=left)
            return _by_deputy(space, by_deputy, started)
        script = installed.SHM_PACKER if installed.SHM_PACKER.exists() else criu.AT_POST_DUMP
        arguments = criu.dump_arguments(pid, inside, script, seconds, left)
        more = {"GPUCKPT_SNAPSHOT": rest[1], "GPUCKPT_LOG": run_path(KERNEL_LOG)}
        more |= criu.dump_environment(inside)
        more |= shared_memory.asked_for(settings.NAMESPACE_RUN_DIR)
        more |= twin.asked_for(pid, settings.NAMESPACE_RUN_DIR, reads_ahead=reads_ahead) if has_twins else {}
        return _run(space, program, arguments, more, seconds, started)

    waiting = outside / criu.NOT_ACCEPTED

    async def run_unless_waiting() -> int:
        status = await run()
        if status != 0 and waiting.exists() and waiting.stat().st_size:
            raise _NotAccepted
        return status

    for tries_left in reversed(range(_DUMPS)):
        # What waits for longer comes back closed.
        waiting.unlink(missing_ok=True)
        if tries_left:
            waiting.touch(0o600)
        try:
            await _outcome(run_unless_waiting(), log_file, failure, seconds)
            waiting.unlink(missing_ok=True)
            return
        except BaseException as e:
            await asyncio.to_thread(twin.end, space.run_dir, space.outer)
            if isinstance(e, _NotAccepted):
                await asyncio.sleep(_ACCEPT)
                continue
            if not isinstance(e, SaveFailed) or not tries_left:
                raise
            if criu_errors.in_log(log_file).cause is not criu_errors.Cause.INTERRUPTED:
                raise
            log.warning("criu dumps the kernel once more: %s", failure.why)


async def restore(
    space: Namespace,
    program: CriuProgram,
    images: Path,
    inside: Path,
    failure: GpuckptError,
    left: criu.Left,
    environment: Mapping[str, str],
) -> None:
    """Have criu restore the tree in `images` (`inside` to the namespace), and leave it, as asked, to process 1.

    `environment` is what our library in criu is told besides; the broker's criu is told nothing.
    When criu fails, `failure` is raised with its words. It may be cancelled.
    """
    seconds = settings.criu_timeout(sum(image.stat().st_size for image in images.iterdir()))
    if space.deputy is None:
        arguments = criu.restore_arguments(inside, inside / criu.RESTORE_LOG, left)
        more = await asyncio.to_thread(mapped_locks.asked_for, images)
        run = _run(space, program, arguments, {**environment, **more}, seconds)
    else:
        # As the sleeper sees it: the system lets a folder be mounted only where it is mounted already.
        where = space.path(str(inside))
        run = _by_deputy(space, functools.partial(space.deputy.restore, where, seconds, left=left))
    await _outcome(run, images / criu.RESTORE_LOG, failure, seconds)


def _run(
    space: Namespace,
    program: CriuProgram,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    seconds: float,
    started: Callable[[int], None] | None = None,
) -> Coroutine[Any, Any, int]:
    known = criu_features.asked_for(program, settings.shared_dir())
    return space.run(
        [*program.argv, *arguments],
        env={**program.environment(), **known, **environment},
        stdout=run_path("criu.out"),
        timeout=seconds,
        started=started,
    )


async def _by_deputy(space: Namespace, run: Callable[..., int], started: Callable[[int], None] = lambda _: None) -> int:
    """Have the deputy run criu, and return its exit status; it is ended when nobody waits for it any longer."""
    loop = asyncio.get_running_loop()
    begun: asyncio.Future[int] = loop.create_future()

    def note(pid: int) -> None:
        started(pid)
        begun.set_result(pid)

    running = asyncio.create_task(asyncio.to_thread(run, started=lambda pid: loop.call_soon_threadsafe(note, pid)))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({begun, running}, return_when=asyncio.FIRST_COMPLETED)
        if begun.done():
            await space.end(begun.result(), running)
        raise


async def _outcome(run: Coroutine[Any, Any, int], log_file: Path, failure: GpuckptError, seconds: float) -> None:
    """Wait for a run of criu; when it fails, raise `failure` with criu's own words, and keep its log."""
    kills = memory.kills(os.getpid())
    try:
        status, why = await run, ""
    except TimeoutError:
        status, why = 1, f"criu did not finish within {seconds:.0f} s"
    except OSError as e:
        status, why = 1, f"criu could not be started: {e}"
    except GpuckptError as e:  # the broker's
        failure.why, failure.then = f"{e.what} {e.why}", e.then
        raise failure from e
    if status == 0:
        return
    kept_log = criu_logs.keep(log_file)
    error = criu_errors.in_log(log_file)
    if shutil.disk_usage(log_file.parent).free < _LOG_ROOM:
        error = error.without_disk(log_file.parent)
    if not why:
        ended = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        why = f"criu says: {error.words}" if error.words else f"criu {ended} and named no error"
    failure.why = why
    failure.then = error.cause.advice
    say_if_killed(failure, kills)
    failure.data.update(criu_status=status, criu_error=error.words)
    if kept_log is not None:
        failure.then += f" criu's log: {kept_log}"
        failure.data["log"] = str(kept_log)
    raise failure


async def let_run(kernel: int | None, still: Collection[int], say: Callable[[str], Awaitable[None]]) -> None:
    """See to it that a kernel's processes run on after a dump, but for those that stood `still` by themselves before.

    A criu that holds them and cannot be killed is waited for, however long, and it is said: what they had on GPUs can
    be given back to them only then, and is kept until then. Who does not want to wait ends that criu, or the kernel.
    """
    while held := await _let_go(kernel, still):
        by = ", ".join(sorted(set(map(str, held.values()))))
        stage = (
            f"Waiting to continue the {{kernel}}, which is stopped. criu (process {by}) does not end and holds "
            f"{', '.join(map(str, held))}, processes of the kernel. They continue as soon as it ends: try "
            f"`kill -9 {by}`; `dmesg` may say what it waits for."
        )
        log.error("%s", stage)
        await say(stage)


async def _let_go(kernel: int | None, still: Collection[int]) -> Mapping[int, int]:
    """Have them run on; return which of them are held for long, and by whom."""
    tree = [kernel, *processes.descendants(kernel)] if kernel is not None else []
    _continue(tree, still)
    began = time.monotonic()
    while held := {pid: tracer for pid in processes.held(tree) if (tracer := processes.tracer(pid)) not in tree}:
        if (waited := time.monotonic() - began) > _LET_GO:
            return held
        await asyncio.sleep(max(_LOOK, waited / 20))
    _continue(tree, still)
    for pid in set(still).difference(processes.stopped(still)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)  # criu had continued it, and was killed
    return {}


def _continue(tree: Collection[int], still: Collection[int]) -> None:
    """Continue what criu has stopped; the others may have a handler of SIGCONT, and have nothing to be told.

    The kernel comes last: no cell of it sees a stopped child.
    """
    for pid in reversed(processes.stopped(tree)):
        if pid not in still:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _command(pid: int) -> str:
    try:
        return proc.read(f"/proc/{pid}/cmdline")
    except OSError:
        return ""  # it has just ended


async def end_criu(space: Namespace, pid: int | None) -> None:
    """Wait for the criu that a dead keeper left running: it lets the processes run on when it is done.

    One that does nothing any more is killed. That is the worse way: it may have put code of its own into a process.
    """
    outer = space.program(pid) if pid else None
    if outer is None or "criu" not in _command(outer):
        return
    done, quiet_since, killed = processes.work_done(outer), time.monotonic(), 0
    while processes.start_time(outer) is not None and killed * _STALLED <= _KILLED:
        await asyncio.sleep(0.05)
        if (now := processes.work_done(outer)) != done:
            done, quiet_since = now, time.monotonic()
        elif time.monotonic() - quiet_since > _STALLED:
            with contextlib.suppress(ProcessLookupError):
                os.kill(outer, signal.SIGKILL)
            quiet_since, killed = time.monotonic(), killed + 1
    space.end_session(outer)


def say_if_killed(failure: GpuckptError, kills: int) -> None:
    """Have a failure say so where the system has killed since then for lack of memory (`memory.kills`)."""
    if memory.kills(os.getpid()) > kills:
        room = memory.room(os.getpid())
        failure.why = f"The system killed a process of it: there is too little memory{room.where}. ({failure.why})"
        failure.then = criu_errors.Cause.NO_MEMORY.advice
