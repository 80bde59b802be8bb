"""A snapshot whose files were taken out of the store, each byte of them verified."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from .manifest import Manifest

__all__ = ["Snapshot"]


class Snapshot:
    """A private copy of a snapshot's files in `directory`, deleted on `close`; a context manager.

    The copy may be changed. It does not change when the snapshot is removed or replaced.

    Attributes
    ----------
    also_close : what else ends with it.
    """

    __slots__ = ("also_close", "directory", "manifest")

    def __init__(self, manifest: Manifest, directory: Path) -> None:
        self.manifest = manifest
        self.directory = directory
        self.also_close: Callable[[], None] = _nothing

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
        """Delete the files; more than once is harmless. Raises nothing."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self.also_close()


def _nothing() -> None:
    pass
