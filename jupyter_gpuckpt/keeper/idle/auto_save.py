"""Automatic saves: a kernel is saved when a cell has ended that ran for long enough, so that the next can be undone.

The save is one like any other, but that there is no snapshot where the next cell has begun before the freeze. Of cells
that end while a snapshot is written, the last one is followed by a save, if the kernel is idle then.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from ...client.record import AutoSave as Rule
from ...errors import Busy, GpuckptError
from ...operations.requests import Auto, Save
from ...operations.results import AutoSaving
from ...spelling import in_a_cell
from ..operations.progress import to_nobody
from ..steps import auto_saving, name_for_now, remove_old
from ..unsaved import unsaved

if TYPE_CHECKING:
    from ..kernel_life import Keeper

__all__ = ["AutoSave"]

log = logging.getLogger("gpuckpt.keeper")


_FOLLOWS = 0.1
"""How soon a cell follows another one that waits already, in seconds: they are saved as one."""


class AutoSave:
    """Looks after one kernel for as long as its keeper lives."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    async def run(self) -> None:
        """Save the kernel whenever it is time; never returns."""
        while True:
            await self._keeper.became_idle.wait()
            self._keeper.became_idle.clear()
            await asyncio.sleep(_FOLLOWS)
            if self._is_time():
                await self._save()

    def _is_time(self) -> bool:
        keeper = self._keeper
        channel, rule, cell = keeper.channel, keeper.state.auto, keeper.last_cell
        if rule is None or cell is None or cell.seconds < rule.after or channel is None or channel.busy:
            return False
        if keeper.operations.current is not None or keeper.state.sleep is not None or keeper.exit_status is not None:
            return False
        new = unsaved(keeper)
        return new is not None and new.cells != 0

    async def _save(self) -> None:
        keeper = self._keeper
        try:
            name = await asyncio.to_thread(name_for_now, keeper)
            saved = await keeper.ask(Save(name=name, automatic=True, between_cells=True), to_nobody)
            await asyncio.to_thread(remove_old, keeper, saved.id)
            keeper.not_saved_by_itself = ""
        except Busy as e:
            log.info("%s", e)
        except GpuckptError as e:
            log.warning("the kernel was not saved by itself: %s", e)
            keeper.not_saved_by_itself = " ".join(filter(None, (e.spelled(in_a_cell).what, e.why, e.then)))

    def set(self, request: Auto) -> AutoSaving:
        """Set the rule, or only say what it is."""
        keeper = self._keeper
        if request.switch:
            given = Rule(
                after=request.after or 0.0,
                keep=Rule.keep if request.keep is None else request.keep,
                under=request.under,
            )
            keeper.state.auto = given if request.switch == "on" else None
            keeper.note_state()
            keeper.not_saved_by_itself = ""
        return auto_saving(keeper)
