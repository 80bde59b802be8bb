"""What NVML says of the GPUs and of the memory that processes hold on them, read through ctypes.

NVML makes no CUDA context and holds no GPU memory. Only the worker (`cuda_worker`) calls this: a
hung driver hangs NVML too. Functions and structures: NVIDIA's `nvml.h`, "NVML API Reference".
"""

from __future__ import annotations

import ctypes
from typing import Any

from .cuda_messages import Gpu, Usage, Worked

__all__ = ["Nvml", "NvmlError"]

_NOT_SUPPORTED = 3
_NO_PERMISSION = 4
_NOT_FOUND = 6
_INSUFFICIENT_SIZE = 7
_NO_DRIVER = (9, 12)
"""`NVML_ERROR_DRIVER_NOT_LOADED` and `NVML_ERROR_LIBRARY_NOT_FOUND`."""
_UNKNOWN_BYTES = 2**64 - 1
"""`NVML_VALUE_NOT_AVAILABLE`."""


class NvmlError(Exception):
    """A call of NVML failed; `number` is its `nvmlReturn_t`."""

    def __init__(self, call: str, number: int, text: str) -> None:
        super().__init__(f"{call}: {text} ({number})")
        self.number = number


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class _ProcessInfo(ctypes.Structure):
    """`nvmlProcessInfo_t`, the version that the `_v3` calls fill."""

    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class _Utilization(ctypes.Structure):
    """`nvmlProcessUtilizationSample_t`: percents of the time of one sample."""

    _fields_ = [
        ("pid", ctypes.c_uint),
        ("time", ctypes.c_ulonglong),
        *((name, ctypes.c_uint) for name in ("sm", "memory", "encoder", "decoder")),
    ]


class Nvml:
    """NVML, loaded and initialised; without a driver there are simply no GPUs.

    Raises
    ------
    NvmlError : NVML is there but does not start.
    """

    def __init__(self) -> None:
        self._library: ctypes.CDLL | None = None
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        library.nvmlErrorString.restype = ctypes.c_char_p
        number = library.nvmlInit_v2()
        if number in _NO_DRIVER:
            return
        self._library = library
        self._check("nvmlInit_v2", number)

    def gpus(self) -> list[Gpu]:
        """Return every GPU."""
        return [self._describe(index, device) for index, device in self._devices()]

    def usage(self) -> list[Usage]:
        """Return who holds memory where.

        The pids are those of the pid namespace of the caller, as far as the driver translates them.
        """
        return [
            Usage(self._text("nvmlDeviceGetUUID", device), pid, used, mps)
            for _, device in self._devices()
            for mps, call in (
                (False, "nvmlDeviceGetComputeRunningProcesses_v3"),
                (True, "nvmlDeviceGetMPSComputeRunningProcesses_v3"),
            )
            for pid, used in self._processes(call, device)
        ]

    def work(self, since: float) -> list[Worked]:
        """Return who has been at work on the GPUs since a time (seconds since the epoch), as samples of the driver's.

        A pid of None means that the driver tells only of the whole GPU, that it is at work now, or does not tell at
        all.
        """
        return [
            Worked(self._text("nvmlDeviceGetUUID", device), pid)
            for _, device in self._devices()
            for pid in self._at_work(device, since)
        ]

    def _at_work(self, device: ctypes.c_void_p, since: float) -> set[int | None]:
        call, last_seen = "nvmlDeviceGetProcessUtilization", ctypes.c_ulonglong(int(since * 1e6))
        room = 0
        while True:
            count = ctypes.c_uint(room)
            samples = (_Utilization * room)() if room else None
            number = self._number(call, device, samples, ctypes.byref(count), last_seen)
            if number != _INSUFFICIENT_SIZE or count.value <= room:
                break
            room = count.value
        if number == _NOT_FOUND:
            return set()
        if number in (_NOT_SUPPORTED, _NO_PERMISSION, _INSUFFICIENT_SIZE):
            return {None} if self._is_at_work(device) else set()
        self._check(call, number)
        found = list(samples or [])[: count.value]
        return {s.pid for s in found if s.time > last_seen.value and (s.sm or s.memory or s.encoder or s.decoder)}

    def _is_at_work(self, device: ctypes.c_void_p) -> bool:
        rates = (ctypes.c_uint * 2)()  # nvmlUtilization_t: of the processors, of the memory
        number = self._number("nvmlDeviceGetUtilizationRates", device, ctypes.byref(rates))
        return number != 0 or any(rates)

    def _devices(self) -> list[tuple[int, ctypes.c_void_p]]:
        if self._library is None:
            return []
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        devices = []
        for index in range(count.value):
            device = ctypes.c_void_p()
            self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))
            devices.append((index, device))
        return devices

    def _describe(self, index: int, device: ctypes.c_void_p) -> Gpu:
        memory = _Memory()
        self._call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
        return Gpu(
            index=index,
            uuid=self._text("nvmlDeviceGetUUID", device),
            name=self._text("nvmlDeviceGetName", device),
            total=memory.total,
            free=memory.free,
            mig=self._mig(device),
            driver=self._text("nvmlSystemGetDriverVersion"),
        )

    def _mig(self, device: ctypes.c_void_p) -> bool:
        current, pending = ctypes.c_uint(), ctypes.c_uint()
        call = "nvmlDeviceGetMigMode"
        number = self._number(call, device, ctypes.byref(current), ctypes.byref(pending))
        if number == _NOT_SUPPORTED:
            return False
        self._check(call, number)
        return bool(current.value)

    def _processes(self, call: str, device: ctypes.c_void_p) -> list[tuple[int, int | None]]:
        """Return the processes, and how many bytes each of them holds, as `Usage` has them."""
        room = 0
        while True:
            count, found = ctypes.c_uint(room), (_ProcessInfo * max(room, 1))()
            number = self._number(call, device, ctypes.byref(count), found)
            if number == _NOT_SUPPORTED:
                return []
            if number != _INSUFFICIENT_SIZE:
                break
            room = count.value + 8  # others may start in between
        self._check(call, number)
        return [(p.pid, None if p.used == _UNKNOWN_BYTES else p.used) for p in found[: count.value]]

    def _text(self, call: str, *arguments: Any) -> str:
        buffer = ctypes.create_string_buffer(128)
        self._call(call, *arguments, buffer, ctypes.c_uint(len(buffer)))
        return buffer.value.decode()

    def _call(self, call: str, *arguments: Any) -> None:
        self._check(call, self._number(call, *arguments))

    def _number(self, call: str, *arguments: Any) -> int:
        try:
            function = getattr(self._library, call)
        except AttributeError:  # an older driver
            return _NOT_SUPPORTED
        return int(function(*arguments))

    def _check(self, call: str, number: int) -> None:
        if number:
            assert self._library is not None
            raise NvmlError(call, number, self._library.nvmlErrorString(number).decode())
