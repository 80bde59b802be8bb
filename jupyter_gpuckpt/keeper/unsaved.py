"""What a kernel has done that is in no snapshot: whoever gives the kernel up for another one is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..client.record import Saved, now
from ..operations.results import Unsaved
from ..snapshots.saved import kernel_of

if TYPE_CHECKING:
    from ..store import Manifest
    from .kernel_life import Keeper

__all__ = ["before", "cells_since", "resumed_from", "saved_by", "saved_with", "unsaved"]

_IDLE = 1.0  # what a kernel that does nothing may compute all the same, in seconds of processor time


def saved_by(begun: int | None, at: str = "", *, in_cell: bool = False) -> Saved:
    """Return what a snapshot has of a kernel `at` a time, when so many cells had begun; None where that is not known.

    `in_cell` is whether the last of them goes on from there: what it does then is in no snapshot.
    """
    return Saved(at or now(), None if begun is None else begun - in_cell)


def saved_with(keeper: Keeper, begun: int | None, at: str = "", *, in_cell: bool = False) -> None:
    """Note that a snapshot has all of the kernel; the arguments are those of `saved_by`."""
    keeper.state.saved = saved_by(begun, at, in_cell=in_cell)
    cells = keeper.state.saved.cells
    keeper.ran = {begun: seconds for begun, seconds in keeper.ran.items() if cells is not None and begun > cells}


def resumed_from(keeper: Keeper, hibernated: Manifest) -> None:
    """Note what snapshots have of a kernel that was hibernated: what it came from is removed when it is back."""
    kernel = kernel_of(hibernated)
    if kernel.saved_at:
        keeper.state.saved = Saved(kernel.saved_at, kernel.saved_cells)
    else:  # an older version saved it, and did not say: so there is something
        keeper.state.saved = saved_by(kernel.cells, hibernated.created, in_cell=True)


def before(keeper: Keeper) -> Saved:
    """Return what a snapshot has of the kernel, or of when it was started, where there is none."""
    state = keeper.state
    return state.saved or Saved(state.started, 0 if keeper.launch.agent else None)


def cells_since(keeper: Keeper, manifest: Manifest, *, asked_by: Mapping[str, Any] | None = None) -> int | None:
    """Return how many cells have begun since a snapshot that the kernel came from; None where that is not known.

    A cell that has done nothing but to ask for a restore (`asked_by`) is not counted.
    """
    kernel = kernel_of(manifest)
    return _cells_since(keeper, saved_by(kernel.cells, in_cell=kernel.in_cell), asked_by)


def _cells_since(keeper: Keeper, saved: Saved, asked_by: Mapping[str, Any] | None) -> int | None:
    channel = keeper.channel
    begun = channel.cells if channel is not None and channel.cells is not None else saved.cells
    if saved.cells is None or begun is None:
        return None
    # One that is a line of %gpuckpt alone is no work, and the kernel has not counted it.
    counted = asked_by is not None and channel is not None and channel.cell is not None and not asked_by.get("worked")
    return max(0, begun - saved.cells - counted)


def unsaved(keeper: Keeper, *, asked_by: Mapping[str, Any] | None = None) -> Unsaved | None:
    """Return what the kernel has done since it was saved, restored or started; None where it has done nothing.

    A cell that has done nothing but to ask for a restore (`asked_by`) is not counted.
    """
    channel, saved = keeper.channel, before(keeper)
    if channel is None:
        return None
    cells = _cells_since(keeper, saved, asked_by)
    cell = None if asked_by is not None else channel.cell
    computed = max(0.0, keeper.work() - keeper.state.worked)
    if not cells and cell is None and (computed < _IDLE or asked_by is not None):
        return None
    return Unsaved(since=saved.at, cells=cells, cell=cell, computed=computed)
