"""What a kernel does about its GPUs: keep them from forked children, and switch peer access off.

Standard library only. Everything that CUDA needs is reached through the libcuda that the kernel
has loaded itself; this module never loads it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import permutations
from typing import Any

from ..errors import DriverError
from ..linux import proc
from ..linux.gpu_devices import device_files, device_mappings
from . import parking

__all__ = ["allocations", "disable_peer_access", "drop_in_children", "enable_peer_access"]

_PROT_NONE = 0
_MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x02, 0x10, 0x20, 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value

_STEP = 2 << 20
"""Bytes: the driver gives every allocation larger than that addresses of its own that begin at a multiple of it."""
_MEMORY_TYPE = 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE
_ON_DEVICE = 2  # CU_MEMORYTYPE_DEVICE

_SUCCESS = 0
_PEER_ACCESS_ALREADY_ENABLED = 704
_PEER_ACCESS_NOT_ENABLED = 705

_registered = False


def drop_in_children() -> None:
    """From now on, let every child that Python code forks drop the GPU devices that it inherits.

    A child forked from a CUDA process can use no CUDA, but it inherits the open device files and
    their mappings, and no process that has those can be dumped. Without any, the child pays for
    one look at its open files. Calling this again does nothing.
    """
    global _registered
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=_dropper())


def _dropper() -> Callable[[], None]:
    """Return the function for the child, with all that it needs at hand: no import after a fork."""
    mmap = ctypes.CDLL(None).mmap
    mmap.restype = ctypes.c_void_p
    mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = _MAP_PRIVATE | _MAP_FIXED | _MAP_ANONYMOUS | _MAP_NORESERVE

    def drop() -> None:
        files = device_files()
        if not files:
            return
        # The addresses and the numbers stay taken, by nothing: libcuda's and NVML's state in this
        # child still names them, and must not reach what would be opened there next.
        for start, end in device_mappings():
            mmap(start, end - start, _PROT_NONE, flags, -1, 0)
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for file in files:
            os.dup2(nothing, file, inheritable=False)
        os.close(nothing)

    return drop


def disable_peer_access() -> list[dict[str, int]]:
    """Switch off the access of this process's GPUs to each other's memory; return what was on.

    A process with peer access checkpoints and may then not be restored, so this comes before every
    save. It waits until the GPUs that are concerned have done what they were given.

    `enable_peer_access` must follow, with the list returned here, before anything else runs that
    uses these GPUs: torch remembers that access is on, and its next copy of a strided tensor from
    one to the other would end in an illegal memory access, which no CUDA context survives.

    Each entry is ``{"from": DEVICE, "to": DEVICE}``, numbered as this process numbers its devices.
    Only primary contexts are seen (torch, JAX, CuPy and the CUDA runtime have no others). Without
    libcuda or with one GPU there is nothing to do.

    Raises
    ------
    DriverError : the driver refuses, with ``call``, ``number`` and the pair in its data.
    """
    was_on = []
    with _active_contexts() as (cuda, contexts):
        for device in contexts if len(contexts) > 1 else ():
            number = _in_context(cuda, contexts[device], cuda.cuCtxSynchronize)
            if number != _SUCCESS:
                raise _error("cuCtxSynchronize", number, device, device)
        for start, peer in permutations(contexts, 2):
            number = _in_context(cuda, contexts[start], cuda.cuCtxDisablePeerAccess, contexts[peer])
            if number == _SUCCESS:
                was_on.append({"from": start, "to": peer})
            elif number != _PEER_ACCESS_NOT_ENABLED:
                raise _error("cuCtxDisablePeerAccess", number, start, peer)
    return was_on


def uses_several_gpus() -> bool:
    """Tell whether this process has a primary context on more than one GPU."""
    with _active_contexts() as (_, contexts):
        return len(contexts) > 1


def are_used() -> bool:
    """Tell whether this process has a primary context on a GPU."""
    with _active_contexts() as (_, contexts):
        return bool(contexts)


def enable_peer_access(pairs: Iterable[dict[str, int]]) -> None:
    """Switch on again what `disable_peer_access` returned, after the save and after a restore.

    Where it fails, copies of strided tensors between GPUs would crash in this process: see there.

    Raises
    ------
    DriverError : the driver refuses, with ``call``, ``number`` and the pair in its data.
    """
    with _active_contexts() as (cuda, contexts):
        for pair in pairs:
            start, peer = pair["from"], pair["to"]
            if start not in contexts or peer not in contexts:
                continue  # the process gave the device up: there is nothing left to have access to
            number = _in_context(cuda, contexts[start], cuda.cuCtxEnablePeerAccess, contexts[peer], ctypes.c_uint(0))
            if number not in (_SUCCESS, _PEER_ACCESS_ALREADY_ENABLED):
                raise _error("cuCtxEnablePeerAccess", number, start, peer)


def allocations() -> dict[int, int]:
    """Return address and size, in bytes, of every piece of GPU memory of this process, but for those of a few MiB.

    The driver tells of an allocation of the current context when it is asked about an address. These addresses are
    this process's too, reserved where nothing else can lie (mappings without any right), so those are asked about, one
    in 2 MiB: that takes 0.02 s, and half a second where NCCL or expandable segments have reserved hundreds of GiB. The
    pieces that expandable segments are made of come one by one.
    """
    found: dict[int, int] = {}
    with _active_contexts() as (cuda, contexts):
        for context in contexts.values():
            _in_context(cuda, context, lambda: _find_allocations(cuda, found))
    return found


def _find_allocations(cuda: Any, found: dict[int, int]) -> int:
    base, size, kind = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_uint()
    for start, end in _reserved():
        at = -(-start // _STEP) * _STEP
        while at < end:
            after = at + _STEP
            address = ctypes.c_uint64(at)
            if cuda.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), address) == _SUCCESS:
                number = cuda.cuPointerGetAttribute(ctypes.byref(kind), _MEMORY_TYPE, address)
                if number == _SUCCESS and kind.value == _ON_DEVICE:
                    found[base.value] = size.value
                after = max(after, -(-(base.value + size.value) // _STEP) * _STEP)
            at = after
    return _SUCCESS


def _reserved() -> Iterator[tuple[int, int]]:
    for line in proc.lines("/proc/self/maps"):
        columns = line.split(maxsplit=5)
        if columns[1] == "---p" and columns[4] == "0":
            start, _, end = columns[0].partition("-")
            yield int(start, 16), int(end, 16)


def _loaded_libcuda() -> ctypes.CDLL | None:
    """Return libcuda if this process has loaded it; never load it."""
    if not parking.is_driver_loaded():
        return None
    try:
        return ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None


@contextmanager
def _active_contexts() -> Iterator[tuple[Any, dict[int, ctypes.c_void_p]]]:
    """Yield libcuda and the primary context of every device of this process that has one."""
    cuda, contexts = _loaded_libcuda(), dict[int, ctypes.c_void_p]()
    try:
        if cuda is not None:
            for device in range(_device_count(cuda)):
                if _is_active(cuda, device):
                    context = ctypes.c_void_p()
                    number = cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
                    if number != _SUCCESS:
                        raise _error("cuDevicePrimaryCtxRetain", number, device, device)
                    contexts[device] = context
        yield cuda, contexts
    finally:
        for device in contexts:
            assert cuda is not None
            cuda.cuDevicePrimaryCtxRelease_v2(device)


def _device_count(cuda: ctypes.CDLL) -> int:
    count = ctypes.c_int()
    # Before cuInit, and in a forked child, the driver answers with an error: no devices, then.
    return count.value if cuda.cuDeviceGetCount(ctypes.byref(count)) == _SUCCESS else 0


def _is_active(cuda: ctypes.CDLL, device: int) -> bool:
    flags, active = ctypes.c_uint(), ctypes.c_int()
    number = cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
    return number == _SUCCESS and bool(active.value)


def _in_context(cuda: ctypes.CDLL, context: ctypes.c_void_p, call: Callable[..., int], *arguments: Any) -> int:
    number = cuda.cuCtxPushCurrent_v2(context)
    if number != _SUCCESS:
        return int(number)
    try:
        return int(call(*arguments))
    finally:
        cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def _error(call: str, number: int, start: int, peer: int) -> DriverError:
    return DriverError(
        f"The peer access of GPU {start} to GPU {peer} could not be switched.",
        f"{call} gave CUresult {number}",
        "Restart the kernel, and start it with one GPU (CUDA_VISIBLE_DEVICES) to be able to save it.",
        call=call,
        number=number,
        **{"from": start, "to": peer},
    )
