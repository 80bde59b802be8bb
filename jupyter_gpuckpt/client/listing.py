"""The kernels and jobs that keepers hold, as every listing tells of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

from .. import settings
from ..errors import GpuckptError, KeeperGone, NoSuchKernel
from ..freeze.cuda_calls import CudaWorker, Usage
from ..freeze.gpu_processes import cuda_pids
from ..operations.requests import Hibernate, Status
from ..operations.results import EndedJob, HibernatedKernel, KernelStatus, ListedKernel, RunningJob, SnapshotName
from ..snapshots.summary import HIBERNATED, summary
from ..spelling import in_a_terminal
from ..store import Manifest, Store
from . import jobs, keepers
from .record import KernelFolder, Launch, State

__all__ = [
    "STATUS_TIMEOUT",
    "OfAnotherMachine",
    "all_jobs",
    "all_left_running",
    "hibernated",
    "left_running",
    "of_other_machines",
    "running_kernels",
    "with_snapshots",
]

T = TypeVar("T")

STATUS_TIMEOUT = 5.0
"""For how long a keeper may be silent when it is asked how its kernel is, in seconds."""
_KEEPERS = 3
"""How many keepers are asked, where one after the other ends."""
_MOMENT, _LOOK = 2.0, 0.02  # for how long a keeper that hung up may take to end, and between two looks; seconds


def running_kernels(worker: CudaWorker) -> tuple[list[ListedKernel], list[GpuckptError]]:
    """Return the status of every kernel that a keeper holds, and an error for each that cannot be told.

    A kernel whose keeper died gets a new one. `worker` is only called where a kernel uses a GPU.
    """
    return _told([folder for folder in keepers.folders() if not jobs.is_job(folder)], worker)


def all_jobs(worker: CudaWorker) -> tuple[list[RunningJob | EndedJob], list[GpuckptError]]:
    """Return the same of every job, those that have ended included."""
    held, faults = _told([folder for folder in keepers.folders() if jobs.is_job(folder)], worker)
    found: list[RunningJob | EndedJob] = [
        RunningJob(**vars(job), command=_command(job.job))
        for job in held
        if job.state != "ended"  # its keeper is about to go
    ]
    running = {job.job for job in found}
    for folder in jobs.all_folders():
        with contextlib.suppress(OSError, ValueError):
            launch, state = folder.launch(), folder.state()
            if launch.job not in running and state.ended is not None:
                found.append(_ended(launch, state))
    return sorted(found, key=lambda job: job.started), faults


def _command(job: str) -> list[str]:
    with contextlib.suppress(OSError, ValueError, NoSuchKernel):  # it has been forgotten meanwhile
        return jobs.folder_of(job).launch().argv
    return []


def with_snapshots(
    list_them: Callable[[CudaWorker], tuple[list[T], list[GpuckptError]]],
) -> tuple[list[T], list[Manifest], list[GpuckptError]]:
    """Return what `running_kernels` or `all_jobs` tells, all snapshots, and what of the two cannot be told."""
    worker = CudaWorker()
    try:
        found, faults = list_them(worker)
    finally:
        worker.close()
    try:
        manifests, _ = Store(settings.store_dir()).scan()
    except GpuckptError as e:
        return found, [], [*faults, e]
    return found, manifests, faults


@dataclass(frozen=True)
class OfAnotherMachine:
    """A kernel or job that another machine has, with the same folders: nothing can be done with it from here."""

    kernel_id: str
    job: str
    notebook: str
    host: str


def of_other_machines() -> list[OfAnotherMachine]:
    """Return the kernels and jobs that other machines have, as far as their folders tell."""
    found = []
    for folder in KernelFolder.elsewhere():
        with contextlib.suppress(OSError, ValueError):
            launch = folder.launch()
            found.append(OfAnotherMachine(launch.kernel_id, launch.job, launch.notebook, folder.head().host.name))
    return found


def left_running(own: Launch) -> list[KernelStatus]:
    """Return the status of each other kernel of the same notebook that outlived the server that held it."""
    found = []
    for folder in KernelFolder.all() if own.notebook else ():
        with contextlib.suppress(GpuckptError, OSError, ValueError):  # it has ended meanwhile, or does not answer
            launch = folder.launch()
            is_its = launch.notebook == own.notebook and launch.kernel_id != own.kernel_id
            if is_its and folder.has_keeper():
                found.append(_status(folder))
    return list(filter(_is_left, found))


def all_left_running() -> list[KernelStatus]:
    """Return the status of each kernel of a notebook that outlived the server that held it.

    Those that end with their client (`GPUCKPT_END_AFTER`) are not among them, nor those on their way to the disk.
    """
    found = []
    for folder in keepers.folders():
        with contextlib.suppress(GpuckptError, OSError, ValueError):  # as above
            if folder.launch().notebook and folder.state().end_after is None:
                found.append(_status(folder))
    return [status for status in found if _is_left(status) and status.state != Hibernate.doing]


def _is_left(kernel: KernelStatus) -> bool:
    return not kernel.attended and kernel.state != "ended"


def _ended(launch: Launch, state: State) -> EndedJob:
    assert state.ended is not None
    return EndedJob(
        kernel_id=launch.kernel_id,
        job=launch.job,
        pid=None,
        exit_status=state.ended.status,
        ended=state.ended.at,
        hibernated_as=state.ended.snapshot,
        started=state.started,
        parent=SnapshotName(**asdict(state.parent)) if state.parent is not None else None,
        command=launch.argv,
    )


def _told(folders: Iterable[KernelFolder], worker: CudaWorker) -> tuple[list[ListedKernel], list[GpuckptError]]:
    kernels: list[KernelStatus] = []
    faults: list[GpuckptError] = []
    for folder in folders:
        try:
            kernels.append(_status(folder))
        except NoSuchKernel:
            continue  # it ended meanwhile
        except GpuckptError as e:
            faults.append(_about(folder, e))
    on_gpu = set(cuda_pids(pid for kernel in kernels for pid in kernel.pids))
    usages: Sequence[Usage] | None = []
    if on_gpu:  # asking the driver takes a while, and there may be none
        try:
            usages = worker.usage()
        except GpuckptError as e:
            faults.append(e)
            usages = None
    return [_with_gpu_memory(kernel, on_gpu, usages) for kernel in kernels], faults


def _with_gpu_memory(kernel: KernelStatus, on_gpu: set[int], usages: Sequence[Usage] | None) -> ListedKernel:
    """Add what a kernel holds on GPUs; `usages` is what the driver tells, None where it does not."""
    if not on_gpu.intersection(kernel.pids):
        return ListedKernel(**vars(kernel), gpu_memory=0)
    held = [None] if usages is None else [usage.bytes for usage in usages if usage.pid in kernel.pids]
    if None in held:
        return ListedKernel(**vars(kernel), gpu_memory=None)
    total = sum(filter(None, held))
    return ListedKernel(**{**vars(kernel), "gpu": replace(kernel.gpu, held=total)}, gpu_memory=total)


def hibernated(store: Store) -> list[HibernatedKernel]:
    """Return the snapshots of hibernated kernels, newest first.

    Raises
    ------
    StoreError : the store cannot be read.
    """
    labels = store.all_labels()
    held = {
        state.hibernated.snapshot.id
        for folder in keepers.folders()
        for state in _states(folder)
        if state.hibernated is not None
    }
    return [
        _hibernated(store, manifest, held=manifest.id in held)
        for manifest in store.list()
        if manifest.id in labels and HIBERNATED in labels[manifest.id].tags and not manifest.kernel.get("job")
    ]


def _hibernated(store: Store, manifest: Manifest, *, held: bool) -> HibernatedKernel:
    """Return one of them; one that no keeper here has may be another machine's, which has the store as well."""
    elsewhere = None if held else store.lease_holder(manifest.id)
    return HibernatedKernel(
        **vars(summary(manifest)),
        kernel_name=str(manifest.kernel.get("name", "")),
        held=held or elsewhere is not None,
        host="" if elsewhere is None else elsewhere.host,
    )


def _states(folder: KernelFolder) -> Iterator[State]:
    with contextlib.suppress(OSError, ValueError):  # it has ended meanwhile
        yield folder.state()


def _status(folder: KernelFolder) -> KernelStatus:
    """Ask a keeper how its kernel is; another one where it ends meanwhile, as it does when its kernel has ended.

    Raises
    ------
    NoSuchKernel : the kernel has ended.
    KeeperGone, OtherVersion : its keeper does not tell.
    """
    for _ in range(_KEEPERS - 1):
        try:
            return _asked(folder)
        except KeeperGone:
            if not _ends(folder):
                raise
    return _asked(folder)


def _asked(folder: KernelFolder) -> KernelStatus:
    with keepers.connect(folder) as keeper:
        return keeper.ask(Status(), timeout=STATUS_TIMEOUT)


def _ends(folder: KernelFolder) -> bool:
    """Tell whether a keeper that hung up is gone: it has a moment for writing down how its kernel ended."""
    deadline = time.monotonic() + _MOMENT
    while folder.has_keeper() and time.monotonic() < deadline:
        time.sleep(_LOOK)
    return not folder.has_keeper()


def _about(folder: KernelFolder, error: GpuckptError) -> GpuckptError:
    """Say in an error which kernel it is about."""
    kind = type(error)
    return kind(
        f"Kernel {folder.path.name}: {error.what}",
        error.why,
        in_a_terminal(error.then, folder.path.name[:8]),
        **error.data,
    )
