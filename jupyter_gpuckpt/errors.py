"""The errors a user can meet: what happened, why, and what to do next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from .spelling import Spell, in_a_terminal
from .subject import said

__all__ = [
    "BadName",
    "Busy",
    "Cancelled",
    "Damaged",
    "DriverError",
    "Elsewhere",
    "ForkFailed",
    "GpuFailed",
    "GpuckptError",
    "Incompatible",
    "KeeperGone",
    "KernelLost",
    "KernelWaits",
    "NameTaken",
    "NoRoomYet",
    "NoSuchKernel",
    "NoSuchSnapshot",
    "NotOwn",
    "OtherVersion",
    "Pinned",
    "Refused",
    "RemoteChanged",
    "RemoteError",
    "Replayed",
    "RestoreFailed",
    "RevokedKey",
    "SaveFailed",
    "Sealed",
    "StoreError",
    "Unavailable",
    "Unconfirmed",
    "UnknownKey",
    "Unsigned",
    "Untrusted",
    "WrongName",
    "WrongSignature",
]


class GpuckptError(Exception):
    """Base of every error of the project.

    Parameters
    ----------
    what : what happened, one sentence.
    why : the cause, with the cause's own words where there are any.
    then : what the user can do next; commands as in `spelling`. In all three, ``{kernel}`` as in `subject`.
    data : whatever describes the case further (JSON types only): it crosses process borders.
    """

    kinds: ClassVar[dict[str, type[GpuckptError]]] = {}

    def __init_subclass__(cls) -> None:
        GpuckptError.kinds[cls.__name__] = cls

    def __init__(self, what: str, why: str = "", then: str = "", **data: Any) -> None:
        what, why, then = said(what), said(why), said(then)
        super().__init__(what, why, then)
        self.what, self.why, self.then, self.data = what, why, then, data

    def __str__(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append(f"Why: {self.why}")
        if self.then:
            lines.append(f"Next: {self.then}")
        return in_a_terminal("\n".join(lines))

    def sentences(self) -> str:
        """Return all of it as sentences, one after the other; commands as in `spelling`."""
        parts = [part if part[-1] in ".:!?" else f"{part}." for part in (self.what, self.why, self.then) if part]
        return " ".join(part[0].upper() + part[1:] if part.split()[0].isalpha() else part for part in parts)

    def spelled(self, spell: Spell) -> GpuckptError:
        """Have its commands spelled as they are typed where it is shown; return it."""
        self.what, self.why, self.then = map(spell, (self.what, self.why, self.then))
        return self

    def as_dict(self) -> dict[str, Any]:
        """Return the error as JSON types; `from_dict` is its inverse."""
        return {
            "kind": type(self).__name__,
            "what": self.what,
            "why": self.why,
            "then": self.then,
            "data": self.data,
        }

    @staticmethod
    def from_dict(d: dict[str, Any]) -> GpuckptError:
        """Return the error that `as_dict` described, of the class it had."""
        kind = GpuckptError.kinds.get(str(d.get("kind")), GpuckptError)
        data = d.get("data")
        return kind(
            str(d.get("what", "")),
            str(d.get("why", "")),
            str(d.get("then", "")),
            **(data if isinstance(data, dict) else {}),
        )


class Unavailable(GpuckptError):
    """This machine, user or kernel cannot save or restore at all."""


class Refused(GpuckptError):
    """The request was refused before anything was touched."""

    @classmethod
    def merged(cls, refusals: Sequence[Refused]) -> Refused:
        """Return several reasons to refuse one request as one error; ``data["reasons"]`` has what each one said."""
        if len(refusals) == 1:
            return refusals[0]
        reasons: list[dict[str, Any]] = []
        for one in refusals:
            reasons += one.data.get("reasons") or [{"why": one.why, **one.data}]
        why = "\n".join([f"{len(reasons)} problems:", *(f"- {reason['why']}" for reason in reasons)])
        then = " ".join(dict.fromkeys(one.then for one in refusals))
        return cls(refusals[0].what, why, then, reasons=reasons)


class NotOwn(Refused):
    """The snapshot is another notebook's, and that was not said; ``data["from"]`` is how to say it."""


class Busy(Refused):
    """Another operation on the same kernel is still under way."""


class Cancelled(GpuckptError):
    """The user interrupted the operation; the kernel is as it was."""


class SaveFailed(GpuckptError):
    """A save failed and was undone: the kernel continues as before."""


class GpuFailed(SaveFailed):
    """A GPU has failed for the kernel, so that it can never be saved as it is."""


class RestoreFailed(GpuckptError):
    """A restore failed; the snapshot is as it was, and the text says which kernel runs now."""


class ForkFailed(GpuckptError):
    """A copy of a kernel did not come up; none is left, and the kernel continues."""


class KernelLost(GpuckptError):
    """The kernel is gone, and cannot be brought back but from a snapshot."""


class KernelWaits(KernelLost):
    """The kernel is not back only because the GPU has too little memory free: it can be tried again. Whoever does not
    do that has lost it."""


class DriverError(GpuckptError):
    """A call of the CUDA driver failed or did not return in time."""


class NoRoomYet(DriverError):
    """GPU state was not moved back, nor was it tried: the GPU has too little memory free. It waits in host memory."""


class StoreError(GpuckptError):
    """The store could not be read or written."""


class BadName(StoreError):
    """The text cannot be the name of a snapshot."""


class NameTaken(StoreError):
    """A snapshot or a job of that name exists already."""


class Pinned(StoreError):
    """A snapshot that is to be kept was to be removed or replaced."""


class NoSuchSnapshot(StoreError):
    """No snapshot of that name exists."""


class Damaged(StoreError):
    """A snapshot's bytes are not the ones that were saved."""


class Incompatible(StoreError):
    """A snapshot was written in a format that this version does not know."""


class Untrusted(StoreError):
    """A snapshot was not made by somebody who is trusted, or is not the one that it claims to be."""


class Unsigned(Untrusted):
    """A snapshot has no signature."""


class WrongSignature(Untrusted):
    """A snapshot's bytes are not those that were signed."""


class UnknownKey(Untrusted):
    """A snapshot was signed by somebody who is not trusted."""


class RevokedKey(Untrusted):
    """A snapshot was signed with a key that is no longer trusted."""


class WrongName(Untrusted, Damaged):
    """A snapshot stands under another name than the one that it was signed with."""


class Replayed(Untrusted):
    """A snapshot is older than one of the same maker and name that was seen before."""


class RemoteError(StoreError):
    """A remote could not be read or written, or what it holds cannot be used."""


class Sealed(RemoteError):
    """What was sent elsewhere is encrypted, and no key on this machine fits opens it."""


class RemoteChanged(RemoteError):
    """A remote is not encrypted as it was when it was used from here before."""


class Unconfirmed(RemoteError):
    """It is not known who can read what would be sent to a remote."""


class NoSuchKernel(GpuckptError):
    """No running kernel, and no job, answers to that name."""


class Elsewhere(Refused):
    """A kernel or job is another machine's; ``data["host"]`` names it."""


class KeeperGone(GpuckptError):
    """The keeper of a kernel does not answer."""


class OtherVersion(Refused):
    """The keeper of a kernel is of a version that this one cannot talk to; the kernel keeps running."""
