"""Wake, step by step: what a sleeping kernel had on GPUs comes back to them; a hibernated one comes back whole.

Where it cannot, the kernel sleeps on, unharmed, and wakes at a later try.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ... import settings
from ...client.in_progress import ParkedMemory
from ...client.sleep_record import ASLEEP, WAKING
from ...errors import Cancelled, DriverError, GpuckptError, Refused, StoreError
from ...operations.requests import Wake
from ...operations.results import Woken
from ..gpu import sharing
from .progress import OperationProgress, ProgressCallback, to_nobody
from .sleep import tell_awake
from .wake_at_touch import tell_not_woken
from .wake_hibernated import come_back

if TYPE_CHECKING:
    from ...client.record import Operation
    from ..kernel_life import Keeper

__all__ = ["awaken", "bring_back", "until_whole", "wake"]

log = logging.getLogger("gpuckpt.keeper")

READING = "reading what it had on the GPU"

_STILL_ASLEEP = "The kernel could not be woken and is still asleep; nothing of it is lost."


async def wake(keeper: Keeper, operation: Operation, request: Wake, on_progress: ProgressCallback) -> Woken:
    """Wake the kernel. One that is awake stays as it is.

    Raises
    ------
    Refused, Cancelled : it sleeps on.
    GpuckptError : it is hibernated as before, as `come_back`.
    KernelLost : the GPU state could not be brought back.
    """
    progress = OperationProgress(operation, on_progress)
    if keeper.state.hibernated is not None:
        return await come_back(keeper, operation, request.gpus, progress)
    return await awaken(keeper, progress)


async def awaken(keeper: Keeper, progress: OperationProgress) -> Woken:
    """Wake the kernel, as a part of an operation that needs it awake."""
    gpu, channel = keeper.asleep, keeper.channel
    if keeper.state.sleep is None or gpu is None or channel is None:
        return Woken(already=True, back=0, seconds=progress.seconds())
    noted = keeper.state.sleep

    def note_parked(parked: ParkedMemory) -> None:
        noted.parked = parked
        keeper.note_state()

    await until_whole(keeper, progress)
    async with sharing.turn(gpu.needs, progress):
        if gpu.needs:
            await sharing.make_room(keeper, gpu.needs, progress, _STILL_ASLEEP, gpu.wishes)
        await progress.enter(settings.WAKING, cancellable=False)
        noted.stage = WAKING
        keeper.note_state()
        try:
            await gpu.wake(note_parked)
        except DriverError as e:
            noted.stage = ASLEEP
            keeper.note_state()
            raise Refused(_STILL_ASLEEP, f"{e.what} {e.why}", e.then, **e.data) from e
    await tell_awake(channel, keeper)
    keeper.tidy(gpu.tidy())
    return Woken(already=False, back=gpu.freed, seconds=progress.seconds())


async def until_whole(keeper: Keeper, progress: OperationProgress) -> None:
    """Wait until all of the GPU memory of a kernel that was restored before it is out of the store.

    Raises
    ------
    Refused : it is damaged, or there is no room for it; it can be tried again.
    Cancelled : it was not waited for.
    """
    late = keeper.asleep.late if keeper.asleep is not None else None
    if late is None:
        return
    await progress.enter(READING)
    try:
        await late.whole(progress)
    except Cancelled:
        raise
    except StoreError as e:
        name = late.snapshot.name
        raise Refused(
            f"The kernel runs without the GPU: what it had there, in the snapshot {name}, could not be read.",
            f"{e.what} {e.why}",
            f"{e.then} You can restore any snapshot into this kernel. Until its GPU memory can be read, no cell is "
            "run, and GPU calls wait.",
            **e.data,
        ) from e
    if keeper.asleep is not None:
        keeper.asleep.late = None
    if keeper.state.sleep is not None:
        keeper.state.sleep.late = None
    keeper.note_state()


async def bring_back(keeper: Keeper) -> None:
    """Wake a restored kernel whose keeper died before its GPU state was back."""
    try:
        await keeper.ask(Wake(), to_nobody)
    except GpuckptError as e:
        log.warning("the restored kernel has no GPU state: %s", e)
        if keeper.channel is not None:
            await tell_not_woken(keeper.channel, e)
