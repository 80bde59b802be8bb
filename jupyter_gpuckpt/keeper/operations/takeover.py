"""The takeover: a snapshot that was made ready in a fresh sleeper comes to life there.

Two things are chosen once, and neither looks at the other. The kernel before it is given up first (`InPlace`), or runs
until the other one is complete beside it (`SideBySide`). And what was on GPUs is brought back at once (`AtOnce`), or
behind the running kernel's back (`Later`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ...client.record import KERNEL_LOG
from ...client.sleep_record import ASLEEP
from ...errors import RestoreFailed
from ...freeze import cpu_affinity, criu, cuda, images, parking_channel, random_state, thread_files
from ...freeze.criu_program import CriuProgram
from ...freeze.nccl import Communicators
from ...freeze.new_connections import NewConnections
from ...linux import processes, seccomp
from ...snapshots.saved import kernel_of, processes_of
from ...store import Manifest, Snapshot
from .. import preflight
from ..gpu import gate
from ..gpu.bring_back import GpuReturn
from ..gpu.late_vram import LateVram
from ..gpu.sleep import GpuSleep
from ..namespace import Namespace
from ..ports import Places
from ..staging import vram_files
from ..stopwatch import Stopwatch
from ..taken import lost_locks
from . import criu_run
from .fresh_sleeper import FreshSleeper
from .parts import CRIU_IMAGES
from .predecessor import Predecessor
from .progress import OperationProgress
from .sleep import fell_asleep
from .straight_memory import StraightMemory

if TYPE_CHECKING:
    from ..kernel_life import Keeper

__all__ = ["AtOnce", "Coming", "InPlace", "Later", "SideBySide", "take_over"]

_LONGEST_NAME = 200  # bytes; criu adds ``.cr.ID.ghost``, and the system allows 255
_TURN = 2.0  # how long a kernel's clients may take to leave it when the other one is complete, in seconds


@dataclass(frozen=True)
class Coming:
    """The kernel that comes: a snapshot, all of which is right, in its sleeper."""

    keeper: Keeper
    snapshot: Snapshot
    new: FreshSleeper
    program: CriuProgram
    gpu: AtOnce | Later
    notes: list[str] = field(default_factory=list)
    """What the user should know of how it came up: `take_over` adds to it."""
    memory: StraightMemory | None = None
    """What of the host memory criu's images lack, where nothing runs before it is there."""
    watch: Stopwatch = field(default_factory=Stopwatch)
    environment: dict[str, str] = field(default_factory=dict)
    """What our library in criu is told: of the images as they were saved, before they are made ready."""

    @property
    def space(self) -> Namespace:
        return self.new.space

    @property
    def manifest(self) -> Manifest:
        return self.snapshot.manifest

    @property
    def images(self) -> Path:
        """Where criu's images are."""
        return self.snapshot.directory / CRIU_IMAGES

    @property
    def has_gpu_state(self) -> bool:
        return bool(processes_of(self.manifest).cuda)

    async def run_criu(self, left: criu.Left) -> None:
        """Have criu restore the processes, and leave them as asked. It may be cancelled."""
        failure = RestoreFailed("The snapshot could not be restored.")
        inside = Path(self.new.files_inside, CRIU_IMAGES)
        await criu_run.restore(self.space, self.program, self.images, inside, failure, left, self.environment)
        self.notes.extend(await asyncio.to_thread(lost_locks, self.images, self.space.path("/"), self.space.outer))
        bound = processes_of(self.manifest).bound
        self.notes.extend(await asyncio.to_thread(cpu_affinity.bind, bound, self.space.outer))

    async def have_memory(self) -> None:
        """Bring what criu's images lack, into the processes that are stopped yet. Raises as `StraightMemory.write`."""
        if self.memory is not None:
            self.watch.begin("memory")
            with self.gpu.of.held_back():
                await self.memory.write(self.space.outer)

    def on_gpu(self) -> list[int]:
        """Return the processes that had GPU state, when criu has restored them. Raises `RestoreFailed`."""
        saved = processes_of(self.manifest)
        found = [outer for pid in saved.cuda if (outer := self.space.outer(pid))]
        if len(found) != len(saved.cuda) or self.space.outer(saved.pid) is None:
            raise RestoreFailed("The snapshot could not be restored.", "One of its processes did not come back.")
        return found

    def go_on(self) -> None:
        """Have processes go on that criu has left stopped, but for those that were stopped when they were saved.

        Children go first: none of them is stopped where its parent looks.
        """
        still = images.stopped(self.images)
        for pid in reversed(processes.descendants(self.space.pid)):
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                if processes.inner_pid(pid) not in still:
                    os.kill(pid, signal.SIGCONT)


async def take_over(coming: Coming, way: InPlace | SideBySide, places: Places) -> asyncio.Task[None]:
    """Have criu restore the tree into the new sleeper, and the driver its GPU state; return what is tidied up yet.

    What fails before `Predecessor.leave` has changed nothing for the running kernel.
    """
    keeper, new, space, gpu = coming.keeper, coming.new, coming.space, coming.gpu
    if space.deputy is None:  # which does it itself, at the restore
        random_state.spoil()
    introduce = functools.partial(_introduce, coming, places, way.told | gpu.told)
    output = (space.run_dir / KERNEL_LOG).stat().st_size
    async with contextlib.AsyncExitStack() as undoing:
        coming.watch.begin("images")
        connections = NewConnections()
        undoing.push_async_callback(asyncio.to_thread, connections.close)
        await asyncio.to_thread(_connect, coming, places, connections)
        _make_ready(coming, places, connections.ends)
        await way.begin(introduce)
        try:
            coming.watch.begin("GPU helpers")
            await gpu.get_ready()
            coming.watch.begin("criu")
            # criu and its helpers must not take a pid that the snapshot needs, nor must later processes.
            await space.set_last_pid(images.highest_id(coming.images) + 1)
            if coming.has_gpu_state:
                gate.close(space.run_dir)
            await way.bring_up(coming, introduce)
        finally:
            tidying = asyncio.create_task(gpu.of.close())
    coming.watch.begin("settle")
    communicators = Communicators(space.run_dir, coming.manifest.cuda.get("communicators", []))
    await asyncio.to_thread(communicators.make_again)
    await gpu.settle()
    pid = processes_of(coming.manifest).pid
    await space.adopt(pid)
    if new.placement is not None:
        await new.placement.seal()
    state, asleep = keeper.state, gpu.asleep
    state.own_files, state.worked, state.output = new.has_stand_ins, 0.0, output
    state.shared_files = dict(processes_of(coming.manifest).shared_files)
    state.sleep = asleep.note(ASLEEP) if asleep is not None else None
    keeper.hold(space, new.channel, pid)
    if asleep is not None:
        fell_asleep(keeper, asleep)
    new.channel.hello.set_result({})
    return tidying


# -- when the kernel before it is given up


class InPlace:
    """Nothing runs in its place any more: it runs as soon as it is there.

    Parameters
    ----------
    peers : how many clients the kernel before it had at each channel.
    hold : whether it executes nothing that comes until it is told that it is woken.
    progress : of an operation that need not wait for criu any longer when it is cancelled.
    """

    def __init__(
        self, peers: Mapping[str, int], *, hold: bool = False, progress: OperationProgress | None = None
    ) -> None:
        self._peers, self._progress = peers, progress
        self.told = {"hold": True} if hold else {}

    async def begin(self, introduce: Introduce) -> None:
        await introduce(self._peers)

    async def bring_up(self, coming: Coming, _: Introduce) -> None:
        restoring = self._restore(coming)
        await (restoring if self._progress is None else self._progress.or_cancelled(restoring))
        coming.watch.begin("GPU")
        await coming.gpu.bring_back(coming.on_gpu())

    async def _restore(self, coming: Coming) -> None:
        if coming.memory is None:
            await coming.run_criu("running")
        else:
            await coming.run_criu("stopped")
            await coming.have_memory()
            coming.go_on()


class SideBySide:
    """The kernel before it runs until this one is complete, and stopped: it is given up as late as can be.

    Parameters
    ----------
    way_back : what undoes the restore so far; there is no way back any more once `Predecessor.leave` has cleared it.
    """

    told: ClassVar[dict[str, bool]] = {}

    def __init__(
        self,
        predecessor: Predecessor,
        late: LateVram | None,
        way_back: contextlib.AsyncExitStack,
        progress: OperationProgress,
    ) -> None:
        self._predecessor, self._late = predecessor, late
        self._way_back, self._progress = way_back, progress
        self._turning: asyncio.Task[None] | None = None

    async def begin(self, _: Introduce) -> None:
        """Nothing: how many clients it has is known when the other one is given up."""

    async def bring_up(self, coming: Coming, introduce: Introduce) -> None:
        gpu = coming.gpu
        self._way_back.push_async_callback(self._stop_turning)
        self._way_back.callback(coming.space.kill_now)  # nothing of it has run, and nothing of it shall
        if gpu.comes_later or not coming.has_gpu_state:
            self._turning = asyncio.create_task(self._predecessor.turn())
        await self._progress.or_cancelled(coming.run_criu("stopped"))
        await self._progress.or_cancelled(coming.have_memory())
        if self._late is not None:
            self._late.start()
        on_gpu = coming.on_gpu()
        coming.watch.begin("GPU")
        if gpu.can_stay(on_gpu):
            self._turning = asyncio.create_task(self._turn_soon(gpu.of))
            await gpu.bring_back(on_gpu, stay=True)
            coming.watch.begin("takeover")
            await self._take_its_place(introduce)
            await gpu.of.go()
            coming.go_on()
        else:
            await gpu.of.have_read()
            await self._take_its_place(introduce)
            coming.go_on()
            await gpu.bring_back(on_gpu)

    async def _turn_soon(self, gpu: GpuReturn) -> None:
        await gpu.nearly_read()
        await self._predecessor.turn()

    async def _take_its_place(self, introduce: Introduce) -> None:
        if self._turning is not None:
            # Who does not come over comes when the other one has ended.
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(self._turning, _TURN)
        await self._predecessor.leave(self._late, self._way_back)
        await introduce(self._predecessor.peers)

    async def _stop_turning(self) -> None:
        if self._turning is not None:
            self._turning.cancel()
            await asyncio.wait([self._turning])


# -- when what was on GPUs comes back


class AtOnce:
    """What was on GPUs is there before the kernel continues; nothing, where there was nothing."""

    told: ClassVar[dict[str, bool]] = {}
    comes_later = False
    asleep: GpuSleep | None = None

    def __init__(self, of: GpuReturn, new: FreshSleeper, manifest: Manifest) -> None:
        self.of = of
        self._files, self._needs = vram_files(new.space), cuda.needs(manifest.cuda)
        self._populating: asyncio.Task[None] | None = None

    async def get_ready(self) -> None:
        """Begin with what goes on beside criu, which has one thread and leaves the other processors to it."""
        await self.of.prepare()
        await self.of.preload()
        self.of.go_on_reading()
        self._populating = asyncio.create_task(asyncio.to_thread(self._files.populate))

    def can_stay(self, on_gpu: Sequence[int]) -> bool:
        """Tell whether it can be brought back while the processes are paused."""
        return self.of.can_stay(on_gpu)

    async def bring_back(self, on_gpu: Sequence[int], *, stay: bool = False) -> None:
        """Bring it back; with `stay` the processes are paused until the GPU is told that they go on."""
        if on_gpu:
            await self.of.thaw(on_gpu, self._needs, self._populating, stay=stay)

    async def settle(self) -> None:
        """Free the memory that it was in."""
        await asyncio.to_thread(self._files.discard)


class Later:
    """The kernel sleeps when it goes on: it executes what does not touch a GPU, while `late` reads what was there."""

    told: ClassVar[dict[str, bool]] = {"asleep": True}
    comes_later = True

    def __init__(self, of: GpuReturn, new: FreshSleeper, manifest: Manifest, late: LateVram, keeper: Keeper) -> None:
        self.of = of
        self._new, self._manifest, self._late, self._keeper = new, manifest, late, keeper
        self.asleep: GpuSleep | None = None

    async def get_ready(self) -> None:
        """There is nothing yet."""

    def can_stay(self, _: Sequence[int]) -> bool:
        """It goes on without."""
        return False

    async def bring_back(self, on_gpu: Sequence[int], *, stay: bool = False) -> None:
        """Let it sleep."""
        assert not stay
        worker, space = self._keeper.worker, self._new.space
        asleep = await GpuSleep.of_snapshot(worker, space, self.of, on_gpu[0], self._manifest.cuda, self._late)
        self.asleep = self._keeper.asleep = asleep

    async def settle(self) -> None:
        """It is needed yet."""


# -- what it is told, and what is made ready for criu


Introduce = Callable[[Mapping[str, int]], Coroutine[Any, Any, None]]
"""Tells the kernel who it is, and how many clients it has at each channel."""


async def _introduce(coming: Coming, places: Places, how: Mapping[str, bool], peers: Mapping[str, int]) -> None:
    """Tell the kernel who it is now; this waits in the FIFO when it wakes, before the first message can come."""
    keeper, kernel = coming.keeper, kernel_of(coming.manifest)
    if not kernel.agent:
        return
    connection = json.loads(Path(keeper.launch.connection_file).read_text())
    # What waits for a kernel that wakes has been answered by nobody.
    waited = {"waited": kernel.waited} if kernel.waited is not None and not how.get("hold") else {}
    await coming.new.channel.send(
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


def _connect(coming: Coming, places: Places, connections: NewConnections) -> None:
    """Make the saved tree's own TCP connections anew; those with which that fails come back closed, and are named."""
    may_keep = coming.program.new_connections
    kept = preflight.connections(coming.images, coming.manifest, may_keep=may_keep).kept
    listening = {one.port for one in images.bound_sockets(coming.images) if one.kind == "tcp"}
    cut = connections.make(coming.images, kept, lambda port: places.port(port) if port in listening else 0)
    if cut:
        coming.notes.append(preflight.cut_inside(coming.images, coming.manifest, cut))
    connections.listen(coming.space.run_dir)


def _make_ready(coming: Coming, places: Places, connected: Mapping[int, images.NewEnd]) -> None:
    """Make criu's images ready to be restored here: what differs from one kernel to the next is written again."""
    work, space = coming.images, coming.space
    for pid in processes_of(coming.manifest).cuda:
        parking_channel.make_fifos(space.run_dir, pid)  # one that was to park may have them open, and not have parked
    coming.environment.update(thread_files.asked_for(work))
    images.rewrite_tree(work / "pstree.img", work / "pstree.img")
    images.outlive_parent(work)
    for path in map(places.socket_path, images.socket_paths(work)):
        # Python's multiprocessing binds sockets in folders that it deletes with the process that made them.
        space.path(str(path.parent)).mkdir(mode=0o700, parents=True, exist_ok=True)
    if seccomp.is_filtered():
        # With a filter of its own besides the container's it could never be saved again.
        images.drop_filter(work, b"".join(seccomp.against_io_uring()))
    if os.geteuid() != 0:
        images.own_deleted_files(work, os.geteuid(), [os.getegid(), *os.getgroups()])
    images.rewrite_files(
        work / "files.img",
        work / "files.img",
        port=places.port,
        connected=connected,
        abstract_name=places.abstract_name,
        socket_path=places.socket_path,
        deleted=functools.partial(_place_of_deleted, root=space.path("/")),
        found=functools.partial(preflight.found, root=space.path("/")),
    )


def _place_of_deleted(path: str, root: Path) -> str:
    """Return where a file that was deleted is made again for a moment: elsewhere, if it cannot be where it was.

    A library that was replaced while the kernel had it loaded may have been in a folder that is root's, or read-only.
    If the folder was removed, too, and is open, criu makes it again as well, and cannot remove it while the file is in
    it. criu makes the name longer, and a long one would be too long.
    """
    name = os.fsdecode(os.fsencode(os.path.basename(path))[:_LONGEST_NAME])  # noqa: PTH119
    was_in = folder = (root / path[1:]).parent
    while not folder.is_dir():
        folder = folder.parent
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"/dev/shm/{name}"  # noqa: S108
    return f"{path[: path.rindex('/')]}/{name}" if folder == was_in else f"/{folder.relative_to(root) / name}"
