"""On which processors threads may run (sched_setaffinity(2), `taskset`), which CRIU does not save."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence

from ..linux import processes
from ..quick_dataclass import dataclass

__all__ = ["BoundThreads", "bind", "bound"]


@dataclass(frozen=True)
class BoundThreads:
    """Threads of one process, by their ids in its namespace, and the numbers of the processors that they may run on."""

    pid: int
    threads: list[int]
    processors: list[int]


def bound(pids: Iterable[int], beside: int) -> list[BoundThreads]:
    """Return which threads of processes may run on other processors than a process `beside` them may."""
    common = os.sched_getaffinity(beside)
    found = []
    for pid in pids:
        by_processors: dict[frozenset[int], list[int]] = {}
        with contextlib.suppress(OSError):  # a process, or a thread, that has just ended
            inner = processes.inner_pid(pid)
            for thread in map(int, os.listdir(f"/proc/{pid}/task")):  # noqa: PTH208 - half the cost of Path.iterdir
                with contextlib.suppress(OSError):
                    if (processors := os.sched_getaffinity(thread)) != common:
                        by_processors.setdefault(frozenset(processors), []).append(processes.inner_pid(thread))
            found += [
                BoundThreads(inner, sorted(threads), sorted(processors))
                for processors, threads in by_processors.items()
            ]
    return found


def bind(saved: Sequence[BoundThreads], outer: Callable[[int], int | None]) -> list[str]:
    """Have restored threads run on the processors that they were bound to; return what the user should know.

    `outer` gives the pid here of a process by that in its namespace. Of processors that are not to be had here, threads
    get those that are left; where none is, any.
    """
    unbound: set[int] = set()
    there_are = range(os.sysconf("SC_NPROCESSORS_CONF"))
    for one in saved:
        pid = outer(one.pid)
        here = {} if pid is None else _threads(pid)
        for thread in one.threads:
            try:
                os.sched_setaffinity(here[thread], [number for number in one.processors if number in there_are])
            except OSError:
                unbound.update(one.processors)
            except KeyError:
                continue  # it has ended
    if not unbound:
        return []
    numbers = ", ".join(map(str, sorted(unbound)))
    return [f"Threads that were bound to processors run on any now: of {numbers}, none can be used here."]


def _threads(pid: int) -> dict[int, int]:
    """Return the ids here of a process's threads by those in its namespace."""
    found = {}
    with contextlib.suppress(OSError):
        for thread in map(int, os.listdir(f"/proc/{pid}/task")):  # noqa: PTH208
            with contextlib.suppress(OSError):
                found[processes.inner_pid(thread)] = thread
    return found
