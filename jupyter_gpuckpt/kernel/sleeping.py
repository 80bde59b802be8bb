"""A kernel that sleeps: what it has on GPUs is in host memory, and it is woken before it executes anything.

The keeper does all of it; this is the kernel's end. A sleeping kernel's Python runs on, and only its CUDA calls wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .. import settings
from ..errors import Busy, Cancelled, GpuckptError, KeeperGone
from ..linux.lock_files import KEEPER_LOCK, is_locked
from ..operations.requests import Hibernate, Sleep, Wake
from ..operations.results import Progress, Woken, WokenLater
from ..spelling import in_a_cell
from . import hooks, parking, show
from .background import in_background
from .cells import Asked

if TYPE_CHECKING:
    from .agent import Agent
    from .builtin_hooks import Housekeeping

__all__ = ["Sleeping"]

_NEW_KEEPER = 30.0  # how long a wake waits for a keeper in the place of one that died, in seconds
_LOOK = 0.05
_OWN = "%gpuckpt"


class Sleeping:
    """Whether one kernel sleeps, and how it wakes.

    Attributes
    ----------
    is_asleep : set from before anything is moved until all of it is back.
    """

    def __init__(self, agent: Agent, run_dir: Path, housekeeping: Housekeeping) -> None:
        self._agent, self._run_dir, self._housekeeping = agent, run_dir, housekeeping
        self.is_asleep = False
        self._holds_gpu_state = False
        self._is_on_its_way = False
        self._wanted: tuple[Asked, str] | None = None

    # -- what the keeper asks for

    def restored(self, asleep: bool) -> None:
        """Note that this kernel was restored: `asleep`, where what it had on GPUs comes later, and by itself."""
        self.is_asleep = self._holds_gpu_state = self._is_on_its_way = asleep

    def before_sleep(self) -> dict[str, Any]:
        """Get ready to sleep: from now on what is to be executed wakes the kernel first.

        Raises
        ------
        Busy : a cell runs.
        GpuckptError : its GPU state cannot be moved.
        """
        # In this order, and the other way round where a cell begins: one of the two sees the other.
        self.is_asleep = True
        try:
            if self._agent.cells.are_running():
                raise Busy(
                    "The kernel was not put to sleep; it keeps running.",
                    "A cell is running.",
                    "Try again when it has ended, or run `%gpuckpt sleep` in a cell, which waits for its end.",
                )
            said = self._housekeeping.before_sleep()
            return {**said, "hooks": hooks.are_there()}
        except BaseException:
            self.is_asleep = False
            raise

    def asleep(self, gpu: bool) -> None:
        """Note that the kernel sleeps now; `gpu` is whether anything of it is kept from the GPUs."""
        self._holds_gpu_state = gpu
        self._agent.cells.announce("asleep")

    def not_woken(self, error: dict[str, Any]) -> None:
        """Say in the cell that runs why its touch of the GPU still waits; where it holds Python's lock, later.

        What a restored kernel had on GPUs does not come by itself any more: from now on a cell wakes it first.
        """
        self._is_on_its_way = False
        self._agent.cells.announce("asleep")
        asked = self._agent.cells.describe()
        if asked:
            text = f"This cell waits for the GPU. {GpuckptError.from_dict(error).spelled(in_a_cell)}"
            self._agent.cells.show(asked, {"text/plain": text})

    def after_sleep(self) -> list[str]:
        """The kernel is awake again, or did not fall asleep; return what of it could not be undone, in words."""
        faults = self._housekeeping.after(restored=False)
        self.is_asleep = self._holds_gpu_state = self._is_on_its_way = False
        self._agent.cells.announce("awake")
        return faults

    # -- what the kernel asks for

    def needs_waking(self, code: str) -> bool:
        """Tell whether this cell must not be executed before the kernel is awake."""
        if not self.is_asleep:
            return False
        lines = code.strip().splitlines()
        if len(lines) == 1 and lines[0].split()[:1] == [_OWN]:
            return False  # it touches nothing of the user's, and restores and wakes
        may_wait = self._is_on_its_way or (settings.cells_asleep() and parking.has_gate())
        return not (self._holds_gpu_state and may_wait)

    def wake(self, progress: Callable[[Progress], None] | None = None) -> Woken:
        """Have the keeper wake the kernel, and return what it did; a keeper that dies meanwhile gets a successor.

        Raises
        ------
        GpuckptError : the kernel still sleeps, unharmed.
        """
        self._agent.cells.announce("waking")
        try:
            return self._wake(progress)
        finally:
            self._agent.cells.announce("asleep" if self.is_asleep else "awake")

    def _wake(self, progress: Callable[[Progress], None] | None) -> Woken:
        deadline = time.monotonic() + _NEW_KEEPER
        while True:
            try:
                return self._agent.keeper.request(Wake, {}, progress)
            except KeeperGone:
                while not is_locked(self._run_dir / KEEPER_LOCK):
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(_LOOK)
                if time.monotonic() > deadline:
                    raise

    def wish(self, asked: Asked, op: Literal["sleep", "hibernate"] = "sleep") -> None:
        """Have the kernel put to sleep, or hibernated, when the cell that asks has ended; at once where none does."""
        self._wanted = (asked, op) if asked else None
        if not asked:
            in_background(lambda: self._rest(asked, op))

    def cell_ended(self) -> None:
        """Begin what the cell that has just ended wished for."""
        wanted, self._wanted = self._wanted, None
        if wanted is not None:
            in_background(lambda: self._rest(*wanted))

    def _rest(self, asked: Asked, op: str) -> None:
        cells = self._agent.cells
        before = cells.begun
        try:
            if op == "sleep":
                text = show.Asleep(self._agent.keeper.request(Sleep)).text()
            else:  # its answer comes when it is awake again
                text = show.Hibernated(self._agent.keeper.take(Hibernate, WokenLater, {"idle": True})).text()
        except GpuckptError as e:
            text = str(e)
            # A cell that has come waits until the kernel is awake again, and so runs, or has run by now.
            has_come = cells.wait_or_run() or cells.begun > before
            if isinstance(e, (Busy, Cancelled)) and has_come:
                text = f"Not {'asleep' if op == 'sleep' else 'hibernated'}: another cell was run."
        if asked:
            self._agent.cells.show(asked, {"text/plain": text})
