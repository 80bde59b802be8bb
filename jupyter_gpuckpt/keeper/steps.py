"""Undo and redo: where they lead to in the tree of snapshots, and what is kept before.

A kernel that is put back to a snapshot which its present one came from, whoever asked for that, can be put forward
again, until it is saved anew.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import GpuckptError, Refused
from ..operations.choices import AutoSave
from ..operations.results import AUTOMATIC, AutoSaving, RunningCell
from ..snapshots.naming import own_to_come
from ..snapshots.saved import kernel_of
from ..snapshots.summary import is_automatic, is_of
from ..spelling import in_a_cell
from ..store import Manifest, name_of
from ..store.upkeep.retention import keep_last, keep_under
from .owner import owner_of
from .unsaved import unsaved

if TYPE_CHECKING:
    from ..snapshots.saved import SavedCell
    from .kernel_life import Keeper

__all__ = ["CellsNow", "auto_saving", "back", "cells_now", "forward", "free_name", "remove_old", "undone_after"]

log = logging.getLogger("gpuckpt.keeper")


def back(keeper: Keeper, steps: int, asked_by: Mapping[str, Any] | None) -> Manifest:
    """Return the snapshot that so many steps back lead to; `asked_by` is the cell that asks, if any.

    Raises
    ------
    Refused : there is no snapshot so far back.
    """
    is_new = unsaved(keeper, asked_by=asked_by) is not None
    line = _without_repeated(_line(keeper, keeper.state.parent_id))
    at = steps - is_new
    if at >= len(line):
        before = len(line) - (not is_new)
        there = f"There {'is' if before == 1 else 'are'} only {before}" if before > 0 else "There is no"
        why, failed = "", keeper.not_saved_by_itself
        if keeper.state.auto is None:
            then = "`gpuckpt auto @ on` saves it after each cell from now on."
        elif failed is not None:
            why, then = f"\nThe last automatic save failed: {failed.why}", failed.then
        elif before > 0:
            then = "`gpuckpt log` shows all that can be restored."
        else:
            then = _instead_of_undo(keeper)
        raise Refused(
            "Nothing was undone.",
            f"{there} {'snapshots' if before > 1 else 'snapshot'} before what the {{kernel}} is now.{why}",
            then,
        )
    return line[at]


def _instead_of_undo(keeper: Keeper) -> str:
    """Return what to do where the kernel came from no snapshot, such as after a crash."""
    owner = owner_of(keeper)
    if (coming := own_to_come(keeper.store, owner)) is not None:
        name = name_of(coming.key)
        return f"{name} is still being written; `gpuckpt restore @ {name}` waits for it."
    latest = next((one for one in keeper.store.list() if owner.saved(one) and one.id != keeper.state.parent_id), None)
    if latest is None:
        return "To begin anew, {restart}."
    return f"To go to the latest snapshot: `gpuckpt restore @ {name_of(latest.name)}`. `gpuckpt log` shows all."


def forward(keeper: Keeper, steps: int) -> Manifest:
    """Return the snapshot that the first of the last so many undos came from.

    Raises
    ------
    Refused : there were not so many since the last save, or that snapshot is gone.
    """
    known = {manifest.id: manifest for manifest in keeper.store.list()}
    undone = keeper.state.undone
    then = "`gpuckpt log` shows all that can be restored."
    if not undone:
        raise Refused("There is nothing to redo.", "Nothing was undone since the last save.", then)
    if steps > len(undone):
        n = len(undone)
        there, all_of_them = ("was only 1 undo", "it") if n == 1 else (f"were only {n} undos", "all of them")
        raise Refused(
            "Nothing was redone.",
            f"There {there} since the last save; one undo can take back several cells.",
            f"`gpuckpt redo @{'' if n == 1 else f' {n}'}` takes {all_of_them} back.",
        )
    if undone[-steps] not in known:
        raise Refused("There is nothing to redo.", "The snapshot of what was undone was removed.", then)
    return known[undone[-steps]]


def undone_after(keeper: Keeper, to: Manifest) -> list[str]:
    """Return what can be redone (`State.undone`) once the kernel has been put back `to` a snapshot."""
    undone, now = keeper.state.undone, keeper.state.parent_id
    if to.id in undone:
        return undone[: undone.index(to.id)]
    if now is not None and to.id in [manifest.id for manifest in _line(keeper, now)[1:]]:
        return [*undone, now]
    return []


def auto_saving(keeper: Keeper) -> AutoSaving:
    """Return whether the kernel is saved by itself after cells, and by what rule."""
    rule = keeper.state.auto
    if rule is None:
        return AutoSaving(after=None, keep=AutoSave.keep, under=None)
    failed = keeper.not_saved_by_itself
    why = "" if failed is None else in_a_cell(failed.sentences())
    has_cells = keeper.launch.agent
    return AutoSaving(
        after=rule.after, keep=rule.keep, under=rule.under, every=rule.every, has_cells=has_cells, failed=why
    )


def remove_old(keeper: Keeper, newest: str) -> None:
    """Remove what is too much of the kernel's automatic snapshots, but the `newest`; what cannot be removed stays."""
    rule = keeper.state.auto or AutoSave(after=0.0)
    kernel_id, notebook = keeper.launch.kernel_id, keeper.launch.notebook

    def own(manifest: Manifest) -> bool:
        return is_automatic(manifest) and is_of(manifest, kernel_id, notebook)

    try:
        keep_last(keeper.store, rule.keep, own, newest)
        if rule.under is not None:
            keep_under(keeper.store, rule.under, own, newest)
    except GpuckptError:
        log.exception("old automatic snapshots could not be removed")


def _line(keeper: Keeper, begin: str | None) -> list[Manifest]:
    """Return a snapshot, by its id, and those that it came from, newest first; it ends where one was removed."""
    known = {manifest.id: manifest for manifest in keeper.store.list()}
    found = []
    while (manifest := known.pop(begin or "", None)) is not None:
        found.append(manifest)
        begin = manifest.parent
    return found


def _without_repeated(line: list[Manifest]) -> list[Manifest]:
    """Return snapshots, newest first, without those that only repeat the one before them here.

    The kernel was saved by itself after a cell, and by somebody before the next one.
    """
    return line[:1] + [one for newer, one in itertools.pairwise(line) if not _are_alike(newer, one)]


def _are_alike(one: Manifest, other: Manifest) -> bool:
    a, b = kernel_of(one), kernel_of(other)
    return (a.after is not None or b.after is not None) and (a.cells, a.in_cell) == (b.cells, b.in_cell)


@dataclass(frozen=True)
class CellsNow:
    """Where a kernel is, by its cells: what its automatic snapshots are called by."""

    running: RunningCell | None
    """None also where it does nothing but ask for the snapshot."""
    ended: SavedCell | None
    """The one that has ended last; None where the keeper has seen none end."""
    begun: int | None
    """How many have begun; None where that is not known."""

    @property
    def number(self) -> int:
        """The number of the cell that runs, or has ended last."""
        cell = self.running or self.ended
        return cell.number if cell is not None else 0

    @property
    def note(self) -> str:
        """What a snapshot of this moment says of it."""
        if self.running is not None:
            return f"in the middle of: {self.running.begins}"
        if self.ended is not None:
            return self.ended.begins
        return "before the first cell" if self.begun == 0 else ""


def cells_now(keeper: Keeper, *, asked_in_a_cell: bool = False) -> CellsNow:
    """Return where the kernel is now; `asked_in_a_cell` where the one that runs asks for a snapshot."""
    channel = keeper.channel
    if channel is None:
        return CellsNow(None, keeper.last_cell, None)
    return CellsNow(None if asked_in_a_cell else channel.cell, keeper.last_cell, channel.cells)


def free_name(keeper: Keeper, cells: CellsNow) -> str:
    """Return the name of an automatic snapshot of this moment: none of its notebook is called that."""
    owner = owner_of(keeper)
    taken = {name_of(manifest.name) for manifest in keeper.store.list() if owner.shares_names_with(manifest)}
    name = f"{AUTOMATIC}{cells.number}"
    names = itertools.chain([name], (f"{name}-{times}" for times in itertools.count(2)))
    return next(name for name in names if name not in taken)
