"""What is said of each snapshot in a list, kept so that a list of very many is fast.

``listing.json`` is the hash of the rest in hexadecimal, a line break, and JSON: the version of what is said, and for
each name the manifest's size, inode and times, and what is said. It is only a copy: where it is missing, damaged or
old, the manifests are read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeVar

from ..checked import from_json, to_json
from ..errors import GpuckptError, NoSuchSnapshot
from .chunks import digest
from .durable import read_small, write_new
from .layout import Layout
from .manifest import Manifest

__all__ = ["listed"]

_LIMIT = 2**30
_WORTH_KEEPING = 100
"""Changes from which on it is written again; reading so many manifests takes a moment only."""

_Known = dict[str, tuple[list[int], object]]

T = TypeVar("T")


def listed(
    layout: Layout, read: Callable[[str], Manifest], kind: type[T], describe: Callable[[Manifest], T], version: str
) -> tuple[list[T], list[GpuckptError]]:
    """Return what `describe` says of each snapshot, and an error for each that cannot be read by `read`.

    That is a dataclass of this `kind`. `version` changes with what `describe` says. Raises `OSError`.
    """
    known = _read(layout, version)
    now: _Known = {}
    broken: list[GpuckptError] = []
    read_anew = 0
    for name, state in _states(layout).items():
        before = known.get(name)
        if before is not None and before[0] == state:
            now[name] = before
            continue
        try:
            now[name] = (state, to_json(describe(read(name))))
            read_anew += 1
        except NoSuchSnapshot:
            continue  # removed meanwhile
        except GpuckptError as e:
            broken.append(e)
    if read_anew + len(known.keys() - now.keys()) >= _WORTH_KEEPING:
        with suppress(OSError):  # a disk that is full or cannot be written
            _write(layout, version, now)
    return [from_json(kind, said) for _, said in now.values()], broken


def _states(layout: Layout) -> dict[str, list[int]]:
    states = {}
    with os.scandir(layout.snapshots) as entries:
        for entry in entries:
            name = layout.name_of(entry.name)
            if name is not None:
                with suppress(FileNotFoundError):
                    about = entry.stat(follow_symlinks=False)
                    states[name] = [about.st_size, about.st_ino, about.st_mtime_ns, about.st_ctime_ns]
    return states


def _read(layout: Layout, version: str) -> Mapping[str, tuple[list[int], object]]:
    try:
        seal, _, body = read_small(layout.listing, _LIMIT).partition(b"\n")
    except OSError:
        return {}
    if seal != digest(body).hex().encode("ascii"):
        return {}
    found = json.loads(body)
    return found["snapshots"] if found["version"] == version else {}


def _write(layout: Layout, version: str, known: _Known) -> None:
    body = json.dumps({"version": version, "snapshots": known}, separators=(",", ":")).encode("ascii")
    # Two who write it at once spoil each other's: the hash tells, and the next one writes it again.
    layout.listing_draft.unlink(missing_ok=True)
    write_new(layout.listing_draft, digest(body).hex().encode("ascii") + b"\n" + body)
    layout.listing_draft.rename(layout.listing)
