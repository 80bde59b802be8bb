"""Whether a kernel ends with the program that holds it, as a plain one does that is no server's.

A Jupyter server's kernels outlive it. Where papermill, nbclient or a console was killed, nobody would ever end theirs.
A job of `run` is hibernated on its way. So is all that belongs to a job of Slurm, when that ends: Slurm itself ends
what it finds by control groups, but not everything that it finds otherwise (proctrack/linuxproc, proctrack/pgid).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from typing import TYPE_CHECKING

from ...errors import GpuckptError
from ...linux import processes
from ...operations.requests import Hibernate
from ..operations.progress import to_nobody
from ..operations.shut_down import shut_down
from ..ports import peers

if TYPE_CHECKING:
    from ..kernel_life import Keeper

__all__ = ["end_with_client", "end_with_record", "end_with_step"]

log = logging.getLogger("gpuckpt.keeper")

_LOOK, _NEVER = 1.0, 86400.0  # seconds


async def end_with_client(keeper: Keeper) -> None:
    """End the kernel when it has been without its client for as long as its record says; else never return."""
    since = None
    while True:
        if keeper.state.end_after is None:
            await keeper.holders.changed.wait()
        keeper.holders.changed.clear()
        await asyncio.sleep(_LOOK)
        after = keeper.state.end_after
        if after is None or not _is_without_client(keeper):
            since = None
            continue
        since = since or time.monotonic()
        if time.monotonic() - since >= after:
            break
    log.warning("the kernel ends: what held it, process %d, has ended, and nobody uses it", keeper.state.client[0])  # type: ignore[index]
    # The `run` of a job was killed: the next one is to go on with it.
    await _end(keeper, save=bool(keeper.launch.job))


async def end_with_step(keeper: Keeper) -> None:
    """End the kernel when the batch job has ended that it is of; else never return."""
    step = keeper.state.step
    while step is None or processes.start_time(step[0]) == step[1] or keeper.operations.current is not None:
        await asyncio.sleep(_LOOK if step is not None else _NEVER)
    log.warning("the kernel ends: its batch job has ended, with process %d", step[0])
    await _end(keeper, save=True)


async def end_with_record(keeper: Keeper) -> None:
    """End a job of `run` at once when another machine has it, which took this one for dead; else never return.

    Its folder is that one's keeper's then, and its snapshots are: nothing is saved, and nothing written there.
    """
    while keeper.launch.runner is None or keeper.record_is_closed or await asyncio.to_thread(_is_own, keeper):
        await asyncio.sleep(_LOOK if keeper.launch.runner is not None else _NEVER)
    log.error("the job ends: it was started on another machine, which took this one for dead")
    await keeper.end_sleepers()
    os._exit(1)


def _is_own(keeper: Keeper) -> bool:
    """Tell whether the record in the folder is this keeper's; one that cannot be read, or is not there, may be."""
    try:
        head = keeper.folder.head()
    except (OSError, ValueError):  # a home may be away for a moment
        return True
    return (head.keeper, head.boot) == (keeper.state.keeper, keeper.state.boot)


async def _end(keeper: Keeper, *, save: bool) -> None:
    """End the kernel, hibernated where it is to be saved and can be."""
    if save:
        try:
            await keeper.ask(Hibernate(end=True), to_nobody)
            return
        except GpuckptError as e:
            log.error("it could not be saved: %s", e)
    await shut_down(keeper)
    keeper.closing.set()


def _is_without_client(keeper: Keeper) -> bool:
    """Tell whether the program has ended that the kernel ends with, nobody else uses it, and nothing is done with it.

    One that is hibernated was put aside by somebody, and costs nothing but disk.
    """
    client = keeper.state.client
    if client is None or processes.start_time(client[0]) == client[1]:
        return False
    if keeper.holders or keeper.operations.current is not None or keeper.state.hibernated is not None:
        return False
    with contextlib.suppress(OSError, ValueError, KeyError):
        return not peers(keeper.launch.connection_file).get("iopub_port")
    return True  # without a connection file nobody finds it
