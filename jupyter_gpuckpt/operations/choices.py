"""What a person chooses for a kernel in place of what the settings say: it holds for its next start, too."""

from __future__ import annotations

from ..quick_dataclass import dataclass

__all__ = ["AutoSave", "Choices"]


@dataclass(frozen=True)
class AutoSave:
    """By what rule a kernel is saved by itself."""

    after: float
    """After cells that have run for so many seconds."""
    keep: int = 20
    """How many of these snapshots are kept."""
    under: int | None = None
    """Bytes of the store beyond which the oldest of them go."""
    every: float | None = None
    """Not after cells, but every so many seconds in which it has done something, also while a cell runs."""


@dataclass(frozen=True)
class Choices:
    """What was chosen for one kernel."""

    auto: AutoSave | None = None
    """By what rule it is saved by itself; None for what the setting says."""
    auto_off: bool = False
    """Whether it is not saved by itself, whatever the setting says."""
    sleep_after: float | None = None
    """After how many idle seconds it goes to sleep by itself, 0 for never; None for what the setting says."""
    awake: bool = False
    """Whether nobody but the user may put it to sleep."""
