"""Wake a hibernated kernel, step by step: it comes back from its snapshot, and executes what came for it meanwhile.

It stays hibernated until it has answered as a woken kernel: whatever fails before that, the snapshot is as it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ... import settings
from ...client.broker_connection import COMES_BACK, usable_criu
from ...client.in_progress import WakeInProgress
from ...client.record import now
from ...client.sleep_record import UnconfirmedWake
from ...errors import GpuckptError, RestoreFailed
from ...linux.reserved_ports import Reserved
from ...operations.results import Summary, WakeNote, Woken
from ...snapshots.hibernated import forget
from ...snapshots.saved import kernel_of
from ...snapshots.summary import current_name
from .. import ports, preflight
from ..agent_channel import AgentChannel, AgentSilent
from ..agent_replies import faults_in
from ..gpu import sharing
from ..ports import Places
from .fresh_sleeper import plan_restore
from .hibernate import leave
from .prepared_restore import PreparedRestore
from .progress import OperationProgress
from .takeover import AtOnce, Coming, InPlace, take_over

if TYPE_CHECKING:
    from ...client.record import Operation
    from ..kernel_life import Keeper

__all__ = ["come_back", "finish_wake", "tell_again"]

log = logging.getLogger("gpuckpt.keeper")


async def come_back(keeper: Keeper, operation: Operation, gpus: Sequence[int], progress: OperationProgress) -> Woken:
    """Bring a hibernated kernel back, and have it execute what clients have sent meanwhile.

    Raises
    ------
    Refused, NoSuchSnapshot, Untrusted, Damaged, RestoreFailed, Cancelled : it is hibernated as before.
    """
    keeper.stand_in.announce("waking")
    back = _snapshot(keeper).gpu_memory
    try:
        await progress.enter("checking")
        warnings = await _bring_up(keeper, operation, gpus, progress)
        operation.answering = True
        faults = await finish_wake(keeper)
    except Exception as e:
        error = _failed(keeper, e)
        log.exception("the kernel could not be woken: %s", error)
        await keeper.refuse_requests(error)
        keeper.stand_in.announce("hibernated")
        raise error from e
    keeper.woken = WakeNote(at=now(), seconds=progress.seconds())
    return Woken(already=False, back=back, warnings=[*warnings, *faults], seconds=progress.seconds())


def _failed(keeper: Keeper, cause: Exception) -> GpuckptError:
    name = _snapshot(keeper).name
    then = "It is still hibernated, and its snapshot is intact: run a cell, or `wake` it, to try again."
    if isinstance(cause, GpuckptError):
        kind = type(cause)
        why = f"{cause.what} {cause.why}".strip()
        return kind(f"The hibernated kernel could not be woken ({name}).", why, f"{cause.then} {then}", **cause.data)
    why = str(cause) if isinstance(cause, OSError) else f"{type(cause).__name__}: {cause}"
    return RestoreFailed(f"The hibernated kernel could not be woken ({name}).", why, then)


def _snapshot(keeper: Keeper) -> Summary:
    hibernated = keeper.state.hibernated
    assert hibernated is not None
    return hibernated.snapshot


async def _bring_up(
    keeper: Keeper, operation: Operation, gpus: Sequence[int], progress: OperationProgress
) -> list[str]:
    """Restore the kernel into a fresh sleeper; return what the user must know of it."""
    saved = _snapshot(keeper)
    await asyncio.to_thread(keeper.take_lease, saved.id)
    name = operation.name = await asyncio.to_thread(current_name, keeper.store, saved.name, saved.id)
    manifest, request = await asyncio.to_thread(plan_restore, keeper.store, name)
    program = await asyncio.to_thread(usable_criu, COMES_BACK)
    check = functools.partial(preflight.check_machine, manifest, request, keeper.launch, keeper.worker, program, [])
    fitting = asyncio.create_task(sharing.fitting(keeper, progress, functools.partial(check, keeper.marks, gpus)))
    await fitting
    async with contextlib.AsyncExitStack() as undoing:
        undoing.callback(keeper.without_kernel)
        verified = await PreparedRestore.of(keeper, keeper.store, manifest, request, program, fitting, [], progress)
        undoing.push_async_callback(verified.discard)
        snapshot = verified.snapshot
        await progress.enter("restoring")
        peers = await _clients(keeper)
        keeper.state.operation = WakeInProgress(name)
        keeper.save_state()
        await keeper.stand_in.give_ports_up()
        with contextlib.closing(Reserved()) as reserved:
            places = Places.of_restore(kernel_of(manifest).connection, keeper.launch.connection_file, reserved)
            gpu = AtOnce(verified.gpu, verified.new, manifest)
            coming = Coming(keeper, snapshot, verified.new, program, gpu, verified.warnings)
            tidying = await take_over(coming, InPlace(peers, hold=True, progress=progress), places)
        await tidying
        undoing.pop_all()
    await asyncio.to_thread(snapshot.close)
    return verified.warnings


async def _clients(keeper: Keeper) -> dict[str, int]:
    """Return how many clients the kernel will have when all of them are there again."""
    hibernated = keeper.state.hibernated
    assert hibernated is not None
    await keeper.stand_in.settled()
    hibernated.clients = ports.peers(keeper.launch.connection_file)
    return hibernated.clients


async def finish_wake(keeper: Keeper) -> list[str]:
    """Have the restored kernel execute what came while it was hibernated; return what went wrong in its hooks.

    It is told until it has answered, and noted until then, but not waited for longer than for its hooks. It hears of
    each wake once, also where a keeper dies in the middle and another tells it again.

    Raises
    ------
    RestoreFailed : it has ended; it is hibernated again.
    """
    hibernated, channel, space = keeper.state.hibernated, keeper.channel, keeper.space
    assert hibernated is not None
    assert channel is not None
    assert space is not None
    untold = UnconfirmedWake(hibernated.snapshot, hibernated.snapshot.id + hibernated.since, hibernated.requests)
    telling = _telling(channel, untold)
    died = asyncio.create_task(space.wait(keeper.state.kernel_pid))
    faults: list[str] = []
    try:
        await asyncio.wait({telling, died}, timeout=settings.hook_timeout(), return_when=asyncio.FIRST_COMPLETED)
        if telling.done():
            faults = faults_in(await telling).faults
        elif died.done():
            raise RestoreFailed("The restored kernel ended immediately.", "", "")
    except Exception as e:
        telling.cancel()
        await leave(keeper, ends=False)
        if isinstance(e, AgentSilent):
            raise RestoreFailed("The restored kernel was killed immediately.", "", "") from e
        raise
    finally:
        died.cancel()
        with contextlib.suppress(asyncio.CancelledError, GpuckptError):
            await died
    keeper.state.hibernated = keeper.state.operation = None
    keeper.state.untold = untold
    if telling.done():
        _was_told(keeper)
    else:
        # It runs, and does what waits when it comes to it: a long call that keeps Python's lock was saved in it.
        log.warning("the woken kernel has not answered yet")
        keeper.in_background(_until_told(keeper, telling))
    keeper.note_state()
    keeper.watch()
    return faults


def tell_again(keeper: Keeper) -> None:
    """Tell a woken kernel what waits for it, which the keeper before this one may not have come to."""
    if keeper.state.untold is not None and keeper.channel is not None:
        keeper.in_background(_until_told(keeper, _telling(keeper.channel, keeper.state.untold)))


def _telling(channel: AgentChannel, untold: UnconfirmedWake) -> asyncio.Task[Any]:
    return asyncio.create_task(channel.call("woken", {"token": untold.token, "requests": untold.requests}, None))


async def _until_told(keeper: Keeper, telling: asyncio.Task[Any]) -> None:
    try:
        await telling
    except AgentSilent:
        return  # it has ended
    except GpuckptError as e:
        log.error("what came for the hibernated kernel could not be executed: %s", e)
    _was_told(keeper)
    keeper.note_state()


def _was_told(keeper: Keeper) -> None:
    untold, keeper.state.untold = keeper.state.untold, None
    if untold is not None:
        keeper.in_background(asyncio.to_thread(_forget, keeper, untold))


def _forget(keeper: Keeper, untold: UnconfirmedWake) -> None:
    """Remove the snapshot that the kernel was, which nobody else may bring back before."""
    forget(keeper.store, untold.snapshot.name, untold.snapshot.id)
    keeper.drop_lease()
