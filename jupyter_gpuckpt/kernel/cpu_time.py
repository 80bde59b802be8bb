"""Processor time goes on from the save: a restored process is a new one to the system, and has used none.

Python's functions that tell it are replaced in a restored kernel by ones that add what was used before; in one that
was never restored nothing is.
"""

from __future__ import annotations

import functools
import os
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["go_on", "note"]

_WHO = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
_process_time_ns, _thread_time_ns, _times, _getrusage = (
    time.process_time_ns,
    time.thread_time_ns,
    os.times,
    resource.getrusage,
)


class _Used:
    """What was used before this process began: nanoseconds of it all and of each thread, seconds by user and system."""

    def __init__(self) -> None:
        self.process = 0
        self.threads: dict[int, int] = {}
        self.by: dict[int, tuple[float, float]] = {}

    def now(self) -> _Used:
        """Return what has been used by now, with that of this process."""
        now = _Used()
        now.process = self.process + _process_time_ns()
        for thread in threading.enumerate():
            if thread.native_id is not None and (of_thread := _on_processor(thread.native_id)) is not None:
                now.threads[thread.native_id] = self.threads.get(thread.native_id, 0) + of_thread
        for who in _WHO:
            user, system = self.by.get(who, (0.0, 0.0))
            here = _getrusage(who)
            now.by[who] = user + here.ru_utime, system + here.ru_stime
        return now


_before, _noted = _Used(), _Used()


def note() -> None:
    """Note what has been used by now: the kernel is about to be saved."""
    global _noted
    _noted = _before.now()


def go_on(user_ns: dict[str, Any]) -> None:
    """Have processor time go on from what was noted: this process was just restored.

    Names in `user_ns` that a user has imported one of the functions under tell it, too; other modules' do not.
    """
    global _before
    _before = _noted
    for module, originals in _REPLACED.items():
        for name, (original, replacement) in originals.items():
            setattr(module, name, replacement)
            for own, value in list(user_ns.items()):
                if value is original:
                    user_ns[own] = replacement


def _begin_anew() -> None:
    global _before
    _before = _Used()


os.register_at_fork(after_in_child=_begin_anew)


def _on_processor(thread: int) -> int | None:
    """Return for how long a thread was on a processor, in nanoseconds; None where it has ended or nobody counts it."""
    try:
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


@functools.wraps(time.process_time_ns)
def _all_process_time_ns() -> int:
    return _process_time_ns() + _before.process


@functools.wraps(time.process_time)
def _all_process_time() -> float:
    return _all_process_time_ns() / 1e9


@functools.wraps(time.thread_time_ns)
def _all_thread_time_ns() -> int:
    return _thread_time_ns() + _before.threads.get(threading.get_native_id(), 0)


@functools.wraps(time.thread_time)
def _all_thread_time() -> float:
    return _all_thread_time_ns() / 1e9


@functools.wraps(resource.getrusage)
def _all_getrusage(who: int) -> resource.struct_rusage:
    user, system, *rest = _getrusage(who)
    before = _before.by.get(who, (0.0, 0.0))
    return resource.struct_rusage((user + before[0], system + before[1], *rest))


@functools.wraps(os.times)
def _all_times() -> os.times_result:
    own, children = (_before.by.get(who, (0.0, 0.0)) for who in _WHO)
    *used, elapsed = _times()
    return os.times_result((*(now + then for now, then in zip(used, (*own, *children), strict=True)), elapsed))


_REPLACED: dict[Any, dict[str, tuple[Callable[..., Any], Callable[..., Any]]]] = {
    time: {
        "process_time": (time.process_time, _all_process_time),
        "process_time_ns": (_process_time_ns, _all_process_time_ns),
        "thread_time": (time.thread_time, _all_thread_time),
        "thread_time_ns": (_thread_time_ns, _all_thread_time_ns),
    },
    os: {"times": (_times, _all_times)},
    resource: {"getrusage": (_getrusage, _all_getrusage)},
}
