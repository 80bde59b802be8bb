"""The snapshots of one store, as the API tells of them and changes them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

from .. import settings
from ..checked import to_json
from ..errors import GpuckptError
from ..operations.results import Comparison, Details
from ..snapshots.naming import find, new_key
from ..snapshots.summary import details, listing, origins
from ..spelling import in_a_cell
from ..store import Store, check_key, check_name, name_of
from .events import Events

__all__ = ["Snapshots"]


class Snapshots:
    """What is done with snapshots, in threads.

    `events` tells of changes, where the store is the one that everybody follows; `path_of` returns the path of a
    notebook as this server has it.
    """

    def __init__(self, store: Store, events: Events | None, path_of: Callable[[str], str | None]) -> None:
        self._store, self._events, self._path_of = store, events, path_of

    def _tell(self, change: str, name: str) -> None:
        if self._events is not None:
            self._events.snapshots(change, name)

    async def key_of(self, name: str) -> str:
        """Return the key of the snapshot that is meant: what the API calls its name, or ``notebook:name``.

        Raises
        ------
        BadName, NoSuchSnapshot, Refused : as `find`.
        """
        return await asyncio.to_thread(find, self._store, name) if ":" in name else check_key(name)

    async def all(self) -> dict[str, Any]:
        """Return all snapshots, newest first, what is being saved, errors of what cannot be used, and the room taken.

        Raises
        ------
        StoreError, Incompatible : the store cannot be used.
        """

        def look() -> dict[str, Any]:
            store = self._store
            room = {"used": store.used(), "free": store.free(), "quota": settings.store_quota()}
            found = listing(store, in_a_cell)
            snapshots = [{**to_json(one), "path": self._path_of(one.notebook)} for one in found.snapshots]
            coming = [{"name": name_of(one.key), "path": self._path_of(one.by)} for one in store.being_saved()]
            return {
                "snapshots": snapshots,
                "coming": coming,
                "faults": found.faults,
                "store": {"folder": str(store.root), **room},
            }

        return await asyncio.to_thread(look)

    async def details(self, name: str) -> Details:
        """Return all about one snapshot.

        Raises
        ------
        BadName, NoSuchSnapshot, Damaged, Incompatible : as `Store.get`.
        """
        return details(await asyncio.to_thread(self._store.get, await self.key_of(name)))

    async def origins(self, name: str) -> dict[str, Any]:
        """Return a snapshot and those that its kernel came from, the newest first.

        Raises
        ------
        BadName, NoSuchSnapshot, Damaged, Incompatible : as `Store.get`.
        """
        return {"snapshots": to_json(await asyncio.to_thread(origins, self._store, await self.key_of(name)))}

    async def difference(self, old: str, new: str) -> Comparison:
        """Return what is in one snapshot and not in another.

        Raises
        ------
        BadName, NoSuchSnapshot, Damaged, Incompatible : as `Store.get`.
        """
        return await asyncio.to_thread(_compare, self._store, await self.key_of(old), await self.key_of(new))

    async def remove(self, name: str) -> dict[str, Any]:
        """Remove a snapshot.

        Raises
        ------
        BadName, NoSuchSnapshot, Pinned, Incompatible : as `Store.remove`.
        """
        key = await self.key_of(name)
        freed = await asyncio.to_thread(self._store.remove, key)
        self._tell("removed", key)
        return {"name": key, "freed": freed}

    async def remove_all(self, names: list[str], dry_run: bool) -> dict[str, Any]:
        """Remove those of these snapshots that can be, and say why of each other one; or say what that would free."""
        keys: list[str] = []
        unknown: list[GpuckptError] = []
        for name in dict.fromkeys(names):
            try:
                keys.append(await self.key_of(name))
            except GpuckptError as e:
                unknown.append(e)
        do = self._store.would_remove if dry_run else self._store.remove_all
        gone, freed, errors = await asyncio.to_thread(do, keys)
        if not dry_run:
            for key in gone:
                self._tell("removed", key)
        told = [error.spelled(in_a_cell).as_dict() for error in (*unknown, *errors)]
        return {"would_remove" if dry_run else "removed": gone, "freed": freed, "errors": told}

    async def rename(self, name: str, new: str) -> Details:
        """Give a snapshot another name, and return all about it.

        Raises
        ------
        BadName, NoSuchSnapshot, NameTaken, Damaged, Incompatible : as `Store.rename`.
        """
        key = await self.key_of(name)
        wanted = await asyncio.to_thread(new_key, self._store, key, new)
        manifest = await asyncio.to_thread(self._store.rename, key, wanted)
        self._tell("renamed", manifest.name)
        return details(manifest)

    async def describe(self, name: str, message: str | None, tags: list[str] | None) -> dict[str, Any]:
        """Give a snapshot another note and other tags, where they are given, and return all about it.

        Raises
        ------
        BadName, NoSuchSnapshot, Damaged, Incompatible, Untrusted, Refused : as `Store.note` and `Store.tag`.
        """
        key = await self.key_of(name)

        def change() -> dict[str, Any]:
            for tag in tags or ():
                check_name(tag, "a tag")  # first: all or nothing
            manifest = self._store.get(key) if message is None else self._store.note(key, message)
            labels = self._store.labels(manifest)
            if tags is not None:
                labels = self._store.tag(key, tags, set(labels.tags) - set(tags))
            return {**to_json(details(manifest)), **dataclasses.asdict(labels)}

        changed = await asyncio.to_thread(change)
        self._tell("labelled", key)
        return changed

    async def pin(self, name: str, pinned: bool) -> dict[str, Any]:
        """Have a snapshot kept, or no longer; return its labels.

        Raises
        ------
        BadName, NoSuchSnapshot, Damaged, Incompatible : as `Store.pin`.
        """
        key = await self.key_of(name)
        labels = await asyncio.to_thread(self._store.pin, key, pinned)
        self._tell("labelled", key)
        return {"name": key, **dataclasses.asdict(labels)}


def _compare(store: Store, old: str, new: str) -> Comparison:
    from ..snapshots.comparison import compare

    return compare(store, old, new)
