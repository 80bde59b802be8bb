"""Save and restore, step by step: the order of steps stands here and nowhere else.

A save freezes the kernel only between `_frozen`'s first line and its last, and whatever fails there is undone in
reverse. A restore touches the running kernel only after everything that can be known beforehand is known to fit.
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
import signal
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .. import settings
from ..errors import (
    Cancelled,
    Damaged,
    GpuckptError,
    KernelLost,
    NoSuchSnapshot,
    Refused,
    RestoreFailed,
    SaveFailed,
)
from ..freeze import criu, cuda, images, pages, processes, random_state
from ..freeze.criu_program import CriuProgram, find_criu, version_text
from ..store import Manifest, Snapshot, Writer
from ..store.retention import keep_last, keep_under
from . import comparison, criu_logs, fit, kept_files, needs, placed_files, ports
from .gpu_freeze import GpuFreeze, GpuReturn, parked_in
from .link import AgentSilent, Link
from .namespace import Namespace, run_path
from .needs import NeededFile
from .placed_files import Placement
from .ports import Places
from .staging import Staging, fits_in_memory, vram_files
from .summary import is_of, summary

if TYPE_CHECKING:
    from .process import Keeper, Tell
    from .record import Operation

log = logging.getLogger("gpuckpt.keeper")

_T = TypeVar("_T")

CRIU_IMAGES, VRAM, SHARED_MEMORY, KERNEL_LOG = "criu", "vram", "shm.tar", "kernel.log"
"""The parts of a snapshot: the folders of criu's images and of what was in VRAM, what lies in /dev/shm, and the
kernel's standard output."""

WORKING_COPY = "restore"
"""In the kernel's folder, while a restore is under way: the snapshot's files, where they do not fit in memory."""

_NO_SPACE = "No space left"
_LOG_ROOM = 1 << 16  # below so much free disk criu's log may have been lost, in bytes
_AFTER_FAILURE = 5.0  # how long the kernel has to put right what it had prepared for a save that failed, in seconds
_CRIU_STARTS = 10.0  # how long criu may take to say its version, in seconds
_STALLED = 10.0  # how long the criu of a dead keeper may do nothing before it is killed, in seconds

_AT_POST_DUMP = """#!/bin/sh
# criu runs this at every stage of a dump. At this one the dump is done and the kernel still frozen: what lies in its
# /dev/shm belongs to the same instant as its memory.
[ "$CRTOOLS_SCRIPT_ACTION" = post-dump ] || exit 0
tar -c -f "$GPUCKPT_SNAPSHOT/shm.tar" --one-file-system -C /dev/shm \\
    --exclude=./gpuckpt --exclude=./gpuckpt-staging --exclude=./gpuckpt-vram . &&
cp "$GPUCKPT_LOG" "$GPUCKPT_SNAPSHOT/kernel.log"
"""


class Stages:
    """Tells whoever asked how far an operation is, and stops it where it may be stopped."""

    def __init__(self, operation: Operation, tell: Tell) -> None:
        self._operation, self._tell = operation, tell
        self._began = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._last = 0.0

    async def enter(self, stage: str, *, cancellable: bool = True) -> None:
        self.check()
        self._operation.stage, self._operation.cancellable = stage, cancellable
        await self._tell({"stage": stage, "seconds": self.seconds()})

    def check(self) -> None:
        if self._operation.cancelling.is_set():
            raise Cancelled(
                f"The {self._operation.kind} of {self._operation.name!r} was cancelled.",
                "It was interrupted.",
                "The kernel is as it was, and no snapshot was made or changed.",
            )

    async def or_cancelled(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Wait for something that may take long for no good; a cancellation does not wait for it."""
        doing = asyncio.create_task(work)
        cancelling = asyncio.create_task(self._operation.cancelling.wait())
        try:
            await asyncio.wait({doing, cancelling}, return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                self.check()
            return await doing
        finally:
            doing.cancel()
            cancelling.cancel()

    def seconds(self) -> float:
        return time.monotonic() - self._began

    def amount(self, stage: str, done: int, total: int) -> None:
        """Report from a thread how much of a stage's bytes is done, four times a second at most."""
        self.check()
        now = time.monotonic()
        if now - self._last < 0.25 and done < total:
            return
        self._last = now
        progress = {"stage": stage, "done": done, "total": total, "seconds": self.seconds()}
        asyncio.run_coroutine_threadsafe(self._forward(progress), self._loop)

    async def _forward(self, progress: dict[str, Any]) -> None:
        await self._tell(progress)


# -- save


Check = Callable[[int, Mapping[str, Any]], None]
"""Refuses, before a freeze, what could not be done with the kernel's private bytes and `cuda.describe` of it."""


@dataclass
class Frozen:
    """What a freeze found and took."""

    seconds: float
    tidying: asyncio.Task[None]
    """What goes on of it while the kernel runs again."""
    cuda: dict[str, Any] = field(default_factory=dict)
    process: dict[str, Any] = field(default_factory=dict)


async def save(keeper: Keeper, operation: Operation, args: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Save the kernel under a name; it runs on.

    Raises
    ------
    SaveFailed, Refused, StoreError, Cancelled : nothing was saved, and the kernel is as it was.
    KernelLost : the GPU state could not be brought back.
    """
    stages = Stages(operation, tell)
    await stages.enter("checking")
    space = keeper.namespace()
    # What lives from the files of a snapshot is no use without them.
    with_files = bool(args.get("with_files")) or keeper.state.own_files
    program = await asyncio.to_thread(find_criu)
    begin = functools.partial(
        keeper.store.writer, operation.name, replace=bool(args.get("replace")), quota=settings.store_quota()
    )
    with await asyncio.to_thread(begin) as writer:
        staging, frozen, agent = await take(keeper, operation, writer.directory, program, stages, _RoomInStore(keeper))
        try:
            await stages.enter("writing")
            for folder, inside in ((staging.outside, CRIU_IMAGES), (staging.vram.outside, VRAM)):
                if not folder.is_relative_to(writer.directory):
                    writer.include(folder, inside)
            # The kernel runs: it does not wait for what is written about files, nor for their copies.
            described = await asyncio.to_thread(_describe, keeper, space, writer, staging, agent, with_files)
            frozen.process.update(described)
            manifest = await asyncio.to_thread(
                writer.commit,
                message=str(args.get("message") or ""),
                parent=(keeper.state.parent or {}).get("id"),
                kernel=about_kernel(keeper, agent),
                machine=about_machine(program),
                cuda=frozen.cuda,
                process=frozen.process,
                cut=pages.windows,
                progress=stages.amount,
            )
        finally:
            await frozen.tidying
            await asyncio.to_thread(staging.discard)
    keeper.state.parent = {"name": manifest.name, "id": manifest.id}
    await asyncio.to_thread(_remove_old, keeper)
    return {**summary(manifest), "seconds": stages.seconds()}


def _describe(
    keeper: Keeper, space: Namespace, writer: Writer, staging: Staging, agent: Mapping[str, Any], with_files: bool
) -> dict[str, Any]:
    """Write the kernel's variables and the files that it uses into the snapshot; return what the manifest says of them.

    With `with_files`, the snapshot keeps these files, and those that Python may import.

    Raises
    ------
    SaveFailed : a file could not be read or written, or they are too many.
    """
    root = space.path("/")
    try:
        if "variables" in agent:
            said = {key: agent[key] for key in ("variables", "left_out")}
            (writer.directory / comparison.VARIABLES).write_text(json.dumps(said))
        needed = needs.marked(needs.of_images(staging.outside), root, keeper.marks)
        (writer.directory / needs.NEEDS).write_bytes(needs.to_json(needed))
        if not with_files:
            return {}
        files = kept_files.survey(root, needed, agent.get("environment", {}))
        return {"files": kept_files.keep(files, root, writer, settings.files_limit()).summary()}
    except OSError as e:
        raise SaveFailed(
            "The kernel was not saved; it goes on as before.",
            f"What the snapshot says of files, or keeps of them, could not be written: {e.strerror}: {e.filename}",
            f"Make room on the disk of {keeper.store.root}; with --with-files, see that nothing changes Python's "
            "environment (pip, conda) meanwhile. Then save again.",
        ) from e


async def take(
    keeper: Keeper,
    operation: Operation,
    directory: Path,
    program: CriuProgram,
    stages: Stages,
    check: Check,
) -> tuple[Staging, Frozen, Mapping[str, Any]]:
    """Freeze the kernel for a moment and take all of it: into the staging, and /dev/shm and log into `directory`.

    `check` is called before the freeze. The third thing returned is what the agent says about its kernel.

    Raises
    ------
    SaveFailed, Refused, Cancelled : nothing was taken, and the kernel is as it was.
    KernelLost : the GPU state could not be brought back.
    """
    link = keeper.link
    assert link is not None
    await stages.enter("preparing the kernel")
    # A kernel that is not prepared has nothing to put right but its hooks, and one of them may hang.
    patience = 0.0
    try:
        agent = await stages.or_cancelled(before_save(link, keeper.launch.agent))
        patience = _AFTER_FAILURE
        staging, frozen = await _freeze(keeper, operation, directory, program, agent, stages, check)
    except (GpuckptError, OSError) as e:
        failure = e if isinstance(e, GpuckptError) else _not_saved(e)
        await after_save(link, keeper.launch.agent, failure, patience)
        raise failure from e
    await after_save(link, keeper.launch.agent, None, settings.hook_timeout())
    return staging, frozen, agent


def _remove_old(keeper: Keeper) -> None:
    """Remove this kernel's old snapshots as the settings ask for; what cannot be removed stays."""
    own = functools.partial(is_of, kernel_id=keeper.launch.kernel_id, notebook=keeper.launch.notebook)
    try:
        if (count := settings.keep_last()) is not None:
            keep_last(keeper.store, count, own)
        if (size := settings.keep_under()) is not None:
            keep_under(keeper.store, size, own)
    except GpuckptError:
        log.exception("old snapshots could not be removed")


def _not_saved(error: OSError) -> SaveFailed:
    return SaveFailed("The kernel could not be saved; it goes on as before.", str(error), criu.advice(str(error)))


@dataclass
class _RoomInStore:
    """Refuses a save that the store's disk has no room for."""

    keeper: Keeper

    def __call__(self, private: int, described: Mapping[str, Any]) -> None:
        needed = private + sum(cuda.needs(described).values())
        free = shutil.disk_usage(self.keeper.store.root).free
        if needed > free:
            raise Refused(
                "The save was refused: the store's disk has no room for it.",
                f"The kernel holds {needed / 1e6:,.0f} MB; {free / 1e6:,.0f} MB are free in {self.keeper.store.root}",
                "Remove snapshots (`%gpuckpt rm NAME`), free memory in the kernel, or set GPUCKPT_STORE to a larger "
                "disk.",
                needed=needed,
                free=free,
            )


async def before_save(link: Link, has_agent: bool) -> dict[str, Any]:
    """Have the agent run the hooks; return what it says about its kernel."""
    if not has_agent:
        return {}
    try:
        await asyncio.wait_for(asyncio.shield(link.hello), settings.hook_timeout())
        answer: dict[str, Any] = await link.call("before_save", {}, settings.hook_timeout())
    except (AgentSilent, TimeoutError, asyncio.TimeoutError):
        raise SaveFailed(
            "The kernel was not saved; it goes on as before.",
            f"Its hooks did not finish within {settings.hook_timeout():.0f} s: "
            "something in it holds Python's lock, or a hook hangs.",
            "Save again when the cell that runs is done, or set GPUCKPT_HOOK_TIMEOUT to more seconds.",
        ) from None
    return answer


async def after_save(link: Link, has_agent: bool, failure: GpuckptError | None, patience: float) -> None:
    """Have the agent undo its part, and wait until it has, for `patience` seconds at most."""
    if not has_agent:
        return
    arguments = {"error": failure.as_dict() if failure else None}
    try:
        if patience:
            await link.call("after_save", arguments, patience)
        else:
            await link.send({"call": "after_save", "id": 0, "args": arguments})
    except AgentSilent:
        log.warning("the hooks after the save did not finish in time")


async def _freeze(
    keeper: Keeper,
    operation: Operation,
    directory: Path,
    program: CriuProgram,
    agent: Mapping[str, Any],
    stages: Stages,
    check: Check,
) -> tuple[Staging, Frozen]:
    """Freeze the kernel's tree, take it, and let it run on; what criu wrote is in the staging."""
    space, worker = keeper.namespace(), keeper.worker
    script = keeper.folder.path / "post-dump"
    script.write_text(_AT_POST_DUMP)
    script.chmod(0o700)
    environment = {
        **program.environment(),
        "GPUCKPT_SNAPSHOT": str(directory),
        "GPUCKPT_LOG": run_path(KERNEL_LOG),
    }
    kernel = space.outer(keeper.state.kernel_pid)
    if kernel is None:
        raise KernelLost("The kernel has ended.", "", "Restart it.")
    tree = [kernel, *processes.descendants(kernel)]
    fit.refuse_unsavable(space.pid, kernel, tree)
    on_gpu = await asyncio.to_thread(cuda.freezable, worker, tree)
    described: dict[str, Any] = {}
    if on_gpu:
        peers = {kernel: agent["peers"]} if "peers" in agent else {}
        await asyncio.to_thread(cuda.preflight, worker, on_gpu, peers)
        described = await asyncio.to_thread(cuda.describe, worker, on_gpu)
    private = processes.private_bytes(tree)
    process: dict[str, Any] = {
        "pid": keeper.state.kernel_pid,
        "processes": processes.inner_pids(tree),
        "cuda": [processes.inner_pid(pid) for pid in on_gpu],
        "private_bytes": private,
    }
    in_vram = sum(cuda.needs(described).values())
    check(private, described)
    held = described.get("processes", [])
    keeper.state.operation = {"kind": "save", "name": operation.name, "cuda": on_gpu, "held": held}
    keeper.save_state()
    staging = await asyncio.to_thread(Staging, space, directory / CRIU_IMAGES)
    assert keeper.link is not None
    gpu = GpuFreeze(worker, space, keeper.link, on_gpu, described, staging.vram)

    def note(key: str, value: Any) -> None:
        # Written down so that the next keeper finds it, should this one be killed.
        assert keeper.state.operation is not None
        keeper.state.operation[key] = value
        keeper.note_state()

    def criu_runs(pid: int) -> None:
        note("criu", pid)

    def parks(parked: dict[str, Any]) -> None:
        note("parked", parked)

    try:
        await gpu.prepare(kernel, int(agent.get("parkable", 0)))
        await stages.enter("freezing", cancellable=False)
        began = time.monotonic()
        await gpu.freeze(parks)
        try:
            staging.open_for(private + in_vram - gpu.taken())
            await _run_criu(
                space,
                program,
                criu.dump_arguments(keeper.state.kernel_pid, staging.inside, script, settings.criu_timeout()),
                environment,
                staging.outside / criu.DUMP_LOG,
                SaveFailed("The kernel could not be saved; it goes on as before."),
                criu_runs,
            )
            parked = await gpu.finish_copy()
        finally:
            await gpu.thaw()
        # Without GPU state, only criu stops the kernel, and for less long than it runs.
        seconds = time.monotonic() - began if on_gpu else images.frozen_seconds(staging.outside)
        if space.outer(keeper.state.kernel_pid) is None:
            raise KernelLost("The kernel ended during the save.", "", "Restart it.")
        if images.has_half_connection(staging.outside):
            raise SaveFailed(
                "The kernel could not be saved; it goes on as before.",
                "It waits for another program to accept a Unix connection: a restore of it would fail.",
                "Close the connection, or wait until it is accepted, and save again.",
            )
    except BaseException:
        await gpu.close()
        await asyncio.to_thread(staging.discard)
        raise
    tidying = asyncio.create_task(gpu.close())
    keeper.state.operation = None
    keeper.note_state()
    if parked is not None:
        described = {**described, "parked": asdict(parked)}
    return staging, Frozen(seconds, tidying, described, {**process, "frozen_seconds": seconds})


async def _run_criu(
    space: Namespace,
    program: CriuProgram,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    log_file: Path,
    failure: GpuckptError,
    started: Any = None,
) -> None:
    """Run criu in the namespace; when it fails, raise `failure` with criu's own words, and keep its log."""
    try:
        status = await space.run(
            [*program.argv, *arguments],
            env=environment,
            stdout=run_path("criu.out"),
            timeout=settings.criu_timeout(),
            started=started,
        )
        why = ""
    except TimeoutError:
        status, why = 1, f"criu did not finish within {settings.criu_timeout():.0f} s"
    except OSError as e:
        status, why = 1, f"criu could not be started: {e}"
    if status == 0:
        return
    kept_log = criu_logs.keep(log_file)
    said = criu.first_error(log_file)
    if _NO_SPACE not in said and shutil.disk_usage(log_file.parent).free < _LOG_ROOM:
        # What criu wrote of its error is cut off then, and names what failed, not why.
        said = f"{_NO_SPACE} on the disk, not even for criu's log: {log_file.parent}{said and f' ({said})'}"
    if not why:
        ended = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        why = f"criu says: {said}" if said else f"criu {ended} and named no error"
    failure.why = why
    failure.then = criu.advice(said)
    failure.data.update(criu_status=status, criu_error=said)
    if kept_log is not None:
        failure.then += f" criu's log: {kept_log}"
        failure.data["log"] = str(kept_log)
    raise failure


def about_kernel(keeper: Keeper, agent: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `kernel` object of a manifest; `agent` is what the agent said of it."""
    launch = keeper.launch
    return {
        "kernel_id": launch.kernel_id,
        "name": launch.name,
        "notebook": launch.notebook,
        "agent": launch.agent,
        "connection": ports.of_connection_file(launch.connection_file),
        "execution_count": agent.get("execution_count"),
        "python": agent.get("python"),
        "ipykernel": agent.get("ipykernel"),
        "own_ports": agent.get("own_ports", []),
    }


def about_machine(program: CriuProgram) -> dict[str, Any]:
    """Return the `machine` object of a manifest."""
    return {
        "arch": platform.machine(),
        "kernel": platform.release(),
        "criu": version_text(program.version),
        "cpu_flags": fit.cpu_flags(),
    }


# -- restore


async def restore(keeper: Keeper, operation: Operation, args: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Put the kernel back to a snapshot, and answer the cell that asked from there.

    Raises
    ------
    Refused, NoSuchSnapshot, Untrusted, Damaged, Cancelled : the running kernel was not touched.
    RestoreFailed : the restore failed, and a fresh kernel was started in its place.
    KernelLost : nor could a fresh kernel be started.
    """
    stages = Stages(operation, tell)
    name = operation.name = operation.name or _latest(keeper)
    await stages.enter("checking")
    manifest, request = await asyncio.to_thread(request_of, keeper, name)
    program = await asyncio.to_thread(find_criu)
    leaving = processes.descendants(keeper.namespace().pid)
    gpus = [int(gpu) for gpu in args.get("gpus") or ()]
    fits = await asyncio.to_thread(
        fit.check_machine, manifest, request, keeper.launch, keeper.worker, program, leaving, keeper.marks, gpus
    )
    await stages.enter("verifying")
    new = await Arrival.prepare(keeper, request.images, request.missing)
    gpu = GpuReturn(keeper.worker, new.space, parked_in(manifest.cuda), fits.gpu_map, vram_files(new.space))
    try:
        await gpu.prepare(early=True)
        snapshot = await asyncio.to_thread(
            keeper.store.open, name, new.files, stages.amount, new.elsewhere, request.is_wanted
        )
        if snapshot.manifest.id != manifest.id:
            raise Refused(
                "The snapshot was not restored; nothing was touched.",
                f"Another snapshot was saved as {name!r} at this moment.",
                "Restore it again.",
            )
        await new.furnish(snapshot)
        await new.refuse_without_criu(program)
        await asyncio.to_thread(fit.check_files, snapshot, new.space.path("/"))
        warnings = [*fits.notes, *new.notes(), *await asyncio.to_thread(fit.warnings, snapshot, leaving)]
        if fits.gpu_map is not None:
            warnings += await asyncio.to_thread(cuda.moves, keeper.worker, manifest.cuda, fits.gpu_map)
        await stages.enter("restoring", cancellable=False)
        peers = ports.peers(keeper.launch.connection_file)
        keeper.namespace()  # it may have ended meanwhile
        asked = await _interrupted(keeper, args)
        keeper.state.operation = {"kind": "restore", "name": name, "asked": asked, "peers": peers}
        keeper.save_state()
    except BaseException:
        await gpu.close()
        await new.discard()
        raise
    try:
        # From here on there is no way back to the kernel as it was: its ports and its GPU memory are needed.
        await keeper.give_up()
        places = Places.of_restore(manifest.kernel["connection"], keeper.launch.connection_file)
        tidying_gpu = await put_in_place(keeper, snapshot, new, program, gpu, places, peers)
        # criu is done with them, and the memory that they lie in may be much.
        tidying = asyncio.create_task(asyncio.to_thread(snapshot.close))
        result = {**summary(snapshot.manifest), "restored": True, "warnings": warnings}
        operation.answering = True
        await resume(new.link, snapshot, asked, result, stages)
        await asyncio.gather(tidying, tidying_gpu)
    except (GpuckptError, OSError) as e:
        log.exception("the restore of %r failed", name)
        await new.discard()
        operation.answering = True
        raise await _start_afresh(keeper, snapshot.manifest.name, asked, peers, e) from e
    finally:
        await asyncio.to_thread(snapshot.close)
    keeper.state.parent = {"name": snapshot.manifest.name, "id": snapshot.manifest.id}
    return {**result, "seconds": stages.seconds()}


def _latest(keeper: Keeper) -> str:
    """Return the name of the newest snapshot of this notebook; of all notebooks, where it has none."""
    manifests = keeper.store.list()
    notebook, kernel_id = keeper.launch.notebook, keeper.launch.kernel_id
    own = [m for m in manifests if is_of(m, kernel_id, notebook)]
    if not manifests:
        raise NoSuchSnapshot(
            "There is no snapshot to restore.",
            "The store is empty.",
            "Save one first: `%gpuckpt save NAME`.",
        )
    return (own or manifests)[0].name


async def _interrupted(keeper: Keeper, args: Mapping[str, Any]) -> dict[str, Any]:
    """Ask the kernel which cells it leaves unanswered: the one that asked, or else runs, and those behind it.

    As late as can be: cells that come to the kernel afterwards are lost with it.
    """
    asked = {"cell": args["cell"]} if "cell" in args else {}
    if not keeper.launch.agent or keeper.link is None:
        return asked
    try:
        found: dict[str, Any] = await keeper.link.call("interrupted", {}, 2.0)
    except AgentSilent:
        return asked
    return {**found, **asked, "from_outside": not asked}


@dataclass(frozen=True)
class Request:
    """What of a snapshot is read for a restore here, and what that takes."""

    needed: Sequence[NeededFile]
    """What its processes use of the machine's files, but for what it brings along itself; empty in old snapshots."""
    missing: Sequence[kept_files.KeptFile]
    """What of its own files this machine lacks."""
    images: int
    """Bytes of what is taken out of the store for criu."""
    placed: int
    """Bytes of its own files that are put in place."""
    parts: frozenset[str]
    """The parts of it that hold them."""

    def is_wanted(self, path: str) -> bool:
        """Tell whether a part of the snapshot is read."""
        return not path.startswith(kept_files.FILES + "/") or path in self.parts


def request_of(keeper: Keeper, name: str) -> tuple[Manifest, Request]:
    """Read what a snapshot says of files, and compare it with what is here."""
    manifest, contents, read = keeper.store.read_files(name, [needs.NEEDS, kept_files.TABLE])
    try:
        kept = kept_files.from_json(read[kept_files.TABLE]) if kept_files.TABLE in read else kept_files.Kept([])
        needed = needs.from_json(read[needs.NEEDS]) if needs.NEEDS in read else []
        missing = placed_files.missing(kept, contents)
        placed = placed_files.bytes_of(missing, contents)
    except ValueError as e:
        raise Damaged(f"The snapshot {name} is damaged.", f"{e}", "Restore another snapshot.", name=name) from e
    brought = {file.path for file in missing}
    parts = frozenset(placed_files.parts_of(missing))
    outside = (VRAM + "/", kept_files.FILES + "/")
    images_size = sum(contents.size_of(path) for path in contents.files if not path.startswith(outside))
    return manifest, Request([file for file in needed if file.path not in brought], missing, images_size, placed, parts)


@dataclass
class Arrival:
    """The fresh sleeper that a snapshot is restored into."""

    space: Namespace
    link: Link
    files: Path
    """Where the snapshot's files are put, as the keeper names it."""
    files_inside: str
    """The same folder, as the namespace names it."""
    placement: Placement | None = None
    """What of the snapshot's own files is put in place; None where the machine has them all."""

    @classmethod
    async def prepare(cls, keeper: Keeper, needed: int, missing: Sequence[kept_files.KeptFile] = ()) -> Arrival:
        """Start a sleeper, and choose where it gets files of `needed` bytes: in its memory, or on the disk.

        `missing` are the files of the snapshot's own that are to be put in place.
        """
        space, link = await keeper.new_namespace()
        inside = settings.NAMESPACE_STAGING_DIR
        new = cls(space, link, space.path(inside), inside)
        if not fits_in_memory(space, needed):
            new.files = keeper.folder.path / WORKING_COPY
            new.files_inside = str(new.files)
            await asyncio.to_thread(shutil.rmtree, new.files, ignore_errors=True)  # of one whose keeper was killed
        if missing:
            new.placement = Placement(space, missing)
        return new

    @property
    def elsewhere(self) -> dict[str, Path]:
        """Where folders of the snapshot are put that do not go into `files`."""
        return {VRAM: self.vram, **({kept_files.FILES: self.placement.raw} if self.placement else {})}

    def notes(self) -> list[str]:
        """Return what the person must know of the files that were put in place."""
        if self.placement is None:
            return []
        kept = f"{len(self.placement.files)} files and folders of the snapshot's own stand in for what is not here."
        if not self.placement.folders:
            return [kept]
        return [kept, f"No new files can be created directly in {', '.join(self.placement.folders)}."]

    @property
    def vram(self) -> Path:
        """Where the snapshot's VRAM is put, as the keeper names it: the processes take it from there."""
        return vram_files(self.space).outside

    async def furnish(self, snapshot: Snapshot) -> None:
        """Give the sleeper the run folder, the /dev/shm and the own files of the snapshot."""
        kernel_log = self.space.run_dir / KERNEL_LOG
        shutil.copyfile(snapshot.directory / KERNEL_LOG, kernel_log)
        kernel_log.chmod(0o600)
        # tar keeps what counts here: owners, modes, and several names of one semaphore's file.
        unpack = await asyncio.create_subprocess_exec(
            "tar",
            "-x",
            "-p",
            "-f",
            str(snapshot.directory / SHARED_MEMORY),
            "-C",
            str(self.space.shared_memory),
            stdin=asyncio.subprocess.DEVNULL,
        )
        if await unpack.wait() != 0:
            raise Refused(
                "The snapshot was not restored; nothing was touched.",
                "Its shared memory (/dev/shm) could not be put in place.",
                "Check with `df /dev/shm` that there is room for it.",
            )
        if self.placement is not None:
            await self.placement.place()

    async def refuse_without_criu(self, program: CriuProgram) -> None:
        """Refuse a restore for which criu does not start any more: a C library of the snapshot's own stands in its way.

        Raises
        ------
        Refused : with what criu said.
        """
        if self.placement is None:
            return
        said = "criu.start"
        arguments = [*program.argv, "--version"]
        status = await self.space.run(arguments, env=program.environment(), stdout=run_path(said), timeout=_CRIU_STARTS)
        if status != 0:
            words = (self.space.run_dir / said).read_text("utf-8", "replace").strip().splitlines()
            raise Refused(
                "The snapshot was not restored; nothing was touched.",
                f"criu does not start among the snapshot's own files: {words[-1] if words else f'status {status}'}",
                "Run `jupyter gpuckpt setup` with GPUCKPT_CRIU_PREFIX set to an empty folder: that criu has libraries "
                "of its own.",
            )

    async def discard(self) -> None:
        """End it and everything in it."""
        self.link.close()
        await self.space.kill()
        await asyncio.to_thread(shutil.rmtree, self.files, ignore_errors=True)


async def put_in_place(
    keeper: Keeper,
    snapshot: Snapshot,
    new: Arrival,
    program: CriuProgram,
    gpu: GpuReturn,
    places: Places,
    peers: Mapping[str, int],
) -> asyncio.Task[None]:
    """Have criu restore the tree into the new sleeper, and the driver its GPU state; return what is tidied up yet."""
    manifest = snapshot.manifest
    work = snapshot.directory / CRIU_IMAGES
    _make_ready(work, places, new.space)
    random_state.spoil()
    # Waiting in the FIFO when the kernel wakes: it must know its new key before the first message comes.
    connection = json.loads(Path(keeper.launch.connection_file).read_text())
    await new.link.send(
        {
            "call": "identity",
            "id": 0,
            "args": {
                "connection": connection,
                "connection_file": keeper.launch.connection_file,
                "kernel_id": keeper.launch.kernel_id,
                "peers": dict(peers),
                "ports": dict(places.table),
            },
        }
    )
    try:
        await gpu.prepare()
        await gpu.preload()
        # criu and its helpers must not take a pid that the snapshot needs, nor must later processes.
        await new.space.set_last_pid(images.highest_id(work) + 1)
        inside = Path(new.files_inside, CRIU_IMAGES)
        await _run_criu(
            new.space,
            program,
            criu.restore_arguments(inside, inside / criu.RESTORE_LOG),
            program.environment(),
            work / criu.RESTORE_LOG,
            RestoreFailed("The snapshot could not be restored."),
        )
        pid = int(manifest.process["pid"])
        on_gpu = [outer for p in manifest.process["cuda"] if (outer := new.space.outer(int(p)))]
        if len(on_gpu) != len(manifest.process["cuda"]) or new.space.outer(pid) is None:
            raise RestoreFailed("The snapshot could not be restored.", "A process of it did not come back.")
        if on_gpu:
            await gpu.thaw(on_gpu, cuda.needs(manifest.cuda))
    finally:
        tidying = asyncio.create_task(gpu.close())
    await asyncio.to_thread(vram_files(new.space).discard)
    await new.space.adopt(pid)
    if new.placement is not None:
        await new.placement.seal()
    keeper.state.own_files = new.placement is not None
    keeper.hold(new.space, new.link, pid)
    new.link.hello.set_result({})
    return tidying


def _make_ready(work: Path, places: Places, space: Namespace) -> None:
    """Make criu's images ready to be restored here: what differs from one kernel to the next is written anew."""
    images.rewrite_tree(work / "pstree.img", work / "pstree.img")
    for path in map(places.socket_path, images.socket_paths(work)):
        # Python's multiprocessing binds sockets in folders that it deletes with the process that made them.
        space.path(str(path.parent)).mkdir(mode=0o700, parents=True, exist_ok=True)
    images.rewrite_files(
        work / "files.img",
        work / "files.img",
        port=places.port,
        abstract_name=places.abstract_name,
        socket_path=places.socket_path,
        found=functools.partial(fit.found, root=space.path("/")),
    )


async def resume(
    link: Link,
    snapshot: Snapshot,
    asked: Mapping[str, Any],
    result: Mapping[str, Any],
    stages: Stages,
) -> list[str]:
    """Have the restored kernel run its hooks and answer the cell that asked; return what went wrong in the hooks."""
    if not snapshot.manifest.kernel["agent"]:
        return []
    arguments = {
        "asked": dict(asked),
        "result": dict(result),
        "asked_at": time.time() - stages.seconds(),
    }
    try:
        answer: dict[str, Any] = await link.call("resumed", arguments, settings.hook_timeout())
    except AgentSilent:
        # It runs, and what it holds is right; a long call that keeps Python's lock was saved in the middle.
        log.warning("the restored kernel has not answered yet")
        return []
    return list(answer["faults"])


def _failed(name: str, cause: Exception) -> RestoreFailed:
    """Return the error of a restore that failed when there was no way back."""
    error = RestoreFailed(
        f"The restore of {name!r} failed. The snapshot is as it was; the kernel before it was "
        "given up, and a fresh, empty one runs in its place.",
        str(cause),
    )
    if isinstance(cause, GpuckptError):
        own_words = () if isinstance(cause, RestoreFailed) else (cause.what,)
        error.why, error.then, error.data = " ".join((*own_words, cause.why)), cause.then, cause.data
    return error


async def _start_afresh(
    keeper: Keeper,
    name: str,
    asked: Mapping[str, Any],
    peers: Mapping[str, int],
    cause: Exception,
) -> GpuckptError:
    """Start a fresh kernel after a failed restore, answer the cell from it, and return the error to raise."""
    error = _failed(name, cause)
    try:
        await keeper.start_kernel()
    except (GpuckptError, OSError) as e:
        lost = KernelLost(
            f"The restore of {name!r} failed, and so did a fresh start. The snapshot is as it was.",
            f"{error.why} Then: {e}",
            "Restart the kernel, and run `jupyter gpuckpt doctor`.",
        )
        await keeper.ended(-signal.SIGKILL)
        return lost
    await _answer_from_fresh(keeper, asked, peers, error)
    return error


async def _answer_from_fresh(
    keeper: Keeper, asked: Mapping[str, Any], peers: Mapping[str, int], error: GpuckptError
) -> None:
    link = keeper.link
    if link is None or not keeper.launch.agent or not asked.get("cell"):
        return
    try:
        await asyncio.wait_for(asyncio.shield(link.hello), settings.hook_timeout())
        arguments = {"asked": dict(asked), "peers": dict(peers), "error": error.as_dict()}
        await link.call("answer", arguments, settings.hook_timeout())
    except (AgentSilent, TimeoutError, asyncio.TimeoutError):
        log.warning("the fresh kernel did not answer the cell")


# -- after a keeper's death


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
        await _end_criu(keeper.namespace(), left.get("criu"))
        vram = vram_files(keeper.namespace())
        gpu = await GpuReturn.after(keeper.worker, keeper.namespace(), left, vram)
        try:
            await gpu.prepare()
            await gpu.mend(left.get("cuda", []), left.get("held", []))
        finally:
            await gpu.close()
        await asyncio.to_thread(vram.discard)
    with contextlib.suppress(GpuckptError):
        await asyncio.to_thread(keeper.store.collect)
    if left.get("fresh"):
        # The old kernel was gone already, and a fresh one has been started in its place.
        cause = RestoreFailed("", "The kernel's keeper died in the middle of it.", "Restore it again.")
        await _answer_from_fresh(keeper, left["asked"], left["peers"], _failed(left["name"], cause))
    keeper.state.operation = None
    keeper.note_state()


async def _end_criu(space: Namespace, pid: int | None) -> None:
    """Wait for the criu that a dead keeper left running: it lets the processes run on when it is done.

    One that does nothing any more is killed. That is the worse way: it may have put code of its own into a process.
    """
    outer = space.outer(pid) if pid else None
    if outer is None or b"criu" not in Path(f"/proc/{outer}/cmdline").read_bytes():
        return
    done, quiet_since = processes.work_done(outer), time.monotonic()
    while processes.start_time(outer) is not None:
        await asyncio.sleep(0.05)
        if (now := processes.work_done(outer)) != done:
            done, quiet_since = now, time.monotonic()
        elif time.monotonic() - quiet_since > _STALLED:
            with contextlib.suppress(ProcessLookupError):
                os.kill(outer, signal.SIGKILL)
            quiet_since = time.monotonic()
    space.end_session(outer)
