"""A folder on the store's disk for somebody at work; where that one is killed, the next save removes it."""

from __future__ import annotations

import shutil
from pathlib import Path

from .durable import make_folder
from .layout import Layout
from .sessions import Session

__all__ = ["WorkingFolder"]


class WorkingFolder:
    """One such folder, from its making until `close`.

    Attributes
    ----------
    path : the folder, with mode 0700.
    """

    def __init__(self, layout: Layout, by: str) -> None:
        """Make it; `by` tells others who is at work. Raises `OSError`."""
        self._session = Session(layout.locks, "restore", by=by)
        self.path: Path = layout.saving_of(self._session.id)
        try:
            make_folder(self.path)
        except BaseException:
            self._session.close()
            raise

    def close(self) -> None:
        """Delete it with all in it; more than once is harmless. Raises nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._session.close()
