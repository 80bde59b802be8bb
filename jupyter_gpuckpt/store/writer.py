"""Write one snapshot: nothing of it is visible until all of it is on the disk.

The order of writes of a save:

1. ``locks/ID`` is created and its lock shared: from here the data below is in use.
2. ``data/ID/`` is created; the caller fills it.
3. Each file is made 0600 and synced, and hashed on the way; then every folder, from the leaves up
   to ``data/`` itself.
4. ``snapshots/ID.tmp`` gets the manifest, is synced and read back.
5. It becomes ``snapshots/NAME.json``: by `link`, which fails where the name is taken, or by
   `rename`, which replaces. This is the commit.
6. ``snapshots/`` is synced: only now is success reported.
7. The temporary name goes, and the data of a replaced snapshot.

A crash before 5 leaves what `collect` deletes. Between 5 and 6 the snapshot is whole, and a power
cut decides whether it has its name.
"""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import GpuckptError, NameTaken, StoreError
from .collect import discard
from .digest import digest_file
from .durable import (
    FILE_MODE,
    FOLDER_MODE,
    make_folder,
    read_small,
    sync_file,
    sync_folder,
    write_new,
)
from .failures import storing
from .layout import Layout
from .locks import Lock
from .manifest import MAX_SIZE, Manifest, StoredFile
from .names import is_plain_path
from .parallel import Tally, run_all
from .snapshot import Progress

__all__ = ["Writer", "name_taken"]


def name_taken(name: str) -> NameTaken:
    """Return the error for a name that a snapshot has already."""
    return NameTaken(
        f"A snapshot named {name} exists already.",
        "a snapshot is never overwritten unless that is asked for",
        "Choose another name, or save with --replace.",
        name=name,
    )


class Writer:
    """A snapshot being written; a context manager.

    Put the files in `directory`, then `commit`. Leaving the block without a commit deletes them.
    """

    def __init__(self, layout: Layout, name: str, *, replace: bool) -> None:
        """Begin; `Store.writer` checks the name and the store first. Raises `StoreError`."""
        self._layout = layout
        self._name = name
        self._replace = replace
        self._kept = False  # the manifest may be in place: the data must stay
        self.id = uuid.uuid4().hex
        with storing(f"The snapshot {name} cannot be written.", layout.root):
            lock = Lock.shared(layout.lock_of(self.id))
            while lock is None:  # swept between its creation and its locking
                lock = Lock.shared(layout.lock_of(self.id))
            self._lock = lock
            try:
                make_folder(self.directory)
            except BaseException:
                self.close()
                raise

    @property
    def directory(self) -> Path:
        """The folder to fill, with mode 0700; it may get sub-folders."""
        return self._layout.data_of(self.id)

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
        """Give up what was not committed and delete it; harmless after a commit."""
        self._lock.release()
        if not self._kept:
            # What cannot be deleted now is litter for `collect`: the cause must not be hidden.
            with suppress(OSError):
                discard(self._layout, self.id)

    def commit(
        self,
        *,
        message: str,
        parent: str | None,
        kernel: Mapping[str, Any],
        machine: Mapping[str, Any],
        cuda: Mapping[str, Any],
        process: Mapping[str, Any],
        progress: Progress | None = None,
    ) -> Manifest:
        """Make the snapshot exist, whole and on the disk, and return its manifest.

        `progress` is called with the stage ``store``. May be called once.

        Raises
        ------
        NameTaken : another writer was first.
        StoreError : the disk refused; where ``data["in_doubt"]`` is true the snapshot is there,
            but may be gone after a power cut.
        TypeError, ValueError : one of the objects is not JSON.
        """
        with storing(f"The snapshot {self._name} could not be stored.", self._layout.root):
            files = self._store_files(progress)
            manifest = Manifest(
                name=self._name,
                id=self.id,
                message=message,
                created=datetime.now(timezone.utc).isoformat(timespec="microseconds"),
                parent=parent,
                files=files,
                size=sum(f.size for f in files.values()),
                kernel=kernel,
                machine=machine,
                cuda=cuda,
                process=process,
            )
            self._write_draft(manifest.to_json())
            replaced = self._replaced_id()
            self._put_in_place()
        self._make_last()
        self._tidy(replaced)
        return manifest

    def _store_files(self, progress: Progress | None) -> dict[str, StoredFile]:
        """Make all files and folders private and lasting; return the record of each file."""
        paths, folders = self._survey()
        total = sum(size for _, size in paths)
        records: dict[str, StoredFile] = {}

        def sync(path: str, size: int, tally: Tally) -> None:
            sync_file(self.directory / path)
            tally.add(size)

        def digest(path: str, size: int, tally: Tally) -> None:
            records[path] = digest_file(self.directory / path, tally.add)

        # A sync waits for the disk while others hash: each file is two jobs, the largest first.
        paths.sort(key=lambda item: -item[1])
        jobs = [partial(job, *item) for item in paths for job in (sync, digest)]
        run_all(
            jobs,
            (lambda done: progress("store", done // 2, total)) if progress else (lambda _: None),
        )
        for folder in reversed(folders):
            sync_folder(folder)
        sync_folder(self._layout.data)
        return records

    def _survey(self) -> tuple[list[tuple[str, int]], list[Path]]:
        """Set all modes; return each file's path and size, and the folders, parents first."""
        paths: list[tuple[str, int]] = []
        folders = [self.directory]
        for folder in folders:  # grows on the way
            folder.chmod(FOLDER_MODE)
            with os.scandir(folder) as entries:
                for entry in entries:
                    path = Path(entry.path)
                    about = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(about.st_mode):
                        folders.append(path)
                        continue
                    inside = str(path.relative_to(self.directory))
                    if not stat.S_ISREG(about.st_mode) or not is_plain_path(inside):
                        raise _odd_file(self._name, inside)
                    path.chmod(FILE_MODE)
                    paths.append((inside, about.st_size))
        return paths, folders

    def _write_draft(self, content: bytes) -> None:
        draft = self._layout.draft(self.id)
        write_new(draft, content)
        if read_small(draft, MAX_SIZE) != content:
            raise OSError(5, "the manifest reads back with other bytes", str(draft))

    def _replaced_id(self) -> str | None:
        if not self._replace:
            return None
        try:
            raw = read_small(self._layout.manifest(self._name), MAX_SIZE)
            return Manifest.from_json(raw, self._name).id
        except (FileNotFoundError, GpuckptError):
            return None

    def _put_in_place(self) -> None:
        draft, target = self._layout.draft(self.id), self._layout.manifest(self._name)
        self._kept = True  # first: an interrupt may come right after the call
        try:
            if self._replace:
                draft.rename(target)
            else:
                os.link(draft, target)
        except FileExistsError:
            self._kept = False
            raise name_taken(self._name) from None
        except OSError:
            # Failed calls may have taken effect, on a network file system for one.
            self._kept = self._may_be_in_place()
            raise

    def _may_be_in_place(self) -> bool:
        try:
            raw = read_small(self._layout.manifest(self._name), MAX_SIZE)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return self.id.encode("ascii") in raw

    def _make_last(self) -> None:
        try:
            sync_folder(self._layout.snapshots)
        except OSError as e:
            raise StoreError(
                f"The snapshot {self._name} may not last.",
                f"all of it was written, but the disk did not confirm its name: {e.strerror}",
                "Look for errors of that disk (`dmesg`), then save again under another name.",
                errno=e.errno,
                name=self._name,
                in_doubt=True,
            ) from e

    def _tidy(self, replaced: str | None) -> None:
        # The snapshot is safe: what cannot be tidied up now is litter for `collect`.
        with suppress(OSError):
            self._layout.draft(self.id).unlink(missing_ok=True)
            if replaced is not None:
                discard(self._layout, replaced)


def _odd_file(name: str, path: str) -> StoreError:
    return StoreError(
        f"The snapshot {name} could not be stored.",
        f"{path!a} among its files is not a regular file with a plain name",
        "This is a fault of jupyter_gpuckpt: please report it.",
        file=ascii(path),
    )
