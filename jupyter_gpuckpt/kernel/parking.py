"""The kernel's end of parking: GPU memory that leaves the process for a save (`driver/` says how and why)."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

from .. import installed, settings
from ..errors import DriverError
from ..linux import proc

__all__ = ["has_gate", "is_driver_loaded", "keep_apart", "park", "parkable", "part_at", "prepare", "watch_gate"]

_library: ctypes.PyDLL | None = None
_DRIVER = "libcuda.so.1"
_CACHE = Path("/etc/ld.so.cache")
_FOLDERS = ("/lib64", "/usr/lib64", "/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu")
"""Where Linux looks beside `LD_LIBRARY_PATH` and the cache (ld.so(8))."""
_ELF_64 = b"\x7fELF\x02"
_TOOLS = ("CUDA_INJECTION64_PATH", "NV_SANITIZER_")
"""How variables begin by which NVIDIA's profilers and compute-sanitizer have programs load their libraries."""


def prepare() -> None:
    """Have all calls of the CUDA driver pass through our library, from now on.

    To be called before anything that uses CUDA is loaded: what looks for the driver later finds our library. Does
    nothing where there is no driver or it is loaded already, the library was not built, GPUCKPT_PARKING is ``off``, or
    a debugger or profiler is at work here, which wants the driver for itself.
    """
    global _library
    if _library is not None or not settings.parking() or not installed.PARKING_LIBRARY.exists():
        return
    driver = _driver()
    if driver is None or any(name.startswith(_TOOLS) for name in os.environ) or _is_traced() or _is_mapped():
        return
    try:
        # PyDLL: what it calls keeps Python's lock, so that no other Python code runs.
        library = ctypes.PyDLL(str(installed.PARKING_LIBRARY), mode=ctypes.RTLD_GLOBAL)
    except OSError:  # built for another kind of machine
        return
    library.gpuckpt_parkable.restype = ctypes.c_uint64
    library.gpuckpt_parkable_on.restype = ctypes.c_int64
    library.gpuckpt_part_at.restype = ctypes.c_uint64
    library.gpuckpt_park.restype = None
    library.gpuckpt_park.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    library.gpuckpt_begin.restype = None
    library.gpuckpt_begin.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    library.gpuckpt_begin(os.fsencode(driver), os.fsencode(Path(settings.NAMESPACE_RUN_DIR, settings.GATE)))
    _library = library


def parkable() -> list[tuple[str, int]]:
    """Return how many bytes of GPU memory could be parked now: for each GPU that this process sees, in its order, its
    UUID and bytes; nothing without any."""
    if _library is None or not _library.gpuckpt_parkable():
        return []
    places: list[tuple[str, int]] = []
    uuid = ctypes.create_string_buffer(16)
    while (size := _library.gpuckpt_parkable_on(len(places), uuid)) >= 0:
        places.append((f"GPU-{UUID(bytes=uuid.raw)}", size))
    return places


def keep_apart(on: bool) -> bool:
    """Take from this process's GPUs the access to memory of others that may be parked, or give it back.

    Returns whether there was any.

    Raises
    ------
    DriverError : the driver refuses.
    """
    done = 0 if _library is None or not is_driver_loaded() else int(_library.gpuckpt_keep_apart(int(on)))
    if done < 0:
        raise DriverError(
            "The GPUs' access to each other's memory could not be switched.",
            f"cuMemSetAccess gave CUresult {-done}",
            "Restart the kernel, and start it with one GPU (CUDA_VISIBLE_DEVICES) to be able to save it.",
            call="cuMemSetAccess",
            number=-done,
        )
    return done > 0


def part_at(address: int) -> int:
    """Return the bytes of the parts that the memory at an address is made in; 0 where it cannot be parked."""
    return 0 if _library is None else int(_library.gpuckpt_part_at(ctypes.c_uint64(address)))


def is_driver_loaded() -> bool:
    """Tell whether this process has loaded the CUDA driver; whoever asks the library itself would load it."""
    return _is_mapped() if _library is None else bool(_library.gpuckpt_is_open())


def has_gate() -> bool:
    """Tell whether this kernel's CUDA calls all wait while the driver has its GPU state."""
    return _library is not None and (is_driver_loaded() or not _is_mapped())


def watch_gate(on: bool) -> None:
    """Have all CUDA calls look whether the gate is open before they go on: from before a save until after it."""
    if _library is not None:
        _library.gpuckpt_watch(int(on))


def park(run_dir: Path) -> None:
    """Park, and come back, as the keeper says through the FIFOs in the run folder; no Python runs meanwhile."""
    assert _library is not None
    to_kernel, from_kernel = (run_dir / name for name in settings.PARKING_FIFOS)
    _library.gpuckpt_park(os.fsencode(to_kernel), os.fsencode(from_kernel))


def _driver() -> Path | None:
    """Return the library that a program would find as libcuda.so.1; None where there is none."""
    for path in _candidates():
        try:
            with path.open("rb") as file:
                if file.read(len(_ELF_64)) == _ELF_64:
                    return path.resolve()
        except OSError:
            continue
    return None


def _candidates() -> Iterator[Path]:
    for folder in filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")):
        yield Path(folder, _DRIVER)
    cached = _CACHE.read_bytes() if _CACHE.exists() else b""
    for path in re.findall(rb"/[^\0]*/" + re.escape(_DRIVER.encode()) + rb"(?=\0)", cached):
        yield Path(os.fsdecode(path))
    for folder in _FOLDERS:
        yield Path(folder, _DRIVER)


def _is_mapped() -> bool:
    return any(re.search(r"/libcuda\.so[.\d]*$", line.rstrip()) for line in proc.lines("/proc/self/maps"))


def _is_traced() -> bool:
    return any(line.startswith("TracerPid:") and line.split()[1] != "0" for line in proc.lines("/proc/self/status"))
