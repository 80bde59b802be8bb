"""Shut down, step by step: the kernel ends, and what is under way with it; its keeper leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from ...snapshots.hibernated import forget

if TYPE_CHECKING:
    from ..kernel_life import Keeper

__all__ = ["shut_down"]

_PATIENCE = 30.0  # how long a shutdown waits for a broken-off operation to end, in seconds


async def shut_down(keeper: Keeper) -> None:
    """End the kernel and all of its processes, and what is under way; remove its folder. It is done once.

    A save that is being written goes on: what was taken is not the kernel's any more.
    """
    if keeper.record_is_closed:
        return  # the folder may be another keeper's by now
    keeper.record_is_closed = keeper.ending = True
    keeper.let_go()
    keeper.keep_output()
    operations = keeper.operations
    operations.break_off()
    await keeper.end_sleepers()
    if keeper.channel is not None:
        keeper.channel.close()
    await keeper.stand_in.close()
    keeper.let_ports_go()
    await asyncio.to_thread(keeper.worker.close)
    if operations.writes is None:
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
            await asyncio.wait_for(operations.idle.wait(), _PATIENCE)
    if keeper.state.hibernated is not None:
        # As a shutdown ends any kernel; `hibernate` with ``end`` is what leaves the snapshot.
        snapshot = keeper.state.hibernated.snapshot
        await asyncio.to_thread(forget, keeper.store, snapshot.name, snapshot.id)
    if keeper.launch.copy_of and not keeper.holders:
        # Nobody else will: it was written for the fork.
        Path(keeper.launch.connection_file).unlink(missing_ok=True)
    keeper.folder.leave(keeper.exit_status)
