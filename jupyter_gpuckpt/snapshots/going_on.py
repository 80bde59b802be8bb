"""With which snapshot a job of `run` goes on, and what becomes of the others of it.

There is one at a time, but for the moment between a save and the removal of the one before: that to which the job was
hibernated, or that was saved while it ran. What somebody gave another name is theirs, and is left alone.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator

from ..errors import BadName, NoSuchSnapshot, Pinned
from ..store import Manifest, Store, name_of
from .hibernated import remove
from .naming import new_key
from .summary import HIBERNATED

__all__ = ["MAX_NAME", "check", "find", "is_of", "name_while_running", "remove_all_but", "set_aside"]

MAX_NAME = 60
"""How long the name of such a job may be: its snapshots' names are longer."""
_RUNNING, _SET_ASIDE = "running", "ended"


def check(job: str) -> None:
    """Raise `BadName` where a job's name leaves no room for more in the names of its snapshots."""
    if len(job) > MAX_NAME:
        raise BadName(
            f"{job[:20]}... cannot be the name of a job of `run`.",
            f"it has {len(job)} characters, at most {MAX_NAME} are allowed",
            "Use a shorter name.",
        )


def name_while_running(job: str) -> str:
    """Return what a job's snapshot is called that is saved while it runs."""
    return f"{_RUNNING}-{job}"


def find(store: Store, job: str) -> Manifest | None:
    """Return the snapshot that a job is to go on with; None where there is none.

    Raises
    ------
    StoreError : the store cannot be read.
    """
    found = list(_all(store, job))
    # Clocks of machines differ: one that another came from is not the newest, whatever time it has.
    parents = {manifest.parent for manifest in found}
    return max((m for m in found if m.id not in parents), key=lambda manifest: manifest.created, default=None)


def remove_all_but(store: Store, job: str, snapshot_id: str = "") -> None:
    """Remove what a job no longer goes on with: all but the snapshot of this id.

    Raises
    ------
    StoreError : the store cannot be read or written.
    """
    for manifest in _all(store, job):
        if manifest.id != snapshot_id:
            with contextlib.suppress(NoSuchSnapshot):
                remove(store, manifest.name)


def set_aside(store: Store, job: str) -> str:
    """Give what a job would go on with a name by which it does not; return that, or nothing where there is none.

    It replaces the one that was set aside before, unless that is pinned.

    Raises
    ------
    StoreError : the store cannot be read or written.
    """
    last = find(store, job)
    if last is None:
        return ""
    remove_all_but(store, job, last.id)
    name = f"{_SET_ASIDE}-{job}"
    with contextlib.suppress(NoSuchSnapshot, Pinned):
        store.remove(name)
    taken = {name_of(manifest.name) for manifest in store.list()}
    numbered = (f"{name}-{n}" for n in itertools.count(2))
    name = next(one for one in itertools.chain([name], numbered) if one not in taken)
    store.pin(last.name, False)
    store.tag(last.name, [], [HIBERNATED])
    return store.rename(last.name, new_key(store, last.name, name)).name


def is_of(job: str, manifest: Manifest) -> bool:
    """Tell whether a snapshot is one that a job may go on with."""
    names = rf"{_RUNNING}-{re.escape(job)}|{HIBERNATED}-{re.escape(job)}(-[0-9]+)?"
    return manifest.kernel.get("job") == job and re.fullmatch(names, name_of(manifest.name)) is not None


def _all(store: Store, job: str) -> Iterator[Manifest]:
    return (manifest for manifest in store.list() if is_of(job, manifest))
