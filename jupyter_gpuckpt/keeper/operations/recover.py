"""What a new keeper does about an operation that the one before it died in."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from ...errors import (
    GpuckptError,
    RestoreFailed,
)
from ..gpu_freeze import GpuReturn
from ..staging import vram_files
from .criu_run import end_criu
from .hibernate import finish_wake, remove_broken_off
from .restore import answer_from_fresh, failed_restore
from .save import resume_processes

if TYPE_CHECKING:
    from ..process import Keeper

log = logging.getLogger("gpuckpt.keeper")


async def recover(keeper: Keeper) -> None:
    """Undo what a dead keeper had begun with the kernel, or bring it to an end.

    Raises
    ------
    KernelLost : the GPU state could not be brought back.
    """
    left = keeper.state.operation or {}
    if left:
        log.warning("the keeper before this one died during a %s", left["kind"])
    if left.get("kind") == "save":
        await end_criu(keeper.namespace(), left.get("criu"))
        if left.get("left") == "stopped":
            resume_processes(keeper.namespace())
        vram = vram_files(keeper.namespace())
        gpu = await GpuReturn.after(keeper.worker, keeper.namespace(), left, vram)
        try:
            await gpu.prepare()
            await gpu.mend(left.get("cuda", []), left.get("held", []))
        finally:
            await gpu.close()
        await asyncio.to_thread(vram.discard)
    if left.get("left") == "stopped":
        with contextlib.suppress(GpuckptError):
            await asyncio.to_thread(remove_broken_off, keeper.store, left["name"])
    with contextlib.suppress(GpuckptError):
        await asyncio.to_thread(keeper.store.collect)
    if left.get("fresh"):
        # The old kernel was gone already, and a fresh one has been started in its place.
        cause = RestoreFailed("", "The kernel's keeper died in the middle of it.", "Restore it again.")
        await answer_from_fresh(keeper, left["asked"], left["peers"], failed_restore(left["name"], cause))
    if keeper.state.hibernated is not None and keeper.space is not None:
        await finish_wake(keeper)
    keeper.state.operation = None
    keeper.note_state()
