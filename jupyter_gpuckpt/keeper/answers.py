"""How requests are answered: with a result or an error, and progress until then."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..checked import to_json
from ..errors import GpuckptError
from ..operations.results import Progress
from ..spelling import in_a_terminal
from .operations.progress import ProgressCallback

log = logging.getLogger("gpuckpt.keeper")

PULSE = 2.0  # how often a client that waits hears that its request is being worked on, in seconds


@dataclass(frozen=True)
class Answer:
    """The result of a request, or the error in its place."""

    result: object = None
    error: GpuckptError | None = None

    def as_members(self) -> dict[str, object]:
        """Return it as a message has it."""
        return {"result": to_json(self.result)} if self.error is None else {"error": self.error.as_dict()}


async def answer_to(
    op: str,
    work: Callable[[ProgressCallback], Coroutine[Any, Any, Any]],
    on_progress: ProgressCallback,
    pulse: ProgressCallback,
    folder: Path,
) -> Answer:
    """Do what was asked for, and return what came of it.

    `work` gets something to be told how far it is, which `tell` is told at once. `pulse` is told the same once more now
    and then: it is being done. `folder` is the kernel's.
    """
    latest = Progress(stage="starting")

    async def note(progress: Progress) -> None:
        nonlocal latest
        latest = replace(progress, taken=None)
        await on_progress(progress)

    async def beat() -> None:
        began = time.monotonic()
        while True:
            await asyncio.sleep(PULSE)
            await pulse(replace(latest, seconds=time.monotonic() - began))

    beating = asyncio.create_task(beat())
    try:
        return Answer(await work(note))
    except GpuckptError as e:
        return Answer(error=e)
    except Exception as e:
        log.exception("%s failed", op)
        return Answer(error=unforeseen(op, e, folder))
    finally:
        beating.cancel()


def without_magic(answer: Answer, named: str) -> Answer:
    """Return an answer of a kernel that has no ``%gpuckpt``, or of a job, which a terminal knows as `named`."""
    if answer.error is None:
        return answer
    return replace(answer, error=answer.error.spelled(partial(in_a_terminal, kernel=named)))


def unforeseen(op: str, error: Exception, folder: Path) -> GpuckptError:
    """Return what to say of an error that nobody thought of; `folder` is the kernel's."""
    return GpuckptError(
        f"The {op} failed with an unexpected error.",
        f"{type(error).__name__}: {error}",
        f"The keeper's log has the details: {folder}/keeper.log",
    )
