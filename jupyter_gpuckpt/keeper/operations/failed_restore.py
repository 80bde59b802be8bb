"""What is said of a restore that failed, and the fresh kernel that comes where the one before it was given up."""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ... import settings
from ...errors import DriverError, GpuckptError, KernelLost, RestoreFailed
from ..agent_channel import AgentSilent

if TYPE_CHECKING:
    from ..kernel_life import Keeper

__all__ = ["answer_from_fresh", "failed_restore", "not_restored", "start_afresh"]

log = logging.getLogger("gpuckpt.keeper")


def not_restored(name: str, cause: Exception, *, has_ended: bool) -> Exception:
    """Return the error of a restore that failed before the running kernel was given up; that may have ended itself."""
    of_the_other = (RestoreFailed, DriverError) if has_ended else (RestoreFailed, DriverError, KernelLost)
    if isinstance(cause, GpuckptError) and not isinstance(cause, of_the_other):
        return cause
    what = f"The restore of {name!r} failed. The snapshot and the {{kernel}} are as they were."
    error = RestoreFailed(what, str(cause))
    if isinstance(cause, GpuckptError):
        error.why, error.then, error.data = cause.why, cause.then, cause.data
    in_place = f"If there is no room for both kernels, `gpuckpt restore @ {name} --in-place` ends this one first."
    error.then = f"{error.then} {in_place}".strip()
    return error


def failed_restore(name: str, cause: Exception, job: str = "") -> RestoreFailed:
    """Return the error of a restore that failed when there was no way back; `job` names the job, where it is one."""
    now = f"the job {job} does not run"  # it is not started again by itself: its work may have been hours
    if not job:
        now = "the kernel was ended, and a fresh, empty one runs in its place"
    error = RestoreFailed(f"The restore of {name!r} failed. The snapshot is as it was; {now}.", str(cause))
    if isinstance(cause, GpuckptError):
        own_words = () if isinstance(cause, RestoreFailed) else (cause.what,)
        error.why, error.then, error.data = " ".join((*own_words, cause.why)), cause.then, cause.data
    return error


async def start_afresh(
    keeper: Keeper,
    name: str,
    asked: Mapping[str, Any],
    peers: Mapping[str, int],
    cause: Exception,
) -> GpuckptError:
    """Start a fresh kernel after a failed restore, answer the cell from it, and return the error to raise."""
    error = failed_restore(name, cause)
    try:
        await keeper.start_kernel()
    except Exception as e:
        log.exception("and no fresh kernel could be started either")
        lost = KernelLost(
            f"The restore of {name!r} failed, and so did a fresh start. The snapshot is as it was.",
            f"{error.why} Then: {e}",
            "{Restart}, and run `gpuckpt doctor`.",
        )
        await keeper.ended(-signal.SIGKILL)
        return lost
    await answer_from_fresh(keeper, asked, peers, error)
    return error


async def answer_from_fresh(
    keeper: Keeper, asked: Mapping[str, Any], peers: Mapping[str, int], error: GpuckptError
) -> None:
    """Have the fresh kernel, which runs in place of one that could not be restored, say so to the cell that asked."""
    channel = keeper.channel
    if channel is None or not keeper.launch.agent or not asked.get("cell"):
        return
    try:
        arguments = {"asked": dict(asked), "peers": dict(peers), "error": error.as_dict()}
        await channel.call_when_there("answer", arguments, settings.hook_timeout())
    except AgentSilent:
        log.warning("the fresh kernel did not answer the cell")
