"""Sleep, step by step: what the kernel has on GPUs goes to host memory, and stays there; its processes run on.

Whatever fails is undone, and the kernel continues as before.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
from typing import TYPE_CHECKING, Any

from ... import settings
from ...client.in_progress import ParkedMemory
from ...client.record import now
from ...client.sleep_record import ASLEEP, FALLING_ASLEEP, Sleep
from ...errors import Busy, Cancelled, GpuckptError, KernelLost, Refused
from ...freeze import cuda
from ...freeze.cuda_waits import CudaWaits
from ...linux import processes
from ...operations import requests as asked
from ...operations.results import Slept
from ..agent_channel import AgentChannel, AgentSilent
from ..agent_replies import ReadyForSleep
from ..gpu.freeze import refuse_imports
from ..gpu.peers import parked_or_apart
from ..gpu.sleep import GpuSleep
from ..staging import vram_files
from .progress import OperationProgress, ProgressCallback
from .wake_at_touch import wake_at_touch

if TYPE_CHECKING:
    from ...client.record import Operation
    from ..kernel_life import Keeper

__all__ = ["fell_asleep", "sleep", "tell_awake"]

log = logging.getLogger("gpuckpt.keeper")

_NOT_ASLEEP = "The {kernel} was not put to sleep; it keeps running."


async def sleep(keeper: Keeper, operation: Operation, request: asked.Sleep, on_progress: ProgressCallback) -> Slept:
    """Put the kernel to sleep.

    Raises
    ------
    Busy, Refused, SaveFailed, Cancelled : the kernel is as it was.
    KernelLost : the GPU state could not be brought back.
    """
    progress = OperationProgress(operation, on_progress)
    await progress.enter("checking")
    if keeper.state.sleep is not None:
        return Slept(already=True, freed=keeper.state.sleep.freed, seconds=progress.seconds())
    channel = _agent_of(keeper)
    if request.idle_for is not None:
        _refuse_unless_idle(keeper, channel, request.idle_for)
    # Before the agent hears of it: it then sends all cells here first, also should this keeper die.
    _note(keeper, Sleep(FALLING_ASLEEP, now()))
    await progress.enter("preparing the {kernel}")
    try:
        agent = await progress.or_cancelled(channel.ask("before_sleep", ReadyForSleep, Refused, _NOT_ASLEEP))
        gpu = await _fall_asleep(keeper, agent, progress)
    except BaseException as e:
        if isinstance(e, KernelLost):
            raise
        await tell_awake(channel, keeper)
        if isinstance(e, GpuckptError | OSError):
            raise _not_asleep(e) from e
        raise
    fell_asleep(keeper, gpu)
    with contextlib.suppress(AgentSilent):
        await channel.send({"call": "asleep", "id": 0, "args": {"gpu": bool(gpu.freed)}})
    return Slept(already=False, freed=gpu.freed, seconds=progress.seconds())


def fell_asleep(keeper: Keeper, gpu: GpuSleep) -> None:
    """Note that the kernel sleeps, and wake it when it touches a GPU."""
    keeper.asleep = gpu
    if gpu.freed and keeper.state.sleep is not None:
        keeper.in_background(wake_at_touch(keeper, gpu, keeper.state.sleep.waits))


def _agent_of(keeper: Keeper) -> AgentChannel:
    if keeper.launch.job:
        raise Refused(
            _NOT_ASLEEP,
            "It is a job, so nothing would wake it.",
            f"Hibernate it: `gpuckpt hibernate {keeper.launch.job}`; `gpuckpt restore` with its name brings it back.",
        )
    if keeper.channel is None or not keeper.launch.agent:
        raise Refused(
            _NOT_ASLEEP,
            "It has no agent, so running a cell could not wake it.",
            'Put kernels of the kind "Python 3 (gpuckpt)" to sleep.',
        )
    return keeper.channel


def _refuse_unless_idle(keeper: Keeper, channel: AgentChannel, seconds: float) -> None:
    if keeper.state.awake:
        raise Refused(_NOT_ASLEEP, "It is being kept awake.", "`gpuckpt awake @ off` allows it to sleep.")
    last = datetime.datetime.fromisoformat(channel.last_active)
    idle = (datetime.datetime.now(datetime.timezone.utc) - last).total_seconds()
    if channel.busy or idle < seconds:
        raise Busy(_NOT_ASLEEP, "It is in use.", f"Try again when it has been idle for {seconds:.0f} s.")


async def _fall_asleep(keeper: Keeper, agent: ReadyForSleep, progress: OperationProgress) -> GpuSleep:
    space, worker = keeper.namespace(), keeper.worker
    kernel = space.outer(keeper.state.kernel_pid)
    if kernel is None:
        raise KernelLost("The {kernel} has ended.", "", "{Restart}.")

    on_gpu = await asyncio.to_thread(cuda.freezable, worker, [kernel, *processes.descendants(kernel)])
    described: dict[str, Any] = {"processes": []}
    unless_parked, several = dict[int, Refused](), list[int]()
    if on_gpu:
        await asyncio.to_thread(refuse_imports, space.run_dir, on_gpu)
        described = await asyncio.to_thread(cuda.describe, worker, on_gpu)
        known = {kernel: agent.peers} if agent.peers is not None else {}
        refused = await asyncio.to_thread(cuda.preflight, worker, on_gpu, known, room_later=True)
        unless_parked, several = await asyncio.to_thread(parked_or_apart, space.run_dir, on_gpu, refused, described)
    vram = vram_files(space)
    await asyncio.to_thread(vram.discard)
    gpu = GpuSleep(worker, space, on_gpu, described, vram)
    noted = gpu.note(FALLING_ASLEEP)
    noted.hooks = agent.hooks
    noted.waits = sorted(await asyncio.to_thread(CudaWaits(on_gpu).places))
    _note(keeper, noted)

    def note_parked(parked: ParkedMemory) -> None:
        noted.parked = parked
        keeper.note_state()

    await progress.enter(FALLING_ASLEEP, cancellable=False)
    await gpu.fall_asleep(kernel, note_parked, unless_parked, several)
    if gpu.parked is None:
        noted.parked = None  # it was about to be
    noted.stage, noted.since, noted.host = ASLEEP, now(), await asyncio.to_thread(gpu.host_memory)
    try:
        keeper.save_state()
    except OSError:
        await gpu.wake(note_parked)
        keeper.tidy(gpu.tidy())
        raise
    return gpu


def _note(keeper: Keeper, noted: Sleep) -> None:
    keeper.state.sleep = noted
    try:
        keeper.save_state()
    except OSError:
        keeper.state.sleep = None
        raise


async def tell_awake(channel: AgentChannel, keeper: Keeper) -> None:
    """Note that the kernel is awake, and have its agent do what comes after."""
    with contextlib.suppress(AgentSilent):
        await channel.call("after_sleep", {}, settings.hook_timeout())
    keeper.state.sleep = keeper.asleep = None
    channel.last_active = now()
    keeper.note_state()


def _not_asleep(error: GpuckptError | OSError) -> GpuckptError:
    """Return an error, which may speak of a save, as one of the sleep that was undone."""
    if isinstance(error, OSError):
        return Refused(_NOT_ASLEEP, str(error), "Make room on that disk, and try again.")
    if isinstance(error, (Busy, Cancelled)):
        return error
    return Refused(_NOT_ASLEEP, error.why or error.what, error.then, **error.data)
