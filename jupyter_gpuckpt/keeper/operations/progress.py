"""How far an operation is, reported to the caller; and stopping it where it may be stopped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from ...errors import Cancelled
from ...operations.pace import Pace
from ...operations.results import Progress
from ...subject import said
from ..stopwatch import Stopwatch

if TYPE_CHECKING:
    from ...client.record import Operation

_T = TypeVar("_T")

ProgressCallback = Callable[[Progress], Awaitable[None]]
"""Passes on to the caller how far an operation is."""


async def to_nobody(_: Progress) -> None:
    """Be told of progress where nobody waits for it."""


class OperationProgress:
    """Tells the caller how far an operation is, and stops it where it may be stopped."""

    def __init__(self, operation: Operation, on_progress: ProgressCallback) -> None:
        self._operation, self._on_progress = operation, on_progress
        self._began = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._pace = Pace()
        self._reported = 0.0
        self.watch = Stopwatch()
        self._quiet = False
        """Whether the kernel that asked shows nothing of the stage."""
        self.latest = Progress(stage="starting")
        """What was told last."""

    async def enter(self, stage: str, *, cancellable: bool = True, quiet: bool = False) -> None:
        """Begin a stage; of one that is `quiet`, the kernel that asked shows nothing: it is about to be taken."""
        self.check()
        self._operation.cancellable = cancellable
        self._quiet = quiet
        await self.tell_of(stage)

    async def tell_of(self, stage: str) -> None:
        """Tell what is waited for, also where it was cancelled and what was done is being undone."""
        self._operation.stage = stage = said(stage)
        await self._forward(Progress(stage=stage, quiet=self._quiet, seconds=self.seconds()))

    def asked_at(self) -> float:
        """Return when the operation was asked for, in seconds since the epoch."""
        return time.time() - self.seconds()

    def check(self) -> None:
        if self._operation.cancelling.is_set():
            raise Cancelled(
                f"The {self._operation.kind_and_name()} was cancelled.",
                "It was interrupted.",
                "The {kernel} is as it was, and no snapshot was made or changed.",
            )

    async def or_cancelled(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Wait for something that may take long for no good; a cancellation cancels it, and waits for its last steps.

        What was done in that instant is done.
        """
        doing = asyncio.create_task(work)
        cancelling = asyncio.create_task(self._operation.cancelling.wait())
        try:
            await asyncio.wait({doing, cancelling}, return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                self.check()
            return await doing
        finally:
            doing.cancel()
            cancelling.cancel()
            await asyncio.wait({doing, cancelling})

    def seconds(self) -> float:
        return time.monotonic() - self._began

    def amount(self, _: str, done: int, total: int) -> None:
        """Report from a thread how much of the stage's bytes is done, four times a second at most.

        It is that of the stage which was entered, whatever the store calls what it does.
        """
        self.check()
        now = time.monotonic()
        if now - self._reported < 0.25 and done < total:
            return
        self._reported = now
        far = self._pace.take(now, self._operation.stage, done, total)
        progress = replace(far, quiet=self._quiet, seconds=self.seconds())
        asyncio.run_coroutine_threadsafe(self._forward(progress), self._loop)

    async def _forward(self, progress: Progress) -> None:
        self.latest = progress
        await self._on_progress(progress)
