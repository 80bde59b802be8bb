"""What a check of the machine says, and what all of them together mean."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..spelling import in_a_terminal

__all__ = ["Check", "works"]


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes
    ----------
    name : what was looked at, in a word or two.
    ok : whether it is as it should be.
    required : whether a save and a restore need it.
    found : what is there.
    means : what that means for a user who saves kernels.
    mend : what to do about it; empty when `ok`.
    """

    name: str
    ok: bool
    required: bool
    found: str
    means: str
    mend: str


def works(checks: Iterable[Check]) -> bool:
    """Return whether a save and a restore would work: nothing that they need is amiss."""
    return all(check.ok for check in checks if check.required)


def judge(name: str, ok: bool, found: str, means: str, mend: str, *, required: bool = True) -> Check:
    """Return a check, as it is said in a terminal; what to do is left out where nothing is to be done."""
    return Check(name, ok, required, in_a_terminal(found), in_a_terminal(means), "" if ok else in_a_terminal(mend))
