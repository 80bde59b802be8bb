"""Whether programs are to have the library in the CUDA driver's place (`kernel/driver/`)."""

from __future__ import annotations

import _ctypes
import ctypes
import os
from collections.abc import Mapping

from . import installed, settings

__all__ = ["is_for"]


def is_for(environment: Mapping[str, str]) -> bool:
    """Tell whether a program that is started with this environment is to have the library, and its children, too.

    Not where there is no driver, the library was not built, or GPUCKPT_PARKING is ``off``.
    """
    if not settings.parking.read_from(environment) or not installed.PARKING_LIBRARY.exists():
        return False
    try:
        library = ctypes.CDLL(str(installed.PARKING_LIBRARY))
    except OSError:  # built for another kind of machine
        return False
    try:
        return bool(library.gpuckpt_has_driver(os.fsencode(environment.get("LD_LIBRARY_PATH", ""))))
    finally:
        _ctypes.dlclose(library._handle)  # what looks for the driver in this process shall not find it
