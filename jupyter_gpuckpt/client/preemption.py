"""Hibernating many kernels before a machine or a server goes, the most valuable ones first.

The rule: the more processor time a kernel has used since it was last saved or restored, the sooner it is its turn.
Where something is just being done with one, that has to end first, and goes on while the others have their turn. One
at a time, since several at once would only all be late.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from .. import settings
from ..errors import GpuckptError, NoSuchKernel
from ..linux.private_folders import make_private
from ..operations.requests import Cancel, Hibernate, Status
from ..operations.results import KernelStatus
from . import keepers
from .listing import STATUS_TIMEOUT
from .protocol import new_operation_id
from .record import KernelFolder, now

__all__ = ["Outcome", "hibernate_all", "write_report"]

_CANCEL_TIMEOUT = 5.0
_AT_ONCE = 8  # so many keepers are asked at once


@dataclass(frozen=True)
class Outcome:
    """What became of one kernel."""

    kernel_id: str
    notebook: str
    computed: float
    """Seconds of processor time since it was last saved or restored."""
    saved: bool
    name: str
    """The snapshot's; empty where there is none."""
    seconds: float
    why: str
    """Why it was not saved; empty where it was."""


def hibernate_all(
    folders: Iterable[KernelFolder],
    deadline: float | None,
    how: Callable[[KernelStatus], Hibernate],
) -> list[Outcome]:
    """Hibernate kernels one after the other; return what became of each.

    After `deadline` seconds none is begun any more, and one that is not saved yet is broken off. `how` returns the
    arguments of the keeper's ``hibernate`` for a kernel with this status.
    """
    began = time.monotonic()
    asked = list(folders)
    patience = STATUS_TIMEOUT if deadline is None else min(STATUS_TIMEOUT, deadline / 4)
    with ThreadPoolExecutor(_AT_ONCE) as threads:  # one that is silent must not cost the others their time
        answers = list(zip(asked, threads.map(functools.partial(_status, patience), asked), strict=True))
    found = [(folder, status) for folder, status in answers if isinstance(status, KernelStatus)]
    outcomes = []
    for folder, status in sorted(found, key=lambda pair: (_is_worked_on(pair[1]), -pair[1].computed)):
        left = None if deadline is None else deadline - (time.monotonic() - began)
        outcomes.append(_hibernate(folder, status, left, how(status)))
    outcomes += [_unanswered(folder, error) for folder, error in answers if isinstance(error, Exception)]
    return outcomes


def _status(patience: float, folder: KernelFolder) -> KernelStatus | GpuckptError | OSError | None:
    """Return a kernel's status, or why there is none; None where it has ended."""
    try:
        with keepers.connect(folder) as keeper:
            return keeper.ask(Status(), timeout=patience)
    except (NoSuchKernel, FileNotFoundError):
        return None
    except (GpuckptError, OSError) as e:
        return e


def _is_worked_on(status: KernelStatus) -> bool:
    return status.writing is not None or status.state not in ("running", "sleeping", "hibernated", "ended")


def _unanswered(folder: KernelFolder, error: Exception) -> Outcome:
    notebook = ""
    with contextlib.suppress(OSError, ValueError):
        notebook = folder.launch().notebook
    return Outcome(folder.path.name, notebook, 0.0, saved=False, name="", seconds=0.0, why=str(error))


def _hibernate(folder: KernelFolder, status: KernelStatus, left: float | None, request: Hibernate) -> Outcome:
    began = time.monotonic()
    name, why = "", ""
    if left is not None and left <= 0:
        why = "The deadline had passed."
    else:
        operation = new_operation_id()
        with _cancelled_after(folder, operation, left) as is_late:
            try:
                with keepers.connect(folder) as keeper:
                    name = keeper.ask(replace(request, operation=operation)).name
            except (GpuckptError, OSError) as e:
                why = "The deadline passed before it was saved." if is_late() else str(e)
    seconds = time.monotonic() - began
    about = (status.kernel_id, status.notebook, status.computed)
    return Outcome(*about, bool(name), name, round(seconds, 3), why)


@contextlib.contextmanager
def _cancelled_after(folder: KernelFolder, operation: str, seconds: float | None) -> Iterator[Callable[[], bool]]:
    """Have an operation that is asked for within the block cancelled after a while; gives whether it came to that."""
    late = threading.Event()

    def cancel() -> None:
        late.set()
        # The connection of the request is in use: its answer is being waited for.
        with contextlib.suppress(GpuckptError, OSError), keepers.connect(folder) as keeper:
            keeper.ask(Cancel(operation=operation, kind="hibernate"), timeout=_CANCEL_TIMEOUT)

    timer = None if seconds is None else threading.Timer(seconds, cancel)
    if timer is not None:
        timer.daemon = True
        timer.start()
    try:
        yield late.is_set
    finally:
        if timer is not None:
            timer.cancel()


def write_report(outcomes: Iterable[Outcome], deadline: float | None) -> Path:
    """Write down what became of the kernels, in the folder of the logs, and return where. Raises `OSError`."""
    folder = settings.logs_dir()
    make_private(folder)
    moment = now()
    path = folder / f"hibernated-{moment[:19].replace(':', '')}-{os.getpid()}.json"
    document = {"at": moment, "deadline": deadline, "kernels": [asdict(outcome) for outcome in outcomes]}
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as f:
        json.dump(document, f, indent=2)
        f.flush()
        os.fsync(f.fileno())
    return path
