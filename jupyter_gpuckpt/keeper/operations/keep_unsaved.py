"""What a running kernel has done that is in no snapshot is saved before it is given up for another one.

An undo saves it however long that takes. A restore does where it takes a moment: a kernel with little memory whose
hooks answer. Where it takes longer, or fails, that is no reason not to restore.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ... import settings
from ...client.record import Operation
from ...errors import Cancelled, GpuckptError, GpuFailed, KernelLost, Refused
from ...freeze import cuda
from ...linux import processes
from ...operations.requests import Restore, Save
from ..agent_channel import AgentSilent
from ..unsaved import unsaved
from .progress import OperationProgress, ProgressCallback
from .save import save

if TYPE_CHECKING:
    from ..kernel_life import Keeper

__all__ = ["Kept", "keep_unsaved"]

log = logging.getLogger("gpuckpt.keeper")

_SAYS = 0.25  # of the time that the save may take: for how long a kernel may think what it has on its GPUs
_CONTEXT = 512 << 20
"""Bytes that the driver itself has on a GPU for a process that uses it, at least (589 to 654 MB on an H100)."""
_PACE = 1e9
"""How many bytes a second are frozen, read, compressed and stored by two processors, roughly (docs/benchmarks.md)."""


@dataclass(frozen=True)
class Kept:
    """What was kept: in the snapshot of this name, if any."""

    name: str = ""
    why_not: str = ""
    """Why it could not be saved; empty where it was not to be."""


class _TakesLong(Refused):
    """It would take longer than it may."""

    def __init__(self) -> None:
        super().__init__("It was not saved.", "It has too much memory for that to take a moment.", "")


async def keep_unsaved(
    keeper: Keeper, operation: Operation, request: Restore, progress: OperationProgress, on_progress: ProgressCallback
) -> Kept:
    """Save what the kernel has done that is in no snapshot, as part of a restore; or tell why it could not be.

    Raises
    ------
    Cancelled : the restore was.
    GpuckptError : as `save`, where it must be kept.
    KernelLost : the GPU state could not be brought back.
    """
    limit = None if request.keep else settings.keep_unsaved()
    if limit is None and not request.keep:
        return Kept()
    if request.resume or keeper.launch.job or keeper.space is None or (keeper.asleep is not None and not request.keep):
        return Kept()
    in_a_cell = request.cell is not None
    if unsaved(keeper, asked_by=request.cell) is None:
        return Kept()
    saving = Operation("save", "")
    zeros = await asyncio.to_thread(_zeros_when_saved, keeper) if limit is not None else 0

    def refuse(private: int, described: Mapping[str, Any]) -> None:
        # Not to be seen on the GPU first: what looks there takes seconds to start, and the restore waits for it.
        size = max(cuda.in_use(described), sum(cuda.needs(described).values()) - zeros)
        if limit is not None and private + size > limit * _PACE:
            raise _TakesLong

    ending = asyncio.create_task(_end(saving, operation, limit))
    try:
        if limit is not None and await _least_size(keeper, limit * _SAYS) - zeros > limit * _PACE:
            raise _TakesLong  # before its hooks are run and its garbage is looked for, which the restore would wait for
        request_for_it = Save(name="", automatic=True)
        saved = await save(keeper, saving, request_for_it, on_progress, refuse, asked_in_a_cell=in_a_cell)
        return Kept(saved.name)
    except KernelLost:
        raise
    except GpuckptError as e:
        progress.check()
        if request.keep and not isinstance(e, GpuFailed):  # which cannot be kept at all, and is to be left all the more
            e.what = "Nothing was restored: the present state of the {kernel} could not be saved first."
            raise
        log.info("what the kernel has done since it was last saved is not kept: %s", e)
        if isinstance(e, _TakesLong):
            return Kept()
        was_slow = isinstance(e, Cancelled) and limit is not None
        return Kept(why_not=f"it took longer than {limit:g} s." if was_slow else e.why)
    finally:
        ending.cancel()


async def _least_size(keeper: Keeper, patience: float) -> int:
    """Return how many bytes there are to be saved at least; 0 for a kernel that uses no GPU, which is saved at once."""
    if not (on_gpus := await _bytes_on_gpus(keeper, patience)):
        return 0
    return on_gpus + _CONTEXT + await asyncio.to_thread(processes.private_bytes, keeper.tree())


async def _bytes_on_gpus(keeper: Keeper, patience: float) -> int:
    """Return how much GPU memory the kernel's arrays take, in bytes, if it says so within so many seconds."""
    if keeper.channel is None or not keeper.launch.agent:
        return 0
    try:
        said = await keeper.channel.call("bytes_on_gpus", {}, patience)
    except (AgentSilent, GpuckptError):  # it does not know the question, as one that an older version saved
        return 0
    return said if isinstance(said, int) else 0


def _zeros_when_saved(keeper: Keeper) -> int:
    """Return how many bytes of GPU memory were zeros in the snapshot that the kernel is based on."""
    with contextlib.suppress(GpuckptError):
        for manifest in keeper.store.list():
            if manifest.id == keeper.state.parent_id:
                return int(manifest.cuda.get("zeros", 0))
    return 0


async def _end(saving: Operation, restoring: Operation, after: float | None) -> None:
    """Cancel a save where the restore that it is a part of is cancelled, or when it has taken so many seconds."""
    with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
        await asyncio.wait_for(restoring.cancelling.wait(), after)
    saving.cancelling.set()
