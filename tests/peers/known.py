"""What is known to differ, and why: ``known.txt``, which people read and keep."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LIST", "Difference", "Verdict", "judge", "read"]

LIST = Path(__file__).with_name("known.txt")


@dataclass(frozen=True)
class Difference:
    """A test whose outcome is another with us than without; `seen` is what it says."""

    suite: str
    test: str
    seen: str


@dataclass(frozen=True)
class Verdict:
    """Differences, sorted."""

    new: list[Difference]
    known: list[tuple[Difference, str]]
    """Each with why it is there."""
    gone: list[str]
    """What the list has of these suites, and none of them differs in any more."""


def read(text: str) -> dict[tuple[str, str], str]:
    """Return why each pattern of tests is known to differ, by suite and pattern.

    A block is one or more lines ``SUITE TEST``, where TEST may have ``*``, and below, indented, why.

    Raises
    ------
    ValueError : a line is neither, or a block says no reason.
    """
    found: dict[tuple[str, str], str] = {}
    block: list[tuple[str, str]] = []
    why: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("#"):
            continue
        if line.strip() and not line[0].isspace():
            if why:
                raise ValueError(f"known.txt: an empty line is missing before {line!r}")
            suite, _, test = line.partition(" ")
            if not test.strip():
                raise ValueError(f"known.txt: {line!r} names no test")
            block.append((suite, test.strip()))
        elif line.strip():
            why.append(line.strip())
        elif block:
            if not why:
                raise ValueError(f"known.txt: {block[-1]} has no reason")
            found |= dict.fromkeys(block, " ".join(why))
            block, why = [], []
    return found


def judge(differences: Iterable[Difference], known: Mapping[tuple[str, str], str], suites: Iterable[str]) -> Verdict:
    """Return which differences are new, known, and gone from the `suites` that were run."""
    verdict = Verdict([], [], [])
    met: set[tuple[str, str]] = set()
    for difference in sorted(differences, key=lambda one: (one.suite, one.test)):
        entry = next((key for key in known if key[0] == difference.suite and _matches(difference.test, key[1])), None)
        if entry is None:
            verdict.new.append(difference)
        else:
            met.add(entry)
            verdict.known.append((difference, known[entry]))
    ran = set(suites)
    verdict.gone.extend(" ".join(entry) for entry in known if entry[0] in ran and entry not in met)
    return verdict


def _matches(test: str, pattern: str) -> bool:
    return bool(re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), test))
