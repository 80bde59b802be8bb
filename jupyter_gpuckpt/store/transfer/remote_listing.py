"""What a remote holds: each snapshot, or why it would not be fetched."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import GpuckptError, WrongName
from ..manifest import Manifest, name_in
from ..names import check_key
from ..trust import Trust
from .remote_store import RemoteStore

__all__ = ["Listed", "listed"]


@dataclass(frozen=True)
class Listed:
    """One snapshot at a remote."""

    name: str
    """As its file says; at an encrypted remote, where that says nothing, as its manifest says."""
    manifest: Manifest | None
    """None where nobody who is trusted made it."""
    error: GpuckptError | None


def listed(at: RemoteStore, trust: Trust) -> list[Listed]:
    """Return the snapshots at a remote, by name.

    Raises
    ------
    RemoteError : it cannot be read or listed.
    """
    found = []
    for file, read in at.manifests():
        try:
            raw = read()
        except FileNotFoundError:
            continue  # removed meanwhile
        except GpuckptError as e:
            found.append(Listed(file, None, e))
            continue
        found.append(_look(at, trust, file, raw))
    return sorted(found, key=lambda one: one.name)


def _look(at: RemoteStore, trust: Trust, file: str, raw: bytes) -> Listed:
    name = file
    try:
        trust.check(raw, file)  # first: nothing of what a stranger wrote is taken apart
        if at.seal.name("") is not None:
            name = name_in(raw, file)
            if at.seal.name(name) != file:
                raise WrongName(
                    f"The snapshot {name} is stored under another name.",
                    f"its file at {at.shown} belongs to another snapshot",
                    "Do not use it. Ask whoever saved it to send it again.",
                    name=name,
                )
        return Listed(name, Manifest.from_json(raw, check_key(name)), None)
    except GpuckptError as e:
        return Listed(name, None, e)
