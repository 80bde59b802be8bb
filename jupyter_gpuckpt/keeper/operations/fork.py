"""Fork, step by step: copies of a kernel come up beside it, from what it is now or from a snapshot.

The keeper of the kernel takes everything once (`fork`), decides what each copy gets instead of what it cannot share,
and starts a keeper for each, which brings its copy up (`arrive`). Nothing is stored, and the kernel keeps running.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import secrets
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import settings
from ...checked import from_json, to_json
from ...client import adoption, keepers
from ...client.broker_connection import COMES_BACK, usable_criu
from ...client.record import KernelFolder, Launch, Operation, Parent, Saved, now
from ...errors import ForkFailed, GpuckptError, NoSuchKernel, Refused
from ...freeze import cuda, images
from ...freeze.criu_program import CriuProgram
from ...linux import processes
from ...linux.reserved_ports import Reserved
from ...operations.requests import Fork, Save, Status
from ...operations.results import Copy, Forked, KernelStatus, NewCopy, Restored
from ...snapshots.naming import NOT_RESTORED, find
from ...snapshots.saved import kernel_of, processes_of
from ...snapshots.summary import summary
from ...store import Manifest, Snapshot, name_of
from .. import ports, preflight
from ..files import lifetime
from ..gpu import sharing
from ..gpu.bring_back import GpuReturn
from ..gpu.parked import parked_in
from ..owner import owner_of
from ..staging import claim_memory, vram_files
from ..taken import refuse_for_copies
from ..unsaved import saved_by
from .fresh_sleeper import FreshSleeper, make_lifetime_files, plan_restore, resume
from .parts import CAPTURE, CRIU_IMAGES, VRAM
from .progress import OperationProgress, ProgressCallback
from .save import about_kernel, about_machine, save
from .take import take
from .takeover import AtOnce, Coming, InPlace, take_over

if TYPE_CHECKING:
    from ..kernel_life import Keeper

_NOT_FORKED = "The {kernel} was not forked; it keeps running."


@dataclass(frozen=True)
class Wanted:
    """What was asked for."""

    count: int
    snapshot: str
    save_as: str
    gpus: Sequence[int]
    reseed: bool

    @classmethod
    def of(cls, request: Fork) -> Wanted:
        """Return what a request asks for.

        Raises
        ------
        Refused : it asks for too much, or for things that exclude each other.
        """
        count, snapshot, save_as = request.count, request.key or request.snapshot or "", request.name or ""
        if not 1 <= count <= settings.MOST_COPIES:
            raise Refused(
                _NOT_FORKED, f"{count} copies were asked for.", f"Ask for 1 to {settings.MOST_COPIES} at once."
            )
        if snapshot and save_as:
            raise Refused(
                _NOT_FORKED,
                f"It was to be forked from the snapshot {snapshot!r}, and also saved as {save_as!r}.",
                "Choose one of the two.",
            )
        return cls(count, snapshot, save_as, request.gpus, request.reseed)


@dataclass
class _Capture:
    """What the copies are made of: the files of a snapshot, wherever they lie."""

    manifest: Manifest
    criu: Path
    vram: Path
    rest: Path
    """The folder with /dev/shm and the log."""
    gpu_map: Mapping[str, str] | None
    parent: Parent | None
    """The snapshot that the copies come from."""
    saved: Saved
    """When a snapshot had all that they have."""


@dataclass
class _Order:
    """What the keeper of a copy is told."""

    manifest: Manifest
    criu: str
    vram: str
    rest: str
    """The folders as in `_Capture`."""
    size: int
    ports: dict[str, int]
    """Where the kernel's sockets come to be, by their ports."""
    paths: dict[str, str]
    """The same of the paths of its Unix sockets."""
    gpu_map: dict[str, str] | None
    parent: Parent | None
    saved: Saved
    reseed: bool
    index: int


@dataclass
class _Room:
    """Refuses a fork that host memory or GPUs have no room for, and notes which GPUs the copies get."""

    keeper: Keeper
    wanted: Wanted
    gpu_map: Mapping[str, str] | None = field(default=None, init=False)

    def __call__(self, private: int, described: Mapping[str, Any]) -> None:
        preflight.room_for_copies(private + cuda.in_use(described), self.wanted.count)
        preflight.has_gpu_state(bool(described), self.wanted.gpus, _NOT_FORKED)
        if described:
            self.gpu_map = cuda.fits(
                self.keeper.worker, described, gpus=self.wanted.gpus, copies=self.wanted.count, what=_NOT_FORKED
            )


async def fork(keeper: Keeper, operation: Operation, request: Fork, on_progress: ProgressCallback) -> Forked:
    """Make copies of the kernel; it keeps running.

    Raises
    ------
    Refused, NoSuchSnapshot, Damaged, SaveFailed, StoreError, Cancelled : there is no copy, and the kernel is as it was.
    ForkFailed : a copy did not come up; all others were ended again, and the kernel keeps running.
    KernelLost : the GPU state could not be brought back.
    """
    progress = OperationProgress(operation, on_progress)
    await progress.enter("checking")
    wanted = Wanted.of(request)
    if keeper.launch.job:
        raise Refused(
            _NOT_FORKED,
            "It is a job, which could not be told that it is a copy.",
            f"Save it, and restore the snapshot as a new job: `gpuckpt restore {keeper.launch.job} SNAPSHOT --as NEW`.",
        )
    if not keeper.launch.agent:
        raise Refused(
            _NOT_FORKED,
            "It has no agent, so a copy could not be given its own connection key.",
            'Fork kernels of the kind "Python 3 (gpuckpt)".',
        )
    if keeper.state.own_files:
        raise Refused(
            _NOT_FORKED,
            "It uses files from a snapshot that are not on this machine.",
            "Save it, and restore the snapshot in a notebook of its own.",
        )
    program = await asyncio.to_thread(usable_criu, COMES_BACK)
    if wanted.save_as:
        saved = await save(keeper, operation, Save(name=wanted.save_as), on_progress)
        wanted = replace(wanted, snapshot=saved.name)
    elif wanted.snapshot:
        key = request.key or str(await asyncio.to_thread(find, keeper.store, wanted.snapshot, owner_of(keeper)))
        wanted = replace(wanted, snapshot=key)
    directory = keeper.folder.path / CAPTURE
    await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)  # of a fork whose keeper was killed
    directory.mkdir(mode=0o700)
    moves: list[str] = []
    async with contextlib.AsyncExitStack() as tidying:
        tidying.push_async_callback(asyncio.to_thread, shutil.rmtree, directory, ignore_errors=True)
        take_it = _of_snapshot if wanted.snapshot else _of_kernel
        with _told_of_a_fork():
            capture = await take_it(keeper, operation, directory, program, progress, wanted, tidying)
        await asyncio.to_thread(refuse_for_copies, _NOT_FORKED, capture.criu, wanted.count)
        await progress.enter(_starting(0, wanted.count), cancellable=False)
        kernels, warnings = await _bring_up(keeper, capture, wanted, progress)
        if capture.gpu_map is not None:
            moves = await asyncio.to_thread(cuda.moves, keeper.worker, capture.manifest.cuda, capture.gpu_map)
    if request.adopt:
        kernels = [await _adopted(keeper, one) for one in kernels]
    about = None if wanted.snapshot else processes_of(capture.manifest)
    return Forked(
        kernels=kernels,
        warnings=moves + warnings,
        snapshot=wanted.snapshot,
        frozen_seconds=about.frozen_seconds if about is not None else None,
        gpu_seconds=about.gpu_seconds if about is not None else None,
        seconds=progress.seconds(),
    )


async def _of_kernel(
    keeper: Keeper,
    operation: Operation,
    directory: Path,
    program: CriuProgram,
    progress: OperationProgress,
    wanted: Wanted,
    tidying: contextlib.AsyncExitStack,
) -> _Capture:
    """Take the kernel as it is now."""
    room = _Room(keeper, wanted)
    await _make_room(keeper, progress, room)
    taken = await take(keeper, operation, directory, program, progress, room)
    staging, frozen, agent = taken.staging, taken.frozen, taken.agent
    tidying.push_async_callback(asyncio.to_thread, staging.discard)
    tidying.push_async_callback(frozen.tidied)
    manifest = Manifest(
        name="",
        id=secrets.token_hex(16),
        message="",
        created=now(),
        parent=keeper.state.parent_id,
        contents="",
        size=frozen.process.private_bytes,
        stored=0,
        kernel=to_json(about_kernel(keeper, agent)),
        machine=to_json(about_machine(program)),
        cuda=frozen.cuda,
        process=to_json(frozen.process),
    )
    state = keeper.state
    saved = state.saved or Saved(state.started, 0)
    return _Capture(manifest, staging.outside, staging.vram.outside, staging.rest, room.gpu_map, state.parent, saved)


async def _make_room(keeper: Keeper, progress: OperationProgress, room: _Room) -> None:
    """Have other kernels sleep, where the GPU memory that this one holds now does not fit as often as is wanted.

    What is refused here is refused again where it counts, when the kernel has given back what it does not use.
    """
    pids = cuda.cuda_pids(processes.descendants(keeper.namespace().pid))
    if pids:
        described = await asyncio.to_thread(cuda.describe, keeper.worker, pids)
        with contextlib.suppress(Refused):
            await sharing.fitting(keeper, progress, lambda: room(0, described))


@contextlib.contextmanager
def _told_of_a_fork() -> Iterator[None]:
    """Have what speaks against restoring a snapshot told as what speaks against forking from it."""
    try:
        yield
    except GpuckptError as e:
        if e.what == NOT_RESTORED:
            e.what = _NOT_FORKED
        raise


async def _of_snapshot(
    keeper: Keeper,
    operation: Operation,
    directory: Path,
    program: CriuProgram,
    progress: OperationProgress,
    wanted: Wanted,
    tidying: contextlib.AsyncExitStack,
) -> _Capture:
    """Take a snapshot out of the store, every byte of it verified; the kernel is not touched."""
    await progress.enter("checking")
    manifest, request = await asyncio.to_thread(plan_restore, keeper.store, wanted.snapshot)
    if lacking := request.lacking.files:
        raise Refused(
            _NOT_FORKED,
            f"{lacking[0].path} and {len(lacking) - 1} other files of the snapshot's own are not here.",
            "Restore it in a notebook of its own instead, which gets these files.",
        )
    check = functools.partial(preflight.check_machine, manifest, request, keeper.launch, keeper.worker, program, ())
    fits = await sharing.fitting(keeper, progress, functools.partial(check, keeper.marks, wanted.gpus, wanted.count))
    await progress.enter("verifying")
    space = keeper.namespace()
    claim = await asyncio.to_thread(claim_memory, space, request.images, copies=1 + wanted.count)
    if claim is not None:
        tidying.callback(claim.release)
    into = space.path(settings.NAMESPACE_STAGING_DIR) if claim is not None else directory / "snapshot"
    await asyncio.to_thread(shutil.rmtree, into, ignore_errors=True)  # of an operation whose keeper was killed
    vram = vram_files(space)
    await asyncio.to_thread(vram.discard)
    tidying.push_async_callback(asyncio.to_thread, vram.discard)
    elsewhere = {VRAM: vram.outside}
    snapshot = await asyncio.to_thread(
        keeper.store.open, wanted.snapshot, into, progress.amount, elsewhere, request.is_wanted
    )
    tidying.push_async_callback(asyncio.to_thread, snapshot.close)
    if snapshot.manifest.id != manifest.id:
        raise Refused(_NOT_FORKED, f"Another snapshot was saved as {wanted.snapshot!r} at this moment.", "Fork again.")
    made = await asyncio.to_thread(make_lifetime_files, snapshot.directory)
    tidying.push(lambda kind, *_: lifetime.unmake(made) if kind is not None else None)
    await asyncio.to_thread(preflight.check_files, snapshot, Path("/"))
    of = kernel_of(manifest)
    parent, saved = Parent(name_of(manifest.name), manifest.id), saved_by(of.cells, in_cell=of.in_cell)
    criu = snapshot.directory / CRIU_IMAGES
    return _Capture(manifest, criu, vram.outside, snapshot.directory, fits.gpu_map, parent, saved)


# -- what each copy gets


@dataclass
class _Copy:
    """One copy before it comes up."""

    launch: Launch
    order: _Order
    told: dict[str, int]
    """The ports of the user's own that are others in the copy, by what they are in the kernel."""


class _Plan:
    """Decides for every copy what it gets instead of what it cannot share; `close` when all are up."""

    def __init__(self, keeper: Keeper, capture: _Capture, wanted: Wanted) -> None:
        self._keeper, self._capture, self._wanted = keeper, capture, wanted
        self._reserved = Reserved()
        self._bound = images.bound_ports(capture.criu)
        self._kernel = kernel_of(capture.manifest)
        ours = {*self._kernel.connection.values(), *self._kernel.own_ports}
        self._of_user = [port for port in self._bound if port not in ours]
        self._size = sum(file.stat().st_size for folder in (capture.criu, capture.rest) for file in folder.iterdir())
        self._paths = ports.taken_paths(preflight.shared_socket_paths(capture.criu))

    def copy(self, index: int) -> _Copy:
        """Plan one copy, and write its connection file."""
        source = self._keeper.launch
        kernel_id = str(uuid.uuid4())
        saved = self._kernel.connection
        table = ports.of_a_copy(self._bound, saved, self._reserved)
        launch = _launch_of_copy(source, kernel_id)
        channels = {channel: table[saved[channel]] for channel in ports.CHANNELS}
        _write_connection_file(source.connection_file, launch.connection_file, channels)
        capture = self._capture
        order = _Order(
            manifest=capture.manifest,
            criu=str(capture.criu),
            vram=str(capture.vram),
            rest=str(capture.rest),
            size=self._size,
            ports={str(port): new for port, new in table.items()},
            paths={str(path): f"{path}.{kernel_id[:8]}" for path in self._paths},
            gpu_map=dict(capture.gpu_map) if capture.gpu_map is not None else None,
            parent=capture.parent,
            saved=capture.saved,
            reseed=self._wanted.reseed,
            index=index,
        )
        return _Copy(launch, order, {str(p): table[p] for p in self._of_user if table[p] != p})

    def warnings(self) -> list[str]:
        """Return what the copies share with the kernel, or have under another name, in words."""
        return [
            *(
                f"A Unix socket that is bound to {path} is bound to {path}.ID in a copy, ID being how its id begins."
                for path in sorted(map(str, self._paths))
            ),
            *(
                f"The kernel and its copies all have {path} open for writing: what one writes, the others see."
                for path in preflight.files_written(self._capture.criu)
            ),
        ]

    def close(self) -> None:
        """Let go of the ports."""
        self._reserved.close()


def _launch_of_copy(source: Launch, kernel_id: str) -> Launch:
    """Return how a copy is started, should it ever have to be restarted."""
    connection_file = str(settings.connection_file(kernel_id))
    old = {source.connection_file, os.path.realpath(source.connection_file)}
    return replace(
        source,
        kernel_id=kernel_id,
        argv=[connection_file if word in old else word for word in source.argv],
        connection_file=connection_file,
        notebook="",
        copy_of=source.kernel_id,
    )


def _write_connection_file(source: str, target: str, channels: Mapping[str, int]) -> None:
    """Write the connection file of a copy: its own ports and its own key, all else as the kernel's."""
    content: dict[str, Any] = json.loads(Path(source).read_text())
    content.update(channels, key=secrets.token_hex(32))
    content.pop("jupyter_session", None)
    with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as f:
        json.dump(content, f, indent=2)


# -- bringing them up


async def _bring_up(
    keeper: Keeper, capture: _Capture, wanted: Wanted, progress: OperationProgress
) -> tuple[list[NewCopy], list[str]]:
    """Start all copies, and return what there is to say of each; if one fails, none is left."""
    plan = await asyncio.to_thread(_Plan, keeper, capture, wanted)
    copies: list[_Copy] = []
    # More at once than there are processors would not be up sooner, and need more memory.
    slots = asyncio.Semaphore(os.cpu_count() or 1)
    up = 0

    async def start(index: int) -> NewCopy:
        nonlocal up
        async with slots:
            copy = plan.copy(index)
            copies.append(copy)
            process, folder = await asyncio.to_thread(keepers.start_keeper, copy.launch, copy.order)
            _reap(process)
            status = await asyncio.to_thread(_status, folder)
        up += 1
        await progress.enter(_starting(up, wanted.count), cancellable=False)
        return NewCopy(
            id=copy.launch.kernel_id,
            index=copy.order.index,
            name=copy.launch.name,
            connection_file=copy.launch.connection_file,
            pid=status.pid,
            keeper_pid=status.keeper_pid,
            ports=copy.told,
            notes=status.notes,
            held=False,
        )

    with contextlib.closing(plan), _in_words():
        async with contextlib.AsyncExitStack() as undoing:
            undoing.push_async_callback(asyncio.to_thread, _end_all, copies)
            started = await asyncio.gather(*map(start, range(wanted.count)), return_exceptions=True)
            for outcome in started:
                if isinstance(outcome, BaseException):
                    raise outcome
            undoing.pop_all()
    return [found for found in started if isinstance(found, NewCopy)], plan.warnings()


@contextlib.contextmanager
def _in_words() -> Iterator[None]:
    try:
        yield
    except (GpuckptError, OSError) as e:
        raise _failed(e) from e


def _starting(up: int, count: int) -> str:
    return f"starting the copies: {up} of {count} up" if count > 1 else "starting the copy"


def _status(folder: KernelFolder) -> KernelStatus:
    """Ask a copy's keeper how it is."""
    with keepers.connect(folder) as keeper:
        status = keeper.ask(Status())
    if status.state != "running":
        raise NoSuchKernel("A copy ended immediately.", f"It is {status.state}.", "")
    return status


def _end_all(copies: Sequence[_Copy]) -> None:
    for copy in copies:
        keepers.end(KernelFolder(settings.kernels_dir() / copy.launch.kernel_id))
        Path(copy.launch.connection_file).unlink(missing_ok=True)


def _failed(cause: Exception) -> ForkFailed:
    error = ForkFailed("The fork failed. The {kernel} keeps running, and no copy is left behind.", str(cause))
    if isinstance(cause, GpuckptError):
        error.why, error.then, error.data = f"{cause.what} {cause.why}".strip(), cause.then, cause.data
    return error


def _reap(process: subprocess.Popen[bytes]) -> None:
    """See to it that a copy's keeper, which is this one's child, leaves no zombie when it ends."""
    fd = os.pidfd_open(process.pid)
    loop = asyncio.get_running_loop()

    def ended() -> None:
        loop.remove_reader(fd)
        os.close(fd)
        process.wait()

    loop.add_reader(fd, ended)


async def _adopted(keeper: Keeper, copy: NewCopy) -> NewCopy:
    """Have the Jupyter server that holds the kernel hold a copy, too, where there is one."""
    return replace(copy, held=await asyncio.to_thread(adoption.ask, keeper.holders.pids(), copy.id))


# -- in the keeper of a copy


async def arrive(keeper: Keeper) -> None:
    """Bring up the copy that this keeper is to hold, as it was ordered.

    Raises
    ------
    GpuckptError, OSError : it did not come up; nothing of it is left.
    """
    order = from_json(_Order, keeper.folder.take_order())
    program = await asyncio.to_thread(usable_criu, COMES_BACK)
    manifest = order.manifest
    new = await FreshSleeper.prepare(keeper, manifest, order.size)
    snapshot = Snapshot(manifest, new.files)
    snapshot.also_close = new.leave_files
    # The process that calls the driver needs a while to start: it does so beside what comes first.
    starting = asyncio.create_task(asyncio.to_thread(_start_worker, keeper.worker, bool(processes_of(manifest).cuda)))
    try:
        async with contextlib.AsyncExitStack() as undoing:
            undoing.push_async_callback(new.discard)
            await asyncio.to_thread(_copy_files, order, new)
            await new.furnish(snapshot, Path(order.rest))
            table = {int(port): int(other) for port, other in order.ports.items()}
            places = ports.Places.of_copy(table, order.paths)
            gpu = GpuReturn(keeper.worker, new.space, parked_in(manifest.cuda), order.gpu_map, vram_files(new.space))
            coming = Coming(keeper, snapshot, new, program, AtOnce(gpu, new, manifest))
            tidying = await take_over(coming, InPlace({}), places)
            copy = Copy(index=order.index, reseed=order.reseed, kernel_id=keeper.launch.kernel_id)
            result = Restored(**vars(summary(manifest)), warnings=coming.notes, given_up=None, copy=copy)
            keeper.notes = await resume(new.channel, {}, result, time.time())
            await tidying
            undoing.pop_all()
    finally:
        await starting
        await asyncio.to_thread(snapshot.close)
    keeper.state.parent, keeper.state.saved = order.parent, order.saved


def _start_worker(worker: cuda.CudaWorker, is_needed: bool) -> None:
    if is_needed:
        with contextlib.suppress(GpuckptError):  # who calls it next is told
            worker.version()


def _copy_files(order: _Order, new: FreshSleeper) -> None:
    """Bring what was taken into the new sleeper; it is changed there."""
    new.files.mkdir(mode=0o700)
    target = new.files / CRIU_IMAGES
    target.mkdir(mode=0o700)
    for file in Path(order.criu).iterdir():
        shutil.copyfile(file, target / file.name)
    for file in Path(order.vram).iterdir():
        shutil.copyfile(file, new.vram / file.name)
