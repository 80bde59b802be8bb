"""Whether a save can be undone, and a snapshot fits this machine: found out beforehand."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from ..errors import Refused
from ..linux import memory
from ..linux.gpu_devices import device_mappings
from ..linux.processes import name
from .cuda_calls import CudaWorker, Gpu, Usage
from .gpu_processes import (
    cuda_pids,
    graphics_libraries,
    has_context,
    has_device,
    open_gpus,
    sharing_memory,
    stopped,
    with_communicator,
)
from .inherited_devices import drop_inherited, has_inherited

__all__ = [
    "describe",
    "fits",
    "freezable",
    "in_use",
    "moves",
    "needs",
    "no_peers_afterwards",
    "preflight",
    "refuse_much_unseen",
    "refuse_other_use",
    "refuse_together",
    "refuse_without_memory",
]

_FIRST_CUDA = 12080
"""The first CUDA version whose driver has the checkpoint API (driver 570)."""
_HOST_MARGIN = 512 << 20
"""Bytes of host memory that a checkpoint must leave: it takes more than the bare GPU memory."""

_PEER_SAFE = 448 << 20
"""Bytes up to which no single allocation was seen to stand in the way of peer access after a restore; 512 MiB does."""
_CONTEXT = 1 << 30
"""Bytes of GPU memory that a context takes at most, with the programs loaded into it (0.5 to 0.7 GiB with torch)."""
_UNSEEN = 3 << 29
"""Bytes that a context takes at most with NCCL's programs (1 GiB): more is GPU memory that was not found."""

_FORK_SETTLES = 0.2
"""Seconds after which a child that is about to start another program has done so."""

_DAEMONS_OF_OPEN_MPI = frozenset({"orted", "prte", "prted"})
"""What a program starts that uses MPI and was not started by `mpirun`; its hwloc looks for OpenCL devices."""

_NOT_TOUCHED = "The save was refused; nothing was touched."
_NO_RESTORE = "The snapshot was not restored; nothing was touched."


def freezable(worker: CudaWorker, pids: Iterable[int]) -> list[int]:
    """Return those of the processes that have CUDA state: the ones that a save has to freeze.

    Others that hold devices which one of these opened (they inherited them when they were forked) are made to drop
    them: they can use no GPU, and could not be dumped.

    Raises
    ------
    Refused : a process is stopped, or holds GPU devices without CUDA state; no such process can be dumped.
    DriverError : the driver does not answer.
    """
    candidates = cuda_pids(pids)
    for pid in candidates:
        _not_stopped(pid)
    found = [pid for pid in candidates if worker.state(pid) != "none"]
    heirs = [pid for pid in candidates if pid not in found and has_device(pid)]
    if heirs:
        time.sleep(_FORK_SETTLES)
    if inherited := [pid for pid in heirs if has_inherited(pid, found)]:
        drop_inherited(inherited)
    for pid in filter(has_device, heirs):
        if graphics_libraries(pid):
            raise _uses_otherwise(pid, _NOT_TOUCHED)
        raise Refused(
            _NOT_TOUCHED,
            f"process {pid} ({name(pid)}) has GPU devices open but no CUDA state that could be moved: it uses the "
            "driver without CUDA, or inherited the devices from another process",
            "If it is a child process, end it and try again. If it is the {kernel} itself, {restart}, and have the "
            "program use CUDA.",
            pid=pid,
            program=name(pid),
        )
    return found


def refuse_other_use(pids: Iterable[int]) -> None:
    """Refuse checkpointed processes that have devices of the driver open: they use a GPU otherwise than with CUDA.

    The driver takes away what CUDA has open and mapped, and nothing of OpenGL's and the like. Beforehand one cannot be
    told from the other: a library that is loaded need not be in use.

    Raises
    ------
    Refused : one does.
    """
    for pid in pids:
        if has_device(pid) or next(device_mappings(pid), None) is not None:
            raise _uses_otherwise(pid, "The save was refused; the {kernel} keeps running.")


def _uses_otherwise(pid: int, what: str) -> Refused:
    by, program = graphics_libraries(pid), name(pid)
    then = (
        "If it is a child process, end it and try again. If it is the {kernel} itself, {restart}, and render on the "
        "processor (MuJoCo: `%env MUJOCO_GL=osmesa`, before it is imported) or in a program of its own, which can be "
        "ended before a save."
    )
    if program in _DAEMONS_OF_OPEN_MPI:
        then = (
            "{Restart}, and have HWLOC_COMPONENTS=-opencl in its environment before mpi4py is imported, as Lightning "
            "does (in a cell: `%env HWLOC_COMPONENTS=-opencl`): Open MPI's daemon then leaves the GPU alone."
        )
    return Refused(
        what,
        f"process {pid} ({program}) uses the GPU by {' or '.join(by) or 'something else than CUDA'}, and only what "
        "CUDA has there can be saved",
        then,
        pid=pid,
        program=program,
        by=by,
    )


def preflight(
    worker: CudaWorker,
    pids: Sequence[int],
    peers: Mapping[int, Mapping[str, int]] | None = None,
    *,
    connected: Container[int] = (),
    sharing: Container[int] = (),
    room_later: bool = False,
) -> dict[int, Refused]:
    """Refuse a save of these CUDA processes that could not be done or could not be undone.

    Returns, by pid, why those of them are refused whose GPUs may have access to each other's memory, unless that is
    taken away before they are checkpointed.

    `peers` holds the processes of which it is known that no GPU of theirs has peer access to another now: a process
    with peer access checkpoints well and then cannot be restored. Where it was on before, the value says how many bytes
    of GPU memory the process's allocators know of (``total``), and of the largest single allocation (``largest``).
    With `room_later`, room in host memory is looked for later (`refuse_without_memory`).
    The NCCL communicators of those that are `connected` will be taken down before they are frozen (`nccl`). Those that
    are `sharing` have closed then what they have open of others' memory, as `refuse_together` has it.

    Raises
    ------
    Refused : what stands in the way and what to do about it; nothing was touched.
    DriverError : the driver does not answer.
    """
    if not pids:
        return {}
    together: dict[int, Refused] = {}
    _has_checkpoint_api(worker)
    refuse_together([pid for pid in pids if pid not in connected], sharing)
    gpus, usage = worker.gpus(), worker.usage()
    _no_mig(_NOT_TOUCHED, gpus)
    for pid in pids:
        _not_stopped(pid)
        state = worker.state(pid)
        if state != "running":
            raise Refused(
                _NOT_TOUCHED,
                f"the CUDA state of process {pid} is `{state}`, not `running`",
                "Another program is checkpointing it; wait for it and try again.",
                pid=pid,
                state=state,
            )
        if any(one.pid == pid and one.mps for one in usage):
            raise Refused(
                _NOT_TOUCHED,
                f"process {pid} uses the GPU through MPS, which the driver cannot checkpoint",
                "Start the {kernel} without MPS (unset CUDA_MPS_PIPE_DIRECTORY).",
                pid=pid,
            )
        used = _gpus_used(pid, usage)
        known = (peers or {}).get(pid)
        if known is None and used > 1:
            together[pid] = Refused(
                _NOT_TOUCHED,
                f"process {pid} uses {used} GPUs, and they may have peer access to each other, which cannot be "
                "restored",
                "Limit the process to one GPU (CUDA_VISIBLE_DEVICES), or end it before the save.",
                pid=pid,
                gpus=used,
            )
        if known:
            held = sum(_held(pid, gpus, usage).values())
            unknown = held - known.get("total", held)
            if known.get("largest", 0) > _PEER_SAFE:
                raise no_peers_afterwards(pid, known["largest"], unknown)
            refuse_much_unseen(pid, unknown, used)
    if not room_later:
        refuse_without_memory(pids, sum(size for pid in pids for size in _held(pid, gpus, usage).values()))
    return together


def refuse_much_unseen(pid: int, unknown: int, gpus: int) -> None:
    """Refuse a process of whose memory no allocator knows so many bytes, where contexts on so many GPUs take less.

    Raises
    ------
    Refused : its GPUs might not get access to each other's memory again.
    """
    if unknown > gpus * _UNSEEN:
        raise no_peers_afterwards(pid, unknown=unknown)


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
    worker: CudaWorker,
    cuda_manifest: Mapping[str, Any],
    leaving: Container[int] = (),
    *,
    gpus: Sequence[int] = (),
    copies: int = 1,
    room_later: bool = False,
    environment: Mapping[str, str] | None = None,
    what: str = _NO_RESTORE,
) -> Mapping[str, str] | None:
    """Return the GPU map with which a snapshot can be restored here; None where none is needed.

    It names every GPU. Where nothing else is asked for, each stays on its GPU; where that is not here, was not given to
    the kernel (``CUDA_VISIBLE_DEVICES``), or has not enough memory free, it goes to another of the same model, of those
    that the kernel was given.

    Parameters
    ----------
    cuda_manifest : what `describe` returned at the save.
    leaving : processes that will have given their GPU memory back by the time of the restore.
    gpus : the numbers (NVML's, as `nvidia-smi` shows them) of the GPUs to restore to, one for each that the saved
        processes hold memory of, in the order of the saved ones; empty for no wish.
    copies : how often it is to be restored.
    room_later : whether too little free memory is no reason to refuse: it is waited for when the state comes to a GPU.
    environment : what the kernel would be started with now; this process's own where it is None.
    what : what is said to have happened, where it does not fit.

    Raises
    ------
    Refused : the machine differs in ways that matter; all are named, each with both values.
    DriverError : the driver does not answer.
    """
    if not cuda_manifest["processes"]:
        return None
    here, saved = worker.gpus(), list(cuda_manifest["gpus"])
    if not here:
        raise _differs("GPUs", f"{len(saved)} x {saved[0]['name']}", "none", what)
    _has_checkpoint_api(worker, what)
    _no_mig(what, here)
    reasons: list[Refused] = []
    if cuda_manifest["driver"] != here[0].driver:
        reasons.append(_differs("NVIDIA driver", cuda_manifest["driver"], here[0].driver, what))
    needed = {old: copies * held for old, held in needs(cuda_manifest).items() if held}
    free = _free(worker, here, leaving)
    usual = _places(saved, here)
    if usual is None:
        reasons.append(_differs("number of GPUs", len(saved), len(here), what))
        models, there = sorted({gpu.name for gpu in here}), sorted({gpu["name"] for gpu in saved})
        if models != there:
            reasons.append(_differs("GPU model", ", ".join(there), ", ".join(models), what))
        raise Refused.merged(reasons)
    if gpus:
        places = _wanted_places(saved, here, [gpu["uuid"] for gpu in saved if gpu["uuid"] in needed], gpus, what)
    else:
        environment = os.environ if environment is None else environment
        own = _visible(here, environment)
        are_given = not _is_certain(here, own, environment) or all(usual[old] in own for old in needed)
        places = usual
        if not (are_given and _have_room(usual, needed, free)):
            others = _other_places(saved, here, own, needed, free)
            places = others or (usual if are_given else _given_places(saved, here, own, needed, what))
    for gpu in saved:
        place = places[gpu["uuid"]]
        if gpu["name"] != place.name:
            reasons.append(_differs("GPU model", gpu["name"], place.name, what))
    if not room_later:
        reasons += _lacking_room(places, needed, free, what)
    if reasons:
        raise Refused.merged(reasons)
    moved = {old: place.uuid for old, place in places.items() if old != place.uuid}
    # A single GPU needs no map where it goes to its usual place: measured from one machine to another, also to one
    # with two GPUs. More must be named all together: the driver refuses a map of only some of them.
    as_usual = len(saved) == 1 and places == usual
    return {old: place.uuid for old, place in places.items()} if moved and not as_usual else None


def needs(cuda_manifest: Mapping[str, Any]) -> dict[str, int]:
    """Return how many bytes of each GPU (by its UUID at the save) all processes held together."""
    total: dict[str, int] = defaultdict(int)
    for process in cuda_manifest.get("processes", []):
        for gpu, held in process["used"].items():
            total[gpu] += held
    return dict(total)


def in_use(cuda_manifest: Mapping[str, Any]) -> int:
    """Return how many bytes of what all processes held were more than zeros, as far as that is known (``zeros``)."""
    return sum(needs(cuda_manifest).values()) - int(cuda_manifest.get("zeros", 0))


def moves(worker: CudaWorker, cuda_manifest: Mapping[str, Any], gpu_map: Mapping[str, str]) -> list[str]:
    """Return a sentence for every GPU whose memory comes to be on another one on this machine."""
    here = {gpu.uuid: gpu for gpu in worker.gpus()}
    numbers = {gpu["uuid"]: number for number, gpu in enumerate(cuda_manifest["gpus"])}
    return [
        f"What was on GPU {here[old].index if old in here else numbers[old]} ({old}) is now on GPU "
        f"{here[gpu_map[old]].index} ({gpu_map[old]})."
        for old, held in needs(cuda_manifest).items()
        if held and gpu_map.get(old, old) != old
    ]


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


def _wanted_places(
    saved: Sequence[Mapping[str, Any]], here: Sequence[Gpu], used: Sequence[str], wanted: Sequence[int], what: str
) -> dict[str, Gpu]:
    """Return the GPU here for every GPU there, where those in use go to the wanted ones."""
    by_number = {gpu.index: gpu for gpu in here}
    numbers = ", ".join(map(str, by_number))
    if unknown := [number for number in wanted if number not in by_number]:
        raise Refused(
            what,
            f"there is no GPU {unknown[0]} on this machine: it has {numbers}",
            "Choose one that `nvidia-smi` lists.",
            gpus=list(by_number),
        )
    if len(set(wanted)) != len(used) or len(wanted) != len(used):
        raise Refused(
            what,
            f"it uses {len(used)} GPUs, and {len(wanted)} were named ({', '.join(map(str, wanted))})",
            "Name a different GPU for each one that it uses, as in --gpu 1,0.",
            used=len(used),
        )
    if len(saved) > 1 and len(saved) != len(here):
        raise _differs("number of GPUs", len(saved), len(here), what)
    return _completed(saved, here, {old: by_number[number] for old, number in zip(used, wanted, strict=True)})


def _visible(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> list[Gpu]:
    """Return the GPUs that a program may use in an environment: all, unless ``CUDA_VISIBLE_DEVICES`` names some.

    It is read as the CUDA programming guide says: numbers, or beginnings of UUIDs, up to the first that is no GPU.
    """
    if (named := environment.get("CUDA_VISIBLE_DEVICES")) is None:
        return list(gpus)
    visible = []
    for one in named.split(","):
        found = [gpu for gpu in gpus if one.strip() == str(gpu.index) or gpu.uuid.startswith(one.strip() or "?")]
        if len(found) != 1:
            break
        visible += found
    return visible


def _is_certain(gpus: Sequence[Gpu], own: Sequence[Gpu], environment: Mapping[str, str]) -> bool:
    """Tell whether the GPUs that an environment leaves to a program are certainly these.

    CUDA puts the fastest ones first, unless ``CUDA_DEVICE_ORDER`` says otherwise, where NVML has the order of the bus.
    """
    by_uuid = "GPU-" in environment.get("CUDA_VISIBLE_DEVICES", "")
    same_order = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.name for gpu in gpus}) == 1
    return bool(own) and (by_uuid or same_order)


def _other_places(
    saved: Sequence[Mapping[str, Any]],
    here: Sequence[Gpu],
    own: Container[Gpu],
    needed: Mapping[str, int],
    free: Mapping[str, int],
) -> dict[str, Gpu] | None:
    """Return GPUs of the same model with room for what is needed, each its own where that can be; None without."""
    if len(saved) > 1 and len(saved) != len(here):
        return None
    names = {gpu["uuid"]: gpu["name"] for gpu in saved}
    chosen: dict[str, Gpu] = {}
    for old in sorted(needed, key=lambda uuid: -needed[uuid]):
        fitting = [
            gpu
            for gpu in here
            if gpu in own and gpu not in chosen.values() and gpu.name == names[old] and free[gpu.uuid] >= needed[old]
        ]
        if not fitting:
            return None
        chosen[old] = max(fitting, key=lambda gpu: (gpu.uuid == old, free[gpu.uuid]))
    return _completed(saved, here, chosen)


def _given_places(
    saved: Sequence[Mapping[str, Any]], here: Sequence[Gpu], own: Sequence[Gpu], needed: Iterable[str], what: str
) -> dict[str, Gpu]:
    """Return the GPUs that this process was given, in their order, for those in use, whether they fit or not.

    Raises
    ------
    Refused : it was given too few.
    """
    used = list(needed)
    if len(used) > len(own):
        raise _differs("number of GPUs (CUDA_VISIBLE_DEVICES)", len(used), len(own), what)
    return _completed(saved, here, dict(zip(used, own, strict=False)))


def _completed(saved: Sequence[Mapping[str, Any]], here: Sequence[Gpu], chosen: Mapping[str, Gpu]) -> dict[str, Gpu]:
    """Return a place for every GPU, where those in use have theirs: the others stay, or take what is left."""
    places = dict(chosen)
    left = [gpu for gpu in here if gpu not in chosen.values()]
    others = [gpu["uuid"] for gpu in saved if gpu["uuid"] not in places]
    for gpu in [gpu for gpu in left if gpu.uuid in others]:
        places[gpu.uuid] = gpu
        left.remove(gpu)
    for uuid in others:
        if uuid not in places and left:
            places[uuid] = left.pop(0)
    return {gpu["uuid"]: places[gpu["uuid"]] for gpu in saved}


def _free(worker: CudaWorker, gpus: Sequence[Gpu], leaving: Container[int]) -> dict[str, int]:
    """Return the bytes that every GPU will have free when some processes have left."""
    free = {gpu.uuid: gpu.free for gpu in gpus}
    for one in worker.usage():
        if one.pid in leaving and one.gpu in free:
            free[one.gpu] += one.bytes or 0
    return free


def _have_room(places: Mapping[str, Gpu], needed: Mapping[str, int], free: Mapping[str, int]) -> bool:
    return all(free[places[old].uuid] >= size for old, size in needed.items())


def no_peers_afterwards(pid: int, largest: int = 0, unknown: int = 0) -> Refused:
    """Return why a process is refused whose GPUs could not have access to each other again after a restore.

    Measured (580.159, H200): `cuCtxEnablePeerAccess` then gives CUDA_ERROR_INVALID_HANDLE where an allocation of
    `cudaMalloc` has 512 MiB or more, and works with smaller ones, and with expandable segments of any size.
    """
    return Refused(
        _NOT_TOUCHED,
        "copies between GPUs would not work afterwards: the driver does not give GPUs access to each other again "
        f"where one allocation of GPU memory has more than {_PEER_SAFE >> 20} MiB (process {pid})",
        "Have torch allocate in small pieces: {restart}, and run "
        "`%env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` before torch uses a GPU.",
        pid=pid,
        largest=largest,
        unknown=max(unknown, 0),
    )


def refuse_together(pids: Sequence[int], sharing: Container[int] = ()) -> None:
    """Refuse processes that have each other's GPU memory open: the driver checkpoints them and cannot restore them.

    Measured (580.159, H200): the restore of one gives CUDA_ERROR_OPERATING_SYSTEM (304), and it is lost. Those that are
    `sharing` memory by no handle of the driver's, but events alone, come back (580.159, H200).

    Raises
    ------
    Refused : they are.
    """
    if len(together := with_communicator(pids)) > 1:
        raise Refused(
            _NOT_TOUCHED,
            f"processes {', '.join(map(str, together))} are connected by NCCL, and the driver could not restore them",
            "Call `torch.distributed.destroy_process_group()` in each of them, save, and `init_process_group()` again.",
            pids=together,
        )
    if together := sharing_memory([pid for pid in pids if pid not in sharing]):
        raise Refused(
            _NOT_TOUCHED,
            f"processes {', '.join(map(str, together))} share GPU memory (CUDA IPC, as torch.multiprocessing does), or "
            "did so once, and the driver could not restore them",
            "End all of them but one, and save again; pass tensors between processes on the CPU.",
            pids=together,
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
                "Use a machine without MIG; an administrator can switch it off.",
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
            f"Continue it (`kill -CONT {pid}`, or detach the debugger) and try again.",
            pid=pid,
        )


def refuse_without_memory(pids: Iterable[int], needed: int) -> None:
    """Refuse a save for which so many bytes of processes' GPU memory have no room in host memory. Raises `Refused`."""
    needed += _HOST_MARGIN
    # The copies may count as the processes' own, or, where they lie in files, as the keeper's.
    room = memory.room(os.getpid(), *pids)
    if needed > room.bytes:
        raise Refused(
            _NOT_TOUCHED,
            f"the GPU memory in use needs {_gib(needed)} of host memory, and {_gib(room.bytes)} are left{room.where}",
            "Free GPU memory (`del` what is not needed, then `torch.cuda.empty_cache()`) or host "
            "memory, and try again.",
            needed=needed,
            available=room.bytes,
        )


def _lacking_room(
    places: Mapping[str, Gpu], needed: Mapping[str, int], free: Mapping[str, int], what: str
) -> list[Refused]:
    """Return a reason to refuse for each GPU whose free memory is not enough."""
    return [
        Refused(
            what,
            f"GPU {place.index} ({place.name}) has {_gib(free[place.uuid])} free, and {_gib(size)} are needed",
            "End the other programs on the GPU (`nvidia-smi` lists them), or choose another GPU (--gpu N), and try "
            "again.",
            gpu=place.uuid,
            needed=size,
            available=free[place.uuid],
        )
        for old, size in needed.items()
        if size > free[(place := places[old]).uuid]
    ]


def _differs(of: str, saved: object, here: object, what: str) -> Refused:
    return Refused(
        what,
        f"{of}: saved with {saved}, here {here}",
        "Restore it on a machine like the one it was saved on.",
        of=of,
        saved=saved,
        here=here,
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
