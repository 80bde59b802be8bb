"""The kernels and jobs that keepers hold, as every listing tells of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from .. import settings
from ..errors import GpuckptError, KeeperGone, NoSuchKernel
from ..freeze.cuda_calls import CudaWorker
from ..freeze.gpu_processes import cuda_pids
from ..operations.requests import Status
from ..snapshots.summary import HIBERNATED, summary
from ..spelling import in_a_terminal
from ..store import Manifest, Store
from . import jobs, keepers
from .record import KernelFolder, Launch, State

__all__ = ["STATUS_TIMEOUT", "all_jobs", "hibernated", "left_running", "running_kernels", "with_snapshots"]

Lister = Callable[[CudaWorker], tuple[list[dict[str, Any]], list[GpuckptError]]]

STATUS_TIMEOUT = 5.0
"""For how long a keeper may be silent when it is asked how its kernel is, in seconds."""
_KEEPERS = 3
"""How many keepers are asked, where one after the other ends."""
_MOMENT, _LOOK = 2.0, 0.02  # for how long a keeper that hung up may take to end, and between two looks; seconds


def running_kernels(worker: CudaWorker) -> tuple[list[dict[str, Any]], list[GpuckptError]]:
    """Return the status of every kernel that a keeper holds, and an error for each that cannot be told.

    A kernel whose keeper died gets a new one. ``gpu_memory`` is what the kernel holds on all GPUs, in bytes: None
    where the driver does not tell. `worker` is only called where a kernel uses a GPU.
    """
    return _told([folder for folder in keepers.folders() if not jobs.is_job(folder)], worker)


def all_jobs(worker: CudaWorker) -> tuple[list[dict[str, Any]], list[GpuckptError]]:
    """Return the same of every job, those that have ended included: of them ``state``, ``exit_status`` and ``ended``.

    Each has its ``command``, too.
    """
    found, faults = _told([folder for folder in keepers.folders() if jobs.is_job(folder)], worker)
    found = [job for job in found if job["state"] != "ended"]  # its keeper is about to go
    running = {job["job"] for job in found}
    for folder in jobs.all_folders():
        with contextlib.suppress(OSError, ValueError):
            launch, state = folder.launch(), folder.state()
            if launch.job not in running and state.ended is not None:
                found.append(_ended(launch, state))
    for job in found:
        with contextlib.suppress(OSError):
            job["command"] = jobs.folder_of(job["job"]).launch().argv
    return sorted(found, key=lambda job: str(job["started"])), faults


def with_snapshots(list_them: Lister) -> tuple[list[dict[str, Any]], list[Manifest], list[GpuckptError]]:
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


def left_running(own: Launch) -> list[dict[str, Any]]:
    """Return the status of each other kernel of the same notebook that outlived the server that held it."""
    found = []
    for folder in KernelFolder.all() if own.notebook else ():
        with contextlib.suppress(GpuckptError, OSError, ValueError):  # it has ended meanwhile, or does not answer
            launch = folder.launch()
            is_its = launch.notebook == own.notebook and launch.kernel_id != own.kernel_id
            if is_its and folder.has_keeper():
                found.append(_status(folder))
    return [status for status in found if not status["attended"] and status["state"] != "ended"]


def _ended(launch: Launch, state: State) -> dict[str, Any]:
    assert state.ended is not None
    return {
        "kernel_id": launch.kernel_id,
        "job": launch.job,
        "state": "ended",
        "exit_status": state.ended.status,
        "ended": state.ended.at,
        "hibernated_as": state.ended.snapshot,
        "pid": None,
        "pids": [],
        "memory": 0,
        "gpu_memory": 0,
        "started": state.started,
        "parent": asdict(state.parent) if state.parent is not None else None,
        "command": launch.argv,
    }


def _told(folders: Iterable[KernelFolder], worker: CudaWorker) -> tuple[list[dict[str, Any]], list[GpuckptError]]:
    kernels: list[dict[str, Any]] = []
    faults: list[GpuckptError] = []
    for folder in folders:
        try:
            kernels.append(_status(folder))
        except NoSuchKernel:
            continue  # it ended meanwhile
        except GpuckptError as e:
            faults.append(_about(folder, e))
    try:
        _add_gpu_memory(kernels, worker)
    except GpuckptError as e:
        faults.append(e)
    return kernels, faults


def hibernated(store: Store) -> list[dict[str, Any]]:
    """Return the snapshots of hibernated kernels, newest first: what listings say of each, and who needs it.

    ``held`` is whether its keeper is there, so that the kernel is woken; any other one is resumed in a new kernel.

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
        {**summary(manifest), "kernel_name": manifest.kernel.get("name", ""), "held": manifest.id in held}
        for manifest in store.list()
        if manifest.id in labels and HIBERNATED in labels[manifest.id].tags and not manifest.kernel.get("job")
    ]


def _states(folder: KernelFolder) -> Iterator[State]:
    with contextlib.suppress(OSError, ValueError):  # it has ended meanwhile
        yield folder.state()


def _status(folder: KernelFolder) -> dict[str, Any]:
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


def _asked(folder: KernelFolder) -> dict[str, Any]:
    with keepers.connect(folder) as keeper:
        status: dict[str, Any] = keeper.ask(Status(), timeout=STATUS_TIMEOUT)
        return status


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


def _add_gpu_memory(kernels: Sequence[dict[str, Any]], worker: CudaWorker) -> None:
    for kernel in kernels:
        kernel["gpu_memory"] = 0
        kernel["gpu"].setdefault("host_memory", 0)  # which keepers of older versions do not know
    on_gpu = set(cuda_pids(pid for kernel in kernels for pid in kernel["pids"]))
    if not on_gpu:
        return  # asking the driver takes a while, and there may be none
    for kernel in kernels:
        if on_gpu.intersection(kernel["pids"]):
            kernel["gpu_memory"] = None
    usages = worker.usage()
    for kernel in kernels:
        held = [usage.bytes for usage in usages if usage.pid in kernel["pids"]]
        if kernel["gpu_memory"] is None and None not in held:
            kernel["gpu_memory"] = kernel["gpu"]["held"] = sum(filter(None, held))
