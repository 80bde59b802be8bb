"""The store: a folder that holds snapshots by name."""

from __future__ import annotations

import difflib
from pathlib import Path

from ..errors import Damaged, GpuckptError, NoSuchSnapshot
from .collect import discard, sweep
from .durable import read_small, sync_folder
from .failures import storing
from .layout import Layout
from .locks import Lock
from .manifest import MAX_SIZE, Manifest
from .names import check_name
from .snapshot import Progress, Snapshot, verify
from .writer import Writer, name_taken

__all__ = ["Store"]


class Store:
    """The snapshots in the folder `root`, which the first save creates.

    Any number of processes may use one folder at the same time. Every method but those that
    document more raises `StoreError` where the folder cannot be used, and `Incompatible` where a
    newer version wrote it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._layout = Layout(root)

    def writer(self, name: str, *, replace: bool = False) -> Writer:
        """Begin a snapshot called `name`; with `replace` its commit may replace one.

        Raises
        ------
        BadName : no snapshot can be called that.
        NameTaken : one is called that already; a commit can still find it so.
        """
        check_name(name)
        self._layout.prepare()
        with storing(f"The snapshot {name} cannot be written.", self.root):
            if not replace and self._layout.manifest(name).exists():
                raise name_taken(name)
        self.collect()
        return Writer(self._layout, name, replace=replace)

    def get(self, name: str) -> Manifest:
        """Return the manifest of the snapshot `name`; its files are not looked at.

        Raises
        ------
        BadName, NoSuchSnapshot : the text names no snapshot; names that are close are told.
        Damaged, Incompatible : the manifest cannot be used.
        """
        check_name(name)
        if not self._layout.readable():
            raise self._no_such(name)
        return self._read(name)

    def scan(self) -> tuple[list[Manifest], list[GpuckptError]]:
        """Return all manifests, newest first, and an error for each that cannot be used."""
        manifests: list[Manifest] = []
        broken: list[GpuckptError] = []
        if self._layout.readable():
            with storing("The snapshots cannot be listed.", self.root):
                names = self._layout.names()
            for name in names:
                try:
                    manifests.append(self._read(check_name(name)))
                except NoSuchSnapshot:
                    continue  # removed meanwhile
                except GpuckptError as e:
                    broken.append(e)
        manifests.sort(key=lambda m: (m.created, m.name), reverse=True)
        return manifests, broken

    def list(self) -> list[Manifest]:
        """Return the manifests that can be used, newest first."""
        return self.scan()[0]

    def open(self, name: str, progress: Progress | None = None) -> Snapshot:
        """Verify every byte of the snapshot `name` and return its files, to be closed after use.

        `progress` is called with the stage ``verify``.

        Raises
        ------
        BadName, NoSuchSnapshot : as `get`.
        Damaged, Incompatible : it cannot be used; the text and data say which file and why.
        """
        manifest, lock = self._hold(name)
        directory = self._layout.data_of(manifest.id)
        try:
            verify(manifest, directory, progress)
        except BaseException:
            lock.release()
            raise
        return Snapshot(manifest, directory, lock)

    def remove(self, name: str) -> int:
        """Remove the snapshot `name` and return the bytes freed.

        That is 0 where somebody is reading it: its data then goes with a later `collect`. A
        damaged snapshot is removed as well.

        Raises
        ------
        BadName, NoSuchSnapshot : as `get`.
        Incompatible : a newer version wrote it.
        """
        check_name(name)
        if not self._layout.readable():
            raise self._no_such(name)
        try:
            snapshot_id = self._read(name).id
        except Damaged:
            snapshot_id = None
        with storing(f"The snapshot {name} could not be removed.", self.root):
            try:
                self._layout.manifest(name).unlink()
            except FileNotFoundError:
                raise self._no_such(name) from None
            sync_folder(self._layout.snapshots)
        with storing(f"The data of the snapshot {name} could not be deleted.", self.root):
            if snapshot_id is not None:
                return discard(self._layout, snapshot_id)
        return self.collect()

    def collect(self) -> int:
        """Delete what interrupted or removed work left behind; return the bytes freed.

        Nothing is deleted that a snapshot names or that somebody writes or reads, and nothing at
        all while a manifest cannot be read: it may name anything.
        """
        if not self._layout.readable():
            return 0
        with storing("Left-over data could not be deleted.", self.root):
            return sweep(self._layout, self._named)

    def _named(self) -> frozenset[str] | None:
        manifests, broken = self.scan()
        return None if broken else frozenset(m.id for m in manifests)

    def _read(self, name: str) -> Manifest:
        with storing(f"The snapshot {name} cannot be read.", self.root):
            try:
                raw = read_small(self._layout.manifest(name), MAX_SIZE)
            except FileNotFoundError:
                raise self._no_such(name) from None
        return Manifest.from_json(raw, name)

    def _hold(self, name: str) -> tuple[Manifest, Lock]:
        """Return the manifest of `name` with a share of its lock: its data will stay."""
        while True:
            manifest = self.get(name)
            with storing(f"The snapshot {name} cannot be read.", self.root):
                lock = Lock.shared(self._layout.lock_of(manifest.id))
            if lock is None:
                continue
            try:
                if self.get(name).id == manifest.id:
                    return manifest, lock
            except BaseException:
                lock.release()
                raise
            lock.release()  # replaced meanwhile

    def _no_such(self, name: str) -> NoSuchSnapshot:
        try:
            names = sorted(self._layout.names())
        except OSError:
            names = []
        close = difflib.get_close_matches(name, names, 3, 0.5)
        return NoSuchSnapshot(
            f"There is no snapshot named {name}.",
            f"Snapshots in the store {self.root}: {len(names)}, none of them of that name.",
            f"Did you mean {' or '.join(close)}?"
            if close
            else "`%gpuckpt list`, or in a terminal `jupyter gpuckpt list`, shows all names.",
            name=name,
            close=close,
        )
