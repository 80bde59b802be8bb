"""The library in the driver's place (`kernel/driver/`), and the programs that are started with it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from . import installed, settings

__all__ = ["preload"]

_PRELOAD = "LD_PRELOAD"


def preload(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what to add to the environment of a program, so that it and its children have the library.

    Nothing where there is no driver, the library was not built, or GPUCKPT_PARKING is ``off``. What is preloaded
    already stays.
    """
    path = str(installed.PARKING_LIBRARY)
    others = environment.get(_PRELOAD, "").replace(" ", ":").split(":")
    # ld.so(8) takes both for the end of a path.
    if path in others or set(path) & {" ", ":"} or not settings.parking.read_from(environment):
        return {}
    with _loaded() as library:
        found = library is not None and library.gpuckpt_has_driver(os.fsencode(environment.get("LD_LIBRARY_PATH", "")))
    return {_PRELOAD: ":".join([*filter(None, others), path])} if found else {}


@contextmanager
def _loaded() -> Iterator[ctypes.CDLL | None]:
    """Give the library, loaded for a moment; None where it is not there, or built for another kind of machine."""
    import _ctypes

    try:
        library = ctypes.CDLL(str(installed.PARKING_LIBRARY))
    except OSError:
        yield None
        return
    try:
        yield library
    finally:
        _ctypes.dlclose(library._handle)
