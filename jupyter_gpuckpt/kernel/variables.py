"""What a kernel's variables are, as far as it can be told in a moment: names, types and sizes, never a value.

Nothing of a variable is called but what is known to be quick and harmless: a type of the person's own may do anything
when it is asked for its length.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["describe"]

_MOST = 2000
_TIME = 0.1  # seconds
_COUNTED = (str, bytes, bytearray, list, tuple, dict, set, frozenset, range)
_SIZED = (*_COUNTED, int, float, complex, bool, type(None))


def describe(shell: Any) -> dict[str, Any]:
    """Return the variables of an IPython shell, in the order of their names, and how many were left out.

    Each has ``name``, ``type`` and ``identity`` (where the object lies), and, where that is known, ``size`` (bytes of
    its own, or of an array's elements), ``length`` or ``shape``, ``dtype``, ``device`` and ``address`` of its elements.
    """
    hidden = getattr(shell, "user_ns_hidden", {})
    names = sorted(name for name in list(shell.user_ns) if name not in hidden and not name.startswith("_"))
    until = time.monotonic() + _TIME
    found = list(_until(until, names, shell.user_ns))
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
        if _is(kind, "numpy", "ndarray"):
            data = value.__array_interface__["data"][0]
            return {"size": value.nbytes, "shape": list(value.shape), "dtype": str(value.dtype), "address": data}
        if _is(kind, "torch", "Tensor") or _is(kind, "torch.nn.parameter", "Parameter"):
            on_cpu = value.device.type == "cpu"
            return {
                "size": value.numel() * value.element_size(),
                "shape": list(value.shape),
                "dtype": str(value.dtype),
                "device": str(value.device),
                **({"address": value.data_ptr()} if on_cpu else {}),
            }
        if _is(kind, "pandas", "DataFrame") or _is(kind, "pandas", "Series"):
            return {"shape": list(value.shape)}
    except Exception:  # noqa: BLE001 - a tensor without storage, say: less is known of it
        return {}
    return {}


def _is(kind: type, module: str, name: str) -> bool:
    """Tell whether a type is this class of a module that is loaded; a class of the same name is not."""
    return kind.__name__ == name and getattr(sys.modules.get(module), name, None) is kind
