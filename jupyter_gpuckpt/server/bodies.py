"""What the REST API takes for an operation on a kernel, by its description."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..operations.description import Argument, Offered, arguments_of
from ..operations.requests import Request

__all__ = ["Unfit", "member", "members", "request"]

_TYPES: Mapping[str, type] = {"str": str, "bool": bool, "int": int, "list[str]": list}
STORE = "store"


class Unfit(ValueError):
    """Members do not go together, or one is missing; the text says which."""


def members(kind: type[Request[Any]]) -> dict[str, type]:
    """Return the members that a request for an operation can have, and their types."""
    found = dict(member(field, said) for field, said in arguments_of(kind, Offered.REST))
    return {**found, **({STORE: str} if kind.store_option else {})}


def request(kind: type[Request[Any]], body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is asked of a keeper for these members; an empty text, or None for a number, is one left out.

    Raises
    ------
    Unfit : they are not what the description has.
    """
    found: dict[str, Any] = {}
    excluding: dict[str, str] = {}
    for field, said in arguments_of(kind, Offered.REST):
        name, _ = member(field, said)
        value = body[name]
        is_there = value != "" and value is not None and value is not False
        if said.required and not is_there:
            raise Unfit(f"It has no {name!r}.")
        if said.alone and is_there and excluding.setdefault(said.alone, name) != name:
            raise Unfit(f"It has both {excluding[said.alone]!r} and {name!r}.")
        if value is None and field.default is not dataclasses.MISSING:
            value = field.default
        if said.most is not None and not 1 <= value <= said.most:
            raise Unfit(f"Its {name!r} is not from 1 to {said.most}.")
        if said.member is not None:
            value = [] if value is None else [value]
        found[str(field.metadata.get("name", field.name))] = value
    return {**found, **({STORE: body[STORE]} if kind.store_option else {})}


def member(field: dataclasses.Field[Any], said: Argument) -> tuple[str, type]:
    """Return what an argument is called in a request of the REST API, and its type there."""
    kind = str(field.type).removesuffix(" | None")
    return said.member or (str(field.metadata.get("name", field.name)), _TYPES[kind])
