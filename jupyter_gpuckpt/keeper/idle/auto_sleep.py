"""Auto-sleep: a kernel that has not been used for a set time is put to sleep.

Nothing is asked of a kernel, which says itself when a cell begins and has ended, and it is looked at from outside at
most twice in that time: a busy one does not notice. In doubt a kernel stays awake.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ... import settings
from ...errors import DriverError, GpuckptError
from ...freeze import gpu_processes
from ...linux import processes
from ...operations.requests import Sleep
from ..operations.progress import to_nobody

if TYPE_CHECKING:
    from ..kernel_life import Keeper

__all__ = ["AutoSleep"]

log = logging.getLogger("gpuckpt.keeper")

_SHORTEST = 0.5  # how soon a kernel is looked at again at the earliest, in seconds
_IDLE_SHARE = 0.002
"""How much of one processor the threads of an idle kernel may use: ten times what ipykernel's own do."""
_IDLE_TIME = 0.02
"""The same for short spans, in seconds: two ticks of the clock that the system counts in."""
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class _Sample:
    """How much the processes of a kernel had worked at a moment."""

    moment: float
    """On the monotonic clock, in seconds."""
    time: float
    """The same since the epoch."""
    cpu: float
    """The processor time that they had used, in seconds."""


class AutoSleep:
    """Looks after one kernel for as long as its keeper lives."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._changed = asyncio.Event()
        self._sample: _Sample | None = None

    def look_again(self) -> None:
        """Take note that the setting has changed."""
        self._changed.set()

    async def run(self) -> None:
        """Put the kernel to sleep whenever it has been idle for long enough; never returns."""
        while True:
            self._changed.clear()
            after = self._keeper.state.sleep_after
            wait = None if after is None else max(_SHORTEST, await self._look(after))
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), wait)

    async def _look(self, after: float) -> float:
        """Put the kernel to sleep if it is time; return in how many seconds to look again.

        What goes on in it is watched through the second half of the time, so that a thread counts that works between
        cells.
        """
        half = after / 2
        idle = self._idle_for()
        if idle is None or idle < half:
            self._sample = None
            return half - (idle or 0)
        sample = self._sample
        if sample is None or sample.moment < time.monotonic() - idle:
            self._sample = await asyncio.to_thread(self._take_sample)
            return max(after - idle, half)
        left = max(after - idle, sample.moment + half - time.monotonic())
        if left > 0:
            return left
        self._sample = None
        if await asyncio.to_thread(self._should_stay, sample):
            return half
        try:
            await self._keeper.ask(Sleep(idle_for=half), to_nobody)
        except GpuckptError as e:
            log.info("the kernel does not go to sleep by itself: %s", e)
        return after

    def _idle_for(self) -> float | None:
        """Return for how long no cell has run since it was woken; None where one runs, or it should stay as it is."""
        keeper, channel = self._keeper, self._keeper.channel
        if keeper.operations.current is not None or keeper.exit_status is not None or keeper.state.sleep is not None:
            return None
        if keeper.state.awake or channel is None or channel.busy or not keeper.launch.agent:
            return None
        last = max(channel.last_active, keeper.woken.at if keeper.woken is not None else "")
        return (datetime.datetime.now(datetime.timezone.utc) - datetime.datetime.fromisoformat(last)).total_seconds()

    def _take_sample(self) -> _Sample:
        cpu = sum(processes.work_done(pid)[0] for pid in self._keeper.tree()) / _TICK
        return _Sample(time.monotonic(), time.time(), cpu)

    def _should_stay(self, since: _Sample) -> bool:
        """Tell whether the kernel is to stay awake: it has worked since a sample, or has nothing to give up.

        A thread that gives the GPU work needs the processor for it, and the driver knows who was at work. A process
        that has ended meanwhile takes its time with it: that makes the sum smaller, and the kernel no less idle.
        """
        tree = self._keeper.tree()
        on_gpu = any(map(gpu_processes.has_context, tree))
        if not on_gpu and not settings.sleep_without_gpu():
            return True
        now = self._take_sample()
        if now.cpu - since.cpu > max(_IDLE_TIME, _IDLE_SHARE * (now.moment - since.moment)):
            return True
        if not on_gpu:
            return False
        try:
            at_work = self._keeper.worker.at_work(since.time)
        except DriverError as e:
            log.info("whether the GPU is at work is not known: %s", e)
            return True
        return any(pid is None or pid in tree or processes.start_time(pid) is None for pid in at_work)
