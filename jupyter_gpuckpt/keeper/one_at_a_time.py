"""One operation at a time: which one is under way, and which ones wait for it.

Only a wake does not wait for a save that is being written: what was taken is not the sleeping kernel's any more.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from ..client.record import Operation
from ..errors import Busy
from ..operations.requests import kind_of
from .operations.progress import OperationProgress, ProgressCallback

__all__ = ["OneAtATime"]

_TURN = "waiting for its turn"


class OneAtATime:
    """The operations on one kernel.

    Attributes
    ----------
    idle : set while there is none.
    """

    def __init__(self) -> None:
        self.idle = asyncio.Event()
        self.idle.set()
        self._under_way: list[Operation] = []
        self._queued: list[Operation] = []

    @property
    def current(self) -> Operation | None:
        """The one under way, the latest where there are two; None for none."""
        return self._under_way[-1] if self._under_way else None

    @property
    def holds_kernel(self) -> bool:
        """Whether there is one that needs the kernel as it is."""
        return not all(operation.writing for operation in self._under_way)

    @property
    def writes(self) -> str | None:
        """The name of the snapshot that is being written while the kernel runs on; None for none."""
        return next((operation.name for operation in self._under_way if operation.writing), None)

    @property
    def queued(self) -> list[str]:
        """The kinds of those that wait until that is done."""
        return [operation.kind for operation in self._queued]

    async def wait_for_others(
        self, operation: Operation, on_progress: ProgressCallback, *, patient: bool, for_all: bool = False
    ) -> None:
        """Wait for what is under way where that is right for such an operation, or break it off; or `for_all`.

        A save whose kernel runs on already is waited for in any case, until it is on the disk.

        Raises
        ------
        Cancelled : nobody wants to wait any longer.
        """
        kind = operation.kind
        while (under_way := self.current) is not None and not self._may_begin_beside(kind):
            if under_way.writing:
                await self._wait_for(self.idle, f"waiting until {under_way.name} is written", operation, on_progress)
                continue
            soon = patient and (kind_of(under_way.kind).waited_for or under_way.unasked)
            if not (soon or for_all or under_way.answering):
                return
            if under_way.kind in kind_of(kind).breaks_off:
                under_way.cancelling.set()
            await self._wait_for(under_way.settled, _TURN, operation, on_progress)

    async def wait_for_recovery(self, operation: Operation, on_progress: ProgressCallback) -> None:
        """Wait until what another keeper had begun is undone, before this one does anything with its kernel.

        Raises
        ------
        Cancelled : nobody wants to wait any longer.
        """
        while self.current is not None:
            await self._wait_for(self.idle, _TURN, operation, on_progress)

    async def _wait_for(
        self, end: asyncio.Event, stage: str, operation: Operation, on_progress: ProgressCallback
    ) -> None:
        self._queued.append(operation)
        try:
            progress = OperationProgress(operation, on_progress)
            await progress.enter(stage)
            await progress.or_cancelled(end.wait())
        finally:
            self._queued.remove(operation)

    def _may_begin_beside(self, kind: str) -> bool:
        return kind_of(kind).beside_writing and not self.holds_kernel

    @contextlib.contextmanager
    def begin(self, operation: Operation) -> Iterator[Operation]:
        """Have an operation under way for as long as the context lasts.

        Raises
        ------
        Busy : another one is.
        """
        if self.current is not None and not self._may_begin_beside(operation.kind):
            raise Busy(
                f"The {{kernel}} is busy with a {self.current.kind_and_name()}.",
                "One operation is done at a time.",
                "Wait for it, or cancel it, and ask again.",
            )
        self._under_way.append(operation)
        self.idle.clear()
        try:
            yield operation
        finally:
            self._under_way.remove(operation)
            operation.settled.set()
            if not self._under_way:
                self.idle.set()

    def cancel(self, operation_id: str, kind: str = "") -> bool:
        """Cancel the operation of this id; return whether there was one that can be cancelled.

        Who is of a version without ids has given none, and cancels what nobody has given one, of that `kind` if any.
        """
        for operation in (*self._queued, *reversed(self._under_way)):
            is_meant = operation.id == operation_id and (operation_id or kind in ("", operation.kind))
            if is_meant and operation.cancellable:
                operation.cancelling.set()
                return True
        return False

    def break_off(self) -> None:
        """Cancel what is under way, but for a save that is being written."""
        for operation in self._under_way:
            if not operation.writing:
                operation.cancelling.set()
