"""The access of a kernel's GPUs to each other's memory, where its library cannot take it away: without parking."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from ... import settings
from ...errors import Refused
from ..agent_channel import AgentChannel, AgentSilent
from ..agent_replies import KeptApart, ReadyForSave, ReadyForSleep, checked_reply

__all__ = ["has_to_be_kept_apart", "kept_apart"]

log = logging.getLogger("gpuckpt.keeper")


def has_to_be_kept_apart(ready: ReadyForSave | ReadyForSleep, refused: Refused, why: Mapping[int, Refused]) -> bool:
    """Tell whether a kernel was refused since its memory was not parked, and can do without.

    `why` are the refusals of processes whose memory has to be parked (`cuda.preflight`).
    """
    return ready.can_keep_apart and any(refused is one for one in why.values())


async def kept_apart(channel: AgentChannel, not_done: str) -> KeptApart:
    """Have the kernel turn the access off itself, until after the save or the sleep.

    `not_done` says what was not done, should it fail.

    Raises
    ------
    Refused : it does not answer.
    GpuckptError : it cannot.
    """
    log.info("the kernel keeps its GPUs apart itself")
    try:
        answer = await channel.call("keep_gpus_apart", {}, settings.hook_timeout())
    except AgentSilent:
        raise Refused(
            not_done,
            f"It did not answer within {settings.hook_timeout():.0f} s: something in it holds Python's lock.",
            "Try again when the running code is done.",
        ) from None
    return checked_reply(KeptApart, answer, Refused, not_done)
