"""Threads of ours in a kernel."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

__all__ = ["in_background"]


def in_background(work: Callable[[], object], name: str = "gpuckpt") -> threading.Thread:
    """Begin to do something in a thread of its own, which ends with the kernel, and return the thread."""
    thread: Any = threading.Thread(target=work, name=name, daemon=True)
    thread.pydev_do_not_trace = thread.is_pydev_daemon_thread = True  # the debugger must not stop it
    thread.start()
    started: threading.Thread = thread
    return started
