"""What `/proc` tells of processes that use a GPU, without asking the driver."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable

from ..linux import proc
from ..linux.gpu_devices import device_files
from ..linux.processes import mapped_files, open_files, parent, sockets, tracer, unix_sockets

__all__ = [
    "cuda_pids",
    "ended",
    "graphics_libraries",
    "has_context",
    "has_device",
    "open_gpus",
    "sharing_memory",
    "stopped",
    "with_communicator",
]

_LIBCUDA = re.compile(r"/libcuda\.so[.\d]*( \(deleted\))?$")
_LOOKS, _BETWEEN_LOOKS = 20, 0.001
"""How often, and after how many seconds again, a process is looked at that a tracer holds."""
_COMMUNICATOR = "@tmp/nccl-socket-"
"""How the abstract Unix socket is named that a process has for as long as an NCCL communicator of its (torch 2.11)."""
_SHARED = "/dev/shm/cuda.shm."  # noqa: S108
"""How the file is named that processes have mapped which share GPU memory by CUDA IPC (driver 580.159)."""
_GRAPHICS = {
    "OpenGL": re.compile(r"/lib(EGL_nvidia|nvidia-eglcore|nvidia-glcore|GLX_nvidia|GLESv2_nvidia)\.so"),
    "OpenCL": re.compile(r"/libnvidia-opencl\.so"),
    "OptiX": re.compile(r"/libnvoptix\.so"),
}
"""The driver's libraries by which programs use a GPU otherwise than with CUDA. Vulkan's are those of OpenGL."""
_GPU_FILE = re.compile(r"^/dev/nvidia(\d+)$")


def cuda_pids(pids: Iterable[int]) -> list[int]:
    """Return those of the processes that may have CUDA state: cheap, and never one too few.

    These are the ones that map libcuda or have an NVIDIA device open. Whether there is any state in
    them the driver says (`CudaWorker.state`; one that only uses NVML has some, too). Ended
    processes are left out.

    Raises
    ------
    PermissionError : a process is not this user's.
    """
    return list(filter(_may_have_cuda, pids))


def _may_have_cuda(pid: int) -> bool:
    try:
        return has_device(pid) or _maps_libcuda(pid)
    except PermissionError:
        if ended(pid):  # a zombie, whose files are root's to look at
            return False
        raise


def open_gpus(pid: int) -> list[int]:
    """Return the device numbers of the GPUs (``/dev/nvidiaN``) that a process has open."""
    paths = {*open_files(pid), *mapped_files(pid)}
    return sorted(int(m[1]) for m in map(_GPU_FILE.match, paths) if m)


def has_context(pid: int) -> bool:
    """Return whether a process has a CUDA context: it alone maps ``/dev/nvidia-uvm``."""
    return "/dev/nvidia-uvm" in mapped_files(pid)


def graphics_libraries(pid: int) -> list[str]:
    """Return by what else than CUDA a process may use a GPU: the names of what it has libraries of NVIDIA's for."""
    mapped = set(mapped_files(pid))
    return [name for name, library in _GRAPHICS.items() if any(map(library.search, mapped))]


def with_communicator(pids: Iterable[int]) -> list[int]:
    """Return those of the processes that have an NCCL communicator now, as far as its sockets tell."""
    named = {inode for inode, name in unix_sockets() if name.startswith(_COMMUNICATOR)}
    return [pid for pid in pids if not named.isdisjoint(sockets([pid]))] if named else []


def sharing_memory(pids: Iterable[int]) -> list[int]:
    """Return those of the processes that share GPU memory with another of them by CUDA IPC, or did so once."""
    holders: dict[str, list[int]] = {}
    for pid in pids:
        for path in {path for path in mapped_files(pid) if path.startswith(_SHARED)}:
            holders.setdefault(path, []).append(pid)
    return sorted({pid for together in holders.values() if len(together) > 1 for pid in together})


def stopped(pid: int) -> bool:
    """Return whether a process is stopped, by a signal or by a tracer that holds it longer than for a system call.

    A program that this process started may hold it (`thread_stopper`): it leaves the driver's own threads alone.
    """
    for _ in range(_LOOKS):
        state = _state(pid)
        if state != "t" or parent(tracer(pid)) == os.getpid():
            return state == "T"
        time.sleep(_BETWEEN_LOOKS)
    return True


def ended(pid: int) -> bool:
    """Return whether a process has ended; a zombie has."""
    return _state(pid) in ("", "Z", "X")


def _state(pid: int) -> str:
    """Return the letter of a process's state (`proc_pid_stat(5)`); nothing for no process."""
    try:
        stat = proc.read(f"/proc/{pid}/stat")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return stat.rpartition(")")[2].split()[0]


def has_device(pid: int) -> bool:
    """Return whether a process has a file of an NVIDIA device open."""
    return bool(device_files(pid))


def _maps_libcuda(pid: int) -> bool:
    return any(_LIBCUDA.search(path) for path in mapped_files(pid))
