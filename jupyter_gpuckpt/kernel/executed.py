"""Which cells a kernel has executed, as notebooks number them: any other is no part of its state.

The account lies in the kernel's own memory, and so goes back with it when it is restored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["Executed", "cell_id"]


class Executed:
    """The account of one kernel.

    Attributes
    ----------
    restored : the name of the snapshot that the kernel was last put back to; empty where it never was.
    latest : the number of the cell that began last.
    count : how many cells have begun, whatever numbers they had.
    last : the id of the one that began last; empty where the client did not tell it.
    """

    def __init__(self) -> None:
        self.restored = self.last = ""
        self.latest = self.count = 0
        self._cells: dict[str, int] = {}
        self._others: set[int] = set()

    def begins(self, cell_id: str) -> None:
        """Count a cell, which is no line of %gpuckpt alone."""
        self.count += 1
        self.last = cell_id

    def note(self, cell_id: str, count: int) -> None:
        """Note that a cell was executed under this number; its id is empty where the client did not tell it."""
        self.latest = count
        if cell_id:
            self._cells[cell_id] = count
        else:
            self._others.add(count)

    def as_dict(self) -> dict[str, Any]:
        """Return the account as JSON types: the last number of each cell, and the numbers of cells without an id."""
        return {"restored": self.restored, "cells": dict(self._cells), "others": sorted(self._others)}


def cell_id(message: Mapping[str, Any]) -> str:
    """Return the id of the cell that a request comes from, as JupyterLab tells it; empty where a client does not."""
    return str(message.get("metadata", {}).get("cellId") or "")
