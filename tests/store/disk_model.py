"""What a disk holds after a power cut: of each file the bytes, and of each folder the names, that were synced last."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_Key = tuple[int, int]
"""Device and inode."""


class Disk:
    """Watches the folder `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files: dict[_Key, bytes] = {}
        self._names: dict[_Key, dict[str, _Key]] = {}

    def sync_all(self) -> None:
        """Take all that is there as synced."""
        for path in (self._root, *self._root.rglob("*")):
            self.sync(path)

    def sync(self, path: Path) -> None:
        """Take in that a file or folder was synced."""
        try:
            about = path.stat()
        except FileNotFoundError:
            return
        key = (about.st_dev, about.st_ino)
        if stat.S_ISDIR(about.st_mode):
            self._names[key] = _entries(path)
        else:
            self._files[key] = path.read_bytes()

    def cut(self, target: Path, *, names_survive: bool) -> None:
        """Write into `target` what is left of `root`; with `names_survive` no name is lost, but unsynced bytes are."""
        target.parent.mkdir(exist_ok=True)
        if not self._root.exists():
            return
        about = self._root.stat()
        self._write((about.st_dev, about.st_ino), self._root, target, names_survive)

    def _write(self, key: _Key, origin: Path | None, target: Path, names_survive: bool) -> None:
        there = origin is not None and origin.is_dir() and not origin.is_symlink()
        if key in self._names or there:
            target.mkdir(0o700)
            names = _entries(origin) if names_survive and origin is not None and there else self._names.get(key, {})
            for name, child in names.items():
                self._write(child, origin / name if origin is not None else None, target / name, names_survive)
        else:
            target.write_bytes(self._files.get(key, b""))
            target.chmod(0o600)


def _entries(folder: Path) -> dict[str, _Key]:
    found = {}
    for entry in os.scandir(folder):
        about = entry.stat(follow_symlinks=False)
        found[entry.name] = (about.st_dev, about.st_ino)
    return found
