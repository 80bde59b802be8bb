"""Write one snapshot: nothing of it is visible until all of it is on the disk.

The order of writes of a save:

1. ``locks/ID``: the session begins; what the store holds from here on, stays.
2. ``saving/ID/`` is created; the caller fills it, or names other folders.
3. The chunks that no snapshot has go into ``packs/ID-N``; each pack is synced, then ``packs/``.
4. ``index/ID.tmp`` says where each chunk of the snapshot lies, is synced, and becomes ``index/ID``; ``index/`` is
   synced.
5. ``contents/ID`` says which chunks each file is made of, and is synced; ``contents/`` is synced.
6. ``snapshots/ID.tmp`` gets the manifest, is synced and read back.
7. It becomes ``snapshots/NAME.json``: by `link`, which fails where the name is taken, or by `rename`, which replaces.
   This is the commit.
8. ``snapshots/`` is synced: only now is success reported.
9. The temporary name goes, ``saving/ID/``, ``locks/ID``, and what only a replaced snapshot needed.

A crash before 7 leaves what the next save or a collection deletes. Between 7 and 8 the snapshot is whole, and a power
cut decides whether it has its name.
"""

from __future__ import annotations

import os
import shutil
import stat
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import NameTaken, StoreError
from .chunking import Bases, Cut, Piece, store_files
from .chunks import CHUNK, HASH_OF_ZEROS, HOLE, Changed, Chunk, chunk_of, digest
from .committing import Commit
from .contents import Contents
from .durable import make_folder, sync_folder, write_at, write_new
from .failures import storing
from .index import Index, merge, with_bases, write_part
from .layout import Layout
from .lookup import Lookup
from .manifest import Manifest
from .names import is_plain_path
from .pack import PackReader, PackWriter
from .parallel import Progress
from .reading import read_contents
from .sessions import Session
from .sources import Source

__all__ = ["Choose", "Writer"]

Choose = Callable[[], tuple[str, bool]]
"""Returns under which name a snapshot is to be, and whether it may replace the one of that name."""


class Writer:
    """A snapshot being written; a context manager.

    Put files into `directory`, or `include` other folders, then `commit`. Leaving the block without a commit deletes
    what was written.
    """

    def __init__(
        self,
        layout: Layout,
        name: str,
        *,
        replace: bool,
        room: int | None,
        sign: Callable[[bytes], bytes],
        collect: Callable[[], object],
        choose: Choose,
        by: str,
    ) -> None:
        """Begin; `Store.writer` checks the name and the store first. Raises `StoreError`.

        `room` is how many bytes may be added to the packs; `sign` adds to a manifest who made it; `collect` deletes
        what only a replaced snapshot needed. `choose` is called when the snapshot is to get its name. `by` says for
        people who saves it.
        """
        self._layout = layout
        self._name = name
        self._replace = replace
        self._at_work = threading.RLock()
        self._is_given_up = False
        self._choose = choose
        self._sign = sign
        self._collect = collect
        with storing(f"The snapshot {name} cannot be written.", layout.root):
            self._session = Session(layout.locks, "save", name=name, by=by)
            self.id = self._session.id
            self._folders: dict[str, Path] = {"": self.directory}
            self._files: list[Source] = []
            self._told: dict[str, Sequence[Piece]] = {}
            self._contents = Contents({})
            self._held: Index = {}
            self._known: Lookup | None = None
            self.bases = Bases()
            """What is in memory of chunks that others are deltas of; may be replaced by those of the save before."""
            self._packs = PackWriter(layout.packs, self.id, room)
            self._commit = Commit(layout, name, self.id, replace=replace)
            try:
                make_folder(self.directory)
            except BaseException:
                self.close()
                raise

    @property
    def directory(self) -> Path:
        """A folder to fill, with mode 0700; it may get sub-folders. The commit uses its files up."""
        return self._layout.saving_of(self.id)

    def include(self, folder: Path, inside: str) -> None:
        """Let the files in `folder` be files of the snapshot, under the path `inside`.

        They stay where they are; nobody may change them before the commit.
        """
        self._folders[inside] = folder

    def add(self, file: Path, path: str, size: int, *, own: bool = False) -> None:
        """Let the first `size` bytes of a file be the file `path` of the snapshot; it stays where it is.

        What is the caller's `own` nobody else can change before the commit.
        """
        self._files.append(Source(file, size, path, own=own))

    def hashed(self, path: str, keys: Sequence[bytes]) -> None:
        """Say which hashes the chunks of the file `path` have, each of `CHUNK` bytes, as `tell` does."""
        self.tell(path, [chunk_of(key) for key in keys])

    def tell(self, path: str, pieces: Sequence[Piece]) -> None:
        """Say how the file `path` is cut, and which of its chunks are known.

        The file need not have those that the store holds, nor zeros. Of the others that are known, what is read is held
        against them. Of pieces of which it is told what was there before, the store may keep what has changed alone.
        """
        self._told[path] = pieces

    def holds(self, chunks: Collection[Chunk]) -> set[Chunk]:
        """Return those of the chunks that the store has, until this writer is closed. Raises `StoreError`."""
        with storing(f"The snapshot {self._name} cannot be written.", self._layout.root):
            known = self._lookup()
            known.find_all(chunk.hash for chunk in chunks)
            found = {chunk for chunk in chunks if chunk.hash == HOLE or known.find(chunk.hash) is not None}
        merge(self._held, known.found)
        return found

    def _lookup(self) -> Lookup:
        if self._known is None:
            self._known = Lookup(self._layout)
        return self._known

    def held_of(self, manifest: Manifest | None, paths: Callable[[str], bool]) -> list[bytes]:
        """Return the hashes of chunks of `CHUNK` bytes of another snapshot's files that the store holds, and of zeros.

        It holds them until this writer is closed. All chunks of that snapshot are looked up at once, which spares the
        commit a look for each. Raises `Damaged`.
        """
        contents = read_contents(self._layout, manifest) if manifest is not None else Contents({})
        files = contents.files
        keys = {chunk.hash for path in files if paths(path) for chunk in files[path] if chunk.size == CHUNK}
        with storing(f"The snapshot {self._name} cannot be written.", self._layout.root):
            known = self._lookup()
            known.find_all(chunk.hash for chunk in contents.chunks() if chunk.hash != HOLE)
            found = [key for key in keys if key != HOLE and known.find(key) is not None]
        # The packs stay, but the part of the index goes with that snapshot.
        merge(self._held, known.found)
        return [HASH_OF_ZEROS, *found]

    def put_back(self, file: Path, keys: Sequence[bytes]) -> None:
        """Write into a file, whose chunks have these hashes, those that `held_of` has found.

        Raises
        ------
        StoreError, ValueError : they could not be read or written, or are damaged.
        """
        with storing("GPU memory could not be read from the store.", self._layout.root):
            reader = PackReader(self._layout.packs, self._held)
            fd = os.open(file, os.O_WRONLY | os.O_NOFOLLOW)
            try:
                for number, key in enumerate(keys):
                    if (at := self._held.get(key)) is not None:
                        write_at(fd, number * CHUNK, reader.read(key, at))
            finally:
                os.close(fd)

    def stored(self, path: str) -> Sequence[tuple[Chunk, bool]]:
        """Return the chunks that a file was made of, when it is committed; of each, whether the store had it not."""
        return [(chunk, chunk.hash in self._packs.placed) for chunk in self._contents.files.get(path, ())]

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give up what was not committed and delete it; harmless after a commit.

        A commit in another thread is broken off, and its end waited for: it may be too late.
        """
        self._is_given_up = True
        with self._at_work:
            self._close()

    def _close(self) -> None:
        self._packs.close()
        shutil.rmtree(self.directory, ignore_errors=True)
        if not self._commit.kept:
            # What cannot be deleted now is litter for a collection: the cause must not be hidden.
            with suppress(OSError, StoreError):
                self._layout.draft(self.id).unlink(missing_ok=True)
                self._give_up_chunks()
        self._session.close()

    def _give_up_chunks(self) -> None:
        if self._layout.part_of(self.id).exists():
            # Others may rely on these chunks since they have been in the index.
            self._session.close()
            self._collect()
            return
        self._layout.part_draft(self.id).unlink(missing_ok=True)
        for pack in self._layout.packs_of(self.id):
            pack.unlink(missing_ok=True)

    def commit(
        self,
        *,
        message: str,
        parent: str | None,
        kernel: Mapping[str, Any],
        machine: Mapping[str, Any],
        cuda: Mapping[str, Any],
        process: Mapping[str, Any],
        cut: Cut = lambda _: None,
        progress: Progress | None = None,
    ) -> Manifest:
        """Make the snapshot exist, whole and on the disk, and return its manifest.

        `cut` may know better than the store where the chunks of a file begin. `progress` is called with the stage
        ``store``. May be called once.

        Raises
        ------
        NameTaken : another writer was first.
        StoreError : the disk refused; where ``data["in_doubt"]`` is true the snapshot is there,
            but may be gone after a power cut. Or this writer was closed meanwhile.
        TypeError, ValueError : one of the objects is not JSON.
        """
        with self._at_work, storing(f"The snapshot {self._name} could not be stored.", self._layout.root):
            contents = self._contents = self._store_files(cut, progress)
            raw = contents.to_bytes()
            manifest = Manifest(
                name=self._name,
                id=self.id,
                message=message,
                created=datetime.now(timezone.utc).isoformat(timespec="microseconds"),
                parent=parent,
                contents=digest(raw).hex(),
                size=contents.size,
                stored=sum(at.taken for at in self._packs.placed.values()),
                kernel=kernel,
                machine=machine,
                cuda=cuda,
                process=process,
            )
            write_new(self._layout.contents_of(self.id), raw)
            sync_folder(self._layout.contents)
            self._refuse_given_up()
            manifest = self._put_in_place(manifest)
        self._commit.make_last()
        # The snapshot is safe: what cannot be tidied up now is litter for a collection.
        with suppress(OSError):
            self._layout.draft(self.id).unlink(missing_ok=True)
        self.close()
        if self._replace:
            with suppress(StoreError):
                self._collect()
        return manifest

    def _refuse_given_up(self) -> None:
        if self._is_given_up:
            raise StoreError(f"The snapshot {self._name} was not stored.", "It was given up meanwhile.", "Save again.")

    def _put_in_place(self, manifest: Manifest) -> Manifest:
        """Give the snapshot the name that is chosen now, and return its manifest."""
        while True:
            chosen = self._choose()
            if chosen != (self._name, self._replace):
                self._name, self._replace = chosen
                manifest = replace(manifest, name=self._name)
                self._commit = Commit(self._layout, self._name, self.id, replace=self._replace)
            try:
                self._commit.put_in_place(self._sign(manifest.to_json()), [self._session])
            except NameTaken:
                if self._choose() == chosen:
                    raise
                self._layout.draft(self.id).unlink(missing_ok=True)
            else:
                return manifest

    def _store_files(self, cut: Cut, progress: Progress | None) -> Contents:
        """Have all chunks on the disk, and the index that says where; return which they are."""
        sources = [source for inside, folder in self._folders.items() for source in self._survey(folder, inside)]
        sources += self._files
        total = sum(source.size for source in sources)
        known = self._lookup()
        merge(known.found, self._held)
        if any(isinstance(piece, Changed) for pieces in self._told.values() for piece in pieces):
            self._layout.allow_deltas()

        def report(done: int) -> None:
            self._refuse_given_up()
            if progress is not None:
                progress("store", done, total)

        reader = PackReader(self._layout.packs)
        contents = Contents(store_files(sources, cut, known, reader, self._packs, report, self._told, self.bases))
        # Also those that were there before: a collection may be about to delete what no other snapshot needs.
        where = merge(known.found, self._packs.placed)
        write_part(self._layout, self.id, with_bases(where, (chunk.hash for chunk in contents.chunks())), self.id)
        return contents

    def _survey(self, top: Path, inside: str) -> list[Source]:
        """Return all files in a folder and below."""
        sources: list[Source] = []
        folders = [top]
        for folder in folders:  # grows on the way
            with os.scandir(folder) as entries:
                for entry in entries:
                    about = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(about.st_mode):
                        folders.append(Path(entry.path))
                        continue
                    path = str(Path(inside) / Path(entry.path).relative_to(top))
                    if not stat.S_ISREG(about.st_mode) or not is_plain_path(path):
                        raise _odd_file(self._name, path)
                    sources.append(Source(Path(entry.path), about.st_size, path, top == self.directory, own=True))
        return sources


def _odd_file(name: str, path: str) -> StoreError:
    return StoreError(
        f"The snapshot {name} could not be stored.",
        f"{path!a} is not a regular file with a plain name",
        "This is a bug in jupyter_gpuckpt: please report it.",
        file=ascii(path),
    )
