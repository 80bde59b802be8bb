"""What a new keeper does with a kernel that another one held, and about an operation that that one died in."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import shutil
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...client.in_progress import MoveInProgress, ParkedMemory, RestoreInProgress, SaveInProgress, WakeInProgress
from ...client.record import Operation, State
from ...client.sleep_record import ASLEEP, WAKING, Sleep
from ...errors import (
    DriverError,
    GpuckptError,
    KernelLost,
    KernelWaits,
    RestoreFailed,
)
from ...freeze import twin
from ...freeze.nccl import Communicators
from ...linux import processes
from ...operations.results import Restored
from .. import memory_claim
from ..gpu import gate
from ..gpu.bring_back import GpuReturn
from ..gpu.late_vram import LateVram
from ..gpu.sleep import GpuSleep
from ..namespace import Namespace
from ..staging import discard_left, vram_files
from .criu_run import end_criu, let_run
from .failed_restore import answer_from_fresh, failed_restore
from .fresh_sleeper import resume
from .hibernate import remove_broken_off
from .parts import CAPTURE, VRAM, WORKING_COPY
from .progress import OperationProgress, to_nobody
from .sleep import fell_asleep, tell_awake
from .wake import bring_back
from .wake_hibernated import finish_wake, tell_again

if TYPE_CHECKING:
    from ..kernel_life import Keeper

__all__ = ["recover", "take_over"]

log = logging.getLogger("gpuckpt.keeper")

_ROOM = 5.0
"""For how long a kernel that was waking is waited for that finds no room on its GPU, in seconds: then it sleeps on."""


async def take_over(keeper: Keeper) -> None:
    """Hold the kernel that a dead keeper held; `recover` then undoes or finishes what that one had begun.

    Raises
    ------
    KernelLost : the kernel cannot be held any more.
    """
    state, left, folder = keeper.state, keeper.state.operation, keeper.folder
    if state.hibernated is not None and not isinstance(left, WakeInProgress):
        state.sleeper = None  # it was to be killed
    kept = state.sleeper[0] if state.sleeper is not None and folder.has_sleeper() else None
    for pid in folder.sleepers():
        if pid != kept:  # a restore had begun with it
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    for run_dir in folder.path.glob("run-*/"):
        if kept is None or run_dir.name != state.run:
            shutil.rmtree(run_dir, ignore_errors=True)
    for left_over in (WORKING_COPY, CAPTURE):
        shutil.rmtree(folder.path / left_over, ignore_errors=True)
    memory_claim.remove_left(folder.path)
    if kept is not None:
        await keeper.attach(state.run, kept, state.kernel_pid)
        assert keeper.space is not None
        assert keeper.channel is not None
        if keeper.space.outer(state.kernel_pid) is None:
            log.warning("the kernel did not outlive its keeper")
        keeper.channel.introduce(keeper.launch.agent, comes_back=_comes_back(state))
    elif state.hibernated is not None:
        keeper.without_kernel()
    elif isinstance(left, RestoreInProgress) and not keeper.launch.job:
        log.warning("the keeper before this one died in the middle of a restore; the kernel starts afresh")
        await keeper.start_kernel()
    else:
        raise KernelLost("The {kernel} is gone.", "Its keeper died, and so did its namespace.", "{Restart}.")


def _comes_back(state: State) -> bool:
    """Tell whether the kernel came from a snapshot, and may not have been told of it: `recover` sees to that."""
    return _left_untold(state) is not None or state.hibernated is not None or state.untold is not None


def _left_untold(state: State) -> Restored | None:
    """Return what the kernel is to be told that a dead keeper had restored; None where the one before it runs on."""
    left = state.operation
    if isinstance(left, RestoreInProgress) and not left.fresh and left.run != state.run:
        return left.result
    return None


async def recover(keeper: Keeper) -> None:
    """Undo what a dead keeper had begun with the kernel, or bring it to an end."""
    try:
        await _mend(keeper)
    except KernelLost as e:
        log.error("the kernel is lost: %s", e)
        await keeper.ended(-signal.SIGKILL)
    except RestoreFailed as e:
        log.warning("the kernel is hibernated again: %s", e)
    await asyncio.to_thread(_take_lease, keeper)
    keeper.wake_if_asked()


def _take_lease(keeper: Keeper) -> None:
    """Have the hibernated kernel belong to this keeper again; where somebody was faster, a wake says so."""
    hibernated = keeper.state.hibernated
    if hibernated is not None:
        try:
            keeper.take_lease(hibernated.snapshot.id)
        except GpuckptError as e:
            log.warning("%s", e)


async def _mend(keeper: Keeper) -> None:
    """Undo or finish what was under way, and find the kernel as it is to be: asleep, hibernated, or running.

    Raises
    ------
    KernelLost : the GPU state could not be brought back.
    RestoreFailed : it was waking, and has ended; it is hibernated again.
    """
    left = keeper.state.operation
    if left is not None:
        log.warning("the keeper before this one died during a %s", left.kind)
    if isinstance(left, SaveInProgress):
        # Others wait for it, and are told: the kernel may be held by a criu that no signal ends.
        operation = Operation("hibernate" if left.left == "stopped" else "save", left.name, cancellable=False)
        undoing = OperationProgress(operation, to_nobody)
        with keeper.operations.begin(operation):
            await undoing.tell_of(f"undoing the {operation.kind} in the middle of which its keeper died")
            await _recover_save(keeper, left, undoing)
    elif isinstance(left, MoveInProgress):
        await _recover_move(keeper, left)
    if keeper.state.sleep is not None:
        await _recover_sleep(keeper, keeper.state.sleep)
    with contextlib.suppress(GpuckptError):
        await asyncio.to_thread(keeper.store.collect)
    if isinstance(left, RestoreInProgress):
        await _recover_restore(keeper, left)
    if keeper.state.hibernated is not None and keeper.space is not None:
        await finish_wake(keeper)
    else:
        tell_again(keeper)
    if keeper.space is not None:
        await asyncio.to_thread(discard_left, keeper.space)
        await asyncio.to_thread(twin.end, keeper.space.run_dir, keeper.space.outer, kept=True)
        if keeper.state.sleep is None:
            gate.open_(keeper.space.run_dir)
            await asyncio.to_thread(_make_communicators_again, keeper.space)
            if left is None:  # but perhaps a save was being written
                await asyncio.to_thread(vram_files(keeper.space).discard)
    if isinstance(left, RestoreInProgress) and (result := _left_untold(keeper.state)) is not None:
        # Not waited for: its hooks may wait for GPU memory, which comes when this is over.
        keeper.in_background(_tell_restored(keeper, left, result))
    else:
        keeper.state.operation = None
        keeper.note_state()


def _make_communicators_again(space: Namespace) -> None:
    living = processes.inner_pids(processes.descendants(space.pid))
    try:
        Communicators.left_behind(space.run_dir, living).make_again()
    except DriverError as e:
        log.error("%s", e)


async def _recover_save(keeper: Keeper, left: SaveInProgress, undoing: OperationProgress) -> None:
    """Let the kernel run on, with what it has on GPUs; one that was to be hibernated is not."""
    await end_criu(keeper.namespace(), left.criu)
    await asyncio.to_thread(twin.end, keeper.namespace().run_dir, keeper.namespace().outer)
    await let_run(keeper.namespace().outer(keeper.state.kernel_pid), left.still, undoing.tell_of)
    await _bring_back_gpu_state(keeper, left, left.parking)
    if keeper.state.sleep is None:
        await asyncio.to_thread(vram_files(keeper.namespace()).discard)
    if left.left == "stopped":
        with contextlib.suppress(GpuckptError):
            await asyncio.to_thread(remove_broken_off, keeper.store, left.name)


async def _recover_move(keeper: Keeper, left: MoveInProgress) -> None:
    """Bring what the kernel has on GPUs back to those that it was on, or find that it has come to the others."""
    await _bring_back_gpu_state(keeper, left, [])


async def _bring_back_gpu_state(
    keeper: Keeper, left: SaveInProgress | MoveInProgress, parked: Sequence[ParkedMemory]
) -> None:
    gpu = await GpuReturn.after(keeper.worker, keeper.namespace(), parked, vram_files(keeper.namespace()))
    try:
        await gpu.prepare()
        await gpu.mend(left.cuda, [dataclasses.asdict(held) for held in left.held])
    finally:
        await gpu.close()


async def _recover_restore(keeper: Keeper, left: RestoreInProgress) -> None:
    """Say so to the cell that asked, where the old kernel was gone already and a fresh one is in its place."""
    if left.fresh:
        cause = RestoreFailed("", "The {kernel}'s keeper died in the middle of it.", "Restore it again.")
        await answer_from_fresh(keeper, left.asked, left.peers, failed_restore(left.name, cause))


async def _tell_restored(keeper: Keeper, left: RestoreInProgress, result: Restored) -> None:
    """Have the kernel from the snapshot answer the cell that asked, unless it was told before."""
    if keeper.channel is not None and keeper.launch.agent:
        try:
            await resume(keeper.channel, left.asked, result, left.asked_at)
        except GpuckptError as e:
            log.error("the restored kernel could not be told of it: %s", e)
    if keeper.state.operation is left:
        keeper.state.operation = None
        keeper.note_state()


async def _recover_sleep(keeper: Keeper, noted: Sleep) -> None:
    """Find the kernel asleep, as it was; one that was falling asleep or waking is brought back, if there is room."""
    space, channel = keeper.namespace(), keeper.channel
    assert channel is not None
    vram = vram_files(space)
    late = LateVram.noted(noted.late, VRAM, vram.outside) if noted.late is not None else None
    asleep = GpuSleep.noted(keeper.worker, space, noted, vram, late)
    if noted.stage == ASLEEP and await asleep.is_whole():
        fell_asleep(keeper, asleep)
        if late is not None:
            keeper.in_background(bring_back(keeper))
        return
    log.warning("the keeper before this one died while the kernel was %s", noted.stage)
    gpu = await GpuReturn.after(keeper.worker, space, [noted.parked] if noted.parked is not None else [], vram)
    try:
        await gpu.prepare()
        held, patience = noted.described.get("processes", []), _ROOM if noted.stage == WAKING else None
        await gpu.mend(noted.cuda, held, patience=patience)
    except KernelWaits:
        if noted.stage != WAKING:
            raise
        noted.stage = ASLEEP
        fell_asleep(keeper, asleep)
        return
    finally:
        await gpu.close()
    await asyncio.to_thread(vram.discard)
    await tell_awake(channel, keeper)
