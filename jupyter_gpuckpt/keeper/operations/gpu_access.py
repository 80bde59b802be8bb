"""The access of a kernel's GPUs to each other's memory, where its library cannot take it away: without parking."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import Refused
from ...freeze import cuda, parking_channel
from ..agent_channel import AgentChannel
from ..agent_replies import KeptApart, ReadyForSave, ReadyForSleep

__all__ = ["has_to_be_kept_apart", "is_much_left", "kept_apart"]

log = logging.getLogger("gpuckpt.keeper")


def is_much_left(run_dir: Path, kernel: int, described: Mapping[str, Any]) -> bool:
    """Tell whether a kernel has much GPU memory that cannot be parked, beside that of its contexts.

    Its GPUs might not get access again. What there is the kernel finds out when it keeps them apart itself. `described`
    is what `cuda.describe` says.
    """
    used = dict[str, int]()
    for one in described.get("processes", []):
        if one["pid"] == kernel:
            used = one["used"]
    parkable = sum(size for _, size in parking_channel.parkable(run_dir, kernel))
    return cuda.is_much_unseen(sum(used.values()) - parkable, len(used))


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
    return await channel.ask("keep_gpus_apart", KeptApart, Refused, not_done)
