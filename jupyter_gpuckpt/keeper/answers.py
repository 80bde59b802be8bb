"""How requests are answered: with a result or an error, and progress until then."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import GpuckptError
from ..spelling import in_a_terminal
from .operations.progress import ProgressCallback

log = logging.getLogger("gpuckpt.keeper")

PULSE = 2.0  # how often a client that waits hears that its request is being worked on, in seconds


async def answer_to(
    op: str,
    work: Callable[[ProgressCallback], Coroutine[Any, Any, Any]],
    on_progress: ProgressCallback,
    pulse: ProgressCallback,
    folder: Path,
) -> dict[str, Any]:
    """Do what was asked for, and return its ``result`` or ``error``.

    `work` gets something to be told how far it is, which `tell` is told at once. `pulse` is told the same once more now
    and then: it is being done. `folder` is the kernel's.
    """
    latest: dict[str, Any] = {"stage": "starting"}

    async def note(progress: dict[str, Any]) -> None:
        nonlocal latest
        latest = {key: value for key, value in progress.items() if key != "taken"}
        await on_progress(progress)

    async def beat() -> None:
        began = time.monotonic()
        while True:
            await asyncio.sleep(PULSE)
            await pulse({**latest, "seconds": time.monotonic() - began})

    beating = asyncio.create_task(beat())
    try:
        return {"result": await work(note)}
    except GpuckptError as e:
        return {"error": e.as_dict()}
    except Exception as e:
        log.exception("%s failed", op)
        return {"error": unforeseen(op, e, folder).as_dict()}
    finally:
        beating.cancel()


def without_magic(answer: dict[str, Any], named: str) -> dict[str, Any]:
    """Return an answer of a kernel that has no ``%gpuckpt``, or of a job, which a terminal knows as `named`."""
    if "error" not in answer:
        return answer
    error = GpuckptError.from_dict(answer["error"]).spelled(partial(in_a_terminal, kernel=named))
    return {**answer, "error": error.as_dict()}


def unforeseen(op: str, error: Exception, folder: Path) -> GpuckptError:
    """Return what to say of an error that nobody thought of; `folder` is the kernel's."""
    return GpuckptError(
        f"The {op} failed with an unexpected error.",
        f"{type(error).__name__}: {error}",
        f"The keeper's log has the details: {folder}/keeper.log",
    )
