"""A snapshot that was verified byte for byte, and stays on the disk while it is used."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType

from ..errors import Damaged
from .digest import digest_file
from .locks import Lock
from .manifest import Manifest, StoredFile
from .parallel import Tally, run_all

__all__ = ["Progress", "Snapshot", "verify"]

Progress = Callable[[str, int, int], None]
"""Called with the stage's name, the bytes done and the bytes in all; may raise to cancel."""


class Snapshot:
    """The files of a verified snapshot; a context manager.

    Until it is closed nobody deletes them: removing or replacing the snapshot takes away its name
    and leaves the files. Nothing may be written in `directory`: a file more is damage.
    """

    __slots__ = ("_lock", "directory", "manifest")

    def __init__(self, manifest: Manifest, directory: Path, lock: Lock) -> None:
        self.manifest = manifest
        self.directory = directory
        self._lock = lock

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let the files be deleted from now on where the snapshot was removed meanwhile."""
        self._lock.release()


def verify(manifest: Manifest, directory: Path, progress: Progress | None) -> None:
    """Read every byte of a snapshot and compare it with what the manifest says.

    Raises
    ------
    Damaged : a file is missing, one is there too many, or one has other bytes; the first such
        file is in its data as ``file``.
    """
    present = _present(manifest, directory)
    for path in sorted(manifest.files.keys() - present):
        raise _damage(manifest, path, "the file is missing")
    for path in sorted(present - manifest.files.keys()):
        raise _damage(manifest, path, "the file was not there when the snapshot was saved")
    # The largest first, so that no thread is left alone with one at the end.
    order = sorted(manifest.files.items(), key=lambda item: -item[1].size)
    run_all(
        [partial(_verify_file, manifest, directory, path, record) for path, record in order],
        (lambda done: progress("verify", done, manifest.size)) if progress else (lambda _: None),
    )


def _present(manifest: Manifest, directory: Path) -> set[str]:
    try:
        return _files_in(directory)
    except OSError:
        try:
            return _files_in(directory)
        except OSError as e:
            raise _damage(manifest, "", f"its folder cannot be read: {e.strerror}") from e


def _files_in(directory: Path) -> set[str]:
    def fail(error: OSError) -> None:
        raise error

    return {
        str(Path(where, name).relative_to(directory))
        for where, folders, files in os.walk(directory, onerror=fail)
        for name in [*files, *(f for f in folders if Path(where, f).is_symlink())]
    }


def _verify_file(manifest: Manifest, directory: Path, path: str, record: StoredFile, tally: Tally) -> None:
    try:
        found = digest_file(directory / path, tally.add)
    except OSError:
        found = None
    if found == record:
        return
    # Once more, from the disk: a read may fail once, and a wrong byte may be one in memory only.
    try:
        _forget_cached(directory / path)
        found = digest_file(directory / path, lambda _: None)
    except OSError as e:
        raise _damage(manifest, path, f"it cannot be read: {e.strerror or e}") from e
    if found.size != record.size:
        raise _damage(manifest, path, f"it has {found.size} bytes, {record.size} were saved")
    if found != record:
        raise _damage(manifest, path, "its bytes do not have the hash of those that were saved")


def _forget_cached(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _damage(manifest: Manifest, path: str, why: str) -> Damaged:
    return Damaged(
        f"The snapshot {manifest.name} is damaged.",
        f"{path}: {why}" if path else why,
        f"Restore another snapshot; `rm {manifest.name}` removes this one.",
        name=manifest.name,
        file=path,
    )
