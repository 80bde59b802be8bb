"""Dataclasses that are quick to define, for modules that define dozens: what processes say to each other.

`dataclasses.dataclass` writes Python for each method of each class and compiles it, 1 to 2 ms for a frozen one: a
quarter of the time in which a command starts. Those here share methods that go by the fields. What they cost is paid
per object instead, a few microseconds, so what makes objects by the thousand keeps to `dataclasses`.

For everything else, and for type checkers, they are dataclasses: `fields`, `replace` and `asdict` take them. What
inherits from one has to be one of these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["dataclass"]

if TYPE_CHECKING:
    from dataclasses import dataclass
else:
    import dataclasses
    import functools

    def dataclass(cls=None, /, *, frozen=False, kw_only=False):
        """Make a class a dataclass, which has equality and a representation."""
        if cls is None:
            return functools.partial(dataclass, frozen=frozen, kw_only=kw_only)
        if cls.__doc__ is None:
            cls.__doc__ = cls.__name__  # the module would make one of the signature, which takes longer than the rest
        own = set(vars(cls))
        cls = dataclasses.dataclass(cls, init=False, repr=False, eq=False, kw_only=kw_only)
        shared = {"__init__": _init_of(cls), "__repr__": _repr, "__eq__": _eq, "__hash__": _hash if frozen else None}
        if frozen:
            shared |= {"__setattr__": _refuse, "__delattr__": _refuse}
        for name, method in shared.items():
            if name not in own:
                setattr(cls, name, method)
        return cls

    def _init_of(cls):
        fields = [field for field in dataclasses.fields(cls) if field.init]
        names = {field.name for field in fields}
        placed = [field.name for field in fields if not field.kw_only]
        defaults = {
            field.name: field.default for field in dataclasses.fields(cls) if field.default is not dataclasses.MISSING
        }
        factories = [
            (field.name, field.default_factory)
            for field in dataclasses.fields(cls)
            if field.default_factory is not dataclasses.MISSING
        ]
        needed = names - defaults.keys() - {name for name, _ in factories}
        then = getattr(cls, "__post_init__", None)

        def init(self, /, *places, **values):
            given = dict(zip(placed, places, strict=False))
            if len(places) > len(placed) or given.keys() & values.keys():
                raise TypeError(f"{cls.__name__}() takes {len(placed)} arguments by their places, each once")
            given |= values
            if unknown := given.keys() - names:
                raise TypeError(f"{cls.__name__}() has no {', '.join(sorted(unknown))}")
            if missing := needed - given.keys():
                raise TypeError(f"{cls.__name__}() lacks {', '.join(sorted(missing))}")
            members = self.__dict__
            members |= defaults
            members |= given
            for name, factory in factories:
                if name not in members:
                    members[name] = factory()
            if then is not None:
                then(self)

        return init

    def _repr(self):
        shown = (f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if f.repr)
        return f"{type(self).__qualname__}({', '.join(shown)})"

    def _eq(self, other):
        if type(other) is not type(self):
            return NotImplemented
        return all(getattr(self, f.name) == getattr(other, f.name) for f in dataclasses.fields(self) if f.compare)

    def _hash(self):
        return hash(tuple(getattr(self, f.name) for f in dataclasses.fields(self) if f.compare))

    def _refuse(self, name, *_):
        raise dataclasses.FrozenInstanceError(f"{type(self).__name__}.{name} is set once")
