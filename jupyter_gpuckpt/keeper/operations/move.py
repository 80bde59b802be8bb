"""Move, step by step: what the kernel has on its GPUs goes to others, through host memory; its processes stay.

The driver does it all, in the processes as they are: no file is written, and clients stay connected. A step that fails
leaves the kernel on the GPUs that it was on.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ... import settings
from ...client.in_progress import MoveInProgress, held_of
from ...errors import Busy, Cancelled, DriverError, GpuckptError, KernelLost, Refused
from ...freeze import cuda, parking_channel
from ...linux import processes
from ...operations.requests import Move
from ...operations.results import Moved
from ..gpu import gate, sharing
from ..gpu.freeze import refuse_imports
from ..gpu.parked import together
from ..gpu.peers import bring_together, keep_apart, parked_or_apart
from .progress import OperationProgress, ProgressCallback
from .take import after_save, before_save

if TYPE_CHECKING:
    from ...client.record import Operation
    from ..kernel_life import Keeper

_NOT_MOVED = "The {kernel} was not moved; it keeps running."


async def move(keeper: Keeper, operation: Operation, request: Move, on_progress: ProgressCallback) -> Moved:
    """Move the kernel's GPU state to other GPUs.

    Raises
    ------
    Refused, Cancelled : the kernel is as it was.
    KernelLost : the GPU state could not be brought back.
    """
    progress = OperationProgress(operation, on_progress)
    await progress.enter("checking")
    channel = keeper.channel
    assert channel is not None
    await progress.enter("preparing the {kernel}")
    failure: GpuckptError | None = None
    patience = 0.0  # as in `take`
    try:
        agent = await progress.or_cancelled(before_save(channel, keeper.launch.agent))
        patience = settings.hook_timeout()
        moves = await _moved(keeper, request.gpus, agent.peers, progress)
    except (Busy, Cancelled, KernelLost) as e:
        failure = e
        raise
    except GpuckptError as e:  # which may speak of a save
        failure = Refused(_NOT_MOVED, e.why or e.what, e.then, **e.data)
        raise failure from e
    finally:
        await after_save(channel, keeper.launch.agent, failure, patience)
    return Moved(moves=moves, seconds=progress.seconds())


async def _moved(
    keeper: Keeper, gpus: Sequence[int], peers: Mapping[str, int] | None, progress: OperationProgress
) -> list[str]:
    space, worker = keeper.namespace(), keeper.worker
    kernel = space.outer(keeper.state.kernel_pid)
    tree = [kernel, *processes.descendants(kernel)] if kernel is not None else []
    on_gpu = await asyncio.to_thread(cuda.freezable, worker, tree)
    if not on_gpu:
        raise Refused(_NOT_MOVED, "It has nothing on a GPU.", "Move it once it uses one.")
    known = {kernel: peers} if kernel is not None and peers is not None else {}
    await asyncio.to_thread(refuse_imports, space.run_dir, on_gpu)
    refused = await asyncio.to_thread(cuda.preflight, worker, on_gpu, known)
    described = await asyncio.to_thread(cuda.describe, worker, on_gpu)
    to_be_parked, several = await asyncio.to_thread(parked_or_apart, space.run_dir, on_gpu, refused, described)
    for why in to_be_parked.values():
        raise why  # nothing is parked here
    gpu_map = await sharing.fitting(keeper, progress, functools.partial(_map, worker, described, on_gpu, gpus))
    held = cuda.needs(described)
    keeper.state.operation = MoveInProgress(list(on_gpu), held_of(described))
    keeper.save_state()
    await progress.enter("moving", cancellable=False)
    await together(functools.partial(parking_channel.watch_gate, space.run_dir), on_gpu)
    closed = gate.close(space.run_dir)
    try:
        await asyncio.to_thread(gate.settle, closed)
        await asyncio.to_thread(keep_apart, space.run_dir, several)
        await asyncio.to_thread(cuda.freeze, worker, on_gpu, described)
        try:
            await asyncio.to_thread(cuda.thaw, worker, on_gpu, gpu_map, held)
        except DriverError as error:
            await asyncio.to_thread(cuda.mend, worker, on_gpu, described["processes"])
            raise Refused(_NOT_MOVED, f"{error.what} {error.why}", error.then, **error.data) from error
    finally:
        await asyncio.to_thread(bring_together, space.run_dir, several)
        gate.open_(space.run_dir)
        keeper.state.operation = None
        with contextlib.suppress(OSError):
            keeper.save_state()
    return await asyncio.to_thread(cuda.moves, worker, described, gpu_map)


def _map(
    worker: cuda.CudaWorker, described: Mapping[str, Any], on_gpu: Sequence[int], gpus: Sequence[int]
) -> Mapping[str, str]:
    found = cuda.fits(worker, described, on_gpu, gpus=gpus, what=_NOT_MOVED)
    if not found or all(found.get(old, old) == old for old in cuda.needs(described)):
        raise Refused(_NOT_MOVED, "It is already there.", "`nvidia-smi` lists the GPUs and their numbers.")
    return found
