"""What is under way on kernels, and transfers: each operation has an id, says how far it is, and can be cancelled.

All of it belongs to the server's event loop, but for the one thread of each operation, which waits for its keeper or
does the work.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..checked import to_json
from ..client import keepers
from ..client.record import KernelFolder
from ..errors import Cancelled, GpuckptError
from ..operations.pace import Pace
from ..operations.requests import Cancel, Request
from ..operations.results import Progress
from ..spelling import in_a_cell
from ..store import Progress as OnAmount
from .limits import Limit
from .logs import criu_log, keeper_log, keeper_log_size

__all__ = ["NoSuchOperation", "Operation", "Operations"]

_KEPT = 50
"""How many operations that have ended are remembered."""
_MOST, _RETRY_AFTER = 32, 5
"""How many may be under way, each with a thread of its own; when one beyond that may be asked for again, in seconds."""
_CANCEL_TIMEOUT = 10.0  # seconds


class NoSuchOperation(GpuckptError):
    """No operation has that id, or it ended long ago."""


Finish = Callable[[Any], Coroutine[Any, Any, object]]
"""What the server itself has to do with the result of an operation; returns what that is afterwards."""


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="microseconds")


@dataclass
class Operation:
    """Something long on a kernel or a snapshot, such as a save, a sleep or a push, asked for by way of the API."""

    kind: str
    kernel_id: str
    """Empty where it is no kernel's."""
    name: str
    """The snapshot's; empty where there is none, or the choice is left to the keeper or the remote."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    state: str = "running"
    """``running``, ``done``, ``failed`` or ``cancelled``."""
    stage: str = "starting"
    percent: int | None = None
    """How much of the stage is done; None where that is not known."""
    total: int | None = None
    """How many bytes the stage is about; None where that is not known."""
    left: int | None = None
    """How many seconds the stage will still take, by its pace; None where nothing can be said."""
    started: str = field(default_factory=_now)
    ended: str | None = None
    result: object = None
    """A dataclass of `operations.results`, or of `server.transfers`."""
    error: GpuckptError | None = None
    cancelling: bool = False
    """Whether somebody wants it cancelled; a stage that cannot be left is waited for."""
    logs: list[dict[str, Any]] = field(default_factory=list)
    """What the logs said meanwhile, once it has ended: the keeper's goes with the kernel."""

    def outline(self) -> dict[str, Any]:
        """Return what an event tells: where it is, but neither result nor error."""
        return {
            "id": self.id,
            "kind": self.kind,
            "kernel_id": self.kernel_id,
            "name": self.name,
            "state": self.state,
            "stage": self.stage,
            "percent": self.percent,
            "total": self.total,
            "left": self.left,
            "cancelling": self.cancelling,
        }

    def as_dict(self) -> dict[str, Any]:
        """Return all there is to say, as JSON types."""
        return {
            **self.outline(),
            "started": self.started,
            "ended": self.ended,
            "result": to_json(self.result),
            "error": self.error.spelled(in_a_cell).as_dict() if self.error else None,
        }


class Operations:
    """Those under way, and the last ones that ended.

    `changed` is called in the event loop whenever one has moved on.
    """

    def __init__(self, changed: Callable[[Operation], None]) -> None:
        self._changed = changed
        self._all: dict[str, Operation] = {}
        self._limit = Limit(_MOST, "operations", _RETRY_AFTER)

    def all(self) -> list[Operation]:
        """Return them, the newest first."""
        return list(reversed(self._all.values()))

    def get(self, operation_id: str) -> Operation:
        """Return the one of this id.

        Raises
        ------
        NoSuchOperation : there is none.
        """
        try:
            return self._all[operation_id]
        except KeyError:
            raise NoSuchOperation(
                "There is no operation of that id.",
                f"The server remembers those under way and the {_KEPT} that ended last, until it is restarted.",
                "Ask for the kernels and snapshots as they are now.",
            ) from None

    def start(
        self,
        operation: Operation,
        folder: KernelFolder,
        kind: type[Request[Any]],
        request: Mapping[str, object],
        finish: Finish | None = None,
    ) -> Operation:
        """Have the keeper of a kernel do it, and then the server its part, where there is one; returns at once.

        Raises
        ------
        TooMany : so many are under way already.
        """
        waiting = _Waiting(self, operation, asyncio.get_running_loop(), folder, kind, request, finish)
        return self._begin(operation, waiting)

    def do(self, operation: Operation, work: Callable[[OnAmount], object]) -> Operation:
        """Have it done by `work`, which calls its argument as it moves on; returns at once. Raises as `start`."""
        return self._begin(operation, _Working(self, operation, asyncio.get_running_loop(), work))

    def _begin(self, operation: Operation, thread: _Thread) -> Operation:
        self._limit.check(sum(not o.ended for o in self._all.values()))
        self._all[operation.id] = operation
        ended = [o.id for o in self._all.values() if o.ended]
        for old in ended[: max(0, len(ended) - _KEPT)]:
            del self._all[old]
        self._changed(operation)
        # A thread of its own, which no pool waits for: a keeper goes on by itself when the server ends, and what has
        # been sent or fetched is found again.
        threading.Thread(target=thread.run, name=f"gpuckpt-{operation.kind}", daemon=True).start()
        return operation

    async def cancel(self, operation_id: str, folder: KernelFolder | None) -> Operation:
        """Ask for an operation to be cancelled; one that cannot be at this stage is asked again at the next.

        `folder` is that of its kernel, if it is one's.

        Raises
        ------
        NoSuchOperation : there is none of this id.
        """
        operation = self.get(operation_id)
        if operation.ended is None and not operation.cancelling:
            operation.cancelling = True
            self._changed(operation)
            if folder is not None:
                await asyncio.to_thread(_ask_to_cancel, folder, operation)
        return operation

    def moved(self, operation: Operation, progress: Progress) -> None:
        """Take in how far it is."""
        before = operation.outline()
        operation.stage, operation.total = progress.stage, progress.total or None
        operation.percent = 100 * progress.done // progress.total if progress.total else None
        operation.left = None if progress.left is None else round(progress.left)
        if operation.outline() != before and operation.ended is None:
            self._changed(operation)

    def end(
        self,
        operation: Operation,
        result: object,
        error: GpuckptError | None,
        logs: list[dict[str, Any]],
    ) -> None:
        """Take in how it ended."""
        operation.result, operation.error, operation.logs = result, error, logs
        operation.percent = operation.total = operation.left = None
        if error is None:
            operation.state, operation.name = "done", str(getattr(result, "name", operation.name))
        else:
            operation.state = "cancelled" if isinstance(error, Cancelled) else "failed"
        operation.ended = _now()
        self._changed(operation)


@dataclass
class _Thread:
    """What sees an operation to its end, in a thread of its own."""

    operations: Operations
    operation: Operation
    loop: asyncio.AbstractEventLoop

    def run(self) -> None:
        """Do it, and tell how it ended."""
        result: object = None
        error: GpuckptError | None = None
        try:
            result = self.work_out()
        except GpuckptError as e:
            error = e
        except Exception as e:  # noqa: BLE001 - the operation must end, and say how
            error = GpuckptError(
                f"The {self.operation.kind} failed with an unexpected error.",
                f"{type(e).__name__}: {e}",
                "Please report it to the project, with the server's log.",
            )
        logs = [*(criu_log(error) if error else []), *self.logs()]
        self.tell(self.operations.end, self.operation, result, error, logs)

    def work_out(self) -> object:
        """Return the operation's result. Raises `GpuckptError`."""
        raise NotImplementedError

    def logs(self) -> list[dict[str, Any]]:
        """Return what was logged meanwhile by others."""
        return []

    def tell(self, do: Callable[..., None], *args: Any) -> None:
        """Have the event loop do something."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
            self.loop.call_soon_threadsafe(do, *args)

    def moved(self, progress: Progress) -> None:
        """Tell how far it is."""
        self.tell(self.operations.moved, self.operation, progress)


@dataclass
class _Working(_Thread):
    """The thread that does an operation itself."""

    work: Callable[[OnAmount], object]
    _pace: Pace = field(default_factory=Pace)

    def work_out(self) -> object:
        return self.work(self._take)

    def _take(self, stage: str, done: int, total: int) -> None:
        if self.operation.cancelling:
            raise Cancelled(
                f"The {self.operation.kind} was cancelled.",
                "It was interrupted.",
                "What was sent or fetched is found again by the next attempt.",
            )
        self.moved(self._pace.take(time.monotonic(), stage, done, total))


@dataclass
class _Waiting(_Thread):
    """The thread that asks a keeper for an operation and waits for its answer."""

    folder: KernelFolder
    kind: type[Request[Any]]
    request: Mapping[str, object]
    finish: Finish | None
    _agreed: bool = False
    _log_began: int = 0

    def work_out(self) -> object:
        self._log_began = keeper_log_size(self.folder)
        with keepers.connect(self.folder) as keeper:
            # No time limit: moving a large GPU state is silent for minutes. A keeper that dies hangs up.
            named = {**self.request, "operation": self.operation.id}
            result = keeper.ask_with(self.kind, named, timeout=None, progress=self._take)
        if self.finish is not None:
            return asyncio.run_coroutine_threadsafe(self.finish(result), self.loop).result()
        return result

    def logs(self) -> list[dict[str, Any]]:
        return keeper_log(self.folder, self._log_began)

    def _take(self, progress: Progress) -> None:
        self.moved(progress)
        if self.operation.cancelling and not self._agreed:
            self._agreed = _ask_to_cancel(self.folder, self.operation)


def _ask_to_cancel(folder: KernelFolder, operation: Operation) -> bool:
    """Ask a keeper to cancel an operation, and return whether it will."""
    # The connection of the request is in use: its answer is being waited for.
    with contextlib.suppress(GpuckptError), keepers.connect(folder) as keeper:
        named = Cancel(operation=operation.id, kind=operation.kind)
        return bool(keeper.ask(named, timeout=_CANCEL_TIMEOUT))
    return False
