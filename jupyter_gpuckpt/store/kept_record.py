"""A record in the folder of keys: one JSON object, its owner's alone, that several processes may change at once."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import StoreError
from .durable import read_small, sync_folder, write_new
from .own_key import check_private, private_folder
from .sessions import Lock

__all__ = ["KeptRecord", "using_keys"]

_LIMIT = 64 * 1024 * 1024


class KeptRecord:
    """The JSON object in the file `path`; it is empty where there is no file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[str, Any]:
        """Return it. Raises `StoreError` where it is damaged or others can change it, `OSError`."""
        try:
            check_private(self._path.parent)
            raw = read_small(self._path, _LIMIT)
        except FileNotFoundError:
            return {}
        try:
            found = json.loads(raw)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise self.damaged()
        return found

    def change(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Have `change` change it while nobody else does. Raises as `read`."""
        private_folder(self._path.parent)
        lock = Lock.wait(self._path.parent / "lock")
        try:
            found = self.read()
            change(found)
            draft = self._path.with_name(f"{uuid.uuid4().hex}.tmp")
            write_new(draft, json.dumps(found, indent=1, sort_keys=True).encode("ascii") + b"\n")
            draft.rename(self._path)
            sync_folder(self._path.parent)
        finally:
            lock.release()

    def damaged(self) -> StoreError:
        """Return the error for a record that was changed or is incomplete."""
        return StoreError(
            "The list of trusted keys is damaged.",
            f"{self._path} was changed or is incomplete",
            "Restore it from a copy, or move it away and trust the keys again.",
            file=str(self._path),
        )


@contextmanager
def using_keys(folder: Path) -> Iterator[None]:
    """Raise `StoreError` where the folder of keys cannot be used."""
    try:
        yield
    except OSError as e:
        raise StoreError(
            "The keys that snapshots are signed and trusted with cannot be used.",
            f"{e.strerror or e}: {folder}",
            "Make that folder readable and writable for you, or set GPUCKPT_KEYS to another one.",
            folder=str(folder),
        ) from e
