"""Sharing a GPU: where one kernel needs memory that idle ones hold, those are put to sleep, the longest idle first.

Only kernels of the same user are, and none that executes a cell, was used a moment ago, or is to be kept awake. Who
asks waits for those for a while, and nobody is put to sleep unless it helps.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import fcntl
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ... import settings
from ...client import keepers
from ...errors import Busy, GpuckptError, Refused
from ...freeze.cuda_calls import Gpu, Usage
from ...linux import processes
from ...linux.private_folders import make_private
from ...operations.requests import Sleep, Status
from ...operations.results import KernelStatus

if TYPE_CHECKING:
    from ..kernel_life import Keeper
    from ..operations.progress import OperationProgress

__all__ = ["fitting", "make_room", "turn"]

log = logging.getLogger("gpuckpt.sharing")

_T = TypeVar("_T")

_LOOK = 0.2  # seconds between two looks at what others do
_STATUS_TIMEOUT = 5.0  # for how long a keeper may be silent when it is asked how its kernel is, in seconds
_HOPELESS = 2.0  # for how long there must be no hope before one gives up, in seconds: others may just be ending
_SHORT = 8  # how much of a kernel's id is enough to name it, for people


@dataclass(frozen=True)
class _Holder:
    """Somebody who holds memory of a GPU: a kernel of this user's, or a process of anybody else."""

    name: str
    held: Mapping[str, int]
    """Bytes by GPU."""
    kernel_id: str = ""
    """Empty for a stranger."""
    state: str = ""
    can_sleep: bool = False
    idle: float = 0.0
    """For how many seconds it has not been used; 0 while it is."""

    def text(self, gpu: str) -> str:
        state = f", {self.state}" if self.state else ""
        return f"{self.name}: {self.held[gpu] / 2**30:.1f} GiB{state}"


@contextlib.asynccontextmanager
async def turn(gpus: Iterable[str], progress: OperationProgress) -> AsyncIterator[None]:
    """Be the only one that makes room on these GPUs (by UUID) and takes it, within the block.

    The locks are taken in one order, so that two who want several cannot wait for each other.

    Raises
    ------
    Busy : another has had its turn for too long.
    OSError : the locks are somebody else's.
    """
    folder = settings.shared_dir()
    make_private(folder)
    deadline = time.monotonic() + settings.share_timeout()
    with contextlib.ExitStack() as held:
        for gpu in sorted(gpus):
            lock = os.open(folder / f"{gpu}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            held.callback(os.close, lock)
            while not _locked(lock):
                progress.check()
                if time.monotonic() > deadline:
                    raise Busy(
                        "Timed out waiting for the GPU.",
                        f"Another kernel has been allocating memory on it for {settings.share_timeout():.0f} s.",
                        "Try again.",
                    )
                await asyncio.sleep(_LOOK / 4)
        yield


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


async def make_room(
    keeper: Keeper,
    needed: Mapping[str, int],
    progress: OperationProgress,
    what: str,
    wished: Mapping[str, int] | None = None,
    patience: float | None = None,
) -> list[str]:
    """Have GPUs with so many bytes free, by UUID: other kernels fall asleep for that, where need be; return which.

    `wished` is better still, but no condition. `what` is said to have happened where it cannot be had. Kernels in use
    are waited for `patience` seconds; as long as is set unless said.

    Raises
    ------
    Refused : it cannot; who holds what is named, and nobody was put to sleep for nothing.
    Cancelled : the user did not want to wait.
    """
    deadline = time.monotonic() + (settings.share_timeout() if patience is None else patience)
    unwilling: dict[str, str] = {}
    asleep: list[str] = []
    hopeless_since: float | None = None
    while True:
        progress.check()
        gpus = {gpu.uuid: gpu for gpu in await asyncio.to_thread(keeper.worker.gpus)}
        if not _lacking(gpus, wished or needed):
            return asleep
        holders = await asyncio.to_thread(_holders, keeper, unwilling)
        # Only kernels help that sleep at some time or other: what is short without them stays short.
        if wished and not _lacking(gpus, wished, [h for h in holders if h.can_sleep]):
            short = _lacking(gpus, wished)
        else:
            short = _lacking(gpus, needed)
        if not short:
            return asleep
        if _lacking(gpus, needed, [h for h in holders if h.can_sleep]):
            hopeless_since = hopeless_since or time.monotonic()
            if time.monotonic() - hopeless_since > _HOPELESS:
                raise _no_room(gpus, needed, holders, what)
        else:
            hopeless_since = None
        ready = [h for h in holders if h.can_sleep and h.idle >= settings.share_grace()]
        chosen = _chosen(short, sorted(ready, key=lambda holder: -holder.idle))
        if chosen is not None:
            await progress.enter(f"putting {chosen.name} to sleep")
            error = await asyncio.to_thread(_put_to_sleep, chosen)
            if error is None:
                asleep.append(chosen.name)
            elif not isinstance(error, Busy):
                unwilling[chosen.kernel_id] = error.why or error.what
            continue
        if time.monotonic() > deadline:
            raise _no_room(gpus, needed, holders, what)
        await progress.enter("waiting for free GPU memory")
        await asyncio.sleep(_LOOK)


async def fitting(keeper: Keeper, progress: OperationProgress, check: Callable[[], _T]) -> _T:
    """Return what `check` (run in a thread) returns; where it refuses for lack of GPU memory, room is made first.

    Raises
    ------
    Refused : as `check`, or since there is no room.
    """
    try:
        return await asyncio.to_thread(check)
    except Refused as refusal:
        reasons = refusal.data.get("reasons") or [{"why": refusal.why, **refusal.data}]
        missing = {r["gpu"]: int(r["needed"]) - int(r["available"]) for r in reasons if "gpu" in r and "needed" in r}
        if len(missing) < len(reasons):
            raise  # something else stands in the way, too
        gpus = await asyncio.to_thread(keeper.worker.gpus)
        needed = {gpu.uuid: gpu.free + missing[gpu.uuid] for gpu in gpus if gpu.uuid in missing}
        async with turn(needed, progress):
            await make_room(keeper, needed, progress, refusal.what)
    return await asyncio.to_thread(check)


def _lacking(gpus: Mapping[str, Gpu], needed: Mapping[str, int], leaving: Sequence[_Holder] = ()) -> dict[str, int]:
    """Return how many bytes are missing on each GPU that has too few free, once some have left it."""
    missing = {}
    for uuid, size in needed.items():
        free = gpus[uuid].free if uuid in gpus else 0
        free += sum(holder.held.get(uuid, 0) for holder in leaving)
        if size > free:
            missing[uuid] = size - free
    return missing


def _chosen(short: Mapping[str, int], ready: Sequence[_Holder]) -> _Holder | None:
    """Return who is to sleep first, of those in this order, where all of them together are enough; else None."""
    if any(sum(holder.held.get(gpu, 0) for holder in ready) < size for gpu, size in short.items()):
        return None
    return next((holder for holder in ready if any(holder.held.get(gpu) for gpu in short)), None)


def _holders(keeper: Keeper, unwilling: Mapping[str, str]) -> list[_Holder]:
    """Return who else holds GPU memory; those that turned out `unwilling` cannot sleep."""
    usage = keeper.worker.usage()
    found: list[_Holder] = []
    known = {*processes.descendants(os.getpid())}
    now = datetime.datetime.now(datetime.timezone.utc)  # one for all: who answers late is not idle for longer
    for folder in keepers.folders():
        try:
            if folder.path == keeper.folder.path:
                continue
            with keepers.connect(folder) as other:
                status = other.ask(Status(), timeout=_STATUS_TIMEOUT)
        except (GpuckptError, OSError):
            continue  # it ends, or does not answer: its processes are strangers then
        pids = {*status.pids, *processes.descendants(status.keeper_pid)}
        known |= pids
        held = _held(usage, pids)
        if held:
            found.append(_kernel(status, held, now, unwilling.get(status.kernel_id, "")))
    strangers = {one.pid for one in usage} - known
    for pid in sorted(strangers):
        found.append(_Holder(f"process {pid} ({processes.name(pid) or 'unknown'})", _held(usage, {pid})))
    return found


def _held(usage: Iterable[Usage], pids: set[int]) -> dict[str, int]:
    held: dict[str, int] = {}
    for one in usage:
        if one.pid in pids:
            held[one.gpu] = held.get(one.gpu, 0) + (one.bytes or 0)
    return held


def _kernel(status: KernelStatus, held: Mapping[str, int], now: datetime.datetime, unwilling: str) -> _Holder:
    name = f"job {status.job}" if status.job else f"kernel {status.kernel_id[:_SHORT]}"
    if status.notebook:
        name = f"{Path(status.notebook).name} ({name})"
    last = datetime.datetime.fromisoformat(status.last_active)
    idle = 0.0 if status.busy else (now - last).total_seconds()
    state = unwilling or ("kept awake" if status.pinned else "a cell runs" if status.busy else status.state)
    # One that is at something now will have an end of it.
    can_sleep = not (unwilling or status.pinned or status.state == "ended")
    at_work = status.state != "running"
    return _Holder(name, held, status.kernel_id, state, can_sleep, 0.0 if at_work else max(0.0, idle))


def _put_to_sleep(holder: _Holder) -> GpuckptError | None:
    """Put a kernel to sleep, if it is idle still; return why it is not asleep."""
    log.info("putting %s to sleep", holder.name)
    try:
        with keepers.connect(keepers.find(holder.kernel_id)) as keeper:
            keeper.ask(Sleep(idle_for=settings.share_grace()))
    except GpuckptError as e:
        log.warning("%s was not put to sleep: %s", holder.name, e)
        return e
    return None


def _no_room(gpus: Mapping[str, Gpu], needed: Mapping[str, int], holders: Sequence[_Holder], what: str) -> Refused:
    lines = []
    for uuid in _lacking(gpus, needed):
        gpu = gpus.get(uuid)
        if gpu is None:
            lines.append(f"There is no GPU {uuid} on this machine.")
            continue
        lines.append(
            f"GPU {gpu.index} ({gpu.name}) has {gpu.free / 2**30:.1f} GiB free, and {needed[uuid] / 2**30:.1f} GiB are "
            "needed. It is held by:"
        )
        lines += [f"- {holder.text(uuid)}" for holder in holders if holder.held.get(uuid)]
    return Refused(
        what,
        "\n".join(lines),
        "End one of them or put it to sleep (`gpuckpt sleep KERNEL`), and try again.",
        name="NO_ROOM",
        needed=dict(needed),
        holders=[{"name": h.name, "kernel_id": h.kernel_id, "held": dict(h.held), "state": h.state} for h in holders],
    )
