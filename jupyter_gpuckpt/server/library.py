"""The snapshots as the API shows them: listed fast, however many there are."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from ..errors import GpuckptError, NoSuchSnapshot
from ..keeper.summary import details, summary
from ..store import Store

__all__ = ["Library"]

_Stamp = tuple[int, int, int]
_Entry = dict[str, Any] | GpuckptError


class Library:
    """The store behind the API; for threads, since every method reads the disk.

    A manifest is never changed in place (see `jupyter_gpuckpt.store`), so one whose file is the same file as at the
    last listing is not read again: a thousand snapshots are listed in some milliseconds.
    """

    def __init__(self, root: Path) -> None:
        self._store = Store(root)
        self._manifests = root / "snapshots"
        self._known: dict[str, tuple[_Stamp, _Entry]] = {}
        self._turn = threading.Lock()

    def listing(self) -> dict[str, Any]:
        """Return all snapshots, newest first, and as ``faults`` an error for each that cannot be used.

        Raises
        ------
        StoreError, Incompatible : the store cannot be used.
        """
        with self._turn:
            stamps = self._stamps()
            if not stamps:
                self._store.list()  # it knows best whether there is nothing, or something amiss
            self._known = {name: self._entry(name, stamp) for name, stamp in stamps.items()}
            entries = [entry for _, entry in self._known.values()]
        found = [entry for entry in entries if isinstance(entry, dict)]
        found.sort(key=lambda s: (s["created"], s["name"]), reverse=True)
        faults = [e.as_dict() for e in entries if isinstance(e, GpuckptError) and not isinstance(e, NoSuchSnapshot)]
        return {"snapshots": found, "faults": faults}

    def _stamps(self) -> dict[str, _Stamp]:
        """Return what tells whether a manifest's file is still the same, by the snapshot's name."""
        stamps = {}
        try:
            with os.scandir(self._manifests) as files:
                for file in files:
                    name = file.name.removesuffix(".json")
                    if name != file.name:
                        about = file.stat(follow_symlinks=False)
                        stamps[name] = (about.st_ino, about.st_mtime_ns, about.st_size)
        except OSError:
            return {}
        return stamps

    def _entry(self, name: str, stamp: _Stamp) -> tuple[_Stamp, _Entry]:
        known = self._known.get(name)
        if known is not None and known[0] == stamp and isinstance(known[1], dict):
            return known
        try:
            return stamp, summary(self._store.get(name))
        except GpuckptError as e:
            return stamp, e

    def show(self, name: str) -> dict[str, Any]:
        """Return all about one snapshot.

        Raises
        ------
        BadName, NoSuchSnapshot, Damaged, Incompatible : as `Store.get`.
        """
        return details(self._store.get(name))

    def remove(self, name: str) -> int:
        """Remove a snapshot; return the bytes freed.

        Raises
        ------
        BadName, NoSuchSnapshot, Incompatible : as `Store.remove`.
        """
        return self._store.remove(name)
