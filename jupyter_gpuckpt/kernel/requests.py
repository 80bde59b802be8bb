"""What the kernel asks of its keeper, and how it waits for that: until an answer, an interrupt or the keeper's end."""

from __future__ import annotations

import itertools
import os
import queue
import threading
import uuid
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import GpuckptError, KeeperGone
from ..linux.lock_files import KEEPER_LOCK, is_locked
from ..spelling import in_a_cell
from . import interrupts
from .channel import Channel

__all__ = ["Progress", "Requests", "broken_off"]

_ALIVE_EVERY = 0.5  # how often a waiting request looks whether the keeper still lives, in seconds
_QUIET = 10.0  # after how long a silence a keeper, which is heard of every two seconds, is taken to hang, in seconds

Progress = Callable[[dict[str, Any]], None]


class _Waiting:
    """A request to the keeper that has not been answered yet.

    Attributes
    ----------
    operation : the id by which it can be cancelled.
    afterwards : takes what the keeper says after it has ``taken`` the kernel: the cell that asked does not wait for it.
    """

    def __init__(self, op: str, operation: str, afterwards: Progress | None) -> None:
        self.op, self.operation = op, operation
        self.is_cells = threading.current_thread() is threading.main_thread()
        """Whether a cell waits for it, and nothing beside the cells."""
        self.messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.afterwards = afterwards
        self.is_left = False
        """Whether nobody waits for the end of it any more."""


class Requests:
    """Those of one kernel; what is to be done `later` is done in another thread than the one that hears the keeper."""

    def __init__(self, channel: Channel, run_dir: Path, later: Callable[[Callable[[], None]], None]) -> None:
        self._channel = channel
        self._run_dir = run_dir
        self._later = later
        self._pid = os.getpid()
        self._waiting: dict[int, _Waiting] = {}
        self._ids = itertools.count(1)

    def send(self, op: str, args: dict[str, Any]) -> None:
        """Ask for something of which nobody hears the answer. Raises `KeeperGone`."""
        self._channel.send({"request": next(self._ids), "op": op, "args": args})

    def ask(
        self,
        op: str,
        args: dict[str, Any],
        progress: Progress | None,
        afterwards: Progress | None,
        failed: Callable[[], object],
    ) -> Any:
        """Ask for an operation and wait for its result, as `Agent.request`; `failed` is called before it raises."""
        if os.getpid() != self._pid:
            raise KeeperGone(
                "Only the kernel itself can talk to its keeper.",
                f"This is process {os.getpid()}, a child of it.",
                "Use %gpuckpt in a cell.",
            )
        number = next(self._ids)
        args = {"operation": uuid.uuid4().hex, **args}
        waiting = _Waiting(op, str(args["operation"]), afterwards)
        with interrupts.told(lambda: waiting.messages.put({"interrupted": True})):
            try:
                with self._channel.sending:
                    self._waiting[number] = waiting
                    self._channel.send({"request": number, "op": op, "args": args})
                return self._wait(waiting, progress)
            except GpuckptError:
                failed()
                raise
            finally:
                if not waiting.is_left:
                    self._waiting.pop(number, None)

    def _wait(self, waiting: _Waiting, progress: Progress | None) -> Any:
        interrupted = False
        latest: dict[str, Any] = {"stage": "starting", "seconds": 0.0}
        quiet = 0.0  # counted, not measured: the time for which this process is paused is not the keeper's silence
        while True:
            try:
                message = waiting.messages.get(timeout=_ALIVE_EVERY)
            except queue.Empty:
                if not is_locked(self._run_dir / KEEPER_LOCK):
                    raise broken_off(waiting.op, "The kernel gets a new one automatically within seconds.") from None
                quiet += _ALIVE_EVERY
                if quiet >= _QUIET:
                    if interrupted:
                        silence = f"The kernel's keeper is stopped or hangs: it was silent for {quiet:.0f} s."
                        raise _not_waited_for(waiting.op, silence) from None
                    if progress is not None:
                        progress({"stage": "the keeper is silent (interrupt to stop waiting)", "seconds": quiet})
                continue
            if "interrupted" in message:
                if interrupted:
                    raise _not_waited_for(waiting.op, "It was interrupted twice, and the keeper cannot stop it now.")
                interrupted = True
                self._cancel(waiting)
                if progress is not None:
                    progress({**latest, "cancelling": True})
                continue
            quiet = 0.0
            if "taken" in message.get("progress", ()):
                taken: dict[str, Any] = message["progress"].pop("taken")
                return {**taken, "taken": True, "progress": message["progress"]}
            if "progress" in message:
                if interrupted and message["progress"]["stage"] != latest["stage"]:
                    self._cancel(waiting)  # the stage before may have been one that cannot be left
                latest = message["progress"]
                if progress is not None:
                    progress({**latest, "cancelling": interrupted})
            elif "error" in message:
                raise GpuckptError.from_dict(message["error"]).spelled(in_a_cell)
            else:
                return message.get("result")

    def _cancel(self, waiting: _Waiting) -> None:
        self.send("cancel", {"operation": waiting.operation, "kind": waiting.op})

    def hear(self, number: int, message: dict[str, Any]) -> None:
        """Pass on what the keeper says about a request."""
        waiting = self._waiting.get(number)
        if waiting is None:
            return
        if waiting.is_left and waiting.afterwards is not None:
            if "progress" not in message:
                self._waiting.pop(number, None)
            self._later(partial(waiting.afterwards, message))
            return
        waiting.is_left = waiting.afterwards is not None and "taken" in message.get("progress", ())
        waiting.messages.put(message)

    def end_all(self, answered: Collection[str], result: Any, error: Callable[[str], GpuckptError]) -> None:
        """End all that is waited for: operations that are `answered` with a result, the others with an error each."""
        for number, waiting in list(self._waiting.items()):
            if waiting.op in answered:
                self.hear(number, {"result": result})
            else:
                self.hear(number, {"error": error(waiting.op).as_dict()})

    def awaited(self, ops: Collection[str]) -> bool:
        """Tell whether the end of one of these operations is waited for."""
        return any(waiting.op in ops and not waiting.is_left for waiting in self._waiting.values())

    def awaited_by_cell(self, ops: Collection[str]) -> bool:
        """Tell whether a cell waits for the end of one of these operations."""
        return any(one.is_cells and one.op in ops and not one.is_left for one in self._waiting.values())


def broken_off(op: str, then: str) -> KeeperGone:
    """Return what to say of an operation whose keeper died."""
    return KeeperGone(f"The {op} was aborted; the kernel keeps running.", "The kernel's keeper died.", then)


def _not_waited_for(op: str, why: str) -> GpuckptError:
    return GpuckptError(
        f"Stopped waiting for the {op}; it may still be carried out.",
        why,
        "Run `%gpuckpt status`; if that does not answer either, restart the kernel.",
    )
