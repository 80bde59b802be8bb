"""The store: a folder that holds snapshots by name."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ..errors import Damaged, GpuckptError, NoSuchSnapshot
from .collect import Collected, collect, sweep, would_collect
from .durable import read_small, sync_folder
from .failures import storing
from .layout import Layout
from .manifest import MAX_SIZE, Manifest
from .names import check_name
from .parallel import Progress
from .reading import extract, locate, read_contents
from .sessions import Session
from .snapshot import Snapshot
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
            sweep(self._layout)
        return Writer(self._layout, name, replace=replace, collect=self.collect)

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

    def open(self, name: str, into: Path, progress: Progress | None = None) -> Snapshot:
        """Write the files of the snapshot `name` into the new folder `into`, and return them, to be closed after use.

        Every byte is verified on its way. `progress` is called with the stage ``verify``.

        Raises
        ------
        BadName, NoSuchSnapshot : as `get`.
        Damaged, Incompatible : it cannot be used; the text and data say which file and why. `into` is gone then.
        StoreError : `into` has no room for it, or cannot be written.
        """
        while True:
            manifest = self.get(name)
            with storing(f"The snapshot {name} cannot be read.", self.root):
                session = Session.for_reading(self._layout.locks)
            try:
                if self.get(name).id != manifest.id:
                    continue  # replaced before its chunks were safe from a collection
                snapshot = Snapshot(manifest, into)
                try:
                    self._extract(manifest, into, progress)
                except BaseException:
                    snapshot.close()
                    raise
                return snapshot
            finally:
                if session is not None:
                    session.close()

    def _extract(self, manifest: Manifest, into: Path, progress: Progress | None) -> None:
        contents = read_contents(self._layout, manifest)
        with storing(f"The snapshot {manifest.name} cannot be read.", self.root):
            index = locate(self._layout, manifest, contents)
        with storing(f"The files of the snapshot {manifest.name} cannot be written.", into.parent):
            extract(self._layout, manifest, contents, index, into, progress)

    def remove(self, name: str) -> int:
        """Remove the snapshot `name` and return the bytes freed.

        Those that other snapshots need are not among them, nor those that somebody at work may rely on: these go with
        a later `collect`. A damaged snapshot is removed as well.

        Raises
        ------
        BadName, NoSuchSnapshot : as `get`.
        Incompatible : a newer version wrote it.
        """
        check_name(name)
        if not self._layout.readable():
            raise self._no_such(name)
        with suppress(Damaged):
            self._read(name)
        with storing(f"The snapshot {name} could not be removed.", self.root):
            try:
                self._layout.manifest(name).unlink()
            except FileNotFoundError:
                raise self._no_such(name) from None
            sync_folder(self._layout.snapshots)
        return self.collect().freed

    def collect(self, grace: float = 0.0) -> Collected:
        """Delete what interrupted or removed work left behind, and return what that freed.

        Nothing is deleted that a snapshot needs or that somebody at work may rely on, and nothing at all while a
        manifest cannot be read: it may name anything. What is found needless stays for `grace` seconds.
        """
        if not self._layout.readable():
            return Collected()
        with storing("Left-over data could not be deleted.", self.root):
            return collect(self._layout, self._all_manifests, grace)

    def would_collect(self) -> Collected:
        """Return what `collect` would free; nothing is changed."""
        if not self._layout.readable():
            return Collected()
        with storing("The store cannot be read.", self.root):
            return would_collect(self._layout, self._all_manifests)

    def _all_manifests(self) -> Sequence[Manifest] | None:
        manifests, broken = self.scan()
        return None if broken else manifests

    def _read(self, name: str) -> Manifest:
        with storing(f"The snapshot {name} cannot be read.", self.root):
            try:
                raw = read_small(self._layout.manifest(name), MAX_SIZE)
            except FileNotFoundError:
                raise self._no_such(name) from None
        return Manifest.from_json(raw, name)

    def _no_such(self, name: str) -> NoSuchSnapshot:
        try:
            names = sorted(self._layout.names())
        except OSError:
            names = []
        close = difflib.get_close_matches(name, names, 3, 0.5)
        return NoSuchSnapshot(
            f"There is no snapshot named {name}.",
            f"the store {self.root} has {len(names)} snapshots, none of that name",
            f"Did you mean {' or '.join(close)}?" if close else "`list` shows all names.",
            name=name,
            close=close,
        )
