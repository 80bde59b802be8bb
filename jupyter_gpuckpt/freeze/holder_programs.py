"""The programs that hold parked GPU memory (`vram_holder`), started before it is known what each of them is for.

Until such a program can use a GPU takes a fifth of a second; what it is for is known no sooner as a rule.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterable

from .line_program import LineProgram

__all__ = ["HolderPrograms", "start_holder"]


class HolderPrograms:
    """Those that were started and are not used yet; many threads may use it."""

    def __init__(self) -> None:
        self._waiting: list[tuple[frozenset[str], LineProgram]] = []
        self._lock = threading.Lock()
        self._closed = False

    def start(self, gpus_of_each: Iterable[Collection[str]]) -> None:
        """Start one for each of these: the UUIDs of the GPUs that it has a context on at once, which takes memory."""
        with self._lock:
            if not self._closed:
                self._waiting.extend((frozenset(gpus), start_holder(gpus)) for gpus in gpus_of_each)

    def take(self, gpus: Collection[str] = ()) -> LineProgram:
        """Return one that was started, if possible for these GPUs, or that is started now: the caller ends it."""
        with self._lock:
            if not self._waiting:
                return start_holder(gpus)
            fitting = (number for number, (its, _) in enumerate(self._waiting) if its == set(gpus))
            return self._waiting.pop(next(fitting, 0))[1]

    def close(self) -> None:
        """End those that nobody took; more than once is harmless."""
        with self._lock:
            self._closed = True
            while self._waiting:
                _, program = self._waiting.pop()
                program.kill()
                program.close()


def start_holder(gpus: Collection[str] = ()) -> LineProgram:
    """Start one, which sees all GPUs, and has a context on some (UUIDs) before it is told what it is for."""
    every_gpu = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    return LineProgram("jupyter_gpuckpt.freeze.vram_holder", *gpus, environment=every_gpu)
