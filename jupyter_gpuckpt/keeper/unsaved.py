"""What a kernel has done that is in no snapshot: whoever gives the kernel up for another one is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..client.record import Saved, now
from ..operations.results import Unsaved

if TYPE_CHECKING:
    from .kernel_life import Keeper

__all__ = ["saved_by", "saved_with", "unsaved"]

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


def unsaved(keeper: Keeper, *, asked_in_a_cell: bool = False) -> Unsaved | None:
    """Return what the kernel has done since it was saved, restored or started; None where it has done nothing.

    A cell that asks for a restore is not counted.
    """
    state, channel = keeper.state, keeper.channel
    if channel is None:
        return None
    saved = state.saved or Saved(state.started, 0 if keeper.launch.agent else None)
    begun = channel.cells if channel.cells is not None else saved.cells
    # One that is a line of %gpuckpt alone is no work, and the kernel has not counted it.
    counted = asked_in_a_cell and channel.cell is not None
    cells = None if saved.cells is None or begun is None else max(0, begun - saved.cells - counted)
    cell = None if asked_in_a_cell else channel.cell
    computed = max(0.0, keeper.work() - state.worked)
    if not cells and cell is None and (computed < _IDLE or asked_in_a_cell):
        return None
    return Unsaved(since=saved.at, cells=cells, cell=cell, computed=computed)
