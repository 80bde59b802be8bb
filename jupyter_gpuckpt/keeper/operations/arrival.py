"""The fresh sleeper that a snapshot or a copy comes up in: what it is given, and how it is brought to life."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ... import settings
from ...client import broker_connection
from ...client.kernel_start import run_path
from ...client.resting import ASLEEP
from ...errors import (
    Damaged,
    Refused,
    RestoreFailed,
)
from ...freeze import criu, cuda, images, random_state
from ...freeze.criu_program import CriuProgram
from ...freeze.parking import Parked
from ...linux import processes
from ...linux.root_only import environment
from ...snapshots import kept_files, needs
from ...snapshots.needs import NeededFile
from ...snapshots.summary import current_name
from ...snapshots.temporary import can_be_made
from ...store import Manifest, Snapshot, Store
from .. import fit
from ..agent_says import faults_said
from ..files import lifetime, placed_files
from ..files.placed_files import Lacking, Placement
from ..gpu import gate
from ..gpu.freeze import GpuReturn, parked_in
from ..gpu.late_vram import LateVram
from ..gpu.sleep import GpuSleep
from ..link import AgentSilent, Link
from ..namespace import Namespace
from ..ports import Places
from ..staging import fits_in_memory, vram_files
from . import criu_run
from .parts import CRIU_IMAGES, KERNEL_LOG, SHARED_MEMORY, VRAM, WORKING_COPY
from .sleep import fell_asleep
from .stages import Stages

if TYPE_CHECKING:
    from ..kernel_life import Keeper

log = logging.getLogger("gpuckpt.keeper")

_TURN = 2.0  # how long a kernel's clients may take to leave it when the other one is complete, in seconds
_CRIU_STARTS = 10.0  # how long criu may take to say its version, in seconds
_SHOWN = 10  # how many files a note names
_NOTHING = Lacking()


@dataclass(frozen=True)
class Request:
    """What of a snapshot is read for a restore here, and what that takes."""

    needed: Sequence[NeededFile]
    """What its processes use of the machine's files, but for what it brings along itself; empty in old snapshots."""
    lacking: Lacking
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

    def is_wanted_at_once(self, path: str) -> bool:
        """Tell whether it is read before the kernel runs: where GPU memory need not be."""
        return self.is_wanted(path) and not path.startswith(VRAM + "/")


def request_of(store: Store, name: str) -> tuple[Manifest, Request]:
    """Read what a snapshot says of files, and compare it with what is here."""
    manifest, contents, read = store.read_files(name, [needs.NEEDS, kept_files.TABLE])
    try:
        kept = kept_files.from_json(read[kept_files.TABLE]) if kept_files.TABLE in read else kept_files.Kept([])
        needed = needs.from_json(read[needs.NEEDS]) if needs.NEEDS in read else []
        made = {file.path for file in needed if file.kept and can_be_made(Path(file.path))}
        lacking = placed_files.lacking(kept, needed, contents, made)
        placed = placed_files.bytes_of(lacking.files, contents)
    except ValueError as e:
        raise Damaged(f"The snapshot {name} is damaged.", f"{e}", "Restore another snapshot.", name=name) from e
    brought = {file.path for file in lacking.files}
    parts = frozenset(placed_files.parts_of(lacking.files))
    outside = (VRAM + "/", kept_files.FILES + "/")
    images_size = sum(contents.size_of(path) for path in contents.files if not path.startswith(outside))
    return manifest, Request([file for file in needed if file.path not in brought], lacking, images_size, placed, parts)


def make_lifetime_files(folder: Path) -> list[Path]:
    """Make those of the files that live as long as the kernel that are gone; return what was made.

    Raises
    ------
    Refused : it cannot be done.
    """
    archive = folder / lifetime.ARCHIVE
    if not archive.exists():
        return []
    try:
        return lifetime.make(archive, needs.of_snapshot(folder))
    except OSError as e:
        raise Refused(
            "The snapshot was not restored; nothing was touched.",
            f"A file that went with its kernel could not be made again: {e.strerror or e}: {e.filename}",
            "Make it possible to write there, and restore again.",
        ) from e


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
    made: list[Path] = field(default_factory=list)
    """What was made of the files that live as long as the kernel, since it was gone."""

    @classmethod
    async def prepare(cls, keeper: Keeper, needed: int, lacking: Lacking = _NOTHING) -> Arrival:
        """Start a sleeper, and choose where it gets files of `needed` bytes: in its memory, or on the disk.

        `lacking` are the files of the snapshot's own that are to be put in place.
        """
        if (stand_ins := lacking.stand_ins) and broker_connection.is_needed():
            raise Refused(
                "The snapshot was not restored; nothing was touched.",
                f"This machine lacks {len(stand_ins)} of the files that the snapshot brings along, such as "
                f"{stand_ins[0].path}, and only root can put them in place for a kernel.",
                "Install them (the same versions of the same packages), or restore it as root.",
            )
        space, link = await keeper.new_namespace()
        inside = settings.NAMESPACE_STAGING_DIR
        new = cls(space, link, space.path(inside), inside)
        if not fits_in_memory(space, needed):
            new.files = keeper.folder.path / WORKING_COPY
            new.files_inside = str(new.files)
            await asyncio.to_thread(shutil.rmtree, new.files, ignore_errors=True)  # of one whose keeper was killed
        if lacking.files:
            new.placement = Placement(space, lacking)
        return new

    @property
    def elsewhere(self) -> dict[str, Path]:
        """Where folders of the snapshot are put that do not go into `files`."""
        return {VRAM: self.vram, **({kept_files.FILES: self.placement.raw} if self.placement else {})}

    @property
    def has_stand_ins(self) -> bool:
        """Tell whether files of the snapshot's own stand in the kernel's mount namespace alone."""
        return self.placement is not None and bool(self.placement.lacking.stand_ins)

    def notes(self) -> list[str]:
        """Return what the person must know of the files that were put in place."""
        if self.placement is None:
            return []
        found = []
        if made := [str(path) for path in self.placement.made]:
            more = f" and {len(made) - _SHOWN} more" if len(made) > _SHOWN else ""
            found.append(f"Files and folders that were gone were created again: {', '.join(made[:_SHOWN])}{more}.")
        if stand_ins := self.placement.lacking.stand_ins:
            found.append(f"{len(stand_ins)} files and folders of the snapshot's own stand in for what is not here.")
        if mixed := self.placement.mixed:
            found.append(
                f"What is installed or created directly in {', '.join(mixed)} is this kernel's alone, and goes with it."
            )
        if sealed := self.placement.sealed:
            found.append(f"No new files can be created directly in {', '.join(sealed)}.")
        return found

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
            env=environment(),
            stdin=asyncio.subprocess.DEVNULL,
        )
        limit = settings.criu_timeout((snapshot.directory / SHARED_MEMORY).stat().st_size)
        status = -signal.SIGKILL
        try:
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                status = await asyncio.wait_for(unpack.wait(), limit)
        finally:
            if unpack.returncode is None:
                unpack.kill()
        if status != 0:
            raise Refused(
                "The snapshot was not restored; nothing was touched.",
                "Its shared memory (/dev/shm) could not be put in place.",
                "Check with `df /dev/shm` that there is room for it.",
            )
        await to_its_end(lambda: self.made.extend(make_lifetime_files(snapshot.directory)))
        if self.placement is not None:
            await to_its_end(self.placement.build)
            await self.placement.mount()
        if self.space.deputy is not None:
            work = Path(self.files_inside, CRIU_IMAGES)
            await asyncio.to_thread(self.space.deputy.check, self.space.path(str(work)))

    async def refuse_without_criu(self, program: CriuProgram) -> None:
        """Refuse a restore for which criu does not start any more: a C library of the snapshot's own stands in its way.

        Raises
        ------
        Refused : with what criu said.
        """
        if not self.has_stand_ins:
            return
        said = "criu.start"
        arguments = [*program.argv, "--version"]
        status = await self.space.run(arguments, env=program.environment(), stdout=run_path(said), timeout=_CRIU_STARTS)
        if status != 0:
            words = (self.space.run_dir / said).read_text("utf-8", "replace").strip().splitlines()
            raise Refused(
                "The snapshot was not restored; nothing was touched.",
                f"criu does not start among the snapshot's own files: {words[-1] if words else f'status {status}'}",
                "Run `gpuckpt setup` with GPUCKPT_CRIU_PREFIX set to an empty folder: that criu has libraries "
                "of its own.",
            )

    async def discard(self) -> None:
        """End it and everything in it."""
        self.link.close()
        try:
            await self.space.kill()
        finally:
            await asyncio.to_thread(lifetime.unmake, [*self.made, *(self.placement.made if self.placement else ())])
            await asyncio.to_thread(shutil.rmtree, self.files, ignore_errors=True)


async def to_its_end(work: Callable[[], object]) -> None:
    """Have a thread do something, and wait for it also where nobody wants it any more: so that it can be undone."""
    doing = asyncio.create_task(asyncio.to_thread(work))
    try:
        await asyncio.shield(doing)
    except asyncio.CancelledError:
        await asyncio.wait({doing})
        doing.exception()  # seen
        raise


@dataclass
class Verified:
    """A snapshot of which every byte is right, in a fresh sleeper that it fits; no kernel has been touched for it.

    What is read behind the rest is not verified yet; `gpu` and `late` know of it.
    """

    snapshot: Snapshot
    new: Arrival
    gpu: GpuReturn
    warnings: list[str]
    """What the person must know of it."""
    late: LateVram | None = None
    """Reads what was in GPU memory, where that is not waited for: all else is verified."""

    @classmethod
    async def of(
        cls,
        keeper: Keeper,
        store: Store,
        manifest: Manifest,
        request: Request,
        program: CriuProgram,
        fits: fit.Fit,
        leaving: Sequence[int],
        stages: Stages,
        *,
        lazily: bool = False,
        beside: bool = False,
    ) -> Verified:
        """Read it out of the store into a fresh sleeper; `leaving` are the processes that will have ended by then.

        With `lazily`, what was in GPU memory is seen to be there, and is read behind the rest. So is, `beside` a kernel
        that still runs, what goes straight to the GPU.

        Raises
        ------
        Refused, StoreError, Cancelled : nothing is left behind.
        """
        await stages.enter("verifying")
        new = await Arrival.prepare(keeper, request.images, request.lacking)
        parked = parked_in(manifest.cuda)
        read_again = functools.partial(_read_parked, store, manifest, new, parked)
        gpu = GpuReturn(keeper.worker, new.space, parked, fits.gpu_map, vram_files(new.space), read_again)
        snapshot, late = None, None
        is_wanted: Callable[[str], bool] = request.is_wanted
        try:
            await gpu.prepare(early=True, reading=not lazily)
            if lazily:
                late = LateVram(store, manifest.name, manifest.id, VRAM, new.vram)
                await asyncio.to_thread(late.open)
                is_wanted = request.is_wanted_at_once
            takers = {f"{VRAM}/{parked.file}": gpu.taker} if parked is not None and gpu.taker is not None else {}
            if beside and takers:
                is_wanted = _but_for(takers, request.is_wanted)
            open_ = functools.partial(store.open, manifest.name, new.files, stages.amount)
            snapshot = await asyncio.to_thread(open_, new.elsewhere, is_wanted, takers)
            if beside and takers:
                postpone = functools.partial(store.postpone, manifest.name, manifest.id, {VRAM: new.vram})
                gpu.read_behind(await asyncio.to_thread(postpone, takers.__contains__, takers), stages.amount)
            else:
                await gpu.have_read()
            if late is not None:
                late.start()
            if snapshot.manifest.id != manifest.id:
                raise Refused(
                    "The snapshot was not restored; nothing was touched.",
                    f"Another snapshot was saved as {manifest.name!r} at this moment.",
                    "Try again.",
                )
            await stages.or_cancelled(new.furnish(snapshot))
            await new.refuse_without_criu(program)
            await asyncio.to_thread(fit.check_files, snapshot, new.space.path("/"))
            warnings = [*fits.notes, *new.notes(), *await asyncio.to_thread(fit.warnings, snapshot, leaving)]
            if fits.gpu_map is not None:
                warnings += await asyncio.to_thread(cuda.moves, keeper.worker, manifest.cuda, fits.gpu_map)
        except BaseException:
            if late is not None:
                await late.close()
            if snapshot is not None:
                await asyncio.to_thread(snapshot.close)
            await gpu.close()
            await new.discard()
            raise
        return cls(snapshot, new, gpu, warnings, late)

    async def discard(self) -> None:
        """Give it up."""
        if self.late is not None:
            await self.late.close()
        await asyncio.to_thread(self.snapshot.close)
        await self.gpu.close()
        await self.new.discard()


def _but_for(paths: Container[str], is_wanted: Callable[[str], bool]) -> Callable[[str], bool]:
    return lambda path: path not in paths and is_wanted(path)


def _read_parked(store: Store, manifest: Manifest, new: Arrival, parked: Parked | None) -> None:
    """Write what was parked into its file, of a snapshot that is being restored; it may have been renamed meanwhile.

    Raises
    ------
    StoreError : it is not there any more.
    """
    assert parked is not None
    path = f"{VRAM}/{parked.file}"
    name = current_name(store, manifest.name, manifest.id)
    with contextlib.closing(store.postpone(name, manifest.id, {VRAM: new.vram}, path.__eq__)) as files:
        files.read()


class Predecessor(Protocol):
    """The kernel that runs beside the one that comes in its place."""

    @property
    def peers(self) -> Mapping[str, int]:
        """How many clients it had at each channel."""

    async def leave(self, late: LateVram | None) -> None:
        """Give it up, unless this raises. What is read of GPU memory behind the rest must be right so far."""

    async def turn(self) -> None:
        """Have its clients connect to the other one as soon as that listens; it is about to run."""


async def put_in_place(
    keeper: Keeper,
    snapshot: Snapshot,
    new: Arrival,
    program: CriuProgram,
    gpu: GpuReturn,
    places: Places,
    peers: Mapping[str, int],
    *,
    hold: bool = False,
    late: LateVram | None = None,
    predecessor: Predecessor | None = None,
    stages: Stages | None = None,
) -> asyncio.Task[None]:
    """Have criu restore the tree into the new sleeper, and the driver its GPU state; return what is tidied up yet.

    With `hold` the kernel executes nothing that comes until it is told that it is woken. With `late`, which reads what
    was in GPU memory, the kernel sleeps then, and executes what does not touch a GPU. A `predecessor` is given up as
    late as can be, and before anything of this one runs; whatever is raised before that has changed nothing for it.
    Where there is a way back, the operation's `stages` tell whether criu is to be waited for any longer.
    """
    manifest = snapshot.manifest
    work = snapshot.directory / CRIU_IMAGES
    _make_ready(work, places, new.space)
    if new.space.deputy is None:  # which does it itself, at the restore
        random_state.spoil()
    how = {**({"hold": True} if hold else {}), **({"asleep": True} if late is not None else {})}
    introduce = functools.partial(_introduce, keeper, snapshot, new.link, places, how)
    if predecessor is None:
        await introduce(peers)
    output = (new.space.run_dir / KERNEL_LOG).stat().st_size
    has_left = predecessor is None
    turning: asyncio.Task[None] | None = None

    async def take_its_place(of: Predecessor) -> None:
        nonlocal has_left
        if turning is not None:
            # Who does not come over comes when the other one has ended.
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(turning, _TURN)
        await of.leave(late)
        has_left = True
        await introduce(of.peers)

    try:
        populating = None
        if late is None:
            await gpu.prepare()
            await gpu.preload()
            # criu has one thread and leaves the other processors to this.
            populating = asyncio.create_task(asyncio.to_thread(vram_files(new.space).populate))
        # criu and its helpers must not take a pid that the snapshot needs, nor must later processes.
        await new.space.set_last_pid(images.highest_id(work) + 1)
        inside = Path(new.files_inside, CRIU_IMAGES)
        if manifest.process["cuda"]:
            gate.close(new.space.run_dir)
        if predecessor is not None and (late is not None or not manifest.process["cuda"]):
            turning = asyncio.create_task(predecessor.turn())
        failure = RestoreFailed("The snapshot could not be restored.")
        left: criu.Left = "stopped" if predecessor else "running"
        restoring = criu_run.restore(new.space, program, work, inside, failure, left)
        await (restoring if stages is None else stages.or_cancelled(restoring))
        pid = int(manifest.process["pid"])
        on_gpu = [outer for p in manifest.process["cuda"] if (outer := new.space.outer(int(p)))]
        if len(on_gpu) != len(manifest.process["cuda"]) or new.space.outer(pid) is None:
            raise RestoreFailed("The snapshot could not be restored.", "A process of it did not come back.")
        stay = predecessor is not None and late is None and gpu.can_stay(on_gpu)
        if predecessor is not None and not stay:
            await gpu.have_read()
            await take_its_place(predecessor)
            _go_on(new.space, work)
        asleep = None
        if late is not None:
            asleep = await GpuSleep.of_snapshot(keeper.worker, new.space, gpu, on_gpu[0], manifest.cuda, late)
            keeper.asleep = asleep
        elif on_gpu:
            if predecessor is not None and stay:
                turning = asyncio.create_task(_turn_soon(predecessor, gpu))
            await gpu.thaw(on_gpu, cuda.needs(manifest.cuda), populating, stay=stay)
        if predecessor is not None and stay:
            await take_its_place(predecessor)
            await gpu.go()
            _go_on(new.space, work)
    except BaseException:
        if not has_left:
            new.space.kill_now()  # nothing of it has run, and nothing of it shall
        if turning is not None:
            turning.cancel()
            await asyncio.wait([turning])
        raise
    finally:
        tidying = asyncio.create_task(gpu.close())
    if asleep is None:
        await asyncio.to_thread(vram_files(new.space).discard)
    await new.space.adopt(pid)
    if new.placement is not None:
        await new.placement.seal()
    keeper.state.own_files, keeper.state.sleep, keeper.state.worked = new.has_stand_ins, None, 0.0
    keeper.state.output = output
    if asleep is not None:
        keeper.state.sleep = asleep.note(ASLEEP)
    keeper.hold(new.space, new.link, pid)
    if asleep is not None:
        fell_asleep(keeper, asleep)
    new.link.hello.set_result({})
    return tidying


async def _turn_soon(predecessor: Predecessor, gpu: GpuReturn) -> None:
    await gpu.nearly_read()
    await predecessor.turn()


def _go_on(space: Namespace, work: Path) -> None:
    """Have processes go on that were stopped as criu left them, but for those that stood still when they were saved.

    Children go first: none of them stands still where its parent looks.
    """
    still = images.stopped(work)
    for pid in reversed(processes.descendants(space.pid)):
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if processes.inner_pid(pid) not in still:
                os.kill(pid, signal.SIGCONT)


async def _introduce(
    keeper: Keeper,
    snapshot: Snapshot,
    link: Link,
    places: Places,
    how: Mapping[str, bool],
    peers: Mapping[str, int],
) -> None:
    """Tell the kernel who it is now; this waits in the FIFO when it wakes, before the first message can come."""
    if not snapshot.manifest.kernel["agent"]:
        return
    connection = json.loads(Path(keeper.launch.connection_file).read_text())
    kernel = snapshot.manifest.kernel
    # What waits for a kernel that wakes has been answered by nobody.
    waited = {"waited": kernel["waited"]} if "waited" in kernel and not how.get("hold") else {}
    await link.send(
        {
            "call": "identity",
            "id": 0,
            "args": {
                "connection": connection,
                "connection_file": keeper.launch.connection_file,
                "kernel_id": keeper.launch.kernel_id,
                "peers": dict(peers),
                "ports": dict(places.table),
                **how,
                **waited,
            },
        }
    )


def _make_ready(work: Path, places: Places, space: Namespace) -> None:
    """Make criu's images ready to be restored here: what differs from one kernel to the next is written anew."""
    images.rewrite_tree(work / "pstree.img", work / "pstree.img")
    for path in map(places.socket_path, images.socket_paths(work)):
        # Python's multiprocessing binds sockets in folders that it deletes with the process that made them.
        space.path(str(path.parent)).mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.geteuid() != 0:
        images.own_deleted_files(work, os.geteuid(), [os.getegid(), *os.getgroups()])
    images.rewrite_files(
        work / "files.img",
        work / "files.img",
        port=places.port,
        abstract_name=places.abstract_name,
        socket_path=places.socket_path,
        deleted=functools.partial(_place_of_deleted, root=space.path("/")),
        found=functools.partial(fit.found, root=space.path("/")),
    )


def _place_of_deleted(path: str, root: Path) -> str:
    """Return where a file that was deleted is made again for a moment: elsewhere, if it cannot be where it was.

    A library that was replaced while the kernel had it loaded may have been in a folder that is root's, or read-only.
    """
    folder = root / path[1:]
    while not folder.is_dir():
        folder = folder.parent
    return path if os.access(folder, os.W_OK | os.X_OK) else f"/dev/shm/{os.path.basename(path)}"  # noqa: S108, PTH119


async def resume(
    link: Link,
    snapshot: Snapshot,
    asked: Mapping[str, Any],
    result: Mapping[str, Any],
    stages: Stages,
) -> list[str]:
    """Have the restored kernel run its hooks and answer the cell that asked; return what there is to say of it."""
    if not snapshot.manifest.kernel["agent"]:
        return []
    arguments = {
        "asked": dict(asked),
        "result": dict(result),
        "asked_at": time.time() - stages.seconds(),
    }
    try:
        answer = faults_said(await link.call("resumed", arguments, settings.hook_timeout()))
    except AgentSilent:
        # It runs, and what it holds is right; a long call that keeps Python's lock was saved in the middle.
        log.warning("the restored kernel has not answered yet")
        return []
    return [*answer.notes, *answer.faults]
