"""Whose snapshots are used: one's own, and those of people whose keys were trusted by word.

A snapshot is code that would run in one's own name. In the folder of keys lie ``signing.key`` (`store.own_key`),
``trusted.json`` (``{KEY: {"comment", "since", "revoked"}}``) and ``newest.json``, which says for each key and name when
the newest snapshot was made that came from or went to other machines.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..errors import (
    Damaged,
    Refused,
    Replayed,
    RevokedKey,
    UnknownKey,
    Unsigned,
    WrongSignature,
)
from .kept_record import KeptRecord, using_keys
from .manifest import Manifest
from .own_key import OwnKey
from .signatures import MANIFEST, Signature, append, split, verifies

__all__ = ["Trust", "Trusted", "parse_key"]

_KEY = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True)
class Trusted:
    """What was said about somebody's key."""

    comment: str
    since: str
    """When that was said; UTC, ISO 8601."""
    revoked: bool = False


class Trust:
    """The keys in the folder `folder`, which the first signature creates.

    Every method raises `StoreError` where the folder cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._own = OwnKey(folder)
        self._list = KeptRecord(folder / "trusted.json")
        self._newest = KeptRecord(folder / "newest.json")

    # -- signing

    def own(self) -> str:
        """Return one's own public key in hexadecimal; it is made where there is none."""
        with using_keys(self.folder):
            return self._own.public()

    def sign(self, sealed: bytes) -> bytes:
        """Return a manifest with one's own signature."""
        with using_keys(self.folder):
            return append(sealed, self._own.sign(MANIFEST, sealed))

    def sign_as(self, domain: bytes, content: bytes) -> Signature:
        """Return one's own signature of what is no manifest: it counts in that domain only."""
        with using_keys(self.folder):
            return self._own.sign(domain, content)

    # -- whom to trust

    def known(self) -> dict[str, Trusted]:
        """Return the keys of others that were trusted or revoked."""
        with using_keys(self.folder):
            found = self._list.read()
            try:
                return {
                    key: Trusted(str(s["comment"]), str(s["since"]), bool(s["revoked"])) for key, s in found.items()
                }
            except (KeyError, TypeError) as e:
                raise self._list.damaged() from e

    def add(self, key: str, comment: str = "") -> None:
        """Trust what the holder of `key` signs; also of one that was revoked."""
        self._say(key, Trusted(comment, _now()))

    def revoke(self, key: str) -> None:
        """Trust nothing any more that the holder of `key` signed; where it is one's own, a new one is made."""
        self._say(key, Trusted("", _now(), revoked=True))
        with using_keys(self.folder):
            if self._own.exists() and self._own.public() == key:
                self._own.retire()

    def _say(self, key: str, said: Trusted) -> None:
        def change(found: dict[str, Any]) -> None:
            comment = said.comment or found.get(key, {}).get("comment", "")
            found[key] = {**asdict(said), "comment": comment}

        with using_keys(self.folder):
            self._list.change(change)

    # -- judging

    def check(self, raw: bytes, name: str) -> bytes:
        """Return the bytes of a manifest without its signature, if somebody who is trusted signed them.

        Nothing in the manifest is looked at: `Manifest.from_json` checks that it is of this name.

        Raises
        ------
        Unsigned, WrongSignature, UnknownKey, RevokedKey : it is not to be used.
        Damaged : what stands behind the manifest is no signature.
        """
        sealed, signature = self._signature(raw, name)
        if signature is None:
            raise Unsigned(
                f"The snapshot {name} is not signed.",
                "it does not say who saved it, and a snapshot is code that would run in your name",
                f"If you made it yourself, in this store, before snapshots were signed: `gpuckpt sign {name}`. "
                "If not, ask whoever saved it to send it again.",
                name=name,
            )
        about = {"name": name, "key": signature.key}
        if not verifies(MANIFEST, sealed, signature):
            raise WrongSignature(
                f"The signature of the snapshot {name} is wrong.",
                f"the holder of the key {signature.key} did not sign these bytes: they were changed, or somebody "
                "else claims that key",
                "Do not use it. Ask whoever saved it to send it again, by another route.",
                **about,
            )
        said = self.known().get(signature.key)
        if said is not None and said.revoked:
            raise RevokedKey(
                f"The snapshot {name} was signed with a key that was revoked.",
                f"the key {signature.key} was revoked on {said.since[:10]}: whoever holds it now may not be its owner",
                "Ask whoever saved it to send it again, signed with another key. "
                f"To trust this one once more: `gpuckpt trust {signature.key}`.",
                **about,
            )
        if said is None and not self.is_own(signature.key):
            raise UnknownKey(
                f"The snapshot {name} was signed by somebody you do not trust.",
                f"the key {signature.key} is neither yours nor one that you trust; a snapshot is code that would run "
                "in your name",
                "Ask whoever saved it what `gpuckpt trust --own` prints there. If it is this key: "
                f"`gpuckpt trust {signature.key}`.",
                **about,
            )
        return sealed

    def check_newest(self, raw: bytes, manifest: Manifest) -> None:
        """Refuse a snapshot that is older than one of the same key and name that was sent or fetched before.

        Raises
        ------
        Replayed : it is older.
        """
        _, signature = self._signature(raw, manifest.name)
        with using_keys(self.folder):
            newest = self._newest.read().get(_of(signature, manifest), "")
        if manifest.created < str(newest):
            raise Replayed(
                f"The snapshot {manifest.name} is older than an earlier one of that name.",
                f"it is of {manifest.created}, that one of {newest}: somebody may be presenting old state as new",
                "If you want the older one, add --older.",
                name=manifest.name,
                created=manifest.created,
                newest=str(newest),
            )

    def is_foreign(self, raw: bytes, name: str) -> bool:
        """Tell whether somebody else signed a manifest."""
        _, signature = self._signature(raw, name)
        return signature is not None and not self.is_own(signature.key)

    def note_newest(self, raw: bytes, manifest: Manifest) -> None:
        """Remember that this snapshot was sent, or accepted by whoever fetched it, and counts as the newest."""
        _, signature = self._signature(raw, manifest.name)

        def change(found: dict[str, Any]) -> None:
            found[_of(signature, manifest)] = manifest.created

        with using_keys(self.folder):
            self._newest.change(change)

    def is_own(self, key: str) -> bool:
        """Tell whether a public key is one's own, as it is now."""
        with using_keys(self.folder):
            return self._own.exists() and self._own.public() == key

    @staticmethod
    def _signature(raw: bytes, name: str) -> tuple[bytes, Signature | None]:
        try:
            return split(raw)
        except ValueError as e:
            raise Damaged(
                f"The snapshot {name} is damaged.", str(e), "Use another snapshot, or fetch it again.", name=name
            ) from e


def parse_key(text: str) -> str:
    """Return the public key that a text is: 64 hexadecimal digits, with or without what `trust --own` prints around it.

    Raises
    ------
    Refused : it is none.
    """
    words = text.split()
    found = [word for word in words if _KEY.fullmatch(word)]
    if len(found) != 1:
        raise Refused(
            "That is not a key.",
            "a key has 64 hexadecimal digits" + (", and there are several" if found else ""),
            "Give the key, or a file with it, as `gpuckpt trust --own` prints it for its owner.",
        )
    return found[0]


def _of(signature: Signature | None, manifest: Manifest) -> str:
    return f"{signature.key if signature else ''} {manifest.name}"


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
