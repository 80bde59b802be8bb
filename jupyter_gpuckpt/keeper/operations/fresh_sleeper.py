"""The fresh sleeper that a snapshot or a copy comes up in: what it is given, and what its kernel is told at last."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import settings
from ...checked import to_json
from ...client import broker_connection
from ...client.kernel_start import run_path
from ...client.record import KERNEL_LOG
from ...errors import (
    Damaged,
    GpuckptError,
    Refused,
)
from ...freeze import shm_archive
from ...freeze.criu_program import CriuProgram
from ...freeze.ranges import Range
from ...freeze.straight_runs import StraightRuns
from ...linux.root_only import environment
from ...operations.results import Restored
from ...snapshots import kept_files, needs
from ...snapshots.needs import NeededFile
from ...snapshots.saved import processes_of
from ...snapshots.temporary import can_be_made
from ...store import Manifest, Snapshot, Store, WorkingFolder
from .. import file_numbers
from ..agent_channel import AgentChannel, AgentSilent
from ..agent_replies import faults_in
from ..files import lifetime, placed_files
from ..files.placed_files import Lacking, Placement
from ..gpu.parked import parked_in
from ..memory_claim import MemoryClaim
from ..namespace import Namespace
from ..staging import claim_memory, disk_folder, vram_files
from .parts import CRIU_IMAGES, SHARED_MEMORY, VRAM, WORKING_COPY
from .straight_plan import straight_runs

if TYPE_CHECKING:
    from ..kernel_life import Keeper

log = logging.getLogger("gpuckpt.keeper")

_CRIU_STARTS = 10.0  # how long criu may take to say its version, in seconds
_SHOWN = 10  # how many files a note names
_SLEEPERS = (
    16  # how many are started at most, to find one whose /dev/shm has a device with few numbers to be passed over
)
_NOTHING = Lacking()


@dataclass(frozen=True)
class RestorePlan:
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
    parked_in_use: Mapping[str, Sequence[Range]]
    """By the name of its file, where what a process had parked is not zero."""
    parked_hashes: Mapping[str, bytes]
    """And the hashes of all its chunks, one after the other, as the GPU makes them."""
    straight_runs: Sequence[StraightRuns] = ()
    """What of its host memory may be brought straight into the processes."""

    def is_wanted(self, path: str) -> bool:
        """Tell whether a part of the snapshot is read."""
        return not path.startswith(kept_files.FILES + "/") or path in self.parts

    def is_wanted_at_once(self, path: str) -> bool:
        """Tell whether it is read before the kernel runs: where GPU memory need not be."""
        return self.is_wanted(path) and not path.startswith(VRAM + "/")


def plan_restore(store: Store, name: str) -> tuple[Manifest, RestorePlan]:
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
    files = {one.file: f"{VRAM}/{one.file}" for one in parked_in(manifest.cuda)}
    in_use = {file: contents.data_of(path) for file, path in files.items() if path in contents.files}
    hashes = {file: contents.hashes_of(path) for file, path in files.items() if path in contents.files}
    return manifest, RestorePlan(
        [file for file in needed if file.path not in brought],
        lacking,
        images_size,
        placed,
        parts,
        in_use,
        hashes,
        straight_runs(store, manifest, contents),
    )


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
            "Make that folder writable, and restore again.",
        ) from e


@dataclass
class FreshSleeper:
    """The fresh sleeper that a snapshot is restored into."""

    space: Namespace
    channel: AgentChannel
    files: Path
    """Where the snapshot's files are put, as the keeper names it."""
    files_inside: str
    """The same folder, as the namespace names it."""
    placement: Placement | None = None
    """What of the snapshot's own files is put in place; None where the machine has them all."""
    claim: MemoryClaim | None = None
    """What of the machine's memory is kept for `files`, where it lies there."""
    working: WorkingFolder | None = None
    """What `files` is a folder in, where it lies in the store."""
    made: list[Path] = field(default_factory=list)
    """What was made of the files that live as long as the kernel, since it was gone."""

    @classmethod
    async def prepare(
        cls,
        keeper: Keeper,
        manifest: Manifest,
        needed: int,
        lacking: Lacking = _NOTHING,
        early: EarlySleeper | None = None,
    ) -> FreshSleeper:
        """Start a sleeper, and choose where it gets files of `needed` bytes: in its memory, or on the disk.

        `lacking` are the files of the snapshot's own that are to be put in place. It is `early` where that does.
        """
        if (stand_ins := lacking.stand_ins) and broker_connection.is_needed():
            raise Refused(
                "The snapshot was not restored; nothing was touched.",
                f"This machine lacks {len(stand_ins)} of the files that the snapshot brings along, such as "
                f"{stand_ins[0].path}, and only root can put them in place for a kernel.",
                "Install them (the same versions of the same packages), or restore it as root.",
            )
        space, channel = await _new_namespace(keeper, processes_of(manifest).shared_files, early)
        inside = settings.NAMESPACE_STAGING_DIR
        new = cls(space, channel, space.path(inside), inside)
        try:
            new.claim = await asyncio.to_thread(claim_memory, space, needed)
            if new.claim is None:
                await asyncio.to_thread(new._use_disk, keeper)
        except BaseException:
            await new.discard()
            raise
        if lacking.files:
            new.placement = Placement(space, lacking)
        return new

    def _use_disk(self, keeper: Keeper) -> None:
        """Have the snapshot's files on the disk. Raises `StoreError`."""
        if disk_folder() == keeper.store.root:
            self.working = keeper.store.working_folder(keeper.launch.notebook or keeper.launch.job)
            self.files = self.working.path / WORKING_COPY
        else:
            self.files = keeper.folder.path / WORKING_COPY
            shutil.rmtree(self.files, ignore_errors=True)  # of one whose keeper was killed
        self.files_inside = str(self.files)

    def leave_files(self) -> None:
        """Free the room that `files` has: the kernel has come up. More than once is harmless."""
        if self.working is not None:
            self.working.close()
        if self.claim is not None:
            self.claim.release()

    @property
    def elsewhere(self) -> dict[str, Path]:
        """Where folders of the snapshot are put that do not go into `files`."""
        return {VRAM: self.vram, **({kept_files.FILES: self.placement.raw} if self.placement else {})}

    @property
    def has_stand_ins(self) -> bool:
        """Tell whether files of the snapshot's own stand in the kernel's mount namespace alone."""
        return self.placement is not None and bool(self.placement.lacking.stand_ins)

    def notes(self) -> list[str]:
        """Return what the user must know of the files that were put in place."""
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

    async def furnish(self, snapshot: Snapshot, rest: Path | None = None) -> None:
        """Give the sleeper the run folder, the /dev/shm and the own files of the snapshot.

        `rest` is the folder with the first two where they are not among the snapshot's files, and stay as they are.
        """
        kernel_log = self.space.run_dir / KERNEL_LOG
        shutil.copyfile((rest or snapshot.directory) / KERNEL_LOG, kernel_log)
        kernel_log.chmod(0o600)
        archive = (rest or snapshot.directory) / SHARED_MEMORY
        try:
            await self._unpack(archive)
        except OSError as e:
            raise Refused(
                "The snapshot was not restored; nothing was touched.",
                "Its shared memory (/dev/shm) could not be put in place.",
                "Check with `df /dev/shm` that there is space for it.",
            ) from e
        if rest is None:
            archive.unlink()  # it may be large, and lie in memory
        await to_its_end(lambda: self.made.extend(make_lifetime_files(snapshot.directory)))
        if self.placement is not None:
            await to_its_end(self.placement.build)
            await self.placement.mount()
        if self.space.deputy is not None:
            work = Path(self.files_inside, CRIU_IMAGES)
            await asyncio.to_thread(self.space.deputy.check, self.space.path(str(work)))

    async def _unpack(self, archive: Path) -> None:
        """Put what lay in /dev/shm in place. Raises `OSError`."""
        shared_memory = self.space.shared_memory
        large = await asyncio.to_thread(shm_archive.large_files, archive)
        # tar keeps what counts here: owners, modes, and several names of one semaphore's file.
        command = ("tar", "-x", "-p", "-f", "-", "-C", str(shared_memory))
        unpack = await asyncio.create_subprocess_exec(*command, env=environment(), stdin=asyncio.subprocess.PIPE)
        status = -signal.SIGKILL
        try:
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                unpacking = _fed(unpack, shm_archive.without(archive, large))
                status = await asyncio.wait_for(unpacking, settings.criu_timeout(archive.stat().st_size))
        finally:
            if unpack.returncode is None:
                unpack.kill()
        if status != 0:
            raise OSError(0, f"tar ended with status {status}")
        await to_its_end(lambda: shm_archive.fill(archive, large, shared_memory))

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
                f"CRIU does not start with the snapshot's own files: {words[-1] if words else f'status {status}'}",
                "Run `gpuckpt setup` with GPUCKPT_CRIU_PREFIX set to an empty folder: that criu has libraries "
                "of its own.",
            )

    async def discard(self) -> None:
        """End it and everything in it."""
        self.channel.close()
        try:
            await self.space.kill()
        finally:
            await asyncio.to_thread(lifetime.unmake, [*self.made, *(self.placement.made if self.placement else ())])
            await asyncio.to_thread(shutil.rmtree, self.files, ignore_errors=True)
            await asyncio.to_thread(self.leave_files)


class EarlySleeper:
    """A sleeper that is started while it is read what comes up in it."""

    def __init__(self, keeper: Keeper) -> None:
        self._starting: asyncio.Task[tuple[Namespace, AgentChannel]] | None
        self._starting = asyncio.create_task(keeper.new_namespace())

    async def take(self) -> tuple[Namespace, AgentChannel]:
        """Return it when it is there; once. Raises as `Keeper.new_namespace`."""
        assert self._starting is not None
        started = await asyncio.shield(self._starting)
        self._starting = None
        return started

    async def close(self) -> None:
        """End it, where nobody has taken it."""
        if self._starting is not None:
            with contextlib.suppress(GpuckptError, OSError):
                space, channel = await self._starting
                channel.close()
                await space.kill()


async def _new_namespace(
    keeper: Keeper, earlier: Mapping[str, int], early: EarlySleeper | None
) -> tuple[Namespace, AgentChannel]:
    """Start a sleeper in whose /dev/shm no file gets a number that one had in an earlier one of the same device.

    `earlier` is what a snapshot says of these (`SavedProcesses.shared_files`). The first one is `early`.
    """
    started: list[tuple[Namespace, AgentChannel]] = []
    try:
        while True:
            first = early if not started else None
            started.append(await (first.take() if first is not None else keeper.new_namespace()))
            shared_memory = started[-1][0].shared_memory
            device, number = file_numbers.following(shared_memory)
            taken = earlier.get(device, 0)
            # While this one is there, the next one has another device.
            if taken - number <= file_numbers.FEW or len(started) == _SLEEPERS:
                break
        await asyncio.to_thread(file_numbers.pass_over, shared_memory, taken)
        return started.pop()
    finally:
        for space, channel in started:
            channel.close()
            await space.kill()


async def _fed(program: asyncio.subprocess.Process, data: Iterator[bytes]) -> int:
    """Give a program its input, and return its exit status."""
    assert program.stdin is not None
    with contextlib.suppress(ConnectionError):  # it has ended
        while piece := await asyncio.to_thread(next, data, b""):
            program.stdin.write(piece)
            await program.stdin.drain()
    program.stdin.close()
    return await program.wait()


async def to_its_end(work: Callable[[], object]) -> None:
    """Have a thread do something, and wait for it also where nobody wants it any more: so that it can be undone."""
    doing = asyncio.create_task(asyncio.to_thread(work))
    try:
        await asyncio.shield(doing)
    except asyncio.CancelledError:
        await asyncio.wait({doing})
        doing.exception()  # seen
        raise


async def resume(channel: AgentChannel, asked: Mapping[str, Any], result: Restored, asked_at: float) -> list[str]:
    """Have the agent of a restored kernel run its hooks, and answer the cell that asked; return what there is to say.

    A kernel does so once, however often it is told.
    """
    arguments = {"asked": dict(asked), "result": to_json(result), "asked_at": asked_at}
    try:
        answer = faults_in(await channel.call_when_there("resumed", arguments, settings.hook_timeout()))
    except AgentSilent:
        # It runs, and what it holds is right; a long call that keeps Python's lock was saved in the middle.
        log.warning("the restored kernel has not answered yet")
        return []
    return [*answer.notes, *answer.faults]
