"""Functions of the user's that run before a save, and when the kernel runs again."""

from __future__ import annotations

import inspect
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..errors import GpuckptError, SaveFailed
from . import new_environment
from .new_environment import NewEnvironment
from .restored import call_when_restored

log = logging.getLogger("gpuckpt.agent")


@dataclass(frozen=True)
class Resumed:
    """Why a kernel runs again after a freeze.

    Attributes
    ----------
    restored : True in a kernel that was just restored, False in the one that was saved and goes on.
    error : why the save failed, where it did; None otherwise.
    environment : in a restored kernel, the variables that it would be started with now; empty otherwise. There may be
        secrets among them.
    changed : the names of those variables that were brought up to date in ``os.environ``.
    """

    restored: bool
    error: GpuckptError | None = None
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    changed: Sequence[str] = ()


_Before = TypeVar("_Before", bound=Callable[[], Any])
_After = TypeVar("_After", bound=Callable[..., Any])

_before: list[Callable[[], Any]] = []
_after: list[Callable[..., Any]] = []
_generation = secrets.token_hex(16)
_called = "kernel's preparation for a save"
"""Which function is called, or was the last."""
_has_agent = False


def leave_to_agent() -> None:
    """Have nothing called by what is in here itself: this process has an agent."""
    global _has_agent
    _has_agent = True
    new_environment.note_given()


def before_save(fn: _Before) -> _Before:
    """Have `fn()` called before every save of this kernel, the latest registered first; can be a decorator.

    It runs in the agent's thread, also while a cell runs. An exception stops the save, and the kernel continues.
    """
    _before.append(fn)
    return fn


def after_restore(fn: _After) -> _After:
    """Have `fn()` or `fn(resumed)` called when the kernel runs again, in the order of registration; can be a decorator.

    That is in a restored kernel, and also in the kernel that was saved, when the save is done or has failed: what a
    `before_save` function put away can be taken out again. A function that takes an argument is given a `Resumed`,
    which tells these apart. It runs in the agent's thread; an exception is shown as a warning.

    In a job, and in other processes that are saved and are no kernels, it is called in a restored process alone, in a
    thread, while the program goes on; an exception is logged.
    """
    if not _has_agent:
        new_environment.note_given()
        call_when_restored(_run_in_job)
    _after.append(fn)
    return fn


def generation_id() -> str:
    """Return 32 hexadecimal digits that are another's in every kernel, and after every restore."""
    return _generation


def are_there() -> bool:
    """Tell whether functions are registered for before a save: what they do with the GPU nobody knows."""
    return bool(_before)


def run_before() -> None:
    """Call the functions registered for before a save.

    Raises
    ------
    SaveFailed : one of them raised.
    """
    global _called
    for fn in reversed(_before):
        _called = f"before_save function {_name(fn)}"
        try:
            fn()
        except Exception as e:
            raise SaveFailed(
                "The kernel was not saved; it keeps running.",
                f"The before_save function {_name(fn)} raised {type(e).__name__}: {e}",
                "Fix the function, and save again.",
            ) from e


def run_after(resumed: Resumed) -> list[str]:
    """Call the functions registered for after a freeze; return what went wrong in them, a text each."""
    global _called
    faults = []
    for fn in _after:
        _called = f"after_restore function {_name(fn)}"
        try:
            fn(*([resumed] if _takes_argument(fn) else []))
        except Exception as e:
            log.exception("an after_restore function failed")
            faults.append(f"The after_restore function {_name(fn)} raised {type(e).__name__}: {e}")
    return faults


def late(limit: float) -> str:
    """Return, for people, that the functions called before a save or after one have taken more than so many seconds."""
    return (
        f"The {_called} has not ended after {limit:g} s (GPUCKPT_HOOK_TIMEOUT). The kernel goes on beside it, and can "
        "be saved when it has ended. Give what it waits for a time limit of its own."
    )


def _run_in_job() -> None:
    run_after(restored_with(new_environment.bring_up_to_date()))


def restored_with(environment: NewEnvironment) -> Resumed:
    """Return what functions are told in a process that was just restored, which has another `generation_id` now."""
    global _generation
    _generation = secrets.token_hex(16)
    if environment.changed:
        log.info("brought up to date in os.environ: %s", ", ".join(environment.changed))
    return Resumed(restored=True, environment=environment.variables, changed=environment.changed)


def _takes_argument(fn: Callable[..., Any]) -> bool:
    try:
        inspect.signature(fn).bind(None)
    except (TypeError, ValueError):
        return False
    return True


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", repr(fn))
