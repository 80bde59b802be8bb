"""Waking a kernel that touches a GPU while it sleeps: its call waits for that, and goes on.

From outside, since the call may hold Python's lock: the threads are looked at now and then, often while a cell runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ...errors import GpuckptError
from ...freeze.cuda_waits import CudaWaits
from ...operations.requests import Wake
from ..agent_channel import AgentChannel, AgentSilent
from .progress import to_nobody

if TYPE_CHECKING:
    from ..gpu.sleep import GpuSleep
    from ..kernel_life import Keeper

__all__ = ["tell_not_woken", "wake_at_touch"]

log = logging.getLogger("gpuckpt.keeper")

_LOOK = 0.1  # seconds between two looks while a cell runs
_IDLE_LOOKS = 10  # while none does, only every so many of them is one
_AGAIN = 2.0  # after how many seconds a wake that failed is tried again: the call waits


async def wake_at_touch(keeper: Keeper, asleep: GpuSleep, known: Iterable[Sequence[int]]) -> None:
    """Watch the kernel for as long as it sleeps this sleep; `known` are the places where its threads waited before."""
    waits = await asyncio.to_thread(CudaWaits, asleep.pids, known)
    looks, told = 0, False
    while keeper.asleep is asleep and keeper.exit_status is None:
        await asyncio.sleep(_LOOK)
        looks += 1
        busy = keeper.channel is not None and keeper.channel.busy
        if keeper.operations.holds_kernel or not (busy or looks % _IDLE_LOOKS == 0 or waits.is_suspicious):
            continue
        if await asyncio.to_thread(waits.new):
            log.info("the kernel touches a GPU in its sleep")
            try:
                await keeper.ask(Wake(), to_nobody)
            except GpuckptError as e:
                log.warning("the kernel, which touches a GPU in its sleep, was not woken: %s", e)
                if not told and keeper.channel is not None:
                    told = True
                    await tell_not_woken(keeper.channel, e)
                await asyncio.sleep(_AGAIN)


async def tell_not_woken(channel: AgentChannel, error: GpuckptError) -> None:
    """Tell the kernel why it still sleeps: a cell that waits for the GPU shows it, and the next one wakes it first."""
    with contextlib.suppress(AgentSilent):
        await channel.send({"call": "not_woken", "id": 0, "args": {"error": error.as_dict()}})
