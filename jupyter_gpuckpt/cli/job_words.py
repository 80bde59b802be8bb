"""What is said of a job: errors and notes are written for kernels, of which the user of a job need not know."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any, TypeVar

from ..errors import GpuckptError

__all__ = ["about_a_job", "told_of_a_job"]

_PHRASES = (
    ("gpuckpt kernels`", "gpuckpt ps`"),
    ("Restart the kernel", "Stop the job"),
    ("restart the kernel", "stop the job"),
    ("Restart it", "Start it again"),
    ("Processes started by the notebook", "Processes started by the job"),
)
_KERNEL = re.compile(
    r"(?<!Linux )(?<!notebook's )(?<![\w./\"`-])([Kk])ernel(?=s?\b)(?!s?[/\"`-]|s?\.\w| features| [0-9a-f]{8}\b)"
)
"""Neither Linux's, nor one that is named, nor a part of a path."""


_Said = TypeVar("_Said", str, list[str], dict[str, Any])
_TOLD = ("stage", "warnings", "notes")
"""What of a keeper's messages and results is for people."""


def told_of_a_job(said: _Said) -> _Said:
    """Return a text that was written for a kernel as it is said of a job.

    Of several, each; of a keeper's message or result, what people read of it.
    """
    if isinstance(said, dict):
        return {**said, **{name: told_of_a_job(said[name]) for name in _TOLD if isinstance(said.get(name), str | list)}}
    if isinstance(said, list):
        return [told_of_a_job(text) for text in said]
    text = said
    for before, after in _PHRASES:
        text = text.replace(before, after)
    return _KERNEL.sub(lambda found: "Job" if found[1] == "K" else "job", text)


@contextlib.contextmanager
def about_a_job(really: bool = True) -> Iterator[None]:
    """Have errors that are raised within speak of a job, if it is `really` one; what they quote of criu stays."""
    try:
        yield
    except GpuckptError as e:
        if really:
            quoted = str(e.data.get("criu_error") or "")
            e.what, e.why, e.then = (_around(quoted, text) for text in (e.what, e.why, e.then))
            for reason in e.data.get("reasons") or []:  # of `Refused.merged`
                reason["why"] = told_of_a_job(reason["why"])
        raise


def _around(quoted: str, text: str) -> str:
    return quoted.join(map(told_of_a_job, text.split(quoted))) if quoted else told_of_a_job(text)
