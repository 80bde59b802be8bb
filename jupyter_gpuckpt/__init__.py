"""Save a live GPU notebook kernel under a name, and restore it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from .kernel.hooks import Resumed, after_restore, before_save, generation_id

__all__ = ["Resumed", "after_restore", "before_save", "generation_id", "load_ipython_extension"]
__version__ = "0.1.0"


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Offer ``%gpuckpt`` in this shell (``%load_ext jupyter_gpuckpt``)."""
    from .kernel.magic import register

    register(shell)


def __getattr__(name: str) -> object:
    """Load what a kernel's code uses when it does: servers, keepers and the broker import this package, too."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .kernel import hooks

    return getattr(hooks, name)


def __dir__() -> list[str]:
    """Name those, too: for completion, and for what documents them."""
    return sorted({*globals(), *__all__})
