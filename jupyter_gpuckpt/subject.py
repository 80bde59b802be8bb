"""What messages call the thing that is saved: a kernel, or a job.

A keeper has one of the two for all its life, and a command is about one of the two: a process says once which, and
messages that are made in it have the right word from the beginning. A text has ``{kernel}`` where it may be a job.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

__all__ = ["WORDS", "of_a_job", "said", "speak_of_a_job"]

WORDS = {
    "kernel": ("kernel", "job"),
    "restart": ("restart the kernel", "stop the job"),
    "Restart": ("Restart the kernel", "Stop the job"),
    "gpuckpt kernels": ("gpuckpt kernels", "gpuckpt ps"),
}
"""What can stand in braces, and what that is said as of a kernel and of a job."""

_TOKEN = re.compile("{(" + "|".join(WORDS) + ")}")
_is_job = False


def speak_of_a_job(really: bool) -> None:
    """Have what is said in this process be about a job, or about a kernel."""
    global _is_job
    _is_job = really


@contextlib.contextmanager
def of_a_job(really: bool = True) -> Iterator[None]:
    """Have what is said within be about a job, if it is `really` one."""
    before = _is_job
    speak_of_a_job(really)
    try:
        yield
    finally:
        speak_of_a_job(before)


def said(text: str) -> str:
    """Return a text with the words for what it is about."""
    return _TOKEN.sub(lambda found: WORDS[found[1]][_is_job], text)
