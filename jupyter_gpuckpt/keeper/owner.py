"""The kernel that a keeper holds, as the one whose snapshots' names are meant."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..snapshots.naming import Owner

if TYPE_CHECKING:
    from .kernel_life import Keeper

__all__ = ["owner_of"]


def owner_of(keeper: Keeper) -> Owner:
    """Return whose names these are: its notebook's, its job's, or its own."""
    launch = keeper.launch
    return Owner(launch.kernel_id, launch.notebook, launch.job, launch.copy_of, keeper.state.parent_id, launch.title)
