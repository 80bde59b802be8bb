"""Whether a kernel has done all that clients have asked of it by now.

A request comes to a socket of the system's, from there to a thread of zmq's, from there to the thread that reads the
shell channel, and from there to the main thread, where its turn comes. A kernel that is frozen with one on its way
looks idle from outside, and nobody would wake it.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from .cells import Cells
from .clients import until_zmq_has_acted

__all__ = ["all_is_done"]

_PATIENCE = 1.0  # seconds
_POLL = 0.005  # seconds


def all_is_done(kernel: Any, cells: Cells) -> bool:
    """Tell whether every request that has come by now was answered; wait for that, for a second or so at most."""
    deadline = time.monotonic() + _PATIENCE
    until_zmq_has_acted()
    while not (_has_a_turn(kernel, cells, deadline - time.monotonic()) and not cells.wait_or_run()):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL)
    return True


def _has_a_turn(kernel: Any, cells: Cells, patience: float) -> bool:
    """Tell whether the main thread has done what it had in hand when the shell channel was read."""
    turn = threading.Event()
    cells.let_be_read()

    def take_turn() -> None:
        if getattr(kernel, "shell_channel_thread", None) is None:  # ipykernel 6 reads it in this thread
            kernel.shell_stream.flush()
        turn.set()

    kernel.in_main_loop(take_turn)
    return turn.wait(max(0.0, patience))
