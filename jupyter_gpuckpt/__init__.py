"""Save a live GPU notebook kernel under a name, and restore it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .kernel.hooks import Resumed, after_restore, before_save, generation_id

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["Resumed", "after_restore", "before_save", "generation_id", "load_ipython_extension"]
__version__ = "0.1.0"


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Offer ``%gpuckpt`` in this shell (``%load_ext jupyter_gpuckpt``)."""
    from .kernel.magics import register

    register(shell)
