"""Whether a save can be undone, and a snapshot fits this machine: found out beforehand."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from ..errors import Refused
from . import memory
from .cuda_calls import CudaWorker, Gpu, Usage
from .gpu_processes import cuda_pids, has_context, has_device, open_gpus, stopped

__all__ = ["describe", "fits", "freezable", "needs", "preflight"]

_FIRST_CUDA = 12080
"""The first CUDA version whose driver has the checkpoint API (driver 570)."""
_HOST_MARGIN = 512 << 20
"""Bytes of host memory that a checkpoint must leave: it takes more than the bare GPU memory."""

_PEER_SAFE = 448 << 20
"""Bytes up to which no single allocation was seen to stand in the way of peer access after a restore; 512 MiB does."""
_CONTEXT = 1 << 30
"""Bytes of GPU memory that a context takes at most, with the programs loaded into it (0.5 to 0.7 GiB with torch)."""

_FORK_SETTLES = 0.2
"""Seconds after which a child that is about to start another program has done so."""

_NOT_TOUCHED = "The save was refused; nothing was touched."
_NO_RESTORE = "The snapshot was not restored; nothing was touched."


def freezable(worker: CudaWorker, pids: Iterable[int]) -> list[int]:
    """Return those of the processes that have CUDA state: the ones that a save has to freeze.

    Raises
    ------
    Refused : a process is stopped, or holds GPU devices that its parent opened; no such process
        can be dumped.
    DriverError : the driver does not answer.
    """
    candidates = cuda_pids(pids)
    for pid in candidates:
        _not_stopped(pid)
    found = [pid for pid in candidates if worker.state(pid) != "none"]
    heirs = [pid for pid in candidates if pid not in found and has_device(pid)]
    if heirs:
        time.sleep(_FORK_SETTLES)
    for pid in filter(has_device, heirs):
        raise Refused(
            _NOT_TOUCHED,
            f"process {pid} holds GPU devices that it inherited when it was forked",
            "End it and save again; children that Python's own `os.fork` starts drop them.",
            pid=pid,
        )
    return found


def preflight(worker: CudaWorker, pids: Sequence[int], peers: Mapping[int, Mapping[str, int]] | None = None) -> None:
    """Refuse a save of these CUDA processes that could not be done or could not be undone.

    `peers` holds the processes of which it is known that no GPU of theirs has peer access to another now: a process
    with peer access checkpoints well and then cannot be restored. Where it was on before, the value says how many bytes
    of GPU memory the process's allocators know of (``total``), and of the largest single allocation (``largest``).

    Raises
    ------
    Refused : what stands in the way and what to do about it; nothing was touched.
    DriverError : the driver does not answer.
    """
    if not pids:
        return
    _has_checkpoint_api(worker)
    gpus, usage = worker.gpus(), worker.usage()
    _no_mig(_NOT_TOUCHED, gpus)
    for pid in pids:
        _not_stopped(pid)
        state = worker.state(pid)
        if state != "running":
            raise Refused(
                _NOT_TOUCHED,
                f"the CUDA state of process {pid} is `{state}`, not `running`",
                "Another program is checkpointing it; wait for it and save again.",
                pid=pid,
                state=state,
            )
        if any(one.pid == pid and one.mps for one in usage):
            raise Refused(
                _NOT_TOUCHED,
                f"process {pid} uses the GPU through MPS, which the driver cannot checkpoint",
                "Start the kernel without MPS (unset CUDA_MPS_PIPE_DIRECTORY).",
                pid=pid,
            )
        used = _gpus_used(pid, usage)
        if used > 1 and pid not in (peers or {}):
            raise Refused(
                _NOT_TOUCHED,
                f"process {pid} uses {used} GPUs, and nothing says that they have no peer access "
                "to each other: a process with peer access may not come back",
                "Limit the process to one GPU (CUDA_VISIBLE_DEVICES), or end it before the save.",
                pid=pid,
                gpus=used,
            )
        if peers and peers.get(pid):
            _peers_can_be_had_back(pid, peers[pid], sum(_held(pid, gpus, usage).values()), used)
    _room_in_host_memory(pids, gpus, usage)


def describe(worker: CudaWorker, pids: Iterable[int]) -> dict[str, Any]:
    """Return the `cuda` object of a manifest: driver, all GPUs, and what each process holds.

    Call it while the processes are running: a checkpointed one holds nothing. A value of
    ``used`` that the driver does not tell is the most that it can be. JSON types only; bytes.
    """
    gpus, usage = worker.gpus(), worker.usage()
    return {
        "driver": gpus[0].driver if gpus else None,
        "cuda": worker.version() if gpus else None,
        "gpus": [{"uuid": gpu.uuid, "name": gpu.name, "total": gpu.total} for gpu in gpus],
        "processes": [{"pid": pid, "used": _held(pid, gpus, usage)} for pid in pids],
    }


def fits(
    worker: CudaWorker, cuda_manifest: Mapping[str, Any], leaving: Container[int] = ()
) -> Mapping[str, str] | None:
    """Return the GPU map with which a snapshot can be restored here; None where none is needed.

    `cuda_manifest` is what `describe` returned at the save. `leaving` holds processes that will
    have given their GPU memory back by the time of the restore.

    Raises
    ------
    Refused : the machine differs in ways that matter; all are named, each with both values.
    DriverError : the driver does not answer.
    """
    if not cuda_manifest["processes"]:
        return None
    gpus, saved = worker.gpus(), list(cuda_manifest["gpus"])
    if not gpus:
        raise _differs("GPUs", f"{len(saved)} x {saved[0]['name']}", "none")
    _has_checkpoint_api(worker, _NO_RESTORE)
    _no_mig(_NO_RESTORE, gpus)
    reasons: list[Refused] = []
    if cuda_manifest["driver"] != gpus[0].driver:
        reasons.append(_differs("NVIDIA driver", cuda_manifest["driver"], gpus[0].driver))
    places = _places(saved, gpus)
    if places is None:
        reasons.append(_differs("number of GPUs", len(saved), len(gpus)))
        here, there = sorted({gpu.name for gpu in gpus}), sorted({gpu["name"] for gpu in saved})
        if here != there:
            reasons.append(_differs("GPU model", ", ".join(there), ", ".join(here)))
        raise Refused.merged(reasons)
    for gpu in saved:
        place = places[gpu["uuid"]]
        if gpu["name"] != place.name:
            reasons.append(_differs("GPU model", gpu["name"], place.name))
    reasons += _lacking_room(worker, cuda_manifest, places, leaving)
    if reasons:
        raise Refused.merged(reasons)
    moved = {old: place.uuid for old, place in places.items() if old != place.uuid}
    # One GPU needs no map: measured from one machine to another, also to one with two GPUs.
    # More must be named all together: the driver refuses a map of only some of them.
    return {old: place.uuid for old, place in places.items()} if len(saved) > 1 and moved else None


def needs(cuda_manifest: Mapping[str, Any]) -> dict[str, int]:
    """Return how many bytes of each GPU (by its UUID at the save) all processes held together."""
    total: dict[str, int] = defaultdict(int)
    for process in cuda_manifest.get("processes", []):
        for gpu, held in process["used"].items():
            total[gpu] += held
    return dict(total)


def _places(saved: Sequence[Mapping[str, Any]], gpus: Sequence[Gpu]) -> dict[str, Gpu] | None:
    """Return the GPU here for every GPU there: itself where it is here, else that of its place.

    None where several GPUs have other places here than as many others.
    """
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    if all(gpu["uuid"] in by_uuid for gpu in saved):
        return {gpu["uuid"]: by_uuid[gpu["uuid"]] for gpu in saved}
    if len(saved) > 1 and len(saved) != len(gpus):
        return None
    return {old["uuid"]: new for old, new in zip(saved, gpus, strict=False)}


def _peers_can_be_had_back(pid: int, known: Mapping[str, int], held: int, gpus: int) -> None:
    """Refuse a process whose GPUs could not have access to each other again after a restore.

    Measured (580.159, H200): `cuCtxEnablePeerAccess` then gives CUDA_ERROR_INVALID_HANDLE where an allocation of
    `cudaMalloc` has 512 MiB or more, and works with smaller ones, and with expandable segments of any size.
    """
    if known["largest"] <= _PEER_SAFE and held - known["total"] <= gpus * _CONTEXT:
        return
    raise Refused(
        _NOT_TOUCHED,
        "copies between GPUs would not work afterwards: the driver does not give GPUs access to each other again "
        f"where one allocation of GPU memory has more than {_PEER_SAFE >> 20} MiB (process {pid})",
        "Have torch allocate in small pieces: restart the kernel, and run "
        "`%env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` before torch uses a GPU.",
        pid=pid,
        largest=known["largest"],
        unknown=max(held - known["total"], 0),
    )


def _has_checkpoint_api(worker: CudaWorker, what: str = _NOT_TOUCHED) -> None:
    version = worker.version()
    if version < _FIRST_CUDA:
        raise Refused(
            what,
            f"the NVIDIA driver knows CUDA {version // 1000}.{version % 1000 // 10}, "
            "and the checkpoint API came with CUDA 12.8",
            "Install NVIDIA driver 570 or newer.",
            cuda=version,
            needed=_FIRST_CUDA,
        )


def _no_mig(what: str, gpus: Iterable[Gpu]) -> None:
    for gpu in gpus:
        if gpu.mig:
            raise Refused(
                what,
                f"GPU {gpu.index} ({gpu.name}) is split by MIG, which is not supported",
                "Use a machine whose GPUs are whole; an administrator can switch MIG off.",
                gpu=gpu.uuid,
            )


def _held(pid: int, gpus: Iterable[Gpu], usage: Iterable[Usage]) -> dict[str, int]:
    """Return bytes by GPU that a process holds; all that nobody else holds, where it is not told.

    NVML lists a process on the GPUs where it has a context, as long as it can name it in this pid
    namespace.
    """
    listed = {one.gpu: one.bytes for one in usage if one.pid == pid and one.bytes is not None}
    if listed:
        return listed
    if not has_context(pid):
        return {}
    others: dict[str, int] = defaultdict(int)
    for one in usage:
        others[one.gpu] += one.bytes or 0
    return {gpu.uuid: max(gpu.total - gpu.free - others[gpu.uuid], 0) for gpu in gpus}


def _gpus_used(pid: int, usage: Iterable[Usage]) -> int:
    """Return on how many GPUs a process may have a context: every CUDA process opens them all."""
    listed = {one.gpu for one in usage if one.pid == pid}
    if listed or not has_context(pid):
        return len(listed)
    return len(open_gpus(pid))


def _not_stopped(pid: int) -> None:
    if stopped(pid):
        raise Refused(
            _NOT_TOUCHED,
            f"process {pid} is stopped, and the driver cannot lock a stopped process",
            f"Let it go on (`kill -CONT {pid}`, or detach the debugger) and save again.",
            pid=pid,
        )


def _room_in_host_memory(pids: Iterable[int], gpus: Sequence[Gpu], usage: Sequence[Usage]) -> None:
    needed, room = _HOST_MARGIN, None
    for pid in pids:
        needed += sum(_held(pid, gpus, usage).values())
        left = memory.available(pid)
        room = left if room is None else min(room, left)
    if room is not None and needed > room:
        raise Refused(
            _NOT_TOUCHED,
            f"the GPU memory in use needs {_gib(needed)} of host memory, and {_gib(room)} are left",
            "Free GPU memory (`del` what is not needed, then `torch.cuda.empty_cache()`) or host "
            "memory, and save again.",
            needed=needed,
            available=room,
        )


def _lacking_room(
    worker: CudaWorker,
    cuda_manifest: Mapping[str, Any],
    places: Mapping[str, Gpu],
    leaving: Container[int],
) -> list[Refused]:
    """Return a reason to refuse for each GPU whose free memory is not enough."""
    reasons = []
    needed: dict[str, int] = defaultdict(int)
    for old, held in needs(cuda_manifest).items():
        needed[places[old].uuid] += held
    given_back: dict[str, int] = defaultdict(int)
    for one in worker.usage():
        if one.pid in leaving:
            given_back[one.gpu] += one.bytes or 0
    for place in places.values():
        free = place.free + given_back[place.uuid]
        if needed[place.uuid] > free:
            reasons.append(
                Refused(
                    _NO_RESTORE,
                    f"GPU {place.index} ({place.name}) has {_gib(free)} free, and the snapshot needs "
                    f"{_gib(needed[place.uuid])}",
                    "End what else uses the GPU (`nvidia-smi` lists it) and restore again.",
                    gpu=place.uuid,
                    needed=needed[place.uuid],
                    available=free,
                )
            )
    return reasons


def _differs(of: str, saved: object, here: object) -> Refused:
    return Refused(
        _NO_RESTORE,
        f"{of}: saved with {saved}, here {here}",
        "Restore it on a machine like the one it was saved on.",
        of=of,
        saved=saved,
        here=here,
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
