"""Hibernate, step by step: a kernel goes to the disk as a snapshot.

The kernel is paused from the instant that is saved to its end, so that nothing of it is lost in between; and it ends
only once its snapshot is committed and was looked at. From then on `keeper/port_listener.py` listens at its ports,
until it is woken (`wake_hibernated`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import itertools
import json
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import settings
from ...client import sleep_record
from ...client.broker_connection import COMES_BACK, usable_criu
from ...client.record import Ended, now
from ...client.sleep_record import KernelReplies
from ...errors import (
    Busy,
    Cancelled,
    GpuckptError,
    KernelLost,
    NoSuchSnapshot,
    Refused,
    SaveFailed,
)
from ...operations.requests import Hibernate
from ...operations.results import Hibernated
from ...snapshots.hibernated import remove
from ...snapshots.summary import HIBERNATED, summary
from ...store import Manifest, Store
from .. import ports
from ..agent_replies import AboutKernel
from ..connections import Connections, unread_bytes
from .progress import OperationProgress, ProgressCallback
from .save import RoomInStore, commit, describe
from .take import Taken, run_on, take

if TYPE_CHECKING:
    from ...client.record import Operation
    from ..kernel_life import Keeper

__all__ = ["hibernate", "leave", "remove_broken_off"]

log = logging.getLogger("gpuckpt.keeper")

_NOT_HIBERNATED = "The {kernel} was not hibernated; it keeps running."
_LOOK = 0.1  # how often a kernel on its way to the disk looks whether a cell has come, in seconds
_LETTING_GO = 2.0  # how long clients have to close their connections, in seconds
_HAS_ENDED = FileNotFoundError, ProcessLookupError  # what `Connections` fails with where the kernel ends just then
_NAME = 60  # how much of a notebook's name is in a snapshot's


async def hibernate(
    keeper: Keeper, operation: Operation, request: Hibernate, on_progress: ProgressCallback
) -> Hibernated:
    """Put the kernel on the disk, and listen at its ports in its place; return what there is to say of the snapshot.

    Raises
    ------
    Refused, SaveFailed, StoreError, Busy, Cancelled : the kernel is as it was, and no snapshot was made.
    KernelLost : the GPU state could not be brought back.
    """
    progress = OperationProgress(operation, on_progress)
    await progress.enter("checking")
    ends, at_once = request.end, request.at_once
    # Who asks for a kernel that is busy wants that.
    is_idle = request.idle or not (ends or at_once or _is_busy(keeper))
    if keeper.state.hibernated is not None:
        return await _release(keeper) if ends else _already(keeper)
    # A job has no clients either, and comes back as itself.
    if not keeper.launch.agent and not (keeper.launch.job and ends):
        raise Refused(
            _NOT_HIBERNATED,
            "It has no agent, so it could not be given the requests that arrive in the meantime.",
            'Use a kernel of the kind "Python 3 (gpuckpt)".',
        )
    # Before the kernel is paused: what clients are answered with while it is not there.
    await asyncio.to_thread(importlib.import_module, "jupyter_gpuckpt.keeper.port_listener")
    operation.name = name = await asyncio.to_thread(_free_name, keeper)
    program = await asyncio.to_thread(usable_criu, COMES_BACK)
    received = await asyncio.to_thread(_received, keeper) if is_idle else None
    about = await _about(keeper)
    if is_idle and about is not None and not about.idle:
        raise _busy()
    said = about and KernelReplies(about.kernel_info, about.comms, about.executed)
    begin = functools.partial(keeper.store.writer, name, quota=settings.store_quota())
    with await asyncio.to_thread(begin) as writer:
        taken = await take(
            keeper, operation, writer.directory, program, progress, RoomInStore(keeper, keeper.store), left="stopped"
        )
        async with contextlib.AsyncExitStack() as tidying:
            tidying.push_async_callback(asyncio.to_thread, taken.staging.discard)
            tidying.push_async_callback(taken.frozen.tidied)
            async with contextlib.AsyncExitStack() as way_back:
                way_back.push_async_exit(functools.partial(_run_on, keeper, operation, taken, progress))
                _refuse_in_cell(keeper, is_idle)
                if received is not None and received != await asyncio.to_thread(_received, keeper):
                    raise _busy()  # it may be anywhere inside
                await progress.enter("writing")
                await describe(keeper, writer, taken, progress)
                writing = commit(keeper, writer, taken, program, progress, "Hibernated.")
                manifest = await (writing if ends or at_once else _unless_a_cell_comes(keeper, operation, writing))
                _refuse_in_cell(keeper, is_idle)  # what the kernel said before its pause has been heard by now
                await _make_sure(keeper, manifest, said, "end" if ends else "at once" if at_once else "")
                # The point of no return: the snapshot is the kernel from here on.
                way_back.pop_all()
            await leave(keeper, ends=ends)
    await asyncio.to_thread(keeper.worker.close)
    if ends:
        if keeper.launch.job:
            keeper.state.ended = Ended(None, now(), manifest.name)
            keeper.note_state()
        await keeper.ended(0)
    return Hibernated(**vars(summary(manifest)), seconds=progress.seconds())


def _already(keeper: Keeper) -> Hibernated:
    assert keeper.state.hibernated is not None
    return Hibernated(**vars(keeper.state.hibernated.snapshot), seconds=0.0)


async def _release(keeper: Keeper) -> Hibernated:
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


async def _about(keeper: Keeper) -> AboutKernel | None:
    """Ask the kernel what others may ask of it while it is not there; None for a job."""
    if keeper.channel is None or not keeper.launch.agent:
        return None
    try:
        return await keeper.channel.ask("about", AboutKernel, SaveFailed, _NOT_HIBERNATED)
    except SaveFailed:
        keeper.namespace()  # it says so where the kernel has ended
        raise


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


def _is_busy(keeper: Keeper) -> bool:
    return keeper.channel is not None and keeper.channel.busy


def _refuse_in_cell(keeper: Keeper, is_idle: bool) -> None:
    """Refuse a kernel that was to be hibernated as an idle one, and has begun with a cell. Raises `Busy`."""
    if is_idle and _is_busy(keeper):
        raise _busy()


def _received(keeper: Keeper) -> dict[int, int] | None:
    """Return how much has come on each connection of a client's; None where the kernel has ended."""
    kernel = keeper.namespace().outer(keeper.state.kernel_pid)
    if kernel is None:
        return None
    with contextlib.suppress(*_HAS_ENDED), contextlib.closing(Connections(kernel, _for_cells(keeper))) as connections:
        return connections.received()
    return None


def _for_cells(keeper: Keeper) -> set[int]:
    connection = ports.of_connection_file(keeper.launch.connection_file)
    return {connection["shell_port"], connection["stdin_port"]}


def _lost() -> KernelLost:
    return KernelLost("The {kernel} ended while it was hibernated.", "", "{Restart}.")


def _busy() -> Busy:
    return Busy(_NOT_HIBERNATED, "A client sent it a request in the meantime.", "Try again when it is idle.")


async def _make_sure(keeper: Keeper, manifest: Manifest, said: KernelReplies | None, how: str) -> None:
    """Make sure of the snapshot, and write down that it is the kernel now: there is no way back from then on."""
    store = keeper.store
    await asyncio.to_thread(_look_at, store, manifest)
    await asyncio.to_thread(_label, store, manifest)
    await asyncio.to_thread(keeper.take_lease, manifest.id)
    kernel = keeper.namespace().outer(keeper.state.kernel_pid)
    if kernel is None:
        raise _lost()
    clients = dict[str, int]()
    if how != "end":
        clients = await asyncio.to_thread(ports.peers, keeper.launch.connection_file, kernel)
    if not how:
        # Nothing may come between this and the kernel's end, and what has come until now counts.
        try:
            connections = await asyncio.to_thread(Connections, kernel, _for_cells(keeper))
        except _HAS_ENDED:
            raise _lost() from None
        try:
            if connections.unread():
                raise _busy()  # while nobody was cut off
            # Where it does not leave them after all, it answers those that connect again.
            note = keeper.namespace().run_dir / settings.CUT_OFF
            note.touch(mode=0o600)
            note.write_text(json.dumps(clients))
            await connections.end(_LETTING_GO)
            if connections.unread():
                raise _busy()
        finally:
            connections.close()
    if how != "end":
        assert said is not None
        keeper.state.hibernated = sleep_record.Hibernated(summary(manifest), now(), said, clients)
    operation, keeper.state.operation = keeper.state.operation, None
    try:
        keeper.save_state()
    except OSError as e:
        keeper.state.hibernated, keeper.state.operation = None, operation
        raise SaveFailed(_NOT_HIBERNATED, f"The keeper's record could not be written: {e}", "Free disk space.") from e


async def leave(keeper: Keeper, *, ends: bool) -> None:
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


async def _run_on(
    keeper: Keeper,
    operation: Operation,
    taken: Taken,
    progress: OperationProgress,
    _: object,
    cause: BaseException | None,
    __: object,
) -> None:
    """Let the kernel run on, and leave no snapshot of it."""
    failure = cause if isinstance(cause, GpuckptError) else SaveFailed(_NOT_HIBERNATED, str(cause))
    keeper.drop_lease()
    try:
        await run_on(keeper, taken, failure, progress)
    finally:
        with contextlib.suppress(NoSuchSnapshot):
            await asyncio.to_thread(remove, keeper.store, operation.name)


def remove_broken_off(store: Store, name: str) -> None:
    """Remove the snapshot of a kernel that runs on, since its keeper was killed on the way. Raises `StoreError`."""
    with contextlib.suppress(NoSuchSnapshot):
        remove(store, name)
