"""Look at everything on this machine that a save and a restore need."""

from __future__ import annotations

from .checks import Check, works
from .criu_checks import criu_checks
from .gpu_checks import gpu_checks
from .jupyter_checks import jupyter_checks
from .store_checks import store_checks
from .system_checks import system_checks

__all__ = ["examine", "works"]


def examine(deep: bool = False) -> list[Check]:
    """Return every check of this machine, in the order in which a person would mend them.

    It changes nothing and raises nothing that a check can say.

    Parameters
    ----------
    deep : also save a small process and bring it back, which takes a fraction of a second.
    """
    system = system_checks()
    if not system[0].ok:
        return system
    return [
        *system,
        *criu_checks(deep),
        *gpu_checks(),
        *store_checks(),
        *jupyter_checks(),
    ]
