"""Look at everything on this machine that a save and a restore need."""

from __future__ import annotations

from jupyter_gpuckpt.client.broker_connection import is_needed

from .broker_checks import broker_check
from .checks import Check, works
from .criu_checks import criu_checks
from .engine_checks import ENGINES
from .gpu_checks import gpu_checks
from .jupyter_checks import jupyter_checks
from .store_checks import store_checks
from .system_checks import system_checks

__all__ = ["examine", "works"]


def examine(deep: bool = False, engine: str = "") -> list[Check]:
    """Return every check of this machine, in the order in which a user would mend them.

    It changes nothing and raises nothing that a check can say.

    Parameters
    ----------
    deep : also save a small process and bring it back, which takes a fraction of a second.
    engine : of `ENGINES`; how it stops what it has started is checked, too.
    """
    served = broker_check() if is_needed() else None
    system = system_checks(served)
    if not system[0].ok:
        return system
    return [
        *system,
        # The broker has a criu of its own, which only it can try; a user without root has no use for another.
        *([] if served is not None else criu_checks(deep)),
        *gpu_checks(),
        *store_checks(),
        *jupyter_checks(),
        *(ENGINES[engine]() if engine else []),
    ]
