"""What the kernel asks of its keeper, and how it waits for that: until an answer, an interrupt or the keeper's end."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..checked import from_json
from ..errors import GpuckptError, KeeperGone
from ..linux.lock_files import KEEPER_LOCK, is_locked
from ..operations import results
from ..operations.requests import Request, Restoring, Save, answer_of, kind_of
from ..operations.results import Progress, Taking
from ..spelling import in_a_cell
from . import interrupts, rebinding
from .channel import Channel
from .clients import COMING_BACK, introduced, wait_for_peers

__all__ = ["Afterwards", "Answered", "News", "Requests", "broken_off", "news_of"]

_ALIVE_EVERY = 0.5  # how often a waiting request looks whether the keeper still lives, in seconds
_QUIET = 10.0  # after how long a silence a keeper, which is heard of every two seconds, is taken to hang, in seconds


@dataclass(frozen=True)
class Answered:
    """The result of a request, as JSON."""

    result: object


@dataclass(frozen=True)
class _Interrupted:
    """The user interrupted the cell that waits."""


News = Progress | GpuckptError | Answered
"""What the keeper says of a request."""
Afterwards = Progress | results.Saved | GpuckptError
"""What is heard of a save once the cell has gone on."""

R = TypeVar("R")
T = TypeVar("T")


class _Inbox:
    """What came of a request, in its order; a signal's handler may put something in while its thread waits here.

    Before Python 3.13, `SimpleQueue.get` waits without end where it was interrupted, as by any dump, and its time is
    over by then.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[News | _Interrupted] = queue.SimpleQueue()
        self._filled = threading.Lock()
        """Released when something was put in; only a lock of this kind can be where the handler interrupts a wait."""
        self._filled.acquire()

    def put(self, news: News | _Interrupted) -> None:
        self._queue.put(news)
        with contextlib.suppress(RuntimeError):  # somebody else has released it meanwhile
            self._filled.release()

    def get(self, timeout: float) -> News | _Interrupted:
        """Wait for so many seconds for the next. Raises `queue.Empty`."""
        deadline = time.monotonic() + timeout
        while True:
            with contextlib.suppress(queue.Empty):
                return self._queue.get_nowait()
            if not self._filled.acquire(timeout=max(0.0, deadline - time.monotonic())):
                raise queue.Empty


class _Waiting:
    """A request to the keeper that has not been answered yet.

    Attributes
    ----------
    operation : the id by which it can be cancelled.
    afterwards : takes what the keeper says after it has ``taken`` the kernel: the cell that asked does not wait for it.
    """

    def __init__(self, op: str, operation: str, afterwards: Callable[[News], None] | None) -> None:
        self.op, self.operation = op, operation
        self.is_cells = threading.current_thread() is threading.main_thread()
        """Whether a cell waits for it, and nothing beside the cells."""
        self.news = _Inbox()
        self.afterwards = afterwards
        self.is_left = False
        """Whether nobody waits for the end of it any more."""


class Requests:
    """Those of one kernel, which belongs to an ipykernel app.

    What is to be done `later` is done in another thread than the one that hears the keeper. One that `is_coming_back`
    from a snapshot is told by another keeper what became of that, where its own has died.
    """

    def __init__(
        self,
        channel: Channel,
        run_dir: Path,
        app: Any,
        later: Callable[[Callable[[], None]], None],
        is_coming_back: Callable[[], bool],
    ) -> None:
        self._channel, self._app = channel, app
        self._is_coming_back = is_coming_back
        self._run_dir = run_dir
        self._later = later
        self._pid = os.getpid()
        self._waiting: dict[int, _Waiting] = {}
        self._ids = itertools.count(1)

    def send(self, op: str, args: Mapping[str, object]) -> None:
        """Ask for something of which nobody hears the answer. Raises `KeeperGone`."""
        self._channel.send({"request": next(self._ids), "op": op, "args": args})

    def request(
        self,
        kind: type[Request[R]],
        args: Mapping[str, object] | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> R:
        """Ask the keeper for something and wait for its answer.

        An interrupt asks the keeper to cancel, and the keeper's answer is waited for. Another one, a second later or
        more, or a keeper that has fallen silent, ends the waiting; what was asked for may then still be done.

        Raises
        ------
        GpuckptError : whatever the keeper answered, or that it has not answered an interrupt; KeeperGone if it died.
        """
        return answer_of(kind, self._result(kind.op, args, progress))

    def take(
        self,
        kind: type[Request[R]],
        told: type[T],
        args: Mapping[str, object] | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> R | T:
        """Ask as `request` for what takes the kernel: one that comes back from what was taken is `told` that."""
        return answer_of(kind, self._result(kind.op, args, progress), told)

    def save(
        self,
        args: Mapping[str, object],
        progress: Callable[[Progress], None],
        afterwards: Callable[[Afterwards], None] | None,
    ) -> results.Saved | results.Restored | Taking:
        """Ask as `request` for a save.

        With `afterwards`, what was taken is returned when that is safe in memory and not soon on the disk: `afterwards`
        is then called, in another thread, with each later progress, and with the result or the error.
        """

        def hear(news: News) -> None:
            assert afterwards is not None
            afterwards(answer_of(Save, news.result) if isinstance(news, Answered) else news)

        found = self._ask(Save.op, args, progress, None if afterwards is None else hear)
        return found if isinstance(found, Taking) else answer_of(Save, found.result, results.Restored)

    def _result(
        self, op: str, args: Mapping[str, object] | None, progress: Callable[[Progress], None] | None
    ) -> object:
        found = self._ask(op, args, progress, None)
        assert isinstance(found, Answered)  # nothing is to be heard later
        return found.result

    def _ask(
        self,
        op: str,
        args: Mapping[str, object] | None,
        progress: Callable[[Progress], None] | None,
        afterwards: Callable[[News], None] | None,
    ) -> Answered | Taking:
        if os.getpid() != self._pid:
            raise KeeperGone(
                "Only the kernel itself can talk to its keeper.",
                f"This is process {os.getpid()}, a child of it.",
                "Use %gpuckpt in a cell.",
            )
        number = next(self._ids)
        args = {"operation": uuid.uuid4().hex, **(args or {})}
        clients = self._clients_now() if issubclass(kind_of(op), Restoring) else {}
        waiting = _Waiting(op, str(args["operation"]), afterwards)
        with interrupts.told(lambda: waiting.news.put(_Interrupted())):
            try:
                with self._channel.sending:
                    self._waiting[number] = waiting
                    self._channel.send({"request": number, "op": op, "args": args})
                return self._wait(waiting, progress)
            except GpuckptError:
                # A restore that failed late has sent them away to the other kernel; they come back.
                wait_for_peers(clients, encrypted=rebinding.is_encrypted(self._app), connecting=COMING_BACK)
                raise
            finally:
                if not waiting.is_left:
                    self._waiting.pop(number, None)

    def _wait(self, waiting: _Waiting, progress: Callable[[Progress], None] | None) -> Answered | Taking:
        interrupted = False
        latest = Progress(stage="starting", seconds=0.0)
        quiet = 0.0  # counted, not measured: the time for which this process is paused is not the keeper's silence
        while True:
            try:
                news = waiting.news.get(timeout=_ALIVE_EVERY)
            except queue.Empty:
                quiet += _ALIVE_EVERY
                lock = self._run_dir / KEEPER_LOCK
                patience = _QUIET if self._is_coming_back() or not lock.exists() else 0.0
                if not is_locked(lock) and quiet >= patience:
                    raise _ended(waiting.op, lock) from None
                if quiet >= _QUIET:
                    if interrupted:
                        silence = f"The kernel's keeper is stopped or hangs: it was silent for {quiet:.0f} s."
                        raise _not_waited_for(waiting.op, silence) from None
                    if progress is not None:
                        progress(Progress(stage="the keeper is silent (interrupt to stop waiting)", seconds=quiet))
                continue
            if isinstance(news, _Interrupted):
                if interrupted:
                    raise _not_waited_for(waiting.op, "It was interrupted twice, and the keeper cannot stop it now.")
                interrupted = True
                self._cancel(waiting)
                if progress is not None:
                    progress(replace(latest, cancelling=True))
                continue
            quiet = 0.0
            match news:
                case Answered():
                    return news
                case GpuckptError():
                    raise news
                case Taking():
                    return news
                case Progress():
                    if interrupted and news.stage != latest.stage:
                        self._cancel(waiting)  # the stage before may have been one that cannot be left
                    latest = news
                    if progress is not None:
                        progress(replace(latest, cancelling=interrupted))

    def _cancel(self, waiting: _Waiting) -> None:
        self.send("cancel", {"operation": waiting.operation, "kind": waiting.op})

    def _clients_now(self) -> dict[int, int]:
        """Return how many clients there are at the ports where a cell is answered, and asks."""
        there = introduced(encrypted=rebinding.is_encrypted(self._app))
        return {port: there[port] for port in (self._app.shell_port, self._app.iopub_port, self._app.stdin_port)}

    def hear(self, number: int, news: News) -> None:
        """Pass on what the keeper says about a request."""
        waiting = self._waiting.get(number)
        if waiting is None:
            return
        if waiting.is_left and waiting.afterwards is not None:
            if not isinstance(news, Progress):
                self._waiting.pop(number, None)
            self._later(partial(waiting.afterwards, news))
            return
        waiting.is_left = waiting.afterwards is not None and isinstance(news, Taking)
        waiting.news.put(news)

    def end_all(self, answered: Collection[str], result: object, error: Callable[[str], GpuckptError]) -> None:
        """End all that is waited for: operations that are `answered` with a result, the others with an error each."""
        for number, waiting in list(self._waiting.items()):
            self.hear(number, Answered(result) if waiting.op in answered else error(waiting.op).spelled(in_a_cell))

    def awaited(self, ops: Collection[str]) -> bool:
        """Tell whether the end of one of these operations is waited for."""
        return any(waiting.op in ops and not waiting.is_left for waiting in self._waiting.values())

    def awaited_by_cell(self, ops: Collection[str]) -> bool:
        """Tell whether a cell waits for the end of one of these operations."""
        return any(one.is_cells and one.op in ops and not one.is_left for one in self._waiting.values())


def news_of(message: Mapping[str, Any]) -> News:
    """Return what the keeper says of a request in one of its messages."""
    if "progress" in message:
        progress = from_json(Progress, message["progress"])
        return progress if progress.taken is None else Taking(**vars(progress))
    if "error" in message:
        return GpuckptError.from_dict(message["error"]).spelled(in_a_cell)
    return Answered(message.get("result"))


def broken_off(op: str, then: str) -> KeeperGone:
    """Return what to say of an operation whose keeper died."""
    return KeeperGone(f"The {op} was aborted; the kernel keeps running.", "The kernel's keeper died.", then)


def _ended(op: str, lock: Path) -> KeeperGone:
    """Return what to say of an operation whose keeper is silent, and does not hold its lock."""
    if lock.exists():
        return broken_off(op, "The kernel gets a new one automatically within seconds.")
    return KeeperGone(
        "The kernel can no longer be saved or restored; it keeps running.",
        "Its keeper does not answer, and files were removed from its folder, as programs do that remove old temporary "
        "files.",
        "Write what you need to a file, and restart the kernel. Set JUPYTER_RUNTIME_DIR, where Jupyter is started, to "
        "a folder that nothing cleans.",
    )


def _not_waited_for(op: str, why: str) -> GpuckptError:
    return GpuckptError(
        f"Stopped waiting for the {op}; it may still be carried out.",
        why,
        "Run `%gpuckpt status`; if that does not answer either, restart the kernel.",
    )
