"""The keeper's process: it comes to hold one kernel, and lives until that has ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from .. import __version__, settings
from ..client.keepers import without_keeper
from ..client.protocol import PROTOCOL
from ..client.record import KernelFolder
from ..errors import GpuckptError
from ..linux import processes
from ..linux.c_memory import have_few_arenas
from ..linux.lock_files import keep_from_cleaning
from ..linux.spawning import become_subreaper, mind_children
from ..operations.requests import Hibernate
from .answers import unforeseen
from .kernel_life import Keeper
from .operations.progress import to_nobody

if TYPE_CHECKING:
    from .duties import Duties

__all__ = ["Started", "keep"]

log = logging.getLogger("gpuckpt.keeper")


@dataclass(frozen=True)
class Started:
    """A new kernel that runs already: the name of its run folder, the sleeper's pid, and its own in the namespace."""

    run: str
    sleeper: int
    kernel: int


async def keep(
    folder: KernelFolder,
    how: str,
    ready: Callable[[str], None],
    started: Started | None = None,
    step: tuple[int, int] | None = None,
) -> None:
    """Be the keeper of the kernel in this folder until it has ended; its lock is held by this process.

    `how` is ``hold`` for a new kernel that was `started` already, ``job`` for a job that is to be started,
    ``take-over``, ``copy`` for a kernel that comes up as a copy of another, ``restore`` for a job that comes up from a
    snapshot, or ``resume`` for a kernel that was hibernated. `ready` is called once: with nothing when the kernel is
    held, else with the error; OSError from it says that nobody is there to be told any more. `step` is the process that
    the batch job ends with which a kernel that is not taken over is of.

    A kernel that is new ends with a start that fails, or that nobody waits for any more; but a job is saved whose `run`
    was killed, and a kernel that was hibernated goes back to the disk. One that is taken over ran before, and runs on:
    it is left for the next keeper.
    """
    # The sleeper's parent ends at once: sleepers become this process's children, and are reaped by it.
    become_subreaper()
    mind_children()
    have_few_arenas()
    keeper = Keeper(folder)
    pid = os.getpid()
    keeper.state.keeper = (pid, processes.start_time(pid) or 0)
    keeper.state.version, keeper.state.protocol = __version__, PROTOCOL
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        # A keeper ends with its kernel, not with the terminal that its server was started from, nor with what signals
        # every process of that server; nor do the programs that it starts.
        signal.signal(number, signal.SIG_IGN)
    for used in (settings.connection_file("").parent, folder.path.parent):
        keep_from_cleaning(used)
    try:
        try:
            duties = await _hold(keeper, how, started, step)
        except Exception as e:
            log.exception("the kernel could not be held")
            error = e if isinstance(e, GpuckptError) else unforeseen("start", e, folder.path)
            is_left = _is_left(folder, how)
            with contextlib.suppress(OSError):
                ready(json.dumps((without_keeper(error.why or error.what) if is_left else error).as_dict()))
            if is_left:
                _leave()
            return
        try:
            ready("")
        except OSError:
            if how not in ("take-over", "resume") and keeper.launch.runner is None:
                raise
            log.info("whoever wanted the kernel to be held has gone")
            if how == "resume":
                keeper.in_background(_back_to_disk(keeper))
        try:
            await duties.do(how)
        except Exception:
            log.exception("what the keeper before this one had begun could not be brought to an end")
            if _is_left(folder, how):
                _leave()
            raise
    finally:
        from .operations.shut_down import shut_down  # as in `_hold`

        await shut_down(keeper)
        await keeper.operations.idle.wait()
        await asyncio.sleep(0)  # the last answers go out


async def _back_to_disk(keeper: Keeper) -> None:
    """Hibernate a kernel again that nobody waits for any more: it was resumed by a server that has ended meanwhile."""
    try:
        await keeper.ask(Hibernate(end=True), to_nobody)
    except GpuckptError as e:
        log.error("the kernel keeps running: %s", e)


async def _hold(keeper: Keeper, how: str, started: Started | None, step: tuple[int, int] | None) -> Duties:
    """Come to hold the kernel, and return what there is to do with it."""
    if how != "take-over":
        keeper.state.step = step
        runner = keeper.launch.runner
        keeper.state.client, keeper.state.end_after = runner, None if runner is None else 0.0
    keeper.save_state()
    if started is not None:
        keeper.holders.expect_first()
        keeper.ends_with(os.getppid(), 0.0)  # until that holds it
        await keeper.attach(started.run, started.sleeper, started.kernel)
        keeper.expect_start()
    elif how == "job":
        await keeper.start_kernel()
    # Only now: to import what a keeper can do takes as long as Python itself, which a job waits for too.
    from .duties import Duties

    duties = Duties(keeper)
    await duties.take_up(how)
    return duties


def _is_left(folder: KernelFolder, how: str) -> bool:
    """Tell whether a kernel was taken over that is to run on without this keeper; one whose record is gone is not."""
    try:
        return how == "take-over" and folder.has_kernel()
    except FileNotFoundError:
        return False
    except (OSError, ValueError):  # it cannot be read just now
        return True


def _leave() -> NoReturn:
    """End as a keeper does that is killed: the kernel keeps running, and the next keeper takes over."""
    logging.shutdown()
    os._exit(1)
