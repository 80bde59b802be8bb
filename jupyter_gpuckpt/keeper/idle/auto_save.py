"""Automatic saves: a kernel is saved when a cell has ended that ran for long enough, so that the next can be undone.

The save is one like any other, but that it is given up where the next cell runs then, or begins before the freeze is
over: it is made when that one has ended. Of cells that end while a snapshot is written, the last one is followed by a
save, if the kernel is idle then. When somebody switches this on, the kernel is saved as soon as it is idle: what it has
done by then is in no snapshot, or it is in none at all, and its next cell could not be undone.

A kernel that is to be saved every so often is so in the middle of a cell, too: what is restored then goes on in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING

from ...errors import Busy, Cancelled, GpuckptError, Refused
from ...operations.choices import AutoSave as Rule
from ...operations.requests import Auto, Save
from ...operations.results import AutoSaving
from ...spelling import in_a_cell
from ..agent_channel import AgentSilent
from ..operations.progress import to_nobody
from ..steps import auto_saving, remove_old
from ..unsaved import unsaved

if TYPE_CHECKING:
    from ..kernel_life import Keeper

__all__ = ["AutoSave"]

log = logging.getLogger("gpuckpt.keeper")


_FOLLOWS = 0.1
"""How soon a cell follows another one that waits already, in seconds: they are saved as one."""
_GATHERS = 0.5
"""For how long a kernel's memory is put into huge pages before a save, in seconds."""


class AutoSave:
    """Looks after one kernel for as long as its keeper lives."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._began = time.monotonic()
        """When the rule was set, or the last save began that was made every so often."""
        self._is_new = False
        """Whether the kernel is to be saved before the next cell, whatever it has done."""

    async def run(self) -> None:
        """Save the kernel whenever it is time; never returns."""
        keeper = self._keeper
        while True:
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(keeper.became_idle.wait(), self._left())
            keeper.became_idle.clear()
            if (left := self._left()) is None:
                await asyncio.sleep(_FOLLOWS)
            # A cell may have ended before all of a restore was done, or while somebody's own save was being written.
            await keeper.operations.idle.wait()
            if left is None:
                if self._is_after_cell():
                    await self._save(between_cells=True)
            elif left <= 0:
                self._began = time.monotonic()
                if self._may_save() and unsaved(keeper) is not None:
                    await self._save(between_cells=False)

    def _left(self) -> float | None:
        """Return in how many seconds the kernel is to be saved, whatever it does; None where it is after cells."""
        rule = self._keeper.state.auto
        return None if rule is None or rule.every is None else self._began + rule.every - time.monotonic()

    def _is_after_cell(self) -> bool:
        """Tell whether the kernel is to be saved now: a cell that ran for long enough may be followed by short ones."""
        keeper = self._keeper
        channel, rule = keeper.channel, keeper.state.auto
        if rule is None or channel is None or channel.busy or not self._may_save():
            return False
        is_new, self._is_new = self._is_new, False
        if is_new and keeper.state.parent is None:
            return True
        if not is_new and (keeper.last_cell is None or max(keeper.ran.values(), default=0.0) < rule.after):
            return False
        new = unsaved(keeper)
        return new is not None and new.cells != 0

    def _may_save(self) -> bool:
        keeper = self._keeper
        return keeper.operations.current is None and keeper.state.sleep is None and keeper.exit_status is None

    async def _save(self, *, between_cells: bool) -> None:
        keeper = self._keeper
        await asyncio.to_thread(self._gather, between_cells=between_cells)
        try:
            request = Save(name="", automatic=True, between_cells=between_cells)
            saved = await keeper.ask(request, to_nobody)
            await asyncio.to_thread(remove_old, keeper, saved.id)
            await keeper.store_growth.settled()
            failed = None
        except (Busy, Cancelled) as e:  # something else was wanted
            log.info("%s", e)
            return
        except GpuckptError as e:
            log.warning("the kernel was not saved by itself: %s", e)
            failed = e
        had_failed, keeper.not_saved_by_itself = keeper.not_saved_by_itself, failed
        if keeper.channel is not None:
            # Notebooks hear of it by way of the kernel: no server was asked.
            with contextlib.suppress(AgentSilent):
                await keeper.channel.send({"call": "auto_saved", "id": 0, "args": {}})
                if failed or had_failed:
                    why = in_a_cell(failed.sentences()) if failed else ""
                    await keeper.channel.send({"call": "not_saved", "id": 0, "args": {"why": why}})

    def _gather(self, *, between_cells: bool) -> None:
        """Put memory into huge pages, for which the kernel is paused for less time; a cell that comes ends that."""
        keeper, until = self._keeper, time.monotonic() + _GATHERS
        if keeper.space is None or keeper.space.deputy is not None:
            return  # it is not forked

        def goes_on() -> bool:
            is_wanted = not between_cells or keeper.channel is None or not keeper.channel.busy
            return is_wanted and time.monotonic() < until

        if gathered := keeper.huge_pages.gather(keeper.tree(), goes_on):
            log.info("%d bytes of its memory were put into huge pages", gathered)

    def set(self, request: Auto) -> AutoSaving:
        """Set the rule, or only say what it is.

        Raises
        ------
        Refused : the kernel was to be saved after cells, and nobody says when one has ended.
        """
        keeper = self._keeper
        if request.switch == "on" and request.every is None and not keeper.launch.agent:
            raise Refused(
                "The {kernel} is not saved by itself.",
                "A job has no cells." if keeper.launch.job else "It has no agent that tells when a cell has ended.",
                "`gpuckpt auto @ on --every 10m` saves it every 10 minutes in which it computes something.",
            )
        if request.switch:
            given = Rule(
                after=request.after or 0.0,
                keep=Rule.keep if request.keep is None else request.keep,
                under=request.under,
                every=request.every,
            )
            keeper.state.auto = given if request.switch == "on" else None
            keeper.note_state()
            keeper.not_saved_by_itself = None
            self._is_new = request.switch == "on" and request.every is None
            self.look_again()
        return auto_saving(keeper)

    def look_again(self) -> None:
        """Take note that the rule has changed."""
        self._began = time.monotonic()
        self._keeper.became_idle.set()  # what waits for the end of a cell waits for that no longer
