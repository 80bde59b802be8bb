"""Dataclasses as JSON and back: what another process or an earlier version wrote is checked where it enters.

Types that can be checked: ``str``, ``int``, ``float``, ``bool``, ``None``, ``object`` and ``Any`` (anything), ``list``,
``tuple``, ``dict`` and ``Mapping`` with text as keys, dataclasses, ``Literal``, and unions. Dataclasses in a union are
told apart by their tags: fields whose type is a ``Literal`` of one value. A field's ``name`` in its metadata is what it
is called in JSON, where that is no name in Python.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, overload

__all__ = ["Odd", "from_json", "to_json"]

T = TypeVar("T")


class Odd(ValueError):
    """A value is not of its type; the text says which value, and what it should be."""


def to_json(value: object) -> Any:
    """Return a dataclass, and those in it, as JSON objects; a field that is None by default is left out where it is."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        members = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
        written = (pair for pair in members if pair[1] is not None or pair[0].default is not None)
        return {_called(field): to_json(member) for field, member in written}
    if isinstance(value, Mapping):
        return {key: to_json(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(member) for member in value]
    return value


@overload
def from_json(kind: type[T], raw: object) -> T: ...
@overload
def from_json(kind: types.UnionType, raw: object) -> Any: ...
def from_json(kind: Any, raw: object) -> Any:
    """Return the dataclass that a JSON object is; members that it has no field for are those of a later version.

    Raises
    ------
    Odd : it is not one.
    """
    return _checked(kind, raw, "")


def _checked(kind: Any, raw: object, at: str) -> Any:
    """Return what JSON is as a value of a type; `at` is where it stands."""
    if type(raw) is kind or kind in (Any, object):  # a bool is no number
        return raw
    if _is_dataclass(kind):
        return _object(kind, raw, at)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        if any(type(raw) is type(one) and raw == one for one in inner):
            return raw
        raise Odd(f"{at or 'it'} is {_shown(raw)}, and not one of: {', '.join(map(str, inner))}")
    if origin in (Union, types.UnionType):
        return _one_of(inner, raw, at)
    if origin is list and isinstance(raw, list):
        return [_checked(inner[0], member, f"{at}[{i}]") for i, member in enumerate(raw)]
    if origin is tuple and inner[-1] is ... and isinstance(raw, list):
        return tuple(_checked(inner[0], member, f"{at}[{i}]") for i, member in enumerate(raw))
    if origin is tuple and isinstance(raw, list) and len(raw) == len(inner):
        return tuple(_checked(one, raw[i], f"{at}[{i}]") for i, one in enumerate(inner))
    if origin in (dict, Mapping) and isinstance(raw, dict):
        return {key: _checked(inner[1], member, f"{at}.{key}") for key, member in raw.items()}
    if kind is float and type(raw) is int:
        with contextlib.suppress(OverflowError):
            return float(raw)
    raise Odd(f"{at or 'it'} is {_shown(raw)}, and not {_name(kind)}")


def _object(kind: Any, raw: object, at: str) -> Any:
    if not isinstance(raw, dict):
        raise Odd(f"{at or 'it'} is {_shown(raw)}, and not an object")
    found = {}
    for field, its_kind in _fields(kind):
        name = _called(field)
        where = f"{at}.{name}".lstrip(".")
        if name in raw:
            found[field.name] = _checked(its_kind, raw[name], where)
        elif field.default is field.default_factory is dataclasses.MISSING:
            raise Odd(f"{where} is missing")
    return kind(**found)


def _one_of(kinds: tuple[Any, ...], raw: object, at: str) -> Any:
    if raw is None and types.NoneType in kinds:
        return None
    some = [kind for kind in kinds if kind is not types.NoneType]
    fitting = some if len(some) == 1 else [kind for kind in some if _is_tagged_as(kind, raw)]
    for kind in fitting:
        try:
            return _checked(kind, raw, at)
        except Odd:
            if len(fitting) == 1:
                raise  # which says what of it is odd
    raise Odd(f"{at or 'it'} is {_shown(raw)}, and none of: {', '.join(map(_name, kinds))}")


def _is_tagged_as(kind: Any, raw: object) -> bool:
    """Tell whether JSON has the tags of a dataclass; any other type has none."""
    if not _is_dataclass(kind):
        return True
    tags = ((field.name, typing.get_args(its)) for field, its in _fields(kind) if typing.get_origin(its) is Literal)
    return isinstance(raw, dict) and all(raw.get(name) == values[0] for name, values in tags if len(values) == 1)


def _called(field: dataclasses.Field[Any]) -> str:
    return str(field.metadata.get("name", field.name))


def _is_dataclass(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind)


@functools.cache
def _fields(kind: Any) -> list[tuple[dataclasses.Field[Any], Any]]:
    """Return the fields of a dataclass, each with its type."""
    kinds = typing.get_type_hints(kind)
    return [(field, kinds[field.name]) for field in dataclasses.fields(kind)]


def _name(kind: Any) -> str:
    if kind is types.NoneType:
        return "nothing"
    return str(kind) if typing.get_origin(kind) is not None else getattr(kind, "__name__", str(kind))


def _shown(raw: object) -> str:
    return ascii(raw)[:60]
