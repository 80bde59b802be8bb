"""Hibernate and wake, step by step: a kernel goes to the disk as a snapshot, and comes back from there.

The kernel stands still from the instant that is saved to its end, so that nothing of it is lost in between; and it ends
only once its snapshot is committed and was looked at. From then on a doorman has its ports (`keeper/doorman.py`). It
stays hibernated until it has answered as a woken kernel: whatever fails before that, the snapshot is as it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import itertools
import logging
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import settings
from ...client.asked import Hibernate
from ...client.broker_connection import usable_criu
from ...client.in_progress import WakeInProgress
from ...client.record import Ended, now
from ...client.resting import Hibernated, Said, Untold
from ...errors import (
    Busy,
    Cancelled,
    GpuckptError,
    KernelLost,
    NoSuchSnapshot,
    Refused,
    RestoreFailed,
    SaveFailed,
)
from ...linux.reserved_ports import Reserved
from ...snapshots.hibernated import forget, remove
from ...snapshots.summary import HIBERNATED, current_name, summary, summary_of
from ...snapshots.told import Summary
from ...store import Manifest, Store
from .. import fit, ports
from ..agent_says import as_said, faults_said
from ..connections import Connections, own_connections, unread_bytes
from ..gpu import sharing
from ..link import AgentSilent, Link
from ..ports import Places
from .arrival import Verified, put_in_place, request_of
from .save import RoomInStore, commit, describe
from .stages import Stages, Tell
from .take import Taken, run_on, take

if TYPE_CHECKING:
    from ...client.record import Operation
    from ..kernel_life import Keeper

__all__ = ["come_back", "finish_wake", "hibernate", "remove_broken_off", "tell_again"]

log = logging.getLogger("gpuckpt.keeper")

_NOT_HIBERNATED = "The kernel was not hibernated; it goes on as before."
_LOOK = 0.1  # how often a kernel on its way to the disk looks whether a cell has come, in seconds
_LETTING_GO = 2.0  # how long clients have to close their connections, in seconds
_NAME = 60  # how much of a notebook's name is in a snapshot's


async def hibernate(keeper: Keeper, operation: Operation, request: Hibernate, tell: Tell) -> dict[str, Any]:
    """Put the kernel on the disk, and leave a doorman in its place; return what there is to say of the snapshot.

    Raises
    ------
    Refused, SaveFailed, StoreError, Busy, Cancelled : the kernel is as it was, and no snapshot was made.
    KernelLost : the GPU state could not be brought back.
    """
    stages = Stages(operation, tell)
    await stages.enter("checking")
    ends, at_once = request.end, request.at_once
    if keeper.state.hibernated is not None:
        return await _release(keeper) if ends else _already(keeper)
    # A job has no clients either, and comes back as itself.
    if not keeper.launch.agent and not (keeper.launch.job and ends):
        raise Refused(
            _NOT_HIBERNATED,
            "It has no agent: it could neither be told what came meanwhile, nor come back in another kernel.",
            'Use a kernel of the kind "Python 3 (gpuckpt)".',
        )
    # Before the kernel stands still: what clients are answered with while it is not there.
    await asyncio.to_thread(importlib.import_module, "jupyter_gpuckpt.keeper.doorman")
    operation.name = name = await asyncio.to_thread(_free_name, keeper)
    program = await asyncio.to_thread(usable_criu)
    said = await _about(keeper)
    begin = functools.partial(keeper.store.writer, name, quota=settings.store_quota())
    with await asyncio.to_thread(begin) as writer:
        taken = await take(
            keeper, operation, writer.directory, program, stages, RoomInStore(keeper, keeper.store), left="stopped"
        )
        try:
            await stages.enter("writing")
            await describe(keeper, writer, taken, stages)
            writing = commit(keeper, writer, taken, program, stages, "Hibernated.")
            manifest = await (writing if ends or at_once else _unless_a_cell_comes(keeper, operation, writing))
            await _make_sure(keeper, manifest, said, "end" if ends else "at once" if at_once else "")
        except BaseException as e:
            await _run_on(keeper, operation, taken, e, stages)
            raise
        else:
            await _leave(keeper, ends=ends)
        finally:
            await taken.frozen.tidied()
            await asyncio.to_thread(taken.staging.discard)
    await asyncio.to_thread(keeper.worker.close)
    if ends:
        if keeper.launch.job:
            keeper.state.ended = Ended(None, now(), manifest.name)
            keeper.note_state()
        await keeper.ended(0)
    return {**summary(manifest), "seconds": stages.seconds()}


def _already(keeper: Keeper) -> dict[str, Any]:
    assert keeper.state.hibernated is not None
    return {**asdict(keeper.state.hibernated.snapshot), "seconds": 0.0}


async def _release(keeper: Keeper) -> dict[str, Any]:
    """End the keeper of a hibernated kernel, and leave its snapshot to be resumed."""
    found = _already(keeper)
    keeper.state.hibernated = None
    await keeper.ended(0)
    return found


def _free_name(keeper: Keeper) -> str:
    """Return the name of the snapshot: that of the notebook, or the job, is in it."""
    launch = keeper.launch
    notebook = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(launch.notebook or launch.name).stem).strip("-.")[:_NAME]
    name = "-".join(filter(None, (HIBERNATED, notebook, launch.job[:_NAME] or launch.kernel_id[:8])))
    taken = {manifest.name for manifest in keeper.store.list()}
    numbered = (f"{name}-{n}" for n in itertools.count(2))
    return next(one for one in itertools.chain([name], numbered) if one not in taken)


async def _about(keeper: Keeper) -> Said | None:
    """Ask the kernel what others may ask of it while it is not there; None for a job."""
    if keeper.link is None or not keeper.launch.agent:
        return None
    try:
        said = await keeper.link.call_when_there("about", {}, settings.hook_timeout())
    except AgentSilent:
        raise SaveFailed(
            _NOT_HIBERNATED,
            f"It has not answered for {settings.hook_timeout():.0f} s: something in it holds Python's lock.",
            "Try again when the cell that runs is done.",
        ) from None
    return as_said(Said, said, SaveFailed, _NOT_HIBERNATED)


async def _unless_a_cell_comes(keeper: Keeper, operation: Operation, writing: Any) -> Manifest:
    """Wait for the snapshot; a cell that comes for the kernel breaks it off. Raises `Busy`."""
    doing = asyncio.ensure_future(writing)
    a_cell_came = False
    while not doing.done():
        if not a_cell_came and unread_bytes(_for_cells(keeper)):
            a_cell_came = True
            operation.cancelling.set()
        await asyncio.wait({doing}, timeout=_LOOK)
    if a_cell_came and isinstance(doing.exception(), Cancelled):
        raise _busy()
    manifest: Manifest = await doing
    return manifest


def _for_cells(keeper: Keeper) -> set[int]:
    connection = ports.of_connection_file(keeper.launch.connection_file)
    return {connection["shell_port"], connection["stdin_port"]}


def _busy() -> Busy:
    return Busy(_NOT_HIBERNATED, "A client asked something of it meanwhile.", "Ask again when it is idle.")


async def _make_sure(keeper: Keeper, manifest: Manifest, said: Said | None, how: str) -> None:
    """Make sure of the snapshot, and write down that it is the kernel now: there is no way back from then on."""
    store = keeper.store
    await asyncio.to_thread(_look_at, store, manifest)
    await asyncio.to_thread(_label, store, manifest)
    kernel = keeper.namespace().outer(keeper.state.kernel_pid)
    if kernel is None:
        raise KernelLost("The kernel ended while it was hibernated.", "", "Restart it.")
    own, clients = 0, dict[str, int]()
    if how != "end":
        own = own_connections(kernel, ports.of_connection_file(keeper.launch.connection_file)["shell_port"])
        clients = ports.peers(keeper.launch.connection_file)
        clients["shell_port"] -= own
    if not how:
        # Nothing may come between this and the kernel's end, and what has come until now counts.
        connections = await asyncio.to_thread(Connections, kernel, _for_cells(keeper))
        try:
            await connections.end(_LETTING_GO)
            if connections.unread():
                raise _busy()
        finally:
            connections.close()
    if how != "end":
        assert said is not None
        keeper.state.hibernated = Hibernated(summary_of(manifest), now(), said, clients, own)
    operation, keeper.state.operation = keeper.state.operation, None
    try:
        keeper.save_state()
    except OSError as e:
        keeper.state.hibernated, keeper.state.operation = None, operation
        raise SaveFailed(_NOT_HIBERNATED, f"The keeper's record could not be written: {e}", "Free disk space.") from e


async def _leave(keeper: Keeper, *, ends: bool) -> None:
    """End the kernel: it is its snapshot, whatever happens here."""
    try:
        await keeper.give_up()
    except Exception:
        log.exception("what is left of the hibernated kernel")  # it may hang in the driver, and ends with that
    if not ends:
        keeper.without_kernel()


def _look_at(store: Store, manifest: Manifest) -> None:
    """Read what the snapshot says of itself, and see that all that it names is there. Raises `StoreError`."""
    trusted = store.trusted(manifest.name)
    with store.parts(trusted, store.contents(trusted).files):
        if trusted.id != manifest.id:
            raise NoSuchSnapshot(f"The snapshot {manifest.name} was replaced.", "", "Try again.")


def _label(store: Store, manifest: Manifest) -> None:
    store.pin(manifest.name, True)
    store.tag(manifest.name, [HIBERNATED])


async def _run_on(keeper: Keeper, operation: Operation, taken: Taken, cause: BaseException, stages: Stages) -> None:
    """Let the kernel run on, and leave no snapshot of it."""
    failure = cause if isinstance(cause, GpuckptError) else SaveFailed(_NOT_HIBERNATED, str(cause))
    try:
        await run_on(keeper, taken, failure, stages)
    finally:
        with contextlib.suppress(NoSuchSnapshot):
            await asyncio.to_thread(remove, keeper.store, operation.name)


def remove_broken_off(store: Store, name: str) -> None:
    """Remove the snapshot of a kernel that runs on, since its keeper was killed on the way. Raises `StoreError`."""
    with contextlib.suppress(NoSuchSnapshot):
        remove(store, name)


# -- the way back


async def come_back(keeper: Keeper, operation: Operation, gpus: Sequence[int], stages: Stages) -> dict[str, Any]:
    """Bring a hibernated kernel back, and have it execute what clients have sent meanwhile.

    Raises
    ------
    Refused, NoSuchSnapshot, Untrusted, Damaged, RestoreFailed, Cancelled : it is hibernated as before.
    """
    keeper.stand_in.announce("waking")
    back = _snapshot(keeper).gpu_memory
    try:
        await stages.enter("checking")
        warnings = await _bring_up(keeper, operation, gpus, stages)
        operation.answering = True
        faults = await finish_wake(keeper)
    except Exception as e:
        error = _failed(keeper, e)
        log.exception("the kernel could not be woken: %s", error)
        await keeper.refuse_requests(error)
        raise error from e
    keeper.woken = {"at": now(), "seconds": stages.seconds()}
    return {"already": False, "back": back, "warnings": [*warnings, *faults], "seconds": stages.seconds()}


def _failed(keeper: Keeper, cause: Exception) -> GpuckptError:
    name = _snapshot(keeper).name
    then = "It is hibernated as before, and its snapshot is good: run a cell, or `wake` it, to try again."
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


async def _bring_up(keeper: Keeper, operation: Operation, gpus: Sequence[int], stages: Stages) -> list[str]:
    """Restore the kernel into a fresh sleeper; return what the person must know of it."""
    saved = _snapshot(keeper)
    name = operation.name = await asyncio.to_thread(current_name, keeper.store, saved.name, saved.id)
    manifest, request = await asyncio.to_thread(request_of, keeper.store, name)
    program = await asyncio.to_thread(usable_criu)
    check = functools.partial(fit.check_machine, manifest, request, keeper.launch, keeper.worker, program, [])
    fits = await sharing.fitting(keeper, stages, functools.partial(check, keeper.marks, gpus))
    try:
        verified = await Verified.of(keeper, keeper.store, manifest, request, program, fits, [], stages)
    except BaseException:
        keeper.without_kernel()
        raise
    snapshot = verified.snapshot
    try:
        await stages.enter("restoring")
        peers = await _clients(keeper)
        keeper.state.operation = WakeInProgress(name)
        keeper.save_state()
        await keeper.stand_in.give_ports_up()
        with contextlib.closing(Reserved()) as reserved:
            places = Places.of_restore(manifest.kernel["connection"], keeper.launch.connection_file, reserved)
            put = functools.partial(put_in_place, keeper, snapshot, verified.new, program, verified.gpu, places, peers)
            tidying = await put(hold=True, stages=stages)
        await tidying
    except BaseException:
        await verified.discard()
        keeper.without_kernel()
        raise
    await asyncio.to_thread(snapshot.close)
    return verified.warnings


async def _clients(keeper: Keeper) -> dict[str, int]:
    """Return how many connections the kernel will have when all of its clients are there again."""
    hibernated = keeper.state.hibernated
    assert hibernated is not None
    await keeper.stand_in.settled()
    clients = hibernated.clients = ports.peers(keeper.launch.connection_file)
    # The doorman has none of these, and the kernel makes them again as it comes back.
    return {**clients, "shell_port": clients["shell_port"] + hibernated.own_connections}


async def finish_wake(keeper: Keeper) -> list[str]:
    """Have the restored kernel execute what came while it was hibernated; return what went wrong in its hooks.

    It is told until it has answered, and noted until then, but not waited for longer than for its hooks. It hears of
    each wake once, also where a keeper dies in the middle and another tells it again.

    Raises
    ------
    RestoreFailed : it has ended; it is hibernated again.
    """
    hibernated, link, space = keeper.state.hibernated, keeper.link, keeper.space
    assert hibernated is not None
    assert link is not None
    assert space is not None
    untold = Untold(hibernated.snapshot, hibernated.snapshot.id + hibernated.since, hibernated.requests)
    telling = _telling(link, untold)
    died = asyncio.create_task(space.wait(keeper.state.kernel_pid))
    faults: list[str] = []
    try:
        await asyncio.wait({telling, died}, timeout=settings.hook_timeout(), return_when=asyncio.FIRST_COMPLETED)
        if telling.done():
            faults = faults_said(await telling).faults
        elif died.done():
            raise RestoreFailed("The restored kernel ended at once.", "", "")
    except Exception as e:
        telling.cancel()
        await _leave(keeper, ends=False)
        if isinstance(e, AgentSilent):
            raise RestoreFailed("The restored kernel was ended at once.", "", "") from e
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
    if keeper.state.untold is not None and keeper.link is not None:
        keeper.in_background(_until_told(keeper, _telling(keeper.link, keeper.state.untold)))


def _telling(link: Link, untold: Untold) -> asyncio.Task[Any]:
    return asyncio.create_task(link.call("woken", {"token": untold.token, "requests": untold.requests}, None))


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
        keeper.in_background(asyncio.to_thread(forget, keeper.store, untold.snapshot.name, untold.snapshot.id))
