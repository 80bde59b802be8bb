"""Shared memory that our library in criu (`criu_shared.c`) has copied into the images, by many processors."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

from . import pages

__all__ = ["asked_for", "describe", "forget"]

_NOTED = "shared-{}.regions"
_PART = struct.Struct("<QQ")  # first address and end


def asked_for(folder: str) -> Mapping[str, str]:
    """Return what criu's environment has to have for that; `folder` is as criu's namespace names it."""
    return {"GPUCKPT_DUMP_SHARED_FOLDER": folder}


def describe(folder: Path, into: Path) -> None:
    """Put into criu's pagemaps which pages the images have; `folder` is where the library has written it.

    Raises
    ------
    OSError : one cannot be read or written.
    """
    for noted, shared in _noted(folder):
        pagemap = into / f"pagemap-shmem-{shared}.img"
        pagemap.write_bytes(pages.pagemap(pagemap.read_bytes(), _PART.iter_unpack(noted.read_bytes())))
        noted.unlink()


def forget(folder: Path) -> None:
    """Remove what is written down of a dump that failed."""
    for noted, _ in _noted(folder):
        noted.unlink()


def _noted(folder: Path) -> list[tuple[Path, str]]:
    before, after = _NOTED.split("{}")
    found = folder.glob(_NOTED.format("*"))
    return [(path, path.name.removeprefix(before).removesuffix(after)) for path in found]
