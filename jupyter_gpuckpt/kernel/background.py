"""Threads of ours in a kernel."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["in_background"]


class _Thread(threading.Thread):
    """One whose output belongs to the cell that runs.

    Until ipykernel 7.0, `threading.Thread.run` has what a thread prints belong to the cell in which it was started: to
    none, where that was before the first.
    """

    pydev_do_not_trace = is_pydev_daemon_thread = True  # the debugger must not stop it

    def __init__(self, work: Callable[[], object], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work

    def run(self) -> None:
        self._work()


def in_background(work: Callable[[], object], name: str = "gpuckpt") -> threading.Thread:
    """Begin to do something in a thread of its own, which ends with the kernel, and return the thread."""
    thread = _Thread(work, name)
    thread.start()
    return thread
