"""The kernel's end of parking: GPU memory that leaves the process for a save (parking.c says how and why)."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from .. import installed, settings

__all__ = ["has_gate", "park", "parkable", "prepare"]

_library: ctypes.PyDLL | None = None
_PAST_THE_RUNTIME = ("cudf", "cupy", "jax", "numba.cuda", "pycuda", "tensorflow")
"""Modules that call the driver themselves, or a CUDA runtime of their own: past the gate."""


def prepare() -> None:
    """Have large blocks of GPU memory made so that they can be parked: torch's, from now on.

    To be called before anything that uses CUDA is loaded: libraries that are loaded later find `cudaMalloc` here first.
    Does nothing where the library was not built, or GPUCKPT_PARKING is ``off``.
    """
    global _library
    if _library is not None or not settings.parking() or not installed.PARKING_LIBRARY.exists():
        return
    try:
        # PyDLL: what it calls keeps Python's lock, so that no other Python code runs.
        library = ctypes.PyDLL(str(installed.PARKING_LIBRARY), mode=ctypes.RTLD_GLOBAL)
    except OSError:  # built for another kind of machine
        return
    library.gpuckpt_parkable.restype = ctypes.c_uint64
    library.gpuckpt_park.restype = None
    library.gpuckpt_park.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    library.gpuckpt_gate.restype = None
    library.gpuckpt_gate.argtypes = [ctypes.c_char_p]
    library.gpuckpt_gate(os.fsencode(Path(settings.NAMESPACE_RUN_DIR, settings.GATE)))
    _library = library


def parkable() -> int:
    """Return how many bytes of GPU memory could be parked now; they are on this process's only GPU."""
    return 0 if _library is None else int(_library.gpuckpt_parkable())


def has_gate() -> bool:
    """Tell whether this kernel's CUDA calls all wait while the driver has its GPU state, as far as is known."""
    return _library is not None and not any(name in sys.modules for name in _PAST_THE_RUNTIME)


def park(run_dir: Path) -> None:
    """Park, and come back, as the keeper says through the FIFOs in the run folder; no Python runs meanwhile."""
    assert _library is not None
    to_kernel, from_kernel = (run_dir / name for name in settings.PARKING_FIFOS)
    _library.gpuckpt_park(os.fsencode(to_kernel), os.fsencode(from_kernel))
