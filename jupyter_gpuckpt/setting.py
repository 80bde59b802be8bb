"""One thing that can be chosen: how it is read, what holds where nothing is said, and the words that describe it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from .errors import Refused

__all__ = [
    "Setting",
    "When",
    "is_not_off",
    "is_on",
    "parse_count",
    "parse_duration",
    "parse_paths",
    "parse_seconds",
    "parse_size",
    "parse_when",
]

T = TypeVar("T")


@dataclass(frozen=True)
class Setting(Generic[T]):
    """A value that an environment variable sets; called, it returns the one that holds.

    Attributes
    ----------
    variable : the environment variable.
    read : returns the value that a text means; raises `ValueError`, which says why it means none.
    otherwise : returns what holds without it.
    what : what it sets, for people.
    without : what holds without it, for people.
    more : the page below docs that says more.
    configurable : the class of the Jupyter server's configuration that has it, too; none, where a configuration is no
        place for it.
    """

    variable: str
    read: Callable[[str], T]
    otherwise: Callable[[], T]
    _: KW_ONLY
    what: str
    without: str
    more: str = ""
    configurable: str = "Gpuckpt"

    def __call__(self) -> T:
        """Return what holds now. Raises as `read_from` does."""
        return self.read_from(os.environ)

    def read_from(self, environment: Mapping[str, str]) -> T:
        """Return what holds where these variables are set.

        Raises
        ------
        Refused : what the variable says cannot be understood.
        """
        text = environment.get(self.variable)
        if not text:
            return self.otherwise()
        try:
            return self.read(text)
        except ValueError as e:
            raise Refused(
                f"The setting {self.variable} cannot be understood.",
                str(e),
                "Correct it where the Jupyter server is started.",
            ) from None

    @property
    def help(self) -> str:
        """What a configuration says of it."""
        return f"{self.what[:1].upper()}{self.what[1:]}. Without it: {self.without}. It wins over {self.variable}."

    @property
    def trait(self) -> str:
        """What a configuration calls it."""
        return self.variable.removeprefix("GPUCKPT_").lower()


# -- what texts mean: each returns the value, or raises `ValueError`

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SPANS = {"": 1.0, "S": 1.0, "M": 60.0, "MIN": 60.0, "H": 3600.0, "D": 86400.0}


def parse_size(text: str) -> int:
    """Return the bytes that a text such as ``500M`` or ``1.5T`` means."""
    digits = text.strip().upper().removesuffix("B")
    unit = digits[-1:] if digits[-1:] in "KMGT" else ""
    try:
        number = float(digits.removesuffix(unit))
    except ValueError:
        number = -1
    if not 0 <= number < 10**9:
        raise ValueError(f"{text!r} is not a size such as 500M, 20G or 1.5T")
    return int(number * _UNITS[unit])


def parse_duration(text: str) -> float | None:
    """Return the seconds that a text such as ``90``, ``30m`` or ``1.5h`` means; None for ``off``, and for 0."""
    plain = text.strip().upper()
    if plain == "OFF":
        return None
    unit = plain.lstrip("0123456789.").strip()
    try:
        number = float(plain.removesuffix(unit))
        seconds = number * _SPANS[unit]
    except (ValueError, KeyError):
        seconds = -1.0
    if not 0 <= seconds < 10**9:
        raise ValueError(f"{text!r} is neither a time such as 45s, 30m or 2h, nor off")
    return seconds or None


class When(NamedTuple):
    """When kernels are saved by themselves: after cells that took so long, or every so often (seconds)."""

    after: float = 0.0
    every: float | None = None


def parse_when(text: str) -> When | None:
    """Return what ``on``, ``5s`` (after cells of that length) or ``every 10m`` mean, and None for ``off``."""
    words = text.lower().split()
    if words == ["on"]:
        return When()
    if words[:1] == ["every"]:
        every = parse_duration(" ".join(words[1:]))
        return None if every is None else When(every=every)
    after = parse_duration(text)
    return None if after is None else When(after)


def parse_seconds(text: str) -> float:
    """Return a number of seconds."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number of seconds") from None


def parse_count(text: str) -> int:
    """Return a number of 1 and more."""
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is not a number of at least 1")
    return int(text)


def parse_paths(text: str) -> list[Path]:
    """Return paths with colons between them."""
    return [Path(path) for path in text.split(os.pathsep) if path]


def is_on(text: str) -> bool:
    """Tell whether a text says that something is on; any other word does not."""
    return text.lower() in ("on", "1", "yes", "true")


def is_not_off(text: str) -> bool:
    """Tell whether a text does not say that something is off."""
    return text.lower() not in ("off", "0", "no", "false")
