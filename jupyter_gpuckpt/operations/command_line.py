"""What reads the arguments of a request on a line, in a cell or a terminal: argparse, by the description."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

from .description import Argument, Command, Offered, arguments_of
from .requests import OfSnapshot, Request
from .values import folder

__all__ = ["add_arguments", "add_store_option", "arguments", "commands", "syntax", "typed"]

_IN_STORE = {
    "--to": "into a folder on another disk; `--store FOLDER` is how the snapshot is found there",
    "--store": "in this folder, in place of the usual store",
}


def commands(kind: type[Request[Any]] = Request) -> Iterator[tuple[Command, type[Request[Any]]]]:
    """Yield all that people can type which asks a keeper for something, and what it asks for."""
    yield from ((command, kind) for command in kind.commands)
    for more in kind.__subclasses__():
        yield from commands(more)


def add_arguments(parser: argparse.ArgumentParser, kind: type[Request[Any]], where: Offered) -> None:
    """Have a parser read what people give of a request there: as attributes that are called as its fields are."""
    groups: dict[str, Any] = {}
    if issubclass(kind, OfSnapshot) and where in kind.many:
        parser.add_argument("names", metavar="NAME", nargs="+", help="a snapshot")
    for field, said in arguments_of(kind, where):
        if field.name == "name" and issubclass(kind, OfSnapshot) and where in kind.many:
            continue
        to: Any = parser
        if said.alone:
            if said.alone not in groups:
                needed = any(one.required for _, one in arguments_of(kind, where) if one.alone == said.alone)
                groups[said.alone] = parser.add_mutually_exclusive_group(required=needed)
            to = groups[said.alone]
        _add(to, field, said, where)


def _add(to: Any, field: dataclasses.Field[Any], said: Argument, where: Offered) -> None:
    by_flag = said.flags and where not in said.placed_in
    names = said.flags if by_flag else (field.name,)
    more: dict[str, Any] = {"help": said.help}
    if by_flag:
        more |= {"dest": field.name, **({"required": True} if said.required and not said.alone else {})}
    if field.default is False:
        to.add_argument(*names, action="store_true", **more)
        return
    optional = by_flag or where in said.optional_in
    if optional:
        factory = field.default_factory
        empty = factory() if factory is not dataclasses.MISSING else field.default
        is_text = said.parse is None and not said.choices
        more["default"] = "" if empty in (None, dataclasses.MISSING) and is_text else empty
    if not by_flag and optional and said.nargs is None:
        more["nargs"] = "?"
    if said.nargs is not None:
        more["nargs"] = said.nargs
    if by_flag and field.type == "list[str]":
        more |= {"action": "append", "default": []}
    if said.metavar:
        more["metavar"] = said.metavar
    if said.choices:
        more |= {"choices": said.choices, "metavar": "|".join(said.choices)}
    if said.parse is not None:
        more["type"] = said.parse
    to.add_argument(*names, **more)


def add_store_option(parser: argparse.ArgumentParser, kind: type[Request[Any]]) -> None:
    """Have a parser read in which folder the snapshot is, where that can be said."""
    if kind.store_option:
        parser.add_argument(kind.store_option, metavar="FOLDER", type=folder, help=_IN_STORE[kind.store_option])


def arguments(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> list[argparse.Action]:
    """Return what a command takes, but for some options."""
    return [action for action in parser._actions if not {*without} & {*action.option_strings}]


def syntax(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> list[str]:
    """Return how a command's arguments are typed, but for some options: in pieces that stay together."""
    taken = arguments(parser, without)
    alone = {id(action): group for group in parser._mutually_exclusive_groups for action in group._group_actions}
    pieces, done = [], []
    for action in sorted(taken, key=lambda one: bool(one.option_strings)):
        group = alone.get(id(action))
        if group is None:
            pieces.append(typed(action, optional=not action.required))
        elif group not in done:
            done.append(group)
            either = " | ".join(typed(one, optional=False) for one in group._group_actions if one in taken)
            pieces.append(either if group.required else f"[{either}]")
    return pieces


def typed(action: argparse.Action, *, optional: bool) -> str:
    """Return how one argument is typed."""
    value = str(action.metavar or "|".join(action.choices or ())) if action.nargs != 0 else ""
    if action.option_strings:
        text = " ".join(filter(None, [action.option_strings[0], value]))
        return f"[{text}]" if optional else text
    several = value if " " in value else f"[{value} ...]"  # some words that are typed like that say how many
    many = {"+": f"{value} [{value} ...]", "*": several, "?": f"[{value}]" if optional else value}
    return many.get(str(action.nargs), value)
