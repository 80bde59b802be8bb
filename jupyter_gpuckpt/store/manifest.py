"""The manifest: what one snapshot is, as the one file whose presence makes the snapshot exist.

On disk it is one JSON object whose last member is the BLAKE3 of every byte before that member, so
that a change of any byte is seen; and a line with the signature of whoever made it (`store.signatures`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timedelta
from typing import Any, NoReturn

from blake3 import blake3

from ..errors import BadName, Damaged, Incompatible, StoreError, WrongName
from .names import check_key, is_id
from .signatures import MAX_LINE, split

__all__ = ["FEATURES", "FORMAT", "MAX_SIZE", "Manifest", "check_format", "name_in"]

FORMAT = 2
"""The format that this version writes, and the only one that it reads."""

FEATURES: frozenset[str] = frozenset()
"""The mandatory features that this version knows."""

_MAX_SEALED = 16 * 1024 * 1024
MAX_SIZE = _MAX_SEALED + MAX_LINE
"""How long a manifest may be, in bytes, its signature included."""

_SEAL = b',"blake3":"'
_SEAL_END = b'"}\n'
_SEAL_SIZE = len(_SEAL) + 64 + len(_SEAL_END)
_HASH = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True)
class Manifest:
    """What a snapshot is: who it is, where it came from, and the hash of its contents.

    ``kernel``, ``machine``, ``cuda`` and ``process`` are the caller's own JSON objects; the store
    keeps them and looks at nothing in them.
    """

    name: str
    id: str
    message: str
    created: str
    """UTC, ISO 8601 with microseconds: ``2025-01-31T12:00:00.000000+00:00``."""
    parent: str | None
    """The id of the snapshot that the kernel last came from."""
    contents: str
    """The BLAKE3 of the snapshot's `Contents`, in hexadecimal."""
    size: int
    """Bytes of all files together, holes included."""
    stored: int
    """Bytes that were added to the store for it: what no snapshot before it held, compressed."""
    kernel: Mapping[str, Any]
    machine: Mapping[str, Any]
    cuda: Mapping[str, Any]
    process: Mapping[str, Any]
    format: int = FORMAT
    features: tuple[str, ...] = ()
    """Names of what a reader must know to use this snapshot."""

    def to_json(self) -> bytes:
        """Return the bytes to write.

        Raises
        ------
        StoreError : they would be more than 16 MiB.
        TypeError, ValueError : one of the caller's objects is not JSON.
        """
        text = json.dumps(asdict(self), separators=(",", ":"), sort_keys=True, allow_nan=False)
        body = text.encode("ascii")[:-1]
        sealed = body + _SEAL + blake3(body).hexdigest().encode("ascii") + _SEAL_END
        if len(sealed) > _MAX_SEALED:
            raise StoreError(
                f"The manifest of {self.name} would be too large.",
                f"it has {len(sealed)} bytes, at most {_MAX_SEALED} are allowed",
                "Save with a shorter note.",
                size=len(sealed),
            )
        return sealed

    @staticmethod
    def from_json(raw: bytes, name: str) -> Manifest:
        """Return the manifest that `raw` is, read from where the snapshot `name` keeps it.

        Who signed it is not looked at: `Trust.check` does that.

        Raises
        ------
        Incompatible : a newer version wrote it, or it needs a feature that is not known here.
        Damaged : a byte of it is not the one that was written, or it is no manifest at all.
        WrongName : it is that of another snapshot.
        """
        subject = f"The snapshot {name}"
        if len(raw) > MAX_SIZE:
            _damaged(name, f"its manifest is longer than {MAX_SIZE} bytes")
        try:
            raw, _ = split(raw)
        except ValueError as e:
            _damaged(name, str(e))
        try:
            found = json.loads(raw, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
        except (ValueError, RecursionError) as e:
            _damaged(name, f"its manifest is not JSON: {e}")
        if not isinstance(found, dict):
            _damaged(name, "its manifest is not a JSON object")
        check_format(found, subject)
        body = raw[:-_SEAL_SIZE]
        if raw[-_SEAL_SIZE:] != _SEAL + blake3(body).hexdigest().encode("ascii") + _SEAL_END:
            _damaged(name, "its manifest does not have the hash that it was written with")
        del found["blake3"]
        try:
            manifest = _build(found)
        except _OddError as e:
            _damaged(name, f"its manifest is not valid: {e}")
        if manifest.name != name:
            raise WrongName(
                f"The snapshot {name} has another snapshot's contents.",
                f"its manifest is that of the snapshot {manifest.name}, which was put in its place",
                f"Use another snapshot; `gpuckpt mv` gives a snapshot another name. `gpuckpt rm {name}` removes this "
                "one here.",
                name=name,
            )
        return manifest


def check_format(found: Mapping[str, Any], subject: str) -> None:
    """Refuse a JSON object whose ``format`` or ``features`` say that it needs a newer version.

    Raises
    ------
    Incompatible : what is asked for and what is known here are in its text.
    """
    number = found.get("format")
    then = "Update jupyter_gpuckpt. Nothing was changed."
    if type(number) is int and number == 1:
        raise Incompatible(
            f"{subject} was written by a version before the first release.",
            f"it has format 1, this version knows format {FORMAT}",
            "Set GPUCKPT_STORE to another folder, or delete this one. Nothing was changed.",
            format=1,
            known=FORMAT,
        )
    if type(number) is int and number > FORMAT:
        raise Incompatible(
            f"{subject} was written by a newer version.",
            f"it has format {number}, this version knows format {FORMAT}",
            then,
            format=number,
            known=FORMAT,
        )
    features = found.get("features")
    if not isinstance(features, list):
        return  # no manifest of any version: the caller's own checks say what it is
    unknown = sorted(f for f in features if isinstance(f, str) and f not in FEATURES)
    if unknown:
        raise Incompatible(
            f"{subject} needs a feature that this version does not know.",
            f"it needs {', '.join(ascii(f) for f in unknown)}",
            then,
            features=unknown,
        )


def name_in(raw: bytes, shown: str) -> str:
    """Return the name that a manifest has for itself, which lies in what is called `shown`; it is trusted already.

    Raises
    ------
    Damaged : it has none.
    """
    try:
        name = json.loads(split(raw)[0])["name"]
        if not isinstance(name, str):
            raise TypeError("it is not text")
        return check_key(name)
    except (ValueError, KeyError, TypeError, RecursionError, BadName) as e:
        raise Damaged(
            f"{shown} is damaged.",
            f"its manifest has no name: {e}",
            "Ask whoever saved it to send it again.",
            file=shown,
        ) from e


class _OddError(ValueError):
    """A member of a manifest is not what it must be."""


def _damaged(name: str, why: str) -> NoReturn:
    raise Damaged(
        f"The snapshot {name} is damaged.",
        why,
        f"Restore another snapshot; `gpuckpt rm {name}` removes this one.",
        name=name,
    )


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a member is there twice")
    return members


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _build(found: dict[str, Any]) -> Manifest:
    expected = {f.name for f in fields(Manifest)}
    if found.keys() != expected:
        odd = ", ".join(ascii(k) for k in sorted(found.keys() ^ expected))
        raise _OddError(f"missing or unknown: {odd}")
    if type(found["format"]) is not int or found["format"] != FORMAT:
        raise _OddError("format is not a known number")
    if found["features"] != []:
        raise _OddError("features is not a list of names")
    if not is_id(found["id"]):
        raise _OddError("id is not 32 hexadecimal digits")
    if found["parent"] is not None and not is_id(found["parent"]):
        raise _OddError("parent is not 32 hexadecimal digits")
    if not isinstance(found["message"], str):
        raise _OddError("message is not text")
    for member in ("kernel", "machine", "cuda", "process"):
        if not isinstance(found[member], dict):
            raise _OddError(f"{member} is not an object")
    if not (isinstance(found["contents"], str) and _HASH.fullmatch(found["contents"])):
        raise _OddError("contents is not a BLAKE3 hash")
    for member in ("size", "stored"):
        if type(found[member]) is not int or found[member] < 0:
            raise _OddError(f"{member} is not a number of bytes")
    return Manifest(
        name=_name(found["name"]),
        id=found["id"],
        message=found["message"],
        created=_moment(found["created"]),
        parent=found["parent"],
        contents=found["contents"],
        size=found["size"],
        stored=found["stored"],
        kernel=found["kernel"],
        machine=found["machine"],
        cuda=found["cuda"],
        process=found["process"],
    )


def _name(found: object) -> str:
    if not isinstance(found, str):
        raise _OddError("name is not text")
    try:
        return check_key(found)
    except BadName as e:
        raise _OddError(f"name: {e.why}") from e


def _moment(found: object) -> str:
    if not isinstance(found, str):
        raise _OddError("created is not text")
    try:
        moment = datetime.fromisoformat(found)
    except ValueError as e:
        raise _OddError(f"created: {e}") from e
    if moment.utcoffset() != timedelta(0) or moment.isoformat(timespec="microseconds") != found:
        raise _OddError("created is not a time in UTC with microseconds")
    return found
