"""What a kernel's variables are, as far as it can be told in a moment: names, types and sizes, never a value.

Nothing of a variable is called but what is known to be quick and harmless: a type of the user's own may do anything
when it is asked for its length.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from .holdings import Budget, array_of, holdings, is_class

__all__ = ["describe"]

_MOST = 2000
_TIME = 0.1  # seconds
_OBJECTS = 100_000
"""So many objects are followed at most."""
_COUNTED = (str, bytes, bytearray, list, tuple, dict, set, frozenset, range)
_SIZED = (*_COUNTED, int, float, complex, bool, type(None))


def describe(shell: Any) -> dict[str, Any]:
    """Return the variables of an IPython shell, in the order of their names, and how many were left out.

    Each has ``name``, ``type`` and ``identity`` (where the object lies), and, where that is known, ``size`` (bytes of
    its own, or of an array's elements), ``length`` or ``shape``, ``dtype`` and ``device``, and what it holds
    (`holdings`).
    """
    hidden = getattr(shell, "user_ns_hidden", {})
    names = sorted(name for name in list(shell.user_ns) if name not in hidden and not name.startswith("_"))
    until = time.monotonic() + _TIME
    found = list(_until(until, names, shell.user_ns))
    budget = Budget(_OBJECTS)
    for about in found:
        about.update(_inside(shell.user_ns.get(about["name"]), about["identity"], budget))
    return {"variables": found, "left_out": len(names) - len(found)}


def _until(until: float, names: list[str], namespace: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for name in names[:_MOST]:
        if time.monotonic() > until:
            return
        value = namespace.get(name)
        kind = type(value)
        about = {"name": name, "type": f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")}
        yield {**about, "identity": id(value), **_more(value, kind)}


def _more(value: Any, kind: type) -> dict[str, Any]:
    if kind in _SIZED:
        length = {"length": len(value)} if kind in _COUNTED else {}
        return {"size": sys.getsizeof(value), **length}
    try:
        if (array := array_of(value, kind)) is not None:
            return {key: array[key] for key in ("size", "shape", "dtype", "device") if key in array}
        if is_class(kind, "pandas", "DataFrame") or is_class(kind, "pandas", "Series"):
            return {"shape": list(value.shape)}
    except Exception:  # noqa: BLE001 - a tensor without storage, say: less is known of it
        return {}
    return {}


def _inside(value: Any, identity: int, budget: Budget) -> dict[str, Any]:
    try:
        return holdings(value, budget) if id(value) == identity else {}
    except Exception:  # noqa: BLE001 - as above, or another thread changed it meanwhile
        return {}
