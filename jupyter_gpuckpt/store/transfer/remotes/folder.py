"""A remote that is a folder of this machine: a disk that is carried about, or one of the network."""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ....errors import RemoteError
from ...durable import make_folder, make_parents, name_new, sync_folder, write_new
from .remote import DRAFT, Remote

__all__ = ["FolderRemote"]

_READ = 4 * 1024 * 1024


class FolderRemote(Remote):
    """The folder `root`, which the first write creates. What is reported as written is on its disk."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.shown = str(root)

    def read(self, path: str, start: int, size: int) -> bytes:
        with self._using():
            # Nothing else than a file: somebody else may have made the folder.
            fd = os.open(self._at(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise OSError(errno.EINVAL, "not a file", str(self._at(path)))
                found = bytearray()
                while len(found) < size and (more := os.pread(fd, min(_READ, size - len(found)), start + len(found))):
                    found += more
                return bytes(found)
            finally:
                os.close(fd)

    def write(self, path: str, content: bytes) -> None:
        with self._using():
            draft = self._draft(path, content)
            draft.rename(self._at(path))
            sync_folder(draft.parent)

    def create(self, path: str, content: bytes) -> bool:
        with self._using():
            draft = self._draft(path, content)
            try:
                name_new(draft, self._at(path))
            except FileExistsError:
                return False
            finally:
                draft.unlink(missing_ok=True)
            sync_folder(draft.parent)
            return True

    def list(self, folder: str) -> dict[str, int]:
        found = {}
        with self._using(), suppress(FileNotFoundError), os.scandir(self._at(folder)) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    found[entry.name] = entry.stat(follow_symlinks=False).st_size
        return found

    def delete(self, path: str) -> None:
        with self._using():
            self._at(path).unlink(missing_ok=True)

    def _at(self, path: str) -> Path:
        return self._root / path

    def _draft(self, path: str, content: bytes) -> Path:
        """Have the content on the disk under a name that means nothing."""
        folder = self._at(path).parent
        if not folder.is_dir():
            make_parents(folder)
            make_folder(folder)
            sync_folder(folder.parent)
        draft = folder / f"{uuid.uuid4().hex}{DRAFT}"
        write_new(draft, content)
        return draft

    @contextmanager
    def _using(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as e:
            raise RemoteError(
                f"The folder {self.shown} cannot be used.",
                f"{e.strerror or e}" + (f": {os.fsdecode(e.filename)}" if e.filename is not None else ""),
                "Check that it is yours and its disk has room.",
                remote=self.shown,
            ) from e
