"""How a cell wakes the kernel that it is to be executed in, and what it shows of that."""

from __future__ import annotations

import functools
from typing import Any

from .. import settings
from ..errors import GpuckptError
from ..operations.results import Progress
from . import show
from .agent import Agent

__all__ = ["wake_for_cell"]


def wake_for_cell(agent: Agent, shell: Any, silent: bool) -> dict[str, Any] | None:
    """Wake the kernel, and show in the cell that it is woken and how long that took; nothing where it is `silent`.

    Returns None, or where the kernel still sleeps the error as the protocol has it: the cell must not be executed.
    """
    handle = None
    try:
        if not silent:
            handle = _shown("Waking the kernel …")
        woken = show.Awake(agent.sleeping.wake(functools.partial(_take, handle)))
    except KeyboardInterrupt:
        # A second interrupt: nobody waits any longer.
        return {"ename": "KeyboardInterrupt", "evalue": "", "traceback": ["KeyboardInterrupt: the cell was not run"]}
    except GpuckptError as e:
        if handle is not None:
            handle.update({"text/plain": ""}, raw=True)
        return show.error_content(e)
    if handle is not None:
        if agent.cells.shows_updates():
            handle.update(woken.mime() if not woken.already else {"text/plain": ""}, raw=True)
        elif not woken.already:
            handle.display(woken.mime(), raw=True)
    return None


def _take(handle: Any, progress: Progress) -> None:
    """Show what the wake waits for; the wake itself takes no longer than a look at it."""
    if handle is not None and (progress.stage != settings.WAKING or progress.cancelling):
        handle.update({"text/plain": show.progress_text("Waking the kernel", progress)}, raw=True)


def _shown(text: str) -> Any:
    from IPython.display import DisplayHandle

    handle = DisplayHandle()
    handle.display({"text/plain": text}, raw=True)
    return handle
