"""Run a batch of jobs on threads, count the bytes done, and stop them all at the first failure."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

__all__ = ["Job", "Progress", "Tally", "run_all", "workers"]

Progress = Callable[[str, int, int], None]
"""Called with the stage's name, the bytes done and the bytes in all; may raise to cancel."""

_MOST = 16
"""Threads that a batch has at most."""
_MANY = 8
"""From so many processors on one in so many is left to the rest of the program."""
_REPORT_EVERY = 0.1
"""Seconds between two reports."""


class _StoppedError(Exception):
    """Another job of the batch failed, so that this one's result is of no use."""


class Tally:
    """The bytes that a batch of jobs has done so far."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stopped = False
        self.done = 0

    def add(self, count: int) -> None:
        """Count `count` bytes as done; ends the calling job where the batch has failed."""
        if self._stopped:
            raise _StoppedError
        with self._lock:
            self.done += count

    def stop(self) -> None:
        """Make each job of the batch end at its next `add`."""
        self._stopped = True


Job = Callable[[Tally], None]
"""Does a part of a batch, and tells the tally of it."""


def run_all(jobs: Sequence[Job], report: Callable[[int], None], threads: int | None = None) -> None:
    """Run `jobs` on threads and return when all are done; raise the first failure.

    There are as many `threads` as `workers` says, where none are asked for.

    `report` gets the bytes done so far, in the calling thread: what it raises (a cancellation)
    stops the batch as well.
    """
    tally = Tally()
    with ThreadPoolExecutor(min(len(jobs), threads or workers()) or 1, "gpuckpt-store") as pool:
        futures = [pool.submit(job, tally) for job in jobs]
        try:
            pending = set(futures)
            while pending:
                done, pending = wait(pending, _REPORT_EVERY, FIRST_EXCEPTION)
                for future in done:
                    future.result()
                report(tally.done)
        except BaseException:
            tally.stop()
            for future in futures:
                future.cancel()
            raise


def workers(left: int = 0) -> int:
    """Return how many threads a batch has; `left` processors are left to others, but no more than a quarter."""
    processors = len(os.sched_getaffinity(0))
    if processors < _MANY and not left:
        return processors + 2  # some of them wait for the disk while the others hash
    # Measured where a container had 16 processors: 18 threads hashed a third less than 16, since all of a container's
    # threads are paused for a while when they have used up what it is given (cgroups' cpu.max).
    return min(_MOST, processors - max(min(left, processors // 4), processors // _MANY))
