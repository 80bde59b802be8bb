"""A remote that is a folder of this machine: a disk that is carried about, or one of the network.

Somebody else may keep it, and change what it is made of at any moment. So the folders in it are opened once for each
request, and none that is a link: it could lead into a folder of one's own, such as the store, where files would be
read, replaced or collected.
"""

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
_OPEN = os.O_RDONLY | os.O_DIRECTORY


class FolderRemote(Remote):
    """The folder `root`, which the first write creates. What is reported as written is on its disk."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.shown = str(root)

    def read(self, path: str, start: int, size: int) -> bytes:
        with self._folder_of(path) as (folder, name):
            # Nothing else than a file: somebody else may have made the folder.
            fd = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise OSError(errno.EINVAL, "not a file")
                found = bytearray()
                while len(found) < size and (more := os.pread(fd, min(_READ, size - len(found)), start + len(found))):
                    found += more
                return bytes(found)
            finally:
                os.close(fd)

    def write(self, path: str, content: bytes) -> None:
        with self._folder_of(path, create=True) as (folder, name):
            _draft(folder, content).rename(folder / name)
            sync_folder(folder)

    def create(self, path: str, content: bytes) -> bool:
        with self._folder_of(path, create=True) as (folder, name):
            draft = _draft(folder, content)
            try:
                name_new(draft, folder / name)
            except FileExistsError:
                return False
            finally:
                draft.unlink(missing_ok=True)
            sync_folder(folder)
            return True

    def list(self, folder: str) -> dict[str, int]:
        found = {}
        with (
            suppress(FileNotFoundError),
            self._folder_of(f"{folder}/") as (opened, _),
            os.scandir(opened) as entries,
        ):
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    found[entry.name] = entry.stat(follow_symlinks=False).st_size
        return found

    def delete(self, path: str) -> None:
        with suppress(FileNotFoundError), self._folder_of(path) as (folder, name):
            (folder / name).unlink(missing_ok=True)

    @contextmanager
    def _folder_of(self, path: str, *, create: bool = False) -> Iterator[tuple[Path, str]]:
        """Give the folder of a file, by a path that leads there until the end, and the file's name in it."""
        folder, _, name = path.rpartition("/")
        fds: list[int] = []
        try:
            if create and not self._root.is_dir():
                make_parents(self._root)
                make_folder(self._root)
                sync_folder(self._root.parent)
            fds.append(os.open(self._root, _OPEN))
            self._refuse_store(_opened(fds[0]))
            if folder:
                if create and make_folder(_opened(fds[0]) / folder):
                    sync_folder(_opened(fds[0]))
                fds.append(os.open(folder, _OPEN | os.O_NOFOLLOW, dir_fd=fds[0]))
            yield _opened(fds[-1]), name
        except FileNotFoundError:
            raise
        except OSError as e:
            raise RemoteError(
                f"The folder {self.shown} cannot be used.",
                f"{e.strerror or e}: {self._root / path}",
                "Check that it is yours and that its disk has free space.",
                remote=self.shown,
            ) from e
        finally:
            for fd in fds:
                os.close(fd)

    def _refuse_store(self, root: Path) -> None:
        """Refuse a store: it has what is under way in it, which a remote has not and does not look at."""
        if (root / "locks").exists():
            raise RemoteError(
                f"{self.shown} is a store of snapshots, not a remote.",
                f"it may have been put there by a link: it leads to {root.readlink()}",
                "Give another folder; what is in a store is moved by `gpuckpt push` with that store as GPUCKPT_STORE.",
                remote=self.shown,
            )


def _opened(fd: int) -> Path:
    return Path(f"/proc/self/fd/{fd}")


def _draft(folder: Path, content: bytes) -> Path:
    """Have the content on the disk under a name that means nothing."""
    draft = folder / f"{uuid.uuid4().hex}{DRAFT}"
    write_new(draft, content)
    return draft
