"""What a keeper says of its kernel: what it is, what it is doing, what it has."""

from __future__ import annotations

import os

from .. import __version__
from ..client.sleep_record import ASLEEP
from ..freeze import cuda
from ..linux import processes
from ..operations.requests import kind_of
from ..operations.results import GpuUse, HibernatedSince, KernelStatus, SnapshotName
from .kernel_life import Keeper
from .steps import auto_saving
from .unsaved import unsaved

__all__ = ["status"]


def status(keeper: Keeper) -> KernelStatus:
    """Return what the kernel is doing, for listings."""
    tree = keeper.tree()
    operation = keeper.operations.current
    pid = keeper.space.outer(keeper.state.kernel_pid) if keeper.space is not None else None
    asleep = keeper.state.sleep if keeper.state.sleep is not None and keeper.state.sleep.stage == ASLEEP else None
    parent = keeper.state.parent
    return KernelStatus(
        kernel_id=keeper.launch.kernel_id,
        name=keeper.launch.name,
        notebook=keeper.launch.notebook,
        job=keeper.launch.job,
        connection_file=keeper.launch.connection_file,
        state=_word(keeper, is_asleep=asleep is not None),
        writing=keeper.operations.writes,
        queued=keeper.operations.queued,
        stage=operation.stage if operation else "",
        pid=pid,
        keeper_pid=os.getpid(),
        version=__version__,
        pids=tree,
        memory=processes.resident_bytes(tree),
        started=keeper.state.started,
        parent=SnapshotName(name=parent.name, id=parent.id) if parent is not None else None,
        copy_of=keeper.launch.copy_of,
        resumed=keeper.state.resumed,
        unsaved=unsaved(keeper),
        auto=auto_saving(keeper),
        redo=keeper.state.undone[-1] if keeper.state.undone else None,
        computed=max(0.0, keeper.work() - keeper.state.worked),
        hibernated=_hibernated(keeper),
        sleep_after=keeper.state.sleep_after,
        notes=keeper.notes,
        attended=bool(keeper.holders),
        busy=keeper.channel.busy if keeper.channel is not None else False,
        last_active=keeper.channel.last_active if keeper.channel is not None else keeper.state.started,
        pinned=keeper.state.awake,
        asleep_since=asleep.since if asleep else None,
        woken=keeper.woken,
        gpu=GpuUse(
            held=0 if asleep or not cuda.cuda_pids(tree) else None,
            freed=asleep.freed if asleep else 0,
            host_memory=asleep.host_memory().beside + asleep.host_memory().inside if asleep else 0,
        ),
    )


def _word(keeper: Keeper, *, is_asleep: bool) -> str:
    operation = keeper.operations.current
    if keeper.exit_status is not None:
        return "ended"
    if operation is not None and not operation.writing and (doing := kind_of(operation.kind).doing):
        return doing
    if keeper.state.hibernated is not None:
        return "hibernated"
    return "sleeping" if is_asleep else "running"


def _hibernated(keeper: Keeper) -> HibernatedSince | None:
    """Return what listings tell of a hibernated kernel: its snapshot, and since when."""
    hibernated = keeper.state.hibernated
    if hibernated is None:
        return None
    snapshot = hibernated.snapshot
    return HibernatedSince(
        since=hibernated.since,
        name=snapshot.name,
        size=snapshot.size,
        stored=snapshot.stored,
        gpu_memory=snapshot.gpu_memory,
    )
