"""Interrupts of a cell that waits for the keeper: an exception could break off a request at any point."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["ONE", "told"]

ONE = 1.0
"""Interrupts within this time are one, in seconds: a button was pressed twice, or two clients have sent it."""


@contextlib.contextmanager
def told(tell: Callable[[], None]) -> Iterator[None]:
    """Have `tell` called in place of an interrupt; only in the main thread, where they come.

    Those that come right after one and belong to it are passed over also when this has ended: while ipykernel answers
    the cell, they could keep it from doing so.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    until = 0.0

    def interrupted(*_: Any) -> None:
        nonlocal until
        if time.monotonic() >= until:
            until = time.monotonic() + ONE
            tell()

    before: Any = signal.signal(signal.SIGINT, interrupted) or signal.default_int_handler

    def late(number: int, frame: Any) -> None:
        if time.monotonic() >= until:
            signal.signal(signal.SIGINT, before)
            if callable(before):
                before(number, frame)
            else:
                os.kill(os.getpid(), number)

    try:
        yield
    finally:
        signal.signal(signal.SIGINT, late if time.monotonic() < until else before)
