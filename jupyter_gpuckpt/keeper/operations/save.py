"""Save, step by step.

The kernel is frozen only between the beginning and the end of `_freeze`, and whatever fails there is undone in reverse.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import platform
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import __version__, settings
from ...checked import Odd, from_json
from ...errors import (
    GpuckptError,
    KernelLost,
    Refused,
    SaveFailed,
)
from ...freeze import criu, cuda, images, pages, processes
from ...freeze.criu_errors import Cause
from ...freeze.criu_program import CriuProgram, version_text
from ...store import Manifest, Store, Writer
from ...store.upkeep.retention import keep_last, keep_under
from .. import comparison, fit, lost_names, ports
from ..agent_says import NOTHING, AfterSave, ReadyForSave, as_said
from ..asked import Save
from ..deputy import usable_criu
from ..files import kept_files, lifetime, needs
from ..files.databases import DUCKDB
from ..gpu.freeze import GpuFreeze
from ..gpu.sleep import FrozenAsleep
from ..in_progress import ParkedMemory, SaveInProgress, held_of
from ..link import AgentSilent, Link
from ..namespace import Namespace
from ..naming import Owner, choose_key
from ..record import Parent, now
from ..staging import Staging
from ..summary import held_by, is_of, summary
from ..unsaved import saved_with
from . import criu_run
from .parts import CRIU_IMAGES, VRAM
from .stages import Stages, Tell

if TYPE_CHECKING:
    from ..kernel_life import Keeper
    from ..record import Operation

log = logging.getLogger("gpuckpt.keeper")

_AFTER_FAILURE = 5.0  # how long the kernel has to put right what it had prepared for a save that failed, in seconds

_IN_TRANSACTION = "it can be restored until something else is written there. Commit, and save again."
_NO_MEMORY = "It was paused until it was on the disk: too little memory is free to hold it until then."

Check = Callable[[int, Mapping[str, Any]], None]
"""Refuses, before a freeze, what could not be done with the kernel's private bytes and `cuda.describe` of it."""


@dataclass
class Frozen:
    """What a freeze found and took."""

    seconds: float
    gpu: GpuFreeze
    cuda: dict[str, Any] = field(default_factory=dict)
    process: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What the person should know of it."""
    still: list[int] = field(default_factory=list)
    """The processes that stood still by themselves (SIGSTOP)."""
    _tidying: asyncio.Task[None] | None = None

    def begin_to_tidy(self) -> None:
        """End what helped with the GPU, while the kernel runs again."""
        self._tidying = self._tidying or asyncio.create_task(self.gpu.close())

    async def tidied(self) -> None:
        """End what helped with the GPU, and wait for it."""
        self.begin_to_tidy()
        assert self._tidying is not None
        await self._tidying


@dataclass(frozen=True)
class Taken:
    """All of a kernel, not stored yet."""

    staging: Staging
    frozen: Frozen
    agent: ReadyForSave
    """What the agent says about its kernel."""


async def save(keeper: Keeper, operation: Operation, request: Save, tell: Tell) -> dict[str, Any]:
    """Save the kernel under a name; it runs on.

    With ``patience``, a progress with ``taken`` tells what was taken, where that is not on the disk so soon after it.
    Whoever asked need not wait for the end, and hears of it all the same.

    Raises
    ------
    SaveFailed, Refused, StoreError, Cancelled : nothing was saved, and the kernel is as it was.
    KernelLost : the GPU state could not be brought back.
    """
    stages = Stages(operation, tell)
    await stages.enter("checking")
    keeper.namespace()
    store = operation.store or keeper.store
    program = await asyncio.to_thread(usable_criu)
    with await asyncio.to_thread(_writer, keeper, store, operation.name, request.replace) as writer:
        taken = await take(keeper, operation, writer.directory, program, stages, RoomInStore(keeper, store))
        taken_at, worked = now(), keeper.work()
        try:
            await stages.enter("writing")
            # The kernel runs: it does not wait for what is written about files, nor for their copies.
            await describe(keeper, writer, taken, stages, with_files=request.with_files)
            operation.let_kernel_go()
            letting_go = asyncio.create_task(_let_go(operation, request, writer.id, taken.frozen, stages, tell))
            try:
                manifest = await commit(keeper, writer, taken, program, stages, request.message or "")
            finally:
                letting_go.cancel()
        finally:
            await taken.frozen.tidied()
            await asyncio.to_thread(taken.staging.discard)
    keeper.state.parent = Parent(operation.name, manifest.id)
    keeper.state.worked = worked
    saved_with(keeper, taken.agent.cells, taken_at)
    keeper.note_state()
    done = {**summary(manifest), "seconds": stages.seconds(), "notes": taken.frozen.notes}
    if operation.store is not None:
        return {**done, "store": str(store.root)}
    await asyncio.to_thread(_remove_old, keeper, manifest.id)
    return done


def _writer(keeper: Keeper, store: Store, name: str, replace: bool) -> Writer:
    """Begin a snapshot that the kernel's notebook is to have under this name. Raises as `Store.writer`."""
    quota = settings.store_quota() if store is keeper.store else None
    choose = functools.partial(choose_key, store, name, Owner.of(keeper), replace=replace)
    key, replaces = choose()
    by = keeper.launch.notebook or keeper.launch.job or f"Kernel {keeper.launch.kernel_id}"
    return store.writer(key, replace=replaces, quota=quota, choose=choose, by=by)


async def _let_go(
    operation: Operation, request: Save, snapshot_id: str, frozen: Frozen, stages: Stages, tell: Tell
) -> None:
    """Tell whoever asked that the kernel was taken, and need not wait for the disk."""
    if request.patience is None:
        return
    await asyncio.sleep(request.patience)
    taken = {
        "name": operation.name,
        "id": snapshot_id,
        "message": request.message or "",
        "created": now(),
        "size": frozen.process["private_bytes"],
        "gpu_memory": held_by(frozen.cuda),
        "frozen_seconds": frozen.seconds,
        "notes": frozen.notes,
    }
    await tell({**stages.latest, "taken": taken})


async def describe(keeper: Keeper, writer: Writer, taken: Taken, stages: Stages, *, with_files: bool = False) -> None:
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
    described = await asyncio.to_thread(_describe, keeper, keeper.namespace(), writer, taken, stages, with_files)
    taken.frozen.process.update(described)


async def commit(
    keeper: Keeper, writer: Writer, taken: Taken, program: CriuProgram, stages: Stages, message: str
) -> Manifest:
    """Have the store write what was taken and described, and commit it.

    Raises
    ------
    StoreError, Cancelled : there is no such snapshot.
    """
    return await asyncio.to_thread(
        writer.commit,
        message=message,
        parent=keeper.state.parent_id,
        kernel=about_kernel(keeper, taken.agent),
        machine=about_machine(program),
        cuda=taken.frozen.cuda,
        process=taken.frozen.process,
        cut=pages.windows,
        progress=stages.amount,
    )


def _describe(
    keeper: Keeper, space: Namespace, writer: Writer, taken: Taken, stages: Stages, with_files: bool
) -> dict[str, Any]:
    """Write the kernel's variables and the files that it uses into the snapshot; return what the manifest says of them.

    Those that live as long as the kernel are kept; with `with_files` all of them, and those that Python may import.

    Raises
    ------
    SaveFailed : a file could not be read or written, or they are too many.
    """
    root, images_folder, agent = space.path("/"), taken.staging.outside, taken.agent
    try:
        if agent.variables is not None:
            said = {"variables": agent.variables, "left_out": agent.left_out}
            (writer.directory / comparison.VARIABLES).write_text(json.dumps(said))
        needed = needs.marked(needs.of_images(images_folder), root, keeper.marks, images_folder)
        temporary = [path for path in agent.temporary if not path.startswith(needs.ELSEWHERE)]
        needed, large = lifetime.keep(needed, temporary, root, writer.directory / lifetime.ARCHIVE)
        (writer.directory / needs.NEEDS).write_bytes(needs.to_json(needed))
        taken.frozen.notes += _about_files(needed, large)
        if not with_files:
            return {}
        files = kept_files.survey(root, needed, agent.environment)
        return {"files": kept_files.keep(files, root, writer, settings.files_limit(), stages.check).summary()}
    except OSError as e:
        raise SaveFailed(
            "The kernel was not saved; it goes on as before.",
            f"What the snapshot says of files, or keeps of them, could not be written: {e.strerror}: {e.filename}",
            f"Make room on the disk of {writer.directory}; with --with-files, see that nothing changes Python's "
            "environment (pip, conda) meanwhile. Then save again.",
        ) from e


def _about_files(needed: Sequence[needs.NeededFile], large: Sequence[str]) -> list[str]:
    """Return what keeps a restore from succeeding later on, unless the person sees to it."""
    notes = [
        f"A transaction of {file.path} is open: {_IN_TRANSACTION}"
        for file in needed
        if file.in_transaction and file.database
    ]
    notes += [
        f"DuckDB has {file.path} open, and the snapshot has no copy of it: it cannot be restored once that was written "
        "to. Close the database before you save, or copy the file, too."
        for file in needed
        if file.database == DUCKDB and file.writable and not file.kept
    ]
    if large:
        more = f" and {len(large) - 1} more" if len(large) > 1 else ""
        notes.append(
            f"Temporary files that are too large to be in the snapshot: {large[0]}{more}; a restore needs them."
        )
    return notes


async def take(
    keeper: Keeper,
    operation: Operation,
    directory: Path,
    program: CriuProgram,
    stages: Stages,
    check: Check,
    left: criu.Left = "running",
) -> Taken:
    """Freeze the kernel for a moment and take all of it: into the staging, and /dev/shm and log into `directory`.

    `check` is called before the freeze. A kernel that is `left` stopped stays as it was taken, off the GPU, until
    `run_on`.

    Raises
    ------
    SaveFailed, Refused, Cancelled : nothing was taken, and the kernel is as it was.
    KernelLost : the GPU state could not be brought back.
    """
    fit.refuse_ipc(keeper.launch, "The save was refused; nothing was touched.")
    link = keeper.link
    assert link is not None
    await stages.enter("preparing the kernel")
    # A kernel that is not prepared has nothing to put right but its hooks, and one of them may hang.
    patience = 0.0
    try:
        agent = await stages.or_cancelled(before_save(link, keeper.launch.agent))
        patience = _AFTER_FAILURE
        staging, frozen = await _freeze(keeper, operation, directory, program, agent, stages, check, left)
    except BaseException as e:
        failure = e if isinstance(e, GpuckptError) else _not_saved(e)
        await after_save(link, keeper.launch.agent, failure, patience)
        if isinstance(e, OSError):
            raise failure from e
        raise
    if left == "running":
        said = await after_save(link, keeper.launch.agent, None, settings.hook_timeout())
        agent = replace(agent, waited=said.waited or agent.waited)
    return Taken(staging, frozen, agent)


async def run_on(keeper: Keeper, taken: Taken, failure: GpuckptError) -> None:
    """Let a kernel that was left stopped run on, as if it had not been taken.

    Raises
    ------
    SaveFailed : some of it stands still.
    KernelLost : the GPU state could not be brought back.
    """
    link = keeper.link
    assert link is not None
    try:
        await criu_run.let_run(keeper.namespace().outer(keeper.state.kernel_pid), taken.frozen.still)
        await taken.frozen.gpu.thaw()
    finally:
        keeper.state.operation = None
        keeper.note_state()
        await after_save(link, keeper.launch.agent, failure, settings.hook_timeout())


def _remove_old(keeper: Keeper, newest: str) -> None:
    """Remove this kernel's old snapshots as the settings ask for, but the `newest`; what cannot be removed stays."""
    own = functools.partial(is_of, kernel_id=keeper.launch.kernel_id, notebook=keeper.launch.notebook)
    try:
        if (count := settings.keep_last()) is not None:
            keep_last(keeper.store, count, own, newest)
        if (size := settings.keep_under()) is not None:
            keep_under(keeper.store, size, own, newest)
    except GpuckptError:
        log.exception("old snapshots could not be removed")


def _not_saved(error: BaseException) -> SaveFailed:
    return SaveFailed("The kernel could not be saved; it goes on as before.", str(error), Cause.of(error).advice)


_NEW = 16
"""One part in so many of what a kernel holds is taken to be new in any case."""


@dataclass
class RoomInStore:
    """Refuses a save that the store's disk has no room for.

    Of what the kernel held when it was saved or restored last, all may be in the store still: a save may have room that
    would not have it otherwise. Where it turns out to have none, it fails then, and the kernel goes on.
    """

    keeper: Keeper
    store: Store

    def __call__(self, private: int, described: Mapping[str, Any]) -> None:
        needed = private + sum(cuda.needs(described).values())
        free = shutil.disk_usage(self.store.root).free
        if needed > free and (free * _NEW < needed or needed - self._known() > free):
            raise Refused(
                "The save was refused: the store's disk has no room for it.",
                f"The kernel holds {needed / 1e6:,.0f} MB; {free / 1e6:,.0f} MB are free in {self.store.root}",
                "Save to a folder on another disk (`gpuckpt save @ NAME --to FOLDER`), remove snapshots "
                "(`gpuckpt rm NAME`), or free memory in the kernel.",
                needed=needed,
                free=free,
            )

    def _known(self) -> int:
        """Return the bytes of the snapshot that the kernel went to or came from last, if the store has it."""
        return next((m.size for m in self.store.list() if m.id == self.keeper.state.parent_id), 0)


async def before_save(link: Link, has_agent: bool) -> ReadyForSave:
    """Have the agent run the hooks; return what it says about its kernel."""
    if not has_agent:
        return NOTHING
    try:
        answer = await link.call_when_there("before_save", {}, settings.hook_timeout())
    except AgentSilent:
        raise SaveFailed(
            "The kernel was not saved; it goes on as before.",
            f"Its hooks did not finish within {settings.hook_timeout():.0f} s: "
            "something in it holds Python's lock, or a hook hangs.",
            "Save again when the cell that runs is done, or set GPUCKPT_HOOK_TIMEOUT to more seconds.",
        ) from None
    return as_said(ReadyForSave, answer, SaveFailed, "The kernel was not saved; it goes on as before.")


async def after_save(link: Link, has_agent: bool, failure: GpuckptError | None, patience: float) -> AfterSave:
    """Have the agent undo its part, and wait until it has, for `patience` seconds at most; return what it says."""
    if not has_agent:
        return AfterSave()
    arguments = {"error": failure.as_dict() if failure else None}
    try:
        if patience:
            said = await link.call("after_save", arguments, patience) or {}  # an agent of an older version says nothing
            return from_json(AfterSave, said)
        await link.send({"call": "after_save", "id": 0, "args": arguments})
    except AgentSilent:
        log.warning("the hooks after the save did not finish in time")
    except Odd as e:
        log.warning("what the agent says after the save is odd: %s", e)
    return AfterSave()


async def _freeze(
    keeper: Keeper,
    operation: Operation,
    directory: Path,
    program: CriuProgram,
    agent: ReadyForSave,
    stages: Stages,
    check: Check,
    left: criu.Left,
) -> tuple[Staging, Frozen]:
    """Freeze the kernel's tree, take it, and leave it as asked; what criu wrote is in the staging."""
    space, worker = keeper.namespace(), keeper.worker
    kernel = space.outer(keeper.state.kernel_pid)
    if kernel is None:
        raise KernelLost("The kernel has ended.", "", "Restart it.")
    tree = [kernel, *processes.descendants(kernel)]
    fit.refuse_unsavable(space.pid, kernel, tree)
    asleep = keeper.asleep
    on_gpu = asleep.living if asleep is not None else await asyncio.to_thread(cuda.freezable, worker, tree)
    described: dict[str, Any] = dict(asleep.described) if asleep is not None and on_gpu else {}
    if on_gpu and asleep is None:
        peers = {kernel: agent.peers} if agent.peers is not None else {}
        await asyncio.to_thread(cuda.preflight, worker, on_gpu, peers)
        described = await asyncio.to_thread(cuda.describe, worker, on_gpu)
    private = processes.private_bytes(tree) + processes.swapped_bytes(tree) + _only_in_shared_memory(space, tree)
    if asleep is not None:
        private = max(0, private - asleep.vram.taken(on_gpu))  # which are counted as GPU memory
    process: dict[str, Any] = {
        "pid": keeper.state.kernel_pid,
        "processes": processes.inner_pids(tree),
        "cuda": [processes.inner_pid(pid) for pid in on_gpu],
        "private_bytes": private,
    }
    in_vram = sum(cuda.needs(described).values())
    check(private, described)
    noted = SaveInProgress(operation.name, left, still := processes.stopped(tree))
    if asleep is None:
        noted.cuda, noted.held = list(on_gpu), held_of(described)
    keeper.state.operation = noted
    keeper.save_state()
    staging = await asyncio.to_thread(Staging, space, directory / CRIU_IMAGES, sleeps=asleep is not None)
    assert keeper.link is not None
    if asleep is not None:
        gpu: GpuFreeze = FrozenAsleep(asleep, worker, space, keeper.link)
    else:
        gpu = GpuFreeze(worker, space, keeper.link, on_gpu, described, staging.vram)

    # Written down so that the next keeper finds it, should this one be killed.
    def criu_runs(pid: int) -> None:
        noted.criu = pid
        keeper.note_state()

    def parks(parked: ParkedMemory) -> None:
        noted.parked = parked
        keeper.note_state()

    try:
        await gpu.prepare(kernel, agent.parkable)
        await stages.enter("freezing", quiet=True)
        began = time.monotonic()
        await gpu.freeze(parks)
        try:
            stages.check()
            size = private + in_vram - gpu.taken()
            staging.open_for(size)
            dumping = criu_run.dump(
                space,
                program,
                keeper.state.kernel_pid,
                (staging.outside, staging.inside),
                directory,
                left,
                size,
                SaveFailed("The kernel could not be saved; it goes on as before."),
                criu_runs,
            )
            await stages.or_cancelled(dumping)
            operation.cancellable = False
            parked = await gpu.finish_copy()
            _refuse_half_connections(staging)
            notes = await asyncio.to_thread(lost_names.keep, staging.outside, tree)
        except BaseException:
            operation.cancellable = False
            await criu_run.let_run(kernel, still)
            await gpu.thaw()
            raise
        if left == "running":
            await gpu.thaw()
        # Without GPU state, only criu stops the kernel, and for less long than it runs.
        seconds = time.monotonic() - began if on_gpu else images.frozen_seconds(staging.outside)
        if space.outer(keeper.state.kernel_pid) is None:
            raise KernelLost("The kernel ended during the save.", "", "Restart it.")
    except BaseException:
        await gpu.close()
        await asyncio.to_thread(staging.discard)
        raise
    if parked is not None:
        described = {**described, "parked": asdict(parked)}
    process["frozen_seconds"] = seconds
    if not staging.in_memory:
        notes.append(_NO_MEMORY)
    frozen = Frozen(seconds, gpu, described, process, notes, still)
    if left == "running":
        frozen.begin_to_tidy()
        keeper.state.operation = None
        keeper.note_state()
    return staging, frozen


def _only_in_shared_memory(space: Namespace, tree: Sequence[int]) -> int:
    """Return the bytes of files in the kernel's /dev/shm beyond those that its processes have mapped."""
    about = os.statvfs(space.shared_memory)
    used = (about.f_blocks - about.f_bfree) * about.f_frsize
    return max(0, used - processes.mapped_bytes(tree, "/dev/shm/")) if used else 0  # noqa: S108


def _refuse_half_connections(staging: Staging) -> None:
    if images.has_half_connection(staging.outside):
        raise SaveFailed(
            "The kernel could not be saved; it goes on as before.",
            "It waits for another program to accept a Unix connection: a restore of it would fail.",
            "Close the connection, or wait until it is accepted, and save again.",
        )


def about_kernel(keeper: Keeper, agent: ReadyForSave) -> dict[str, Any]:
    """Return the `kernel` object of a manifest; `agent` is what the agent said of it."""
    launch = keeper.launch
    return {
        "kernel_id": launch.kernel_id,
        "name": launch.name,
        "notebook": launch.notebook,
        "agent": launch.agent,
        "connection": ports.of_connection_file(launch.connection_file),
        "endpoint": ports.endpoint(launch.connection_file),
        "rebinds": agent.rebinds,
        "execution_count": agent.execution_count,
        "cells": agent.cells,
        "python": agent.python,
        "ipykernel": agent.ipykernel,
        "protocol": agent.protocol,
        "version": __version__,
        "waits_for_gpu": agent.waits_for_gpu,
        "own_ports": agent.own_ports,
        # Which requests waited, that the kernel was to answer, by their ids: whether each is a cell.
        **({"waited": agent.waited} if agent.waited is not None else {}),
        # Not its arguments: there may be a password among them, and manifests travel.
        **({"job": launch.job, "program": launch.argv[0]} if launch.job else {}),
    }


def about_machine(program: CriuProgram) -> dict[str, Any]:
    """Return the `machine` object of a manifest."""
    return {
        "arch": platform.machine(),
        "kernel": platform.release(),
        "criu": version_text(program.version),
        "cpu_flags": fit.cpu_flags(),
    }
