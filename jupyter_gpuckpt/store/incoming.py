"""A snapshot that comes into the store from elsewhere: it exists when all of it is on the disk and verified.

The order of writes is that of a save (`store.writer`), but that two sessions are held: one that the packs are named
after, and one with the id of the snapshot itself, so that nobody else brings in the same one. Packs of an attempt that
was broken off lie there until the next collection; the next attempt finds what is whole in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType

from ..errors import Damaged, NameTaken, StoreError
from .committing import Commit
from .contents import Contents
from .durable import sync_file, sync_folder, write_new
from .failures import storing
from .index import DamagedPart, Index, from_packs, merge, named_packs, pack_sizes, with_bases, write_part
from .layout import Layout
from .lookup import Lookup
from .manifest import Manifest
from .names import session_of
from .pack import Location, PackReader, PackWriter
from .parallel import Tally, run_all
from .reach import locks_reach
from .reading import parse_contents
from .sessions import Lock, Session, settle

__all__ = ["Incoming"]

_BATCH = 16
"""Chunks of a broken-off attempt that one job verifies."""


class Incoming:
    """A snapshot of somebody who is trusted, being brought into the store; a context manager.

    Ask what is `missing`, `put` that, then `commit`.
    """

    def __init__(
        self,
        layout: Layout,
        manifest: Manifest,
        raw: bytes,
        *,
        replace: bool,
        room: int | None,
        resumable: bool,
        holders: Callable[[str], Sequence[str]],
        collect: Callable[[], object],
    ) -> None:
        """Begin; `Store.incoming` checks the name and the store first.

        With `resumable`, what has arrived stays for another attempt where this one fails. `holders` tells which
        snapshots have an id.

        Raises
        ------
        Busy : somebody else is bringing in the same snapshot.
        NameTaken : it is there under another name.
        StoreError : the store cannot be written.
        """
        self._layout = layout
        self._manifest = manifest
        self._raw = raw
        self._replace = replace
        self._resumable = resumable
        self._collect = collect
        self._contents = Contents({})
        self._raw_contents = b""
        self._found: Index = {}
        with storing(self._failed, layout.root):
            self._claim = Session(layout.locks, "pull", of=manifest.id)
            try:
                if layout.contents_of(manifest.id).exists():
                    _refuse_second(manifest, holders(manifest.id))
                self._session = Session(layout.locks, "pull")
            except BaseException:
                self._claim.close()
                raise
            self._packs = PackWriter(layout.packs, self._session.id, room)
            self._commit = Commit(layout, manifest.name, manifest.id, replace=replace)

    @property
    def _failed(self) -> str:
        return f"The snapshot {self._manifest.name} could not be stored."

    def missing(self, raw_contents: bytes) -> set[bytes]:
        """Return the chunks of these contents, whose hash is in the manifest, that the store does not hold yet.

        Raises
        ------
        Damaged : they are not valid.
        StoreError : the store cannot be read or written.
        """
        self._raw_contents = raw_contents
        self._contents = parse_contents(self._manifest, raw_contents)
        wanted = self.sizes()
        with storing(self._failed, self._layout.root):
            self._adopt(wanted)
            known = Lookup(self._layout)
            places = {key: known.find(key) for key in wanted}
            self._found = known.found
        return {key for key, at in places.items() if at is None or at.size != wanted[key]}

    def sizes(self) -> dict[bytes, int]:
        """Return the size of each chunk of the snapshot, in bytes."""
        return {chunk.hash: chunk.size for chunk in self._contents.chunks()}

    def _adopt(self, wanted: dict[bytes, int]) -> None:
        """Make what a broken-off attempt has left part of this one, as far as it is whole."""
        if not locks_reach(self._layout.root):  # another machine may be deleting them
            return
        # Nobody deletes packs meanwhile; from the end of this on they are named.
        lock = Lock.wait(self._layout.collecting)
        try:
            at_work = settle(self._layout.locks)
            named = named_packs(self._layout, self._layout.parts() - {self._manifest.id})
            left = [p for p in pack_sizes(self._layout) if p not in named and session_of(p) not in at_work]
            told = from_packs(self._layout, left)
            # Others may come to rely on what the index names: it must be right, and on the disk.
            # Deltas are of a save that was broken off, and their bases may be gone.
            whole = self._whole({key: at for key, at in told.items() if wanted.get(key) == at.size and not at.base})
            if whole:
                for pack in {at.pack for at in whole.values()}:
                    sync_file(self._layout.packs / pack)
                sync_folder(self._layout.packs)
                self._write_part(whole)
        except DamagedPart:
            pass  # it may name anything
        finally:
            lock.release()

    def _write_part(self, chunks: Index) -> None:
        write_part(self._layout, self._manifest.id, chunks, self._session.id)

    def _whole(self, told: Index) -> Index:
        """Return those chunks of which every byte is right."""
        whole: Index = {}
        keys = sorted(told, key=lambda key: (told[key].pack, told[key].offset))
        reader = PackReader(self._layout.packs)

        def look(batch: list[bytes], tally: Tally) -> None:
            for key in batch:
                with suppress(OSError, ValueError):
                    reader.read(key, told[key])
                    whole[key] = told[key]
                tally.add(told[key].size)

        run_all([partial(look, keys[i : i + _BATCH]) for i in range(0, len(keys), _BATCH)], lambda _: None)
        return whole

    def put(self, key: bytes, size: int, codec: int, stored: bytes | bytearray | memoryview) -> None:
        """Take in a chunk that was verified; many threads may. Raises `StoreError`."""
        with storing(self._failed, self._layout.root):
            self._packs.put(key, size, codec, stored)

    def commit(self) -> Manifest:
        """Make the snapshot exist, whole and on the disk, and return its manifest. May be called once.

        Raises
        ------
        Damaged : a chunk never came.
        NameTaken : another writer was first.
        StoreError : the disk refused; as `Writer.commit`.
        """
        known = merge({**self._found}, self._packs.placed)
        lost = [chunk for chunk in self._contents.chunks() if not _is_there(known.get(chunk.hash), chunk.size)]
        if lost:
            raise Damaged(
                f"The snapshot {self._manifest.name} is incomplete.",
                f"{len(lost)} of its chunks are missing, the first is {lost[0].hash.hex()[:16]}",
                "Ask whoever saved it to send it again.",
                name=self._manifest.name,
            )
        layout, snapshot_id = self._layout, self._manifest.id
        with storing(self._failed, layout.root):
            self._packs.finish()
            self._write_part(with_bases(known, (chunk.hash for chunk in self._contents.chunks())))
            layout.contents_of(snapshot_id).unlink(missing_ok=True)  # of a broken-off attempt
            write_new(layout.contents_of(snapshot_id), self._raw_contents)
            sync_folder(layout.contents)
            layout.draft(snapshot_id).unlink(missing_ok=True)
            self._commit.put_in_place(self._raw, [self._session, self._claim])
        self._commit.make_last()
        self._end()
        if self._replace:
            with suppress(StoreError):
                self._collect()
        return self._manifest

    def __enter__(self) -> Incoming:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give up what was not committed; harmless after a commit."""
        if self._commit.kept:
            self._end()
            return
        with suppress(OSError, StoreError):  # what cannot be tidied up now must not hide the cause
            if self._resumable:
                self._packs.finish()
                self._end()
                return
            self._packs.close()
            for pack in self._layout.packs_of(self._session.id):
                pack.unlink(missing_ok=True)
            self._end()
            if self._layout.part_of(self._manifest.id).exists():
                self._collect()
        self._end()

    def _end(self) -> None:
        self._packs.close()
        # What cannot be tidied up now is litter for a collection.
        with suppress(OSError):
            self._layout.draft(self._manifest.id).unlink(missing_ok=True)
            self._layout.part_draft(self._session.id).unlink(missing_ok=True)
        self._session.close()
        self._claim.close()


def _refuse_second(manifest: Manifest, names: Sequence[str]) -> None:
    """Refuse a snapshot that is already installed: what the two names share would be changed, or deleted with one."""
    if names:
        raise NameTaken(
            f"The snapshot {manifest.name} is already in the store, as {names[0]}.",
            "both have the same id: they are one snapshot that was renamed",
            f"Use that one, or `gpuckpt mv {names[0]} {manifest.name}`.",
            name=names[0],
        )


def _is_there(at: Location | None, size: int) -> bool:
    return at is not None and at.size == size
