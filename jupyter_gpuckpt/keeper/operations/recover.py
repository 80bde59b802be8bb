"""What a new keeper does about an operation that the one before it died in."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from ...errors import (
    GpuckptError,
    KernelLost,
    RestoreFailed,
)
from .. import gate
from ..gpu_freeze import GpuReturn
from ..gpu_sleep import GpuSleep
from ..late_vram import LateVram
from ..staging import vram_files
from .criu_run import end_criu
from .hibernate import finish_wake, remove_broken_off
from .parts import VRAM
from .restore import answer_from_fresh, failed_restore
from .save import resume_processes
from .sleep import ASLEEP, WAKING, tell_awake
from .wake import bring_back

if TYPE_CHECKING:
    from ..process import Keeper

log = logging.getLogger("gpuckpt.keeper")

_ROOM = 5.0
"""For how long a kernel that was waking is waited for that finds no room on its GPU, in seconds: then it sleeps on."""


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
        if keeper.state.sleep is None:
            await asyncio.to_thread(vram.discard)
    if left.get("left") == "stopped":
        with contextlib.suppress(GpuckptError):
            await asyncio.to_thread(remove_broken_off, keeper.store, left["name"])
    if keeper.state.sleep is not None:
        await _mend_sleep(keeper)
    with contextlib.suppress(GpuckptError):
        await asyncio.to_thread(keeper.store.collect)
    if left.get("fresh"):
        # The old kernel was gone already, and a fresh one has been started in its place.
        cause = RestoreFailed("", "The kernel's keeper died in the middle of it.", "Restore it again.")
        await answer_from_fresh(keeper, left["asked"], left["peers"], failed_restore(left["name"], cause))
    if keeper.state.hibernated is not None and keeper.space is not None:
        await finish_wake(keeper)
    if keeper.state.sleep is None and keeper.space is not None:
        gate.open_(keeper.space.run_dir)
    keeper.state.operation = None
    keeper.note_state()


async def _mend_sleep(keeper: Keeper) -> None:
    """Find the kernel asleep, as it was; one that was falling asleep or waking is brought back, if there is room."""
    noted, space, link = keeper.state.sleep, keeper.namespace(), keeper.link
    assert noted is not None
    assert link is not None
    vram = vram_files(space)
    late = LateVram(keeper.store, noted["late"], VRAM, vram.outside) if "late" in noted else None
    asleep = GpuSleep.noted(keeper.worker, space, noted, vram, late)
    if noted["stage"] == ASLEEP and await asleep.is_whole():
        keeper.fell_asleep(asleep)
        if late is not None:
            keeper.in_background(bring_back(keeper))
        return
    log.warning("the keeper before this one died while the kernel was %s", noted["stage"])
    gpu = await GpuReturn.after(keeper.worker, space, noted, vram)
    try:
        await gpu.prepare()
        await gpu.mend(
            noted["cuda"], noted["described"].get("processes", []), patience=_ROOM if noted["stage"] == WAKING else None
        )
    except KernelLost as e:
        if noted["stage"] != WAKING or e.data.get("name") != "NO_ROOM":
            raise
        noted["stage"] = ASLEEP
        keeper.fell_asleep(asleep)
        return
    finally:
        await gpu.close()
    await asyncio.to_thread(vram.discard)
    await tell_awake(link, keeper)
