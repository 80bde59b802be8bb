"""What objects hold, as far as it takes to tell later whether that changed: where it lies, never what it is.

Objects are followed as the garbage collector does, which runs no code of theirs.
"""

from __future__ import annotations

import collections
import functools
import gc
import sys
import types
import weakref
from typing import Any

__all__ = ["Budget", "array_of", "holdings", "is_class"]

_OBJECTS = 20_000
"""So many objects are followed at most of one."""
_PLACES = 4000
"""So many places of one are named at most."""
_CODE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodWrapperType)
_VALUES = (int, float, complex)
_FIXED = (*_VALUES, bool, str, bytes, range, slice, types.NoneType, types.EllipsisType, *_CODE)
"""What holds nothing that could become another."""
_FIXED_IN = frozenset({"datetime", "decimal", "fractions", "pyarrow.lib", "re", "torch", "zoneinfo"})
"""Nor does what these modules have, tensors apart."""
_OPEN = (
    *(list, tuple, dict, set, frozenset, collections.OrderedDict, collections.defaultdict, collections.deque),
    *(types.MethodType, types.SimpleNamespace, types.MappingProxyType, types.CellType, functools.partial, object),
)
"""What has nothing that the garbage collector does not see."""
_COUNTED = (list, tuple, dict, set, frozenset)
_ATTRIBUTES = 16
"""Bytes that an instance of a class has beyond its base's for attributes and weak references."""
_NOT_FOLLOWED = (types.FrameType, types.GeneratorType, types.CoroutineType)
_HEAD = 16
"""Bytes that an object begins with: its count of references, which says nothing of it, and its type."""


class Budget:
    """How many objects are still followed: a save waits for it."""

    def __init__(self, objects: int) -> None:
        self.objects = objects


def holdings(value: Any, budget: Budget) -> dict[str, Any]:
    """Return what a value holds; nothing where that is too much.

    ``trace``: a number that is another one when the value, or what it holds, is another object. ``data``: address and
    size of each array's elements, and of the values of numbers and texts: another one may lie where one was before.
    ``whole``: whether nothing can have changed while both, and what is in these places, are the same. ``holds``: the
    bytes of all arrays within it, and ``arrays`` how many these are, but of a table.
    """
    trace, held, arrays, whole = 0, 0, 0, True
    data: list[tuple[int, int]] = []
    seen: set[int] = set()
    pending = [value]
    while pending:
        if len(seen) + len(pending) > min(_OBJECTS, budget.objects):
            budget.objects -= len(seen)
            return {}
        one = pending.pop()
        kind = type(one)
        if kind is weakref.ref:
            continue  # who else looks at it is no part of it
        trace = hash((trace, id(one), id(kind)))
        if id(one) in seen:
            continue
        seen.add(id(one))
        if kind in _COUNTED and len(one) > _OBJECTS:
            return {}
        if (array := array_of(one, kind)) is not None:
            arrays += 1
            held += array["size"]
            trace = hash((trace, array.get("address"), array.get("version"), tuple(array["shape"]), array["dtype"]))
            whole &= array["plain"]
            if "address" in array and array["size"]:
                data.append((array["address"], array["size"]))
        elif _is_fixed(kind):
            place = _value(one, kind)
            whole &= place is not None
            if place and place[1]:
                data.append(place)
        elif (table := _table(one, kind)) is not None:
            columns, labels = table
            trace = hash((trace, *map(id, labels)))
            pending += columns
        else:
            whole &= _is_open(kind)
            if kind not in _NOT_FOLLOWED:
                pending += gc.get_referents(one)
    budget.objects -= len(seen)
    if len(data) > _PLACES:
        data, whole = [], False
    inside: dict[str, Any] = {}
    if arrays and array_of(value, type(value)) is None:
        inside = {"holds": held} if _table(value, type(value)) else {"arrays": arrays, "holds": held}
    return {"trace": trace, "data": data, "whole": whole, **inside}


def array_of(value: Any, kind: type) -> dict[str, Any] | None:
    """Return what is known of an array or a tensor; None of anything else.

    ``plain``: whether it is all at its ``address``, which is left out elsewhere: on a GPU, or where it has gaps.
    """
    if is_class(kind, "numpy", "ndarray"):
        where = {"address": value.__array_interface__["data"][0]} if value.flags.forc else {}
        about = {"size": value.nbytes, "shape": list(value.shape), "dtype": str(value.dtype)}
        return {**about, **where, "plain": bool(where) and not value.dtype.hasobject}
    if is_class(kind, "torch", "Tensor") or is_class(kind, "torch.nn.parameter", "Parameter"):
        where = {"address": value.data_ptr()} if value.device.type == "cpu" and value.is_contiguous() else {}
        return {
            "size": value.numel() * value.element_size(),
            "shape": list(value.shape),
            "dtype": str(value.dtype),
            "device": str(value.device),
            # torch counts what is written into it, on whatever device.
            "version": 0 if value.is_inference() else value._version,
            **where,
            "plain": bool(where),
        }
    return None


def is_class(kind: type, module: str, name: str) -> bool:
    """Tell whether a type is this class of a module that is loaded; a class of the same name is not."""
    return kind.__name__ == name and getattr(sys.modules.get(module), name, None) is kind


def _table(value: Any, kind: type) -> tuple[list[Any], list[Any]] | None:
    """Return columns and labels of a table; None of anything else. What pandas keeps for later is no part of it."""
    if is_class(kind, "pandas", "DataFrame") or is_class(kind, "pandas", "Series"):
        manager = value._mgr
        return [block.values for block in manager.blocks], list(manager.axes)
    return None


def _is_fixed(kind: type) -> bool:
    if kind in _FIXED or issubclass(kind, type) or kind.__module__ in _FIXED_IN:
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, (numpy.generic, numpy.dtype, numpy.ufunc))


def _value(one: Any, kind: type) -> tuple[int, int] | None:
    """Return where the value of an object that is fixed lies; nowhere of what has none; None where it is not known."""
    if kind in _VALUES:
        return id(one) + _HEAD, sys.getsizeof(one) - _HEAD
    if kind is bytes or (kind is str and one.isascii()):
        return id(one) + sys.getsizeof(one) - len(one) - 1, len(one)
    has_none = kind in (bool, types.NoneType, types.EllipsisType, *_CODE) or issubclass(kind, type)
    return (0, 0) if has_none else None


def _is_open(kind: type) -> bool:
    """Tell whether the garbage collector sees all that an object of this type has."""
    base = next(one for one in kind.__mro__ if one in _OPEN)
    return kind is base or kind.__basicsize__ <= base.__basicsize__ + _ATTRIBUTES
