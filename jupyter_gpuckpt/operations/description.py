"""How an operation is described: the words for people, the arguments that they give, and where each is offered.

Standard library only, and little of it: a kernel imports this.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

from ..quick_dataclass import dataclass

__all__ = [
    "EVERYWHERE",
    "IN_CELLS",
    "IN_TERMINALS",
    "TYPED",
    "Argument",
    "Command",
    "Offered",
    "argument",
    "arguments_of",
    "given",
]


class Offered(Enum):
    """Where an operation, or one of its arguments, is offered."""

    CELL = "%gpuckpt"
    TERMINAL = "jupyter gpuckpt"
    REST = "REST API"


EVERYWHERE = frozenset(Offered)
IN_CELLS = frozenset({Offered.CELL})
IN_TERMINALS = frozenset({Offered.TERMINAL})
TYPED = IN_CELLS | IN_TERMINALS


@dataclass(frozen=True)
class Command:
    """What people type, and what the help says of it: its line in the list of commands, and more where there is."""

    name: str
    summary: str
    description: str = ""
    """In both, ``{kernel}`` stands for what the kernel is called there."""


@dataclass(frozen=True)
class Argument:
    """One argument as people give it.

    Attributes
    ----------
    flags : how it begins on a line; without any it is told by its place.
    help : what is said of it.
    metavar : what stands for its value in the help.
    parse : makes its value of a word, and raises `argparse.ArgumentTypeError`; without one it is text.
    offered : where it is.
    placed_in : where it is told by its place though it has flags.
    optional_in : where one that is told by its place can be left out.
    required : whether it cannot be left out.
    nargs : as argparse has it, for one that takes several words.
    choices : the words that it can be.
    member : what it is called in a request of the REST API, and its type there, where they are others.
    most : how large a number, from 1 on, the REST API takes.
    alone : those that have the same text here exclude each other; one has to be given where one of them is `required`.
    """

    flags: tuple[str, ...] = ()
    help: str = ""
    metavar: str = ""
    parse: Callable[[str], Any] | None = None
    offered: frozenset[Offered] = EVERYWHERE
    placed_in: frozenset[Offered] = frozenset()
    optional_in: frozenset[Offered] = frozenset()
    required: bool = False
    nargs: str | None = None
    choices: tuple[str, ...] = ()
    member: tuple[str, type] | None = None
    most: int | None = None
    alone: str = ""


def argument(*flags: str, default: Any = dataclasses.MISSING, name: str | None = None, **said: Any) -> Any:
    """Return a dataclass's field that people give as an `Argument`; `name` is what it is called in JSON."""
    metadata = {"argument": Argument(flags, **said), **({} if name is None else {"name": name})}
    if isinstance(default, list):
        return dataclasses.field(default_factory=list, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def arguments_of(kind: type[Any], where: Offered) -> Iterator[tuple[dataclasses.Field[Any], Argument]]:
    """Yield the fields of a request that people give there, and how."""
    for field in dataclasses.fields(kind):
        said = field.metadata.get("argument")
        if said is not None and where in said.offered:
            yield field, said


def given(kind: type[Any], where: Offered, values: object) -> dict[str, Any]:
    """Return the members of a request, by their names in JSON; `values` has them as attributes of the fields' names."""
    named = ((str(field.metadata.get("name", field.name)), field.name) for field, _ in arguments_of(kind, where))
    return {name: getattr(values, attribute) for name, attribute in named}
