"""Calls that take their time, made in threads, so that an event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

__all__ = ["begin_in_thread", "in_thread"]

_P = ParamSpec("_P")
_T = TypeVar("_T")

_is_forked = False


def _now_forked() -> None:
    global _is_forked
    _is_forked = True


os.register_at_fork(after_in_child=_now_forked)


def begin_in_thread(do: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
    """Have something done in a thread of its own; what is returned has the result, or the error.

    In a process that was forked off, such as a worker of a pool, it is done at once instead. There an event loop may be
    its parent's, with which it shares the descriptors that a thread wakes the loop by: the wrong process would wake.
    """
    if not _is_forked:
        thread = ThreadPoolExecutor(1)
        try:
            return thread.submit(do, *args, **kwargs)
        finally:
            thread.shutdown(wait=False)
    done: Future[_T] = Future()
    try:
        done.set_result(do(*args, **kwargs))
    except Exception as e:  # noqa: BLE001 - it is raised where the result is asked for
        done.set_exception(e)
    return done


async def in_thread(do: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Return what something returns that is done as `begin_in_thread` does it. Raises what it raises."""
    done = begin_in_thread(do, *args, **kwargs)
    return done.result() if done.done() else await asyncio.wrap_future(done)
