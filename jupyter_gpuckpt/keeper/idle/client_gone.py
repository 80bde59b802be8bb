"""Whether a kernel ends with the program that holds it, as a plain one does that is no server's.

A Jupyter server's kernels outlive it. Where papermill, nbclient or a console was killed, nobody would ever end theirs.
A job of `run` is hibernated on its way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
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

__all__ = ["end_with_client"]

log = logging.getLogger("gpuckpt.keeper")

_LOOK = 1.0  # seconds


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
    if keeper.launch.job:
        # The `run` of a job was killed: the next one is to go on with it.
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
