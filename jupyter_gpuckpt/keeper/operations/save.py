"""Save, step by step.

What the kernel is paused for is in `take`; it runs again while the capture is described and written.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import __version__, settings
from ...checked import to_json
from ...client.broker_connection import COMES_BACK, usable_criu
from ...client.record import Parent, now
from ...errors import (
    Busy,
    GpuckptError,
    Refused,
    SaveFailed,
    StoreError,
)
from ...freeze import cuda, images, pages, shm_archive
from ...freeze.criu_program import CriuProgram, version_text
from ...freeze.parking import PARKED, Elsewhere, single_hashes
from ...linux import memory, processes
from ...operations.requests import Save
from ...operations.results import Saved
from ...operations.results import Taken as TakenSoFar
from ...snapshots import comparison, kept_files, needs
from ...snapshots.databases import REMEMBERED
from ...snapshots.naming import choose_key
from ...snapshots.saved import OwnFiles, SavedCell, SavedKernel, SavedMachine
from ...snapshots.summary import held_by, is_automatic, is_of, summary
from ...store import Manifest, Store, Writer
from ...store.upkeep.retention import keep_last, keep_under
from ...subject import said
from .. import ports, preflight
from ..agent_replies import ReadyForSave
from ..files import lifetime
from ..namespace import Namespace
from ..owner import owner_of
from ..steps import CellsNow, cells_now, free_name
from ..unsaved import before, saved_with
from .host_memory import HostMemory
from .parts import CRIU_IMAGES, SHARED_MEMORY, VRAM
from .progress import OperationProgress, ProgressCallback
from .take import Check, Frozen, Taken, take

if TYPE_CHECKING:
    from ...client.record import Operation
    from ..kernel_life import Keeper

log = logging.getLogger("gpuckpt.keeper")

_UNKNOWN_CELL = SavedCell(number=0, begins="", seconds=0.0)
"""What an automatic snapshot is after, where the keeper has not seen a cell end."""
_IN_TRANSACTION = "it can be restored until something else is written there. Commit, and save again."


def _refuse_nothing(_: int, __: Mapping[str, Any]) -> None:
    pass


async def save(
    keeper: Keeper,
    operation: Operation,
    request: Save,
    on_progress: ProgressCallback,
    refuse: Check = _refuse_nothing,
    *,
    asked_in_a_cell: bool = False,
) -> Saved:
    """Save the kernel under a name, unless `refuse` does before the freeze; it keeps running.

    An automatic snapshot is called by the cell that it was frozen after or in. `asked_in_a_cell` is whether the one
    that runs does nothing but ask for what this is a part of.

    With ``patience``, a progress with ``taken`` tells what was taken, where that is not on the disk so soon after it.
    The caller need not wait for the end, and hears of it all the same.

    Raises
    ------
    SaveFailed, Refused, StoreError, Cancelled : nothing was saved, and the kernel is as it was.
    KernelLost : the GPU state could not be brought back.
    """
    progress = OperationProgress(operation, on_progress)
    await progress.enter("checking")
    keeper.namespace()
    store = operation.store or keeper.store
    room = RoomInStore(keeper, store)
    cells = cells_now(keeper, asked_in_a_cell=asked_in_a_cell)
    if request.automatic:
        operation.name = await asyncio.to_thread(free_name, keeper, cells)

    def check(private: int, described: Mapping[str, Any]) -> None:
        nonlocal cells
        refuse(private, described)
        room(private, described)
        # Others may have begun or ended while the save waited for its turn, and for the kernel's hooks.
        cells = cells_now(keeper, asked_in_a_cell=asked_in_a_cell)
        if request.between_cells:
            _refuse_running(keeper)

    program = await asyncio.to_thread(usable_criu, COMES_BACK)
    async with contextlib.AsyncExitStack() as closing:
        writer = closing.enter_context(await asyncio.to_thread(_writer, keeper, store, operation, request.replace))
        memory = HostMemory(keeper, writer)
        closing.push_async_callback(asyncio.to_thread, memory.close)
        taken = await take(
            keeper,
            operation,
            writer.directory,
            program,
            progress,
            check,
            look_elsewhere=functools.partial(_elsewhere, keeper, store, writer),
            host_memory=memory,
            refuse_late=functools.partial(_refuse_running, keeper) if request.between_cells else None,
            automatic=request.automatic,
        )
        memory.tell(taken.frozen.memory)
        taken_at, worked = now(), keeper.work()
        try:
            if request.between_cells:
                _refuse_begun(keeper, taken, cells)
            if request.automatic:
                operation.name = await asyncio.to_thread(free_name, keeper, cells)
            await progress.enter("writing")
            # The kernel runs: it does not wait for what is written about files, nor for their copies.
            await describe(keeper, writer, taken, progress, with_files=request.with_files)
            operation.let_kernel_go()
            letting_go = asyncio.create_task(
                _let_go(operation, request, writer.id, taken.frozen, progress, on_progress)
            )
            try:
                after = (cells.ended or _UNKNOWN_CELL) if request.automatic else None
                message = cells.note if request.automatic else request.message or ""
                manifest = await commit(keeper, writer, taken, program, progress, message, after)
            finally:
                letting_go.cancel()
            await memory.keep()
        finally:
            await taken.frozen.tidied()
            await asyncio.to_thread(taken.staging.discard)
    keeper.state.parent = Parent(operation.name, manifest.id)
    keeper.state.worked = worked
    keeper.state.undone.clear()
    saved_with(keeper, taken.agent.cells, taken_at, in_cell=taken.agent.in_cell)
    keeper.note_state()
    elsewhere = None if operation.store is None else str(store.root)
    done = Saved(**vars(summary(manifest)), seconds=progress.seconds(), notes=taken.frozen.notes, store=elsewhere)
    if operation.store is None and not request.automatic:
        await asyncio.to_thread(_remove_old, keeper, manifest.id)
    if operation.store is None:
        keeper.store_growth.saved()
    return done


def _elsewhere(keeper: Keeper, store: Store, writer: Writer) -> Elsewhere:
    """Return what of a kernel's GPU memory the store has in the snapshot before; it is not copied again."""
    parent = next((m for m in store.list() if m.id == keeper.state.parent_id), None)
    known: list[bytes] = []
    with contextlib.suppress(StoreError):  # then all is copied
        known = writer.held_of(parent, lambda path: path.endswith(PARKED))
    return Elsewhere(b"".join(known), lambda into, made: writer.put_back(into, single_hashes(made)))


def _refuse_running(keeper: Keeper) -> None:
    """Refuse what would be taken in the middle of a cell, which a restore would go on with."""
    if keeper.channel is None or keeper.channel.busy:
        raise Busy("The {kernel} was not saved by itself.", "The next cell has begun.", "")


def _refuse_begun(keeper: Keeper, taken: Taken, cells: CellsNow) -> None:
    """Refuse what may have been taken in the middle of a cell that had not begun when `cells` was seen."""
    began, ended = taken.frozen.begun, cells.begun
    if began is None:
        _refuse_running(keeper)
        began, ended = taken.begun, cells_now(keeper).begun
    if began or not cells.begun == taken.agent.cells == ended:
        raise Busy("The {kernel} was not saved by itself.", "The next cell has begun.", "")


def _writer(keeper: Keeper, store: Store, operation: Operation, replace: bool) -> Writer:
    """Begin a snapshot that the kernel's notebook is to have under the operation's name. Raises as `Store.writer`."""
    quota = settings.store_quota() if store is keeper.store else None

    def choose() -> tuple[str, bool]:
        return choose_key(store, operation.name, owner_of(keeper), replace=replace)

    key, replaces = choose()
    return store.writer(key, replace=replaces, quota=quota, choose=choose, by=keeper.launch.title)


async def _let_go(
    operation: Operation,
    request: Save,
    snapshot_id: str,
    frozen: Frozen,
    progress: OperationProgress,
    on_progress: ProgressCallback,
) -> None:
    """Tell the caller that the kernel was taken, and need not wait for the disk."""
    if request.patience is None:
        return
    await asyncio.sleep(request.patience)
    taken = TakenSoFar(
        name=operation.name,
        id=snapshot_id,
        message=request.message or "",
        created=now(),
        size=frozen.process.private_bytes,
        gpu_memory=held_by(frozen.cuda),
        frozen_seconds=frozen.seconds,
        gpu_seconds=frozen.process.gpu_seconds,
        notes=frozen.notes,
    )
    await on_progress(replace(progress.latest, taken=taken))


async def describe(
    keeper: Keeper, writer: Writer, taken: Taken, progress: OperationProgress, *, with_files: bool = False
) -> None:
    """Write beside what was taken what there is to say of it; ``with_files``, with a copy of the files that it uses.

    The kernel's namespace is needed for this, and not afterwards.

    Raises
    ------
    SaveFailed : a file could not be read or written, or they are too many.
    Cancelled : what of them is kept was not waited for.
    """
    staging = taken.staging
    # What lives from the files of a snapshot is no use without them.
    with_files = with_files or keeper.state.own_files
    await asyncio.to_thread(staging.keep)
    for folder, inside in ((staging.outside, CRIU_IMAGES), (staging.vram.outside, VRAM)):
        if not folder.is_relative_to(writer.directory):
            writer.include(folder, inside)
    if not staging.rest.is_relative_to(writer.directory):
        for file in staging.rest.iterdir():
            writer.add(file, file.name, file.stat().st_size, own=True)
    for name, hashes in taken.frozen.gpu.hashes.items():
        writer.hashed(f"{VRAM}/{name}", single_hashes(hashes))
    files = await asyncio.to_thread(_describe, keeper, keeper.namespace(), writer, taken, progress, with_files)
    taken.frozen.process = replace(taken.frozen.process, files=files)


async def commit(
    keeper: Keeper,
    writer: Writer,
    taken: Taken,
    program: CriuProgram,
    progress: OperationProgress,
    message: str,
    after: SavedCell | None = None,
) -> Manifest:
    """Have the store write what was taken and described, and commit it; `after` a cell, where nobody asked for it.

    Raises
    ------
    StoreError, Cancelled : there is no such snapshot.
    """
    return await asyncio.to_thread(
        writer.commit,
        message=message,
        parent=keeper.state.parent_id,
        kernel=to_json(replace(about_kernel(keeper, taken.agent), after=after)),
        machine=to_json(about_machine(program)),
        cuda=taken.frozen.cuda,
        process=to_json(taken.frozen.process),
        cut=_pieces,
        progress=progress.amount,
    )


def _pieces(file: Path) -> Sequence[int] | None:
    """Return the sizes of the pieces of a snapshot's file that belong together; None where that is not known."""
    if file.name == SHARED_MEMORY:
        return shm_archive.pieces(file)
    return images.nameless_pieces(file) or pages.windows(file)


def _describe(
    keeper: Keeper, space: Namespace, writer: Writer, taken: Taken, progress: OperationProgress, with_files: bool
) -> OwnFiles | None:
    """Write the kernel's variables and the files that it uses into the snapshot; return which files it keeps.

    Those that live as long as the kernel are kept; with `with_files` all of them, and those that Python may import.

    Raises
    ------
    SaveFailed : a file could not be read or written, or they are too many.
    """
    root, images_folder, agent = space.path("/"), taken.staging.outside, taken.agent
    try:
        if agent.variables is not None:
            values = {"variables": agent.variables, "left_out": agent.left_out}
            (writer.directory / comparison.VARIABLES).write_text(json.dumps(values))
        needed = needs.marked(
            needs.of_images(images_folder), root, keeper.marks, images_folder, taken.frozen.in_transaction
        )
        temporary = [path for path in agent.temporary if not path.startswith(needs.ELSEWHERE)]
        needed, large = lifetime.keep(needed, temporary, root, writer.directory / lifetime.ARCHIVE)
        (writer.directory / needs.NEEDS).write_bytes(needs.to_json(needed))
        taken.frozen.notes += _about_files(needed, large)
        if not keeper.state.own_files:  # which are mounted, too
            taken.frozen.notes += _about_mounts(space)
        if not with_files:
            return None
        files = kept_files.survey(root, needed, agent.environment)
        return kept_files.keep(files, root, writer, settings.files_limit(), progress.check).summary()
    except OSError as e:
        raise SaveFailed(
            "The {kernel} was not saved; it keeps running.",
            f"The snapshot's file information could not be written: {e.strerror}: {e.filename}",
            f"Free disk space at {writer.directory}; with --with-files, make sure that nothing (pip, conda) "
            "changes the Python environment meanwhile. Then save again.",
        ) from e


def _about_files(needed: Sequence[needs.NeededFile], large: Sequence[str]) -> list[str]:
    """Return what keeps a restore from succeeding later on, unless the user sees to it."""
    notes = [
        f"A transaction of {file.path} is open: {_IN_TRANSACTION}"
        for file in needed
        if file.in_transaction and file.database
    ]
    notes += [
        f"{file.database} has {file.path} open, and the snapshot has no copy of it: it cannot be restored once that "
        "was written to. Close the database before you save, or copy the file, too."
        for file in needed
        if file.database in REMEMBERED and file.writable and not file.kept
    ]
    if large:
        more = f" and {len(large) - 1} more" if len(large) > 1 else ""
        notes.append(
            f"Temporary files too large to be included in the snapshot: {large[0]}{more}; a restore needs them."
        )
    return notes


def _about_mounts(space: Namespace) -> list[str]:
    """Return that file systems are mounted in this kernel alone, as by one of its cells, if there are any."""
    own = processes.mount_points(space.pid) - processes.mount_points("self")
    if not (own := {at for at in own if not at.startswith(needs.ELSEWHERE)}):
        return []
    return [
        said(
            f"Mounted in the {{kernel}} alone: {', '.join(sorted(own))}. A restored one has it only if the machine "
            "has: mount it from a terminal outside the {kernel}."
        )
    ]


def _remove_old(keeper: Keeper, newest: str) -> None:
    """Remove this kernel's old snapshots as the settings ask for, but the `newest`; what cannot be removed stays."""

    def own(manifest: Manifest) -> bool:
        return is_of(manifest, keeper.launch.kernel_id, keeper.launch.notebook) and not is_automatic(manifest)

    try:
        if (count := settings.keep_last()) is not None:
            keep_last(keeper.store, count, own, newest)
        if (size := settings.keep_under()) is not None:
            keep_under(keeper.store, size, own, newest)
    except GpuckptError:
        log.exception("old snapshots could not be removed")


_NEW = 16
"""One part in so many of what a kernel holds is taken to be new in any case."""


@dataclass
class RoomInStore:
    """Refuses a save that the store's disk has no room for.

    Of what the kernel held when it was saved or restored last, all may be in the store still: a save may have room that
    would not have it otherwise. Where it turns out to have none, it fails then, and the kernel continues.
    """

    keeper: Keeper
    store: Store

    def __call__(self, private: int, described: Mapping[str, Any]) -> None:
        needed = private + cuda.in_use(described)
        free, where = shutil.disk_usage(self.store.root).free, f" in {self.store.root}"
        if memory.is_in_memory(self.store.root) and (room := memory.room(os.getpid())).bytes < free:
            free, where = room.bytes, f"{room.where}: {self.store.root} lies in memory"
        if needed > free and (free * _NEW < needed or needed - self._known() > free):
            raise Refused(
                "The save was refused: not enough space on the store's disk.",
                f"The {{kernel}} holds {needed / 1e6:,.0f} MB; {free / 1e6:,.0f} MB are free{where}",
                "Save to a folder on another disk (`gpuckpt save @ NAME --to FOLDER`), remove snapshots "
                "(`gpuckpt rm NAME`), or free memory in the {kernel}.",
                needed=needed,
                free=free,
            )

    def _known(self) -> int:
        """Return the bytes of the snapshot that the kernel went to or came from last, if the store has it."""
        return next((m.size for m in self.store.list() if m.id == self.keeper.state.parent_id), 0)


def about_kernel(keeper: Keeper, agent: ReadyForSave) -> SavedKernel:
    """Return what a manifest says of the kernel; `agent` is what the agent said of it."""
    launch, saved = keeper.launch, before(keeper)
    return SavedKernel(
        kernel_id=launch.kernel_id,
        name=launch.name,
        notebook=launch.notebook,
        agent=launch.agent,
        connection=ports.of_connection_file(launch.connection_file),
        endpoint=ports.endpoint(launch.connection_file),
        rebinds=agent.rebinds,
        execution_count=agent.execution_count,
        cells=agent.cells,
        cell=agent.cell,
        in_cell=agent.in_cell,
        saved_at=saved.at,
        saved_cells=saved.cells,
        python=agent.python,
        ipykernel=agent.ipykernel,
        protocol=agent.protocol,
        version=__version__,
        waits_for_gpu=agent.waits_for_gpu,
        own_ports=agent.own_ports,
        waited=agent.waited,
        choices=keeper.state.choices(launch),
        job=launch.job or None,
        program=launch.argv[0] if launch.job else None,
    )


def about_machine(program: CriuProgram) -> SavedMachine:
    """Return what a manifest says of the machine."""
    return SavedMachine(
        arch=platform.machine(),
        kernel=platform.release(),
        criu=version_text(program.version),
        cpu_flags=preflight.cpu_flags(),
        host=platform.node(),
    )
