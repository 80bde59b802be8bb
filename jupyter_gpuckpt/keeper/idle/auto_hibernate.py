"""When a kernel that sleeps is hibernated: after a set time, or where all sleeping kernels have too much host memory.

Each keeper looks after its own kernel. Which one is to go is the same for all, since all read the same records: the one
that has slept longest goes first.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ... import settings
from ...client.record import KernelFolder
from ...client.sleep_record import ASLEEP, Sleep
from ...errors import GpuckptError
from ...linux import proc, processes
from ...operations.requests import Hibernate
from ..operations.progress import to_nobody

if TYPE_CHECKING:
    from ..kernel_life import Keeper

__all__ = ["hibernate_sleepers"]

log = logging.getLogger("gpuckpt.keeper")

_LOOK = 2.0  # how often a keeper whose kernel sleeps looks, in seconds
_AGAIN = 60.0  # how soon it tries again where it could not hibernate it, in seconds


async def hibernate_sleepers(keeper: Keeper) -> None:
    """Hibernate the keeper's kernel whenever it is time; returns only where nothing is set."""
    try:
        after, limit = settings.hibernate_after(), settings.sleep_limit()
    except (GpuckptError, ValueError) as e:
        log.error("no sleeping kernel is hibernated by itself: %s", e)
        return
    if (after is None and limit is None) or not keeper.launch.agent:
        return
    while True:
        await asyncio.sleep(_LOOK if after is None else min(_LOOK, after / 2))
        slept = _asleep_for(keeper)
        if slept is None:
            continue
        too_long = after is not None and slept >= after
        if not too_long and (limit is None or not await asyncio.to_thread(_is_to_go, keeper, limit)):
            continue
        log.info("the kernel, asleep for %.0f s, is hibernated: %s", slept, "by now" if too_long else "to free memory")
        try:
            await keeper.ask(Hibernate(idle=True), to_nobody)
        except GpuckptError as e:
            log.warning("the sleeping kernel was not hibernated: %s", e)
            await asyncio.sleep(_AGAIN)


def _asleep_for(keeper: Keeper) -> float | None:
    """Return for how long the kernel has slept, in seconds; None where it does not, or is to be left alone."""
    noted, channel = keeper.state.sleep, keeper.channel
    if noted is None or noted.stage != ASLEEP or keeper.operations.current is not None or keeper.state.awake:
        return None
    if channel is None or channel.busy:
        return None
    since = datetime.datetime.fromisoformat(noted.since)
    return (datetime.datetime.now(datetime.timezone.utc) - since).total_seconds()


def _is_to_go(keeper: Keeper, limit: int) -> bool:
    """Tell whether this kernel is among those that slept longest, without which the others are within the limit."""
    sleepers = sorted(_sleepers())
    total = sum(size for _, _, size in sleepers)
    for _, kernel_id, size in sleepers:
        if total <= limit:
            return False
        if kernel_id == keeper.launch.kernel_id:
            return True
        total -= size
    return False


def _sleepers() -> Iterator[tuple[str, str, int]]:
    """Yield since when each sleeping kernel of this user does, its id, and how much host memory it has."""
    for folder in KernelFolder.all():
        with contextlib.suppress(OSError, ValueError):  # it has ended meanwhile
            state = folder.state()
            if state.sleep is not None and state.sleep.stage == ASLEEP and state.sleeper is not None:
                yield state.sleep.since, folder.path.name, _memory(state.sleeper[0], state.sleep)


def _memory(sleeper: int, noted: Sleep) -> int:
    """Return how many bytes of host memory a sleeping kernel has."""
    pages = 0
    for pid in processes.descendants(sleeper):
        with contextlib.suppress(OSError):
            resident, shared = proc.read(f"/proc/{pid}/statm").split()[1:3]
            pages += int(resident) - int(shared)  # what was on a GPU is shared memory
    return pages * os.sysconf("SC_PAGE_SIZE") + noted.host_memory().beside
