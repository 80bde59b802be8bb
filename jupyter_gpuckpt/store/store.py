"""The store: a folder that holds snapshots by name."""

from __future__ import annotations

import difflib
import errno
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from .. import settings
from ..errors import Damaged, GpuckptError, NoSuchSnapshot, Pinned, Refused, StoreError
from .committing import changing, name_taken
from .contents import Contents
from .durable import make_folder, name_new, read_small, sync_folder, write_new
from .extracting import Share, Taker, fill, is_below, make_files
from .failures import storing
from .incoming import Incoming
from .index import pack_sizes
from .labels import Labels, read_labels, write_labels
from .layout import Layout
from .lease import lease_holder, take_lease
from .listing import listed
from .manifest import MAX_SIZE, Manifest
from .names import check_key, check_name, name_of, session_of
from .outgoing import Outgoing
from .parallel import Progress
from .postponed import Postponed
from .reading import Parts, locate, read_contents, read_whole
from .sessions import MOST_BY, Holder, Lock, Session, held, holder
from .signatures import split
from .snapshot import Snapshot
from .trust import Trust
from .upkeep.check import Checked, check
from .upkeep.collect import Collected, collect, sweep, used, would_collect
from .upkeep.compact import compact, would_compact
from .upkeep.repair import Repaired, repair
from .working_folder import WorkingFolder
from .writer import Choose, Writer

T = TypeVar("T")

__all__ = ["BeingSaved", "Store"]


@dataclass(frozen=True)
class BeingSaved:
    """A snapshot that is not there yet."""

    key: str
    pid: int
    """Of the process that saves it, where that runs on this machine."""
    by: str
    """Which notebook or kernel is saved so."""
    since: str
    written: int
    """Bytes."""

    def is_by(self, title: str) -> bool:
        """Tell whether that is who saves it, as `Store.writer` was told."""
        return self.by == title[-MOST_BY:]


class Store:
    """The snapshots in the folder `root`, which the first save creates.

    Any number of processes may use one folder at the same time. Every method but those that
    document more raises `StoreError` where the folder cannot be used, and `Incompatible` where a
    newer version wrote it.
    """

    def __init__(self, root: Path, trust: Trust | None = None) -> None:
        """Use the store in `root`; `trust` says with whose snapshots, by default as the user's own keys say."""
        self.root = root
        self.trust = trust or Trust(settings.keys_dir())
        self._layout = Layout(root)

    def writer(
        self,
        name: str,
        *,
        replace: bool = False,
        quota: int | None = None,
        choose: Choose | None = None,
        by: str = "",
    ) -> Writer:
        """Begin a snapshot called `name`; with `replace` its commit may replace one.

        Where `choose` is given, it says both once more when the snapshot is about to get its name: others may have
        taken it by then. `by` tells others meanwhile who saves it.

        A commit after which the store would take more than `quota` bytes fails, and leaves it as it was.

        Raises
        ------
        BadName : no snapshot can be called that.
        NameTaken : one is called that already; a commit can still find it so.
        Pinned : the one to be replaced is pinned.
        """
        check_key(name)
        self._layout.prepare()
        self.trust.own()  # now: a kernel should not be frozen for what cannot be signed
        with storing(f"The snapshot {name} cannot be written.", self.root):
            self._refuse_taken(name, replace)
            sweep(self._layout, self._layout.sessions())
            room = None if quota is None else quota - used(self._layout)
        return Writer(
            self._layout,
            name,
            replace=replace,
            room=room,
            by=by,
            sign=self.trust.sign,
            collect=self.collect,
            choose=choose or (lambda: (name, replace)),
        )

    def lease(self, snapshot_id: str, by: str) -> Session:
        """Have the hibernated kernel that this snapshot is belong to `by`, a notebook or kernel, until it is closed.

        Raises
        ------
        Busy : it belongs to somebody, on this machine or another one that has the store.
        StoreError : that cannot be written down.
        """
        return take_lease(self._layout, snapshot_id, by)

    def working_folder(self, by: str) -> WorkingFolder:
        """Return a new folder on the store's disk for what `by`, a notebook or kernel, works with until it is closed.

        Raises
        ------
        StoreError : it cannot be made.
        """
        self._layout.prepare()
        with storing("No folder to work in can be made in the store.", self.root):
            sweep(self._layout, self._layout.sessions())
            return WorkingFolder(self._layout, by)

    def lease_holder(self, snapshot_id: str) -> Holder | None:
        """Return whom the hibernated kernel that this snapshot is belongs to; None for nobody."""
        with suppress(OSError):
            return lease_holder(self._layout, snapshot_id)
        return None

    def outgoing(self, name: str) -> Outgoing:
        """Return the snapshot `name`, to be sent elsewhere and then closed.

        Raises
        ------
        Untrusted : as `trusted`: nobody should be sent what is not used here.
        BadName, NoSuchSnapshot, Damaged, Incompatible : as `get`.
        """
        self.get(name)
        with storing(f"The snapshot {name} cannot be read.", self.root):
            session = Session.for_reading(self._layout.locks)
        try:
            manifest, raw = self._trusted(name)
            with storing(f"The snapshot {name} cannot be read.", self.root):
                return Outgoing(self._layout, manifest, raw, session)
        except BaseException:
            if session is not None:
                session.close()
            raise

    def incoming(
        self, raw: bytes, name: str, *, replace: bool = False, quota: int | None = None, resumable: bool = False
    ) -> Incoming:
        """Begin to bring in the snapshot of which `raw` is the signed manifest, and has to be that of `name`.

        With `replace` it may replace one of that name. A snapshot for which the store would take more than `quota`
        bytes fails. With `resumable`, what has arrived stays for another attempt where this one fails.

        Raises
        ------
        Untrusted, Damaged, Incompatible : it is not to be used. Nothing was written.
        NameTaken, Pinned : as `writer`; or the same snapshot is here under another name.
        Busy : somebody else is bringing it in.
        """
        check_key(name)
        self.trust.check(raw, name)  # first: nothing of what a stranger wrote is taken apart
        manifest = Manifest.from_json(raw, name)
        self._layout.prepare()
        with storing(f"The snapshot {name} cannot be stored.", self.root):
            self._refuse_taken(name, replace)
            sweep(self._layout, self._layout.sessions())
            room = None if quota is None else quota - used(self._layout)
        return Incoming(
            self._layout,
            manifest,
            raw,
            replace=replace,
            room=room,
            resumable=resumable,
            holders=self._holders,
            collect=self.collect,
        )

    def holds(self, manifest: Manifest) -> bool:
        """Tell whether this very snapshot is in the store, under its name."""
        try:
            here = self.get(manifest.name)
        except (NoSuchSnapshot, Damaged):
            return False
        return (here.id, here.contents) == (manifest.id, manifest.contents)

    def _holders(self, snapshot_id: str) -> Sequence[str]:
        """Return the names of the snapshots with an id; a damaged manifest may be one's."""
        manifests, broken = self.scan()
        return [m.name for m in manifests if m.id == snapshot_id] or [str(e.data.get("name", "")) for e in broken]

    def _refuse_taken(self, name: str, replace: bool) -> None:
        if self._layout.manifest(name).exists():
            if not replace:
                raise name_taken(name)
            with suppress(Damaged, NoSuchSnapshot):
                self._refuse_pinned(self._read(name), "replaced")

    def get(self, name: str) -> Manifest:
        """Return the manifest of the snapshot `name`; its files are not looked at.

        Raises
        ------
        BadName, NoSuchSnapshot : the text names no snapshot; names that are close are told.
        Damaged, Incompatible : the manifest cannot be used.
        """
        check_key(name)
        if not self._layout.readable():
            raise self._no_such(name)
        return self._read(name)

    def trusted(self, name: str) -> Manifest:
        """Return the manifest of the snapshot `name`, if it may be used.

        Raises
        ------
        Untrusted : nobody who is trusted made it, or it is an older one than was fetched from them.
        BadName, NoSuchSnapshot, Damaged, Incompatible : as `get`.
        """
        return self._trusted(name)[0]

    def _trusted(self, name: str) -> tuple[Manifest, bytes]:
        """Return as well the manifest as it lies in the store."""
        check_key(name)
        if not self._layout.readable():
            raise self._no_such(name)
        raw = self._raw(name)
        manifest = Manifest.from_json(raw, name)
        self.trust.check(raw, name)
        if self.trust.is_foreign(raw, name):
            self.trust.check_newest(raw, manifest)
        return manifest, raw

    def scan(self) -> tuple[list[Manifest], list[GpuckptError]]:
        """Return all manifests, newest first, and an error for each that cannot be used."""
        manifests: list[Manifest] = []
        broken: list[GpuckptError] = []
        if self._layout.readable():
            with storing("The snapshots cannot be listed.", self.root):
                names = self._layout.names()
            for name in names:
                try:
                    manifests.append(self._read(check_key(name)))
                except NoSuchSnapshot:
                    continue  # removed meanwhile
                except GpuckptError as e:
                    broken.append(e)
        manifests.sort(key=lambda m: (m.created, m.name), reverse=True)
        return manifests, broken

    def listed(
        self, kind: type[T], describe: Callable[[Manifest], T], version: str
    ) -> tuple[Sequence[T], Sequence[GpuckptError]]:
        """Return what `describe` says of each snapshot, a dataclass, and an error for each that cannot be used.

        What it said is kept, so that a list of very many is fast; `version` changes with what it says.
        """
        if not self._layout.readable():
            return [], []
        with storing("The snapshots cannot be listed.", self.root):
            return listed(self._layout, lambda name: self._read(check_key(name)), kind, describe, version)

    def keys(self, name: str) -> Sequence[str]:
        """Return the keys of the snapshots called `name`, of which each notebook can have one."""
        if not self._layout.readable():
            return []
        with storing("The snapshots cannot be listed.", self.root):
            return sorted(key for key in self._layout.names() if name_of(key) == name)

    def list(self) -> list[Manifest]:
        """Return the manifests that can be used, newest first."""
        return self.scan()[0]

    def open(
        self,
        name: str,
        into: Path,
        progress: Progress | None = None,
        elsewhere: Mapping[str, Path] = MappingProxyType({}),
        wanted: Callable[[str], bool] = lambda _: True,
        takers: Mapping[str, Taker] = MappingProxyType({}),
    ) -> Snapshot:
        """Write the files of the snapshot `name` into the new folder `into`, and return them, to be closed after use.

        Every byte is verified on its way. What is below a path of the snapshot that `elsewhere` names goes into the
        existing folder there, and is the caller's to delete. Files whose path is not `wanted` are left out, unread.
        Of the files that `takers` names, which lie in such folders in memory, only what is not taken is written.
        `progress` is called with the stage ``verify``.

        Raises
        ------
        BadName, NoSuchSnapshot : as `get`.
        Untrusted : nobody who is trusted made it. `into` is not created.
        Damaged, Incompatible : it cannot be used; the text and data say which file and why. `into` is gone then.
        StoreError : `into` has no room for it, or cannot be written.
        """
        with self._reading(name) as manifest:
            snapshot = Snapshot(manifest, into)
            try:
                self._extract(manifest, into, elsewhere, wanted, progress, takers)
            except BaseException:
                snapshot.close()
                raise
            return snapshot

    def postpone(
        self,
        name: str,
        snapshot_id: str,
        elsewhere: Mapping[str, Path],
        wanted: Callable[[str], bool] = lambda _: True,
        takers: Mapping[str, Taker] = MappingProxyType({}),
    ) -> Postponed:
        """Return those `wanted` files of a snapshot that `elsewhere` says a place for, as in `open`, to be read later.

        They are made now, of zeros; all that they are made of is seen to be there, and nothing of it is deleted until
        the result is closed. Of files that lie nowhere, there are only the bytes that `takers` take.

        Raises
        ------
        NoSuchSnapshot : it was deleted, or replaced by another.
        BadName, Untrusted, Damaged, Incompatible, StoreError : as `open`.
        """
        with ExitStack() as stack:
            manifest = stack.enter_context(self._reading(name))
            if manifest.id != snapshot_id:
                raise NoSuchSnapshot(f"The snapshot {name} was replaced by another.", "", "Use another.", name=name)
            everything = read_contents(self._layout, manifest)
            placed = {path for path in everything.files if is_below(path, elsewhere) and wanted(path)}
            contents = Contents({path: c for path, c in everything.files.items() if path in placed or path in takers})
            with storing(f"The snapshot {name} cannot be read.", self.root):
                index = locate(self._layout, manifest, contents)
            with _placing(manifest, self.root):
                made = Contents({path: contents.files[path] for path in placed})
                targets = make_files(made, self.root, elsewhere)

            def read(progress: Progress | None, share: Share) -> None:
                with _placing(manifest, next(iter(elsewhere.values()), self.root)):
                    fill(self._layout, manifest, contents, index, targets, progress, takers, aside=True, share=share)

            return Postponed(read, stack.pop_all().close)

    def read_files(self, name: str, paths: Collection[str]) -> tuple[Manifest, Contents, dict[str, bytes]]:
        """Return what a snapshot is, and the verified bytes of those of its files that are asked for and there.

        Raises
        ------
        BadName, NoSuchSnapshot, Damaged, Incompatible : as `open`.
        """
        with self._reading(name) as manifest:
            contents = read_contents(self._layout, manifest)
            few = Contents({path: contents.files[path] for path in paths if path in contents.files})
            with storing(f"The snapshot {name} cannot be read.", self.root):
                index = locate(self._layout, manifest, few)
            return manifest, contents, read_whole(self._layout, manifest, few, index)

    @contextmanager
    def parts(self, manifest: Manifest, paths: Collection[str]) -> Iterator[Parts]:
        """Give what reads parts of these files of a snapshot, of which nothing is deleted meanwhile.

        Raises
        ------
        NoSuchSnapshot : it was deleted, or replaced by another.
        Damaged, Incompatible : as `open`.
        """
        with self._reading(manifest.name) as found:
            if found.id != manifest.id:
                raise self._no_such(manifest.name)
            contents = read_contents(self._layout, manifest)
            few = Contents({path: contents.files[path] for path in paths if path in contents.files})
            with storing(f"The snapshot {manifest.name} cannot be read.", self.root):
                index = locate(self._layout, manifest, few)
            yield Parts(self._layout, manifest, few, index)

    @contextmanager
    def _reading(self, name: str) -> Iterator[Manifest]:
        """Give the manifest of a snapshot, of which nothing is deleted while the context is entered."""
        while True:
            manifest = self.trusted(name)
            with storing(f"The snapshot {name} cannot be read.", self.root):
                session = Session.for_reading(self._layout.locks)
            try:
                if self.get(name).id != manifest.id:
                    continue  # replaced before its chunks were safe from a collection
                yield manifest
                return
            finally:
                if session is not None:
                    session.close()

    def _extract(
        self,
        manifest: Manifest,
        into: Path,
        elsewhere: Mapping[str, Path],
        wanted: Callable[[str], bool],
        progress: Progress | None,
        takers: Mapping[str, Taker],
    ) -> None:
        everything = read_contents(self._layout, manifest)
        contents = Contents({path: chunks for path, chunks in everything.files.items() if wanted(path)})
        with storing(f"The snapshot {manifest.name} cannot be read.", self.root):
            index = locate(self._layout, manifest, contents)
        with _placing(manifest, into):
            make_folder(into)
            targets = make_files(contents, into, elsewhere)
            fill(self._layout, manifest, contents, index, targets, progress, takers)

    def remove(self, name: str) -> int:
        """Remove the snapshot `name` and return the bytes freed.

        Those that other snapshots need are not among them, nor those that somebody at work may rely on: these go with
        a later `collect`. A damaged snapshot is removed as well.

        Raises
        ------
        BadName, NoSuchSnapshot : as `get`.
        Pinned : it is to be kept.
        Incompatible : a newer version wrote it.
        """
        self._unlink(name)
        return self.collect().freed

    def remove_all(self, names: Iterable[str]) -> tuple[Sequence[str], int, Sequence[GpuckptError]]:
        """Remove those of these snapshots that can be; return them, the bytes freed, and an error for each other one.

        What `remove` says of the bytes and raises holds for each.
        """
        removed: list[str] = []
        errors: list[GpuckptError] = []
        for name in names:
            try:
                self._unlink(name)
                removed.append(name)
            except GpuckptError as e:
                errors.append(e)
        return removed, self.collect().freed if removed else 0, errors

    def would_remove(self, names: Iterable[str]) -> tuple[Sequence[str], int, Sequence[GpuckptError]]:
        """Return what `remove_all` would, were nobody at work; nothing is changed."""
        going: list[str] = []
        errors: list[GpuckptError] = []
        for name in names:
            try:
                self.refuse_to_remove(name)
                going.append(name)
            except GpuckptError as e:
                errors.append(e)
        return going, self.would_collect(going).freed if going else 0, errors

    def _unlink(self, name: str) -> None:
        self.refuse_to_remove(name)
        with storing(f"The snapshot {name} could not be removed.", self.root):
            try:
                with changing(self._layout):
                    self._layout.manifest(name).unlink()
            except FileNotFoundError:
                raise self._no_such(name) from None
            sync_folder(self._layout.snapshots)

    def refuse_to_remove(self, name: str) -> None:
        """Raise what `remove` would raise beforehand, and do nothing else."""
        check_key(name)
        if not self._layout.readable():
            raise self._no_such(name)
        with suppress(Damaged):
            self._refuse_pinned(self._read(name), "removed")

    def rename(self, name: str, new: str) -> Manifest:
        """Give the snapshot `name` another name, sign it again, and return its manifest.

        An interruption may leave it with both names; either can be removed.

        Raises
        ------
        BadName, NoSuchSnapshot, Damaged, Incompatible : as `get`.
        Untrusted : as `trusted`: what is signed here is trusted from then on.
        NameTaken : there is one called `new`.
        """
        check_key(new)
        self.trusted(name)  # first: nothing is written for one that is not there
        with storing(f"The snapshot {name} could not be renamed.", self.root):
            # A collection might see neither name while it reads all of them.
            lock = Lock.wait(self._layout.collecting)
            try:
                with changing(self._layout):
                    manifest = replace(self.trusted(name), name=new)
                    self._give_name(manifest, name)
            finally:
                lock.release()
        return manifest

    def _give_name(self, manifest: Manifest, old: str) -> None:
        """Put a manifest in place under its name, and take the `old` one away; `changing` is held."""
        session = Session(self._layout.locks, "rename")
        try:
            draft = self._layout.draft(session.id)
            write_new(draft, self.trust.sign(manifest.to_json()))
            try:
                name_new(draft, self._layout.manifest(manifest.name))
            except FileExistsError:
                raise name_taken(manifest.name, replaceable=False) from None
            finally:
                draft.unlink(missing_ok=True)
            sync_folder(self._layout.snapshots)
            self._layout.manifest(old).unlink(missing_ok=True)
            sync_folder(self._layout.snapshots)
        finally:
            session.close()

    def note(self, name: str, message: str) -> Manifest:
        """Give the snapshot `name` another note, sign it again, and return its manifest.

        Raises
        ------
        BadName, NoSuchSnapshot, Damaged, Incompatible : as `get`.
        Untrusted : as `trusted`.
        Refused : somebody else signed it, note included.
        """
        failed = f"The note of {name} could not be changed."
        self.trusted(name)  # first: nothing is written for one that is not there
        with storing(failed, self.root), changing(self._layout):
            manifest, raw = self._trusted(name)
            if self.trust.is_foreign(raw, name):
                raise Refused(
                    failed,
                    "this snapshot was signed by somebody else, and the signature covers the note",
                    f"Add a tag instead, which is not signed: `gpuckpt tag {name} TAG`.",
                    name=name,
                )
            noted = replace(manifest, message=message)
            self._write_anew(name, noted.to_json())
        return noted

    def move(self, name: str, kernel: Mapping[str, Any]) -> Manifest:
        """Have the manifest of the snapshot `name` say other things of its kernel, sign it again, and return it.

        Raises
        ------
        BadName, NoSuchSnapshot, Damaged, Incompatible : as `get`.
        Untrusted : as `trusted`.
        Refused : somebody else signed it, and what it says of its kernel.
        """
        failed = f"The snapshot {name} could not follow its notebook."
        self.trusted(name)  # first: nothing is written for one that is not there
        with storing(failed, self.root), changing(self._layout):
            manifest, raw = self._trusted(name)
            if self.trust.is_foreign(raw, name):
                raise Refused(
                    failed,
                    "it was signed by somebody else, with the path of its notebook",
                    "",
                    name=name,
                )
            moved = replace(manifest, kernel={**manifest.kernel, **kernel})
            self._write_anew(name, moved.to_json())
        return moved

    def _write_anew(self, name: str, content: bytes) -> None:
        """Replace the manifest of a snapshot by one with this content, signed; `changing` is held."""
        session = Session(self._layout.locks, "sign")
        try:
            draft = self._layout.draft(session.id)
            write_new(draft, self.trust.sign(content))
            draft.rename(self._layout.manifest(name))
            sync_folder(self._layout.snapshots)
        finally:
            session.close()

    def sign(self, name: str) -> Manifest:
        """Sign a snapshot that has no signature: it counts as one's own from then on.

        Raises
        ------
        BadName, NoSuchSnapshot, Damaged, Incompatible : as `get`.
        Refused : it has a signature.
        """
        self.get(name)  # first: nothing is written for one that is not there
        with storing(f"The snapshot {name} could not be signed.", self.root), changing(self._layout):
            manifest = self.get(name)
            sealed, signature = split(read_small(self._layout.manifest(name), MAX_SIZE))
            if signature is not None:
                own = signature.key == self.trust.own()
                raise Refused(
                    f"The snapshot {name} is signed already.",
                    "by you" if own else f"by the holder of the key {signature.key}",
                    "" if own else f"To trust everything signed with it: `gpuckpt trust {signature.key}`.",
                    name=name,
                    key=signature.key,
                )
            self._write_anew(name, sealed)
        return manifest

    def labels(self, manifest: Manifest) -> Labels:
        """Return the tags and the pin of a snapshot."""
        with storing(f"The labels of {manifest.name} cannot be read.", self.root):
            return read_labels(self._layout, manifest.id)

    def all_labels(self) -> dict[str, Labels]:
        """Return the tags and pins of all snapshots that have any, by id."""
        with storing("The labels cannot be read.", self.root):
            return {i: read_labels(self._layout, i) for i in self._layout.labelled()}

    def pin(self, name: str, pinned: bool) -> Labels:
        """Keep the snapshot `name` from being removed or replaced, or no longer; return its labels. Errors as `get`."""
        return self._label(name, lambda labels: replace(labels, pinned=pinned))

    def tag(self, name: str, tags: Collection[str], remove: Collection[str] = ()) -> Labels:
        """Add tags to the snapshot `name`, take others from it, and return its labels.

        Raises
        ------
        BadName : a tag has other characters than a name can have, or as `get`.
        NoSuchSnapshot, Damaged, Incompatible : as `get`.
        """
        for tag in tags:
            check_name(tag, "a tag")
        return self._label(name, lambda had: replace(had, tags=tuple(sorted({*had.tags, *tags} - {*remove}))))

    def _label(self, name: str, change: Callable[[Labels], Labels]) -> Labels:
        manifest = self.get(name)
        with storing(f"The labels of {name} could not be written.", self.root):
            labels = change(read_labels(self._layout, manifest.id))
            write_labels(self._layout, manifest.id, labels)
        return labels

    def contents(self, manifest: Manifest) -> Contents:
        """Return the files of a snapshot, as chunks. Raises `Damaged`."""
        return read_contents(self._layout, manifest)

    def used(self) -> int:
        """Return how many bytes the snapshots take on the disk."""
        if not self._layout.readable():
            return 0
        with storing("The store cannot be read.", self.root):
            return used(self._layout)

    def free(self) -> int:
        """Return how many bytes are free on the disk that the store is on, or will be."""
        folder = next(folder for folder in (self.root, *self.root.absolute().parents) if folder.is_dir())
        with storing("The store's disk cannot be read.", self.root):
            return shutil.disk_usage(folder).free

    def check(self, read_data: bool = False, progress: Progress | None = None) -> Checked:
        """Look for damage; with `read_data` in every byte, else in what is written about them. Nothing is changed."""
        manifests, broken = self.scan()
        if not self._layout.readable():
            return Checked()
        with storing("The store cannot be read.", self.root):
            return check(self._layout, manifests, broken, read_data, progress)

    def repair(self) -> Repaired:
        """Repair what can be repaired, and say what cannot; every byte is read."""
        if not self._layout.readable():
            return Repaired()
        manifests, broken = self.scan()
        with storing("The store could not be repaired.", self.root):
            done = repair(self._layout, manifests)
        done.lost.update({str(e.data.get("name", "")): e.why for e in broken})
        return done

    def compact(self, grace: float = 0.0) -> Collected:
        """Do what `collect` does, and write packs again of which little is still needed."""
        if not self._layout.readable():
            return Collected()
        with storing("Unneeded data could not be deleted.", self.root):
            return compact(self._layout, self._all_manifests, grace)

    def collect(self, grace: float = 0.0) -> Collected:
        """Delete what interrupted or removed work left behind, and return what that freed.

        Nothing is deleted that a snapshot needs or that somebody at work may rely on, and nothing at all while a
        manifest cannot be read: it may name anything. What is found needless stays for `grace` seconds.
        """
        if not self._layout.readable():
            return Collected()
        with storing("Unneeded data could not be deleted.", self.root):
            return collect(self._layout, self._all_manifests, grace)

    def would_collect(self, without: Collection[str] = ()) -> Collected:
        """Return what `collect` would free if the snapshots of these names were removed; nothing is changed."""
        if not self._layout.readable():
            return Collected()

        def named() -> Sequence[Manifest] | None:
            manifests = self._all_manifests()
            return manifests and [m for m in manifests if m.name not in without]

        with storing("The store cannot be read.", self.root):
            return would_collect(self._layout, named)

    def would_compact(self) -> Collected:
        """Return what `compact` would free; nothing is changed."""
        if not self._layout.readable():
            return Collected()
        with storing("The store cannot be read.", self.root):
            return would_compact(self._layout, self._all_manifests)

    def _refuse_pinned(self, manifest: Manifest, verb: str) -> None:
        if self.labels(manifest).pinned:
            raise Pinned(
                f"The snapshot {manifest.name} is not {verb}.",
                "it is pinned",
                f"If it is no longer needed: `gpuckpt unpin {manifest.name}`.",
                name=manifest.name,
            )

    def _all_manifests(self) -> Sequence[Manifest] | None:
        manifests, broken = self.scan()
        return None if broken else manifests

    def _read(self, name: str) -> Manifest:
        return Manifest.from_json(self._raw(name), name)

    def _raw(self, name: str) -> bytes:
        with storing(f"The snapshot {name} cannot be read.", self.root):
            try:
                return read_small(self._layout.manifest(name), MAX_SIZE)
            except FileNotFoundError:
                raise self._no_such(name) from None

    def being_saved(self) -> Iterator[BeingSaved]:
        """Yield what is being saved at this moment, and how far that is."""
        with suppress(OSError):
            for session in held(self._layout.locks):
                found = holder(self._layout.locks, session)
                if found is not None and found.work == "save":
                    sizes = pack_sizes(self._layout).items()
                    written = sum(size for pack, size in sizes if session_of(pack) == session)
                    by = found.by or f"Process {found.pid}"
                    yield BeingSaved(found.name, found.pid, by, found.since, written)

    def not_yet_saved(self, saving: BeingSaved) -> NoSuchSnapshot:
        """Return the error for a snapshot that is being saved; ``data["saving"]`` is true."""
        name = name_of(saving.key)
        return NoSuchSnapshot(
            f"The snapshot {name} is still being saved.",
            f"{saving.by} has been saving it since {saving.since}; {saving.written / 1e6:,.0f} MB are written.",
            "Try again when that is done, or run `gpuckpt restore @`, which waits for it.",
            name=name,
            saving=True,
        )

    def _no_such(self, name: str) -> NoSuchSnapshot:
        for saving in self.being_saved():
            if name_of(saving.key) == name_of(name):
                return self.not_yet_saved(saving)
        try:
            names = sorted(set(map(name_of, self._layout.names())))
        except OSError:
            names = []
        close = difflib.get_close_matches(name, names, 3, 0.5)
        return NoSuchSnapshot(
            f"There is no snapshot named {name}.",
            f"Snapshots in the store {self.root}: {len(names)}, none with that name.",
            f"Did you mean {' or '.join(close)}?" if close else "`gpuckpt list` shows all names.",
            name=name,
            close=close,
        )


@contextmanager
def _placing(manifest: Manifest, into: Path) -> Iterator[None]:
    """Tell of files that cannot be written as what they are."""
    try:
        yield
    except OSError as e:
        raise StoreError(
            f"The files of the snapshot {manifest.name} could not be put in place.",
            f"{e.strerror or e}: {into}",
            "Free space there (`df` shows how much there is; in /dev/shm it is memory), and try again.",
            errno=errno.errorcode.get(e.errno or 0, str(e.errno)),
            folder=str(into),
        ) from e
