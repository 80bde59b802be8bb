"""What a snapshot has of GPU memory, read and verified while its kernel runs already: nothing of it is used before."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import settings
from ...client.sleep_record import LateSnapshot
from ...errors import Cancelled
from ...snapshots.summary import current_name
from ...store import Postponed, Store

if TYPE_CHECKING:
    from ..operations.progress import OperationProgress

__all__ = ["LateVram"]


class LateVram:
    """The GPU memory of one snapshot, on its way into the files that a sleeping kernel has it in.

    Parameters
    ----------
    name, id : the snapshot's; it may be renamed meanwhile.
    part : the snapshot's folder with these files.
    folder : where they go.
    """

    def __init__(self, store: Store, name: str, id: str, part: str, folder: Path) -> None:  # noqa: A002 - a snapshot's
        self._store, self._part, self._folder = store, part, folder
        self.snapshot = LateSnapshot(name, id, str(store.root))
        self._files: Postponed | None = None
        self._reading: asyncio.Task[None] | None = None
        self._watched_by: OperationProgress | None = None
        self._stopped = False

    @classmethod
    def noted(cls, snapshot: LateSnapshot, part: str, folder: Path) -> LateVram:
        """Return it as the keeper before this one noted it."""
        return cls(Store(Path(snapshot.store or settings.store_dir())), snapshot.name, snapshot.id, part, folder)

    def open(self) -> None:
        """See that all of it is there, and keep it there until it is read; its files are made, of zeros.

        Raises
        ------
        StoreError : it is not.
        """
        name = current_name(self._store, self.snapshot.name, self.snapshot.id)
        self._files = self._store.postpone(name, self.snapshot.id, {self._part: self._folder})

    def start(self) -> None:
        """Begin to read what was opened; more than once is harmless."""
        if self._reading is None:
            self._read_again()

    def _read_again(self) -> None:
        self._reading = asyncio.create_task(asyncio.to_thread(self._read))

    def _read(self) -> None:
        assert self._files is not None
        try:
            self._files.read(self._progress)
        finally:
            self._files.close()
            self._files = None

    def _progress(self, stage: str, done: int, total: int) -> None:
        if self._stopped:
            raise Cancelled("The restore was aborted.", "Its kernel has ended, or another restore began.", "")
        progress = self._watched_by
        if progress is not None:
            with contextlib.suppress(Cancelled):  # of who waits for it: it is read all the same
                progress.amount(stage, done, total)

    def check(self) -> None:
        """Raise what the reading has met so far: while there still is another kernel, it need not be given up for this.

        Raises
        ------
        StoreError : it is not what was saved, or there is no room for it.
        """
        if self._reading is not None and self._reading.done():
            self._reading.result()

    async def whole(self, progress: OperationProgress) -> None:
        """Wait until all of it is read and verified; where that failed before, it is tried again.

        Raises
        ------
        StoreError : it is not what was saved, or there is no room for it. It can be tried again.
        Cancelled : whoever asked does not wait any longer.
        """
        if self._reading is None or (self._reading.done() and self._reading.exception() is not None):
            await asyncio.to_thread(self.open)
            self._read_again()
        assert self._reading is not None
        self._watched_by = progress
        try:
            await progress.or_cancelled(_ended(self._reading))
        finally:
            self._watched_by = None
        self._reading.result()

    async def close(self) -> None:
        """Stop reading: nobody needs it any more."""
        self._stopped = True
        if self._reading is not None:
            await _ended(self._reading)
            if not self._reading.cancelled():
                self._reading.exception()  # seen: nobody waits for it
        elif self._files is not None:
            await asyncio.to_thread(self._files.close)
            self._files = None


async def _ended(task: asyncio.Task[Any]) -> None:
    """Wait for a task, however it ends; who stops waiting does not stop it."""
    with contextlib.suppress(Exception):
        await asyncio.shield(task)
