"""The programs that hold parked GPU memory (`vram_holder`), started before it is known what each of them is for.

Until such a program runs, and the driver in it, takes a fifth of a second; what it is for is known no sooner as a rule.
"""

from __future__ import annotations

import os
import threading
from collections import deque

from .line_program import LineProgram

__all__ = ["HolderPrograms", "start_holder"]


class HolderPrograms:
    """Those that were started and are not used yet; many threads may use it."""

    def __init__(self) -> None:
        self._waiting: deque[LineProgram] = deque()
        self._lock = threading.Lock()
        self._closed = False

    def start(self, count: int) -> None:
        """Start so many."""
        with self._lock:
            if not self._closed:
                self._waiting.extend(start_holder() for _ in range(count))

    def take(self) -> LineProgram:
        """Return one that was started, or that is started now: the caller ends it."""
        with self._lock:
            return self._waiting.popleft() if self._waiting else start_holder()

    def close(self) -> None:
        """End those that nobody took; more than once is harmless."""
        with self._lock:
            self._closed = True
            while self._waiting:
                program = self._waiting.popleft()
                program.kill()
                program.close()


def start_holder() -> LineProgram:
    """Start one, which sees all GPUs."""
    every_gpu = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    return LineProgram("jupyter_gpuckpt.freeze.vram_holder", environment=every_gpu)
