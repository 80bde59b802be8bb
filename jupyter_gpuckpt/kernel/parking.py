"""The library in the driver's place in a kernel (`driver/` says how and why)."""

from __future__ import annotations

import _ctypes
import ctypes
import os
import re

from .. import driver_library, installed
from ..linux import proc, spawning

__all__ = ["has_gate", "is_driver_loaded", "prepare", "watch_gate"]

_library: ctypes.PyDLL | None = None


def prepare() -> None:
    """Have all calls of the CUDA driver pass through our library, from now on; and those of children, too.

    To be called before anything that uses CUDA is loaded: what looks for the driver later finds our library. Does
    nothing where there is no driver or it is loaded already, the library was not built, GPUCKPT_PARKING is ``off``, or
    a debugger or profiler is at work here, which wants the driver for itself.
    """
    global _library
    if _library is not None or _is_mapped() or not driver_library.is_for(os.environ):
        return
    if not spawning.provide(str(installed.PARKING_LIBRARY), spawning.PARKING):
        return
    try:
        # PyDLL: what it calls keeps Python's lock, so that no other Python code runs.
        library = ctypes.PyDLL(spawning.PARKING, mode=ctypes.RTLD_GLOBAL)
    except OSError:  # built for another kind of machine
        return
    if not library.gpuckpt_is_wanted():
        _ctypes.dlclose(library._handle)
        return
    _library = library
    os.environ["LD_PRELOAD"] = spawning.with_preloaded(os.environ.get("LD_PRELOAD", ""), spawning.PARKING)


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


def _is_mapped() -> bool:
    return any(re.search(r"/libcuda\.so[.\d]*$", line.rstrip()) for line in proc.lines("/proc/self/maps"))
