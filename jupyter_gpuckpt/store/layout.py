"""Where things lie in the store's folder, and whether that folder can be trusted and understood."""

from __future__ import annotations

import errno
import json
import os
import stat
import uuid
from contextlib import suppress
from pathlib import Path

from ..errors import Damaged, StoreError
from .durable import (
    FOLDER_MODE,
    make_folder,
    make_parents,
    read_small,
    refresh,
    sync_folder,
    write_new,
)
from .failures import storing
from .manifest import FORMAT, check_format
from .names import is_id, is_pack, session_of
from .sessions import Lock

__all__ = ["Layout"]

_DELTAS, _COMBINED = "deltas", "combined deltas"
"""The features of a store in which chunks may be deltas, of both kinds. Snapshots that leave it have none."""
_MARK, _MARK_WITH_OLD_DELTAS, _MARK_WITH_DELTAS = (
    json.dumps({"features": features, "format": FORMAT}, separators=(",", ":")).encode() + b"\n"
    for features in ([], [_DELTAS], [_COMBINED, _DELTAS])
)
_MARK_LIMIT = 64 * 1024
_SUFFIX = ".json"
_DRAFT = ".tmp"


class Layout:
    """The paths of a store, and the two checks that come before any use of them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.mark = root / "format.json"
        self.snapshots = root / "snapshots"
        self.contents = root / "contents"
        self.index = root / "index"
        self.packs = root / "packs"
        self.saving = root / "saving"
        self.labels = root / "labels"
        self.locks = root / "locks"
        self.leases = root / "leases"
        self.condemned = root / "condemned.json"
        self.condemned_draft = root / f"condemned{_DRAFT}"
        self.listing = root / "listing.json"
        self.listing_draft = root / f"listing{_DRAFT}"
        self.hints = root / "hints"
        self.folders = (
            self.snapshots,
            self.contents,
            self.index,
            self.packs,
            self.saving,
            self.labels,
            self.locks,
        )

    def manifest(self, name: str) -> Path:
        """Return where the snapshot `name` has its manifest."""
        return self.snapshots / (name + _SUFFIX)

    def draft(self, snapshot_id: str) -> Path:
        """Return where a manifest is written before it gets its name."""
        return self.snapshots / (snapshot_id + _DRAFT)

    def contents_of(self, snapshot_id: str) -> Path:
        """Return where it is written which chunks a snapshot's files are made of."""
        return self.contents / snapshot_id

    def part_of(self, session: str) -> Path:
        """Return where a session has its part of the index."""
        return self.index / session

    def part_draft(self, session: str) -> Path:
        """Return where that is written before it gets its name."""
        return self.index / (session + _DRAFT)

    def parts(self) -> set[str]:
        """Return the ids that have a part of the index."""
        return {e for e in _entries(self.index) if is_id(e)}

    def hinted(self) -> set[Path]:
        """Return the files of hints."""
        return {self.hints / e for e in self._hint_files() if is_id(e)}

    def _hint_files(self) -> list[str]:
        try:
            return _entries(self.hints)
        except OSError:  # nothing fails for lack of them
            return []

    def lists(self) -> set[str]:
        """Return the ids that have a list of contents."""
        return {e for e in _entries(self.contents) if is_id(e)}

    def labelled(self) -> set[str]:
        """Return the ids that have labels."""
        found = {e.removesuffix(_SUFFIX) for e in _entries(self.labels)}
        return {e for e in found if is_id(e)}

    def pack_names(self) -> list[str]:
        """Return the names of all packs."""
        return [e for e in _entries(self.packs) if is_pack(e)]

    def packs_of(self, session: str) -> list[Path]:
        """Return the packs that a session wrote."""
        return [self.packs / name for name in self.pack_names() if session_of(name) == session]

    def labels_of(self, snapshot_id: str) -> Path:
        """Return where the tags and the pin of a snapshot are."""
        return self.labels / (snapshot_id + _SUFFIX)

    def labels_draft(self, session: str) -> Path:
        """Return where these are written before they get their name."""
        return self.labels / (session + _DRAFT)

    def saving_of(self, snapshot_id: str) -> Path:
        """Return the folder that is filled with a snapshot's files while it is being saved."""
        return self.saving / snapshot_id

    @property
    def collecting(self) -> Path:
        """The file whose lock is held by whoever deletes what is not needed, or gives a snapshot another name."""
        return self.locks / "collect"

    def name_of(self, file: str) -> str | None:
        """Return the name of the snapshot whose manifest is this file of `snapshots`; None where it is none's."""
        return file.removesuffix(_SUFFIX) if file.endswith(_SUFFIX) else None

    def names(self) -> list[str]:
        """Return the names that have a manifest, whatever is in it."""
        found = _entries(self.snapshots)
        return [e.removesuffix(_SUFFIX) for e in found if e.endswith(_SUFFIX)]

    def sessions(self) -> set[str]:
        """Return the ids of sessions that are at work, or were when their process ended."""
        return {e for e in (*_entries(self.locks), *_entries(self.saving)) if is_id(e)}

    def begun(self) -> set[str]:
        """Return also the ids of those of which a power cut has left no more than drafts."""
        drafts = (e for folder in (self.snapshots, self.index, self.labels) for e in _entries(folder))
        found = {e.removesuffix(_DRAFT) for e in drafts if e.endswith(_DRAFT)}
        return self.sessions() | {e for e in found if is_id(e)}

    def old_drafts(self) -> list[Path]:
        """Return what is left of marks and hints that were being written, of which nothing is lost."""
        marks = [self.root / e for e in _entries(self.root) if _is_mark_draft(e)]
        return marks + [self.hints / e for e in self._hint_files() if e.endswith(_DRAFT)]

    def readable(self) -> bool:
        """Tell whether there is a store here; False where nothing was ever saved.

        Raises
        ------
        Incompatible : a newer version wrote the store.
        Damaged : its mark is not one.
        StoreError : it belongs to somebody else, other users can write to it, it is another kind of
            folder, or it cannot be read.
        """
        with storing("The store cannot be read.", self.root):
            if not self.root.exists():
                for folder in reversed(self.root.absolute().parents):  # another machine may have made it
                    refresh(folder)
            try:
                about = self.root.stat()
            except FileNotFoundError:
                return False
            self._check_owner(about)
            if self._marked():
                self._check_private(about)
                return True
            self._check_unused()
            return False

    def prepare(self) -> None:
        """Create the store where there is none, and have its folders on the disk.

        Raises
        ------
        StoreError : as `readable`, or it cannot be written.
        """
        if self.readable():
            with storing("The store cannot be written.", self.root):
                if stat.S_IMODE(self.root.stat().st_mode) != FOLDER_MODE:
                    self.root.chmod(FOLDER_MODE)
            return
        with storing("The store cannot be created.", self.root):
            make_parents(self.root)
            if not make_folder(self.root):
                self.root.chmod(FOLDER_MODE)
            for folder in self.folders:
                make_folder(folder)
            sync_folder(self.root)
            sync_folder(self.root.parent)
            # The mark comes last: where it is, everything above it is known to be on the disk.
            self._write_mark(_MARK)

    def allow_deltas(self) -> None:
        """Have the store's mark say that chunks may be deltas, on the disk: versions that know none refuse it then.

        Raises
        ------
        Incompatible, Damaged : it is no mark of this version any more.
        OSError : it cannot be read or written.
        """
        while read_small(self.mark, _MARK_LIMIT) != _MARK_WITH_DELTAS:
            # Whoever has the lock of the mark must not lose it to another: `committing.changing`.
            lock = Lock.wait(self.mark)
            try:
                if lock.stands() and self._marked():
                    self._write_mark(_MARK_WITH_DELTAS)
            finally:
                lock.release()

    def _write_mark(self, mark: bytes) -> None:
        draft = self.root / f"format.{uuid.uuid4().hex}{_DRAFT}"
        write_new(draft, mark)
        with suppress(FileNotFoundError):  # swept by another process
            draft.rename(self.mark)
        sync_folder(self.root)

    def _marked(self) -> bool:
        try:
            raw = read_small(self.mark, _MARK_LIMIT)
        except FileNotFoundError:
            return False
        if raw in (_MARK, _MARK_WITH_OLD_DELTAS, _MARK_WITH_DELTAS):
            return True
        try:
            found = json.loads(raw)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict):
            if isinstance(features := found.get("features"), list):
                found = {**found, "features": [feature for feature in features if feature not in (_DELTAS, _COMBINED)]}
            check_format(found, f"The store in {self.root}")
        raise Damaged(
            "The store's format file is damaged.",
            f"{self.mark} names no format that this or an older version wrote",
            f"If no newer version of jupyter_gpuckpt used this store, write {_MARK.decode()!r} "
            "into that file and list the snapshots.",
            store=str(self.root),
        )

    def _check_owner(self, about: os.stat_result) -> None:
        if not stat.S_ISDIR(about.st_mode):
            raise NotADirectoryError(20, "Not a directory", str(self.root))
        if about.st_uid != os.geteuid():
            raise StoreError(
                "The store belongs to another user.",
                f"{self.root} is owned by uid {about.st_uid}, this process is uid {os.geteuid()}; "
                "a snapshot is code that would run in your name",
                "Choose a folder of your own (--to, GPUCKPT_STORE).",
                store=str(self.root),
                owner=about.st_uid,
            )

    def _check_private(self, about: os.stat_result) -> None:
        if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise StoreError(
                "Other users can write to the store.",
                f"{self.root} has mode {stat.S_IMODE(about.st_mode):04o}; "
                "a snapshot is code that would run in your name",
                f"If you trust what is in it, run `chmod 700 {self.root}`.",
                store=str(self.root),
            )

    def _check_unused(self) -> None:
        """Refuse a folder that holds other things: it would be mixed with what a store keeps."""
        own = {f.name for f in self.folders}
        odd = sorted(e for e in _entries(self.root) if e not in own and e != "lost+found" and not _is_mark_draft(e))
        if not odd:
            odd = sorted(f"{f.name}/{e}" for f in self.folders for e in _entries(f))
        if odd and not self._marked():  # another process may have created the store meanwhile
            raise StoreError(
                "The folder of the store is not a store.",
                f"{self.root} has no format.json but holds {odd[0]}",
                f"Choose one that is empty or does not exist yet, for example {self.root}/gpuckpt (--to, "
                "GPUCKPT_STORE).",
                store=str(self.root),
            )


def _is_mark_draft(entry: str) -> bool:
    return entry.startswith("format.") and entry.endswith(_DRAFT)


def _entries(folder: Path) -> list[str]:
    """Return the names in a folder; none where it is missing. A read that fails is tried once more."""
    refresh(folder)
    for last in (False, True):
        try:
            return os.listdir(folder)  # noqa: PTH208 - names are what is wanted, of 10,000 files at times
        except FileNotFoundError:
            break
        except OSError as e:
            if last or e.errno != errno.EIO:
                raise
    return []
