"""One operation at a time: which one is under way, and which ones wait for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from ..errors import Busy
from .operations.stages import Stages, Tell
from .record import Operation

__all__ = ["OneAtATime"]

_IS_WAITED_FOR = ("sleep", "wake")
"""Operations that others wait for: who asks for something of a kernel need not know that it falls asleep or wakes."""

_BREAKS_OFF = {"wake": ("sleep", "hibernate"), "restore": ("wake",)}
"""What an operation ends that is under way: a kernel that is wanted need not sleep, nor one wake that is given up."""


class OneAtATime:
    """The operations on one kernel.

    Attributes
    ----------
    current : the one under way; None for none.
    idle : set while there is none.
    """

    def __init__(self) -> None:
        self.current: Operation | None = None
        self.idle = asyncio.Event()
        self.idle.set()
        self._queued: list[Operation] = []

    @property
    def writes(self) -> str | None:
        """The name of the snapshot that is being written while the kernel runs on; None for none."""
        return self.current.name if self.current is not None and self.current.writing else None

    @property
    def queued(self) -> list[str]:
        """The kinds of those that wait until that is done."""
        return [operation.kind for operation in self._queued]

    async def wait_for_others(self, kind: str, *, patient: bool) -> None:
        """Wait for what is under way where that is right for an operation of this kind, or break it off."""
        while (under_way := self.current) is not None:
            soon = patient and (under_way.kind in _IS_WAITED_FOR or kind == "wake")
            if not (soon or under_way.answering):
                return
            if under_way.kind in _BREAKS_OFF.get(kind, ()):
                under_way.cancelling.set()
            await self.idle.wait()

    async def wait_until_written(self, kind: str, name: str, tell: Tell) -> None:
        """Wait for a save whose kernel runs on already to be on the disk, where there is one.

        Raises
        ------
        Cancelled : nobody wants to wait any longer.
        """
        writing = self.writes
        if writing is None:
            return
        operation = Operation(kind, name)
        stages = Stages(operation, tell)
        self._queued.append(operation)
        try:
            await stages.enter(f"waiting until {writing} is written")
            await stages.or_cancelled(self.idle.wait())
        finally:
            self._queued.remove(operation)

    @contextlib.contextmanager
    def begin(self, kind: str, name: str) -> Iterator[Operation]:
        """Have an operation under way for as long as the context lasts.

        Raises
        ------
        Busy : another one is.
        """
        if self.current is not None:
            raise Busy(
                f"The kernel is busy with a {self.current.kind} of {self.current.name!r}.",
                "One operation is done at a time.",
                "Wait for it, or cancel it, and ask again.",
            )
        operation = self.current = Operation(kind, name)
        self.idle.clear()
        try:
            yield operation
        finally:
            self.current = None
            self.idle.set()

    def cancel(self, kind: str) -> bool:
        """Cancel the operation of this kind, or the one there is; what waits for its turn comes first.

        Returns whether there was one that can be cancelled.
        """
        present = [*self._queued, *([self.current] if self.current is not None else [])]
        for operation in present:
            if kind in ("", operation.kind) and operation.cancellable:
                operation.cancelling.set()
                return True
        return False
