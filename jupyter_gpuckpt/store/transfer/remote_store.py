"""What lies at a remote: the files of a store that make up its snapshots, in the formats of the store.

``format.json``, ``snapshots/NAME.json``, ``contents/ID``, ``index/ID`` and ``packs/ID-000001`` are those of
`store.layout`; at an encrypted remote each but the first is encrypted as a whole, and a keyed hash stands for NAME.
Each pack is of an id of its own, and has a part of the index of its own until the snapshot has one for all: by these
parts a push finds again what an earlier one, which was broken off, has sent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ...errors import Damaged, NoSuchSnapshot
from ..contents import MAX_SIZE as MAX_CONTENTS
from ..index import Index, Part, part_to_bytes
from ..manifest import FORMAT, Manifest, check_format
from ..manifest import MAX_SIZE as MAX_MANIFEST
from ..names import check_key, is_id, is_pack
from ..pack import PackBuilder
from ..trust import Trust
from .known_remotes import KnownRemotes
from .remotes.remote import Remote
from .sealing import Encrypted, Plain, Seal, Secrets, keep_key, key_of_mark, make_seal, open_seal, recipients_of
from .vouching import vouch, vouched

__all__ = ["RemoteStore"]

MARK = "format.json"
CONDEMNED = "condemned.json"
_MARK_LIMIT = 64 * 1024
_CONDEMNED_LIMIT = 64 * 1024 * 1024
MAX_PACK = 80 * 1024 * 1024
"""How long a pack can be that somebody else wrote, in bytes."""

_SUFFIX = ".json"


@dataclass(frozen=True)
class Encryption:
    """How what lies at a remote is encrypted."""

    encrypted: bool
    key: str | None
    """What its key is known by."""
    recipients: list[str]
    """Who can read it; nobody is named where that is whoever knows a passphrase."""
    signed: str | None
    """Who signed that; nobody did in versions of before."""


class RemoteStore:
    """The snapshots at a remote.

    Every method raises `RemoteError` where the remote cannot be used.
    """

    def __init__(self, remote: Remote, secrets: Secrets, *, create: bool = False) -> None:
        """Use a remote; with `create`, to send something there.

        It is made a store then where it is none, encrypted if `secrets` ask for that.

        Raises
        ------
        NoSuchSnapshot : it is no store.
        Incompatible : a newer version wrote it.
        Sealed : it is encrypted, and no key on this machine fits opens it.
        RemoteChanged : it is not encrypted as it was when it was used from here before.
        Unconfirmed : something is to be sent there, and it is not known who can read it.
        """
        self.remote = remote
        self.seal: Seal = self._open(secrets, create)

    @property
    def shown(self) -> str:
        """The address as it may be shown."""
        return self.remote.shown

    @property
    def encryption(self) -> Encryption:
        """How it is encrypted."""
        if not isinstance(self.seal, Encrypted):
            return Encryption(encrypted=False, key=None, recipients=[], signed=None)
        said = vouched(self.seal.text, self.seal.key)
        readers = recipients_of(self.seal.text)
        return Encryption(encrypted=True, key=self.seal.key, recipients=readers, signed=said.signer if said else None)

    def _open(self, secrets: Secrets, create: bool) -> Seal:
        known = KnownRemotes(secrets.folder)
        try:
            raw = self.remote.read_small(MARK, _MARK_LIMIT)
        except FileNotFoundError:
            if not create:
                raise NoSuchSnapshot(
                    f"There are no snapshots at {self.shown}.",
                    f"it has no {MARK}, which the first push creates",
                    "Check the address.",
                    remote=self.shown,
                ) from None
            known.check_same(self.shown, "")
            trust = Trust(secrets.folder)
            members, made = make_seal(secrets, lambda named, key: vouch(named, key, self.shown, trust))
            raw = json.dumps({**members, "format": FORMAT}, separators=(",", ":"), sort_keys=True).encode() + b"\n"
            if self.remote.create(MARK, raw):
                if isinstance(made, Encrypted):
                    known.note_made(self.shown, made)
                    keep_key(made, secrets)
                return made
            raw = self.remote.read_small(MARK, _MARK_LIMIT)  # another one was first
        mark = self._mark(raw)
        known.check_same(self.shown, key_of_mark(mark, self.shown))
        seal = open_seal(mark, secrets, self.shown)
        if isinstance(seal, Encrypted):
            known.check(self.shown, seal, secrets, sending=create)
            keep_key(seal, secrets)
        return seal

    def _mark(self, raw: bytes) -> dict[str, Any]:
        try:
            found = json.loads(raw)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or not isinstance(found.get("features"), list):
            raise self.unusable(MARK, "it names no format")
        others = {**found, "features": [feature for feature in found["features"] if feature != "age"]}
        check_format(others, f"The store at {self.shown}")
        if found.get("format") != FORMAT:
            raise self.unusable(MARK, "its format is not known")
        return found

    def unusable(self, path: str, why: str) -> Damaged:
        """Return the error for a file at the remote that is not what was written."""
        return Damaged(
            f"What {self.shown} holds is damaged.",
            f"{path}: {why}",
            "Have the snapshot sent there again: `gpuckpt push NAME URL --replace`.",
            remote=self.shown,
            file=path,
        )

    @property
    def threads(self) -> int:
        """How many packs may be on their way at the same time: an encrypted one takes its memory three times."""
        return 6 if isinstance(self.seal, Plain) else 3

    # -- manifests

    def _at(self, name: str) -> str:
        return f"snapshots/{self.seal.name(name) or name}{_SUFFIX}"

    def manifest(self, name: str) -> bytes:
        """Return the manifest of a snapshot, with its signature; nothing in it is looked at.

        Raises
        ------
        NoSuchSnapshot : there is none of that name.
        Damaged : it is not what was written.
        """
        check_key(name)
        try:
            return self._read(self._at(name), MAX_MANIFEST)
        except FileNotFoundError:
            raise NoSuchSnapshot(
                f"There is no snapshot named {name} at {self.shown}.",
                "no manifest of that name is there",
                f"`gpuckpt remote {self.shown}` lists those that exist.",
                name=name,
                remote=self.shown,
            ) from None

    def create_manifest(self, name: str, raw: bytes) -> bool:
        """Make a snapshot exist, whose chunks are all there; False where one is called that."""
        return self.remote.create(self._at(name), self.seal.close(raw))

    def replace_manifest(self, name: str, raw: bytes) -> None:
        """Make a snapshot exist in place of another."""
        self.remote.write(self._at(name), self.seal.close(raw))

    def manifests(self) -> Iterator[tuple[str, Callable[[], bytes]]]:
        """Yield each snapshot's file, and what reads its manifest; errors of that as `manifest`."""
        for file in sorted(self.remote.list("snapshots")):
            if file.endswith(_SUFFIX):
                path = f"snapshots/{file}"
                yield file.removesuffix(_SUFFIX), lambda path=path: self._read(path, MAX_MANIFEST)  # type: ignore[misc]

    def remove_manifest(self, name: str) -> None:
        """Make a snapshot exist no more; what it needed goes with a collection."""
        self.remote.delete(self._at(name))

    # -- contents, index and packs

    def contents(self, manifest: Manifest) -> bytes:
        """Return the list of a snapshot's files, without a look at it but for its length.

        Raises
        ------
        Damaged : it is missing.
        """
        # A record of 40 bytes stands for 4 KiB or more but at the end of a file, and a file needs a line.
        limit = min(MAX_CONTENTS, 64 * 1024 * 1024 + manifest.size // 64)
        with self._whole(f"contents/{manifest.id}") as path:
            return self._read(path, limit)

    def write_contents(self, manifest: Manifest, raw: bytes) -> None:
        """Send the list of a snapshot's files."""
        self.remote.write(f"contents/{manifest.id}", self.seal.close(raw))

    def part(self, part_id: str, limit: int) -> Part:
        """Return a part of the index, of at most `limit` bytes, to ask for those of its chunks that are known here.

        Raises
        ------
        FileNotFoundError : there is none.
        Damaged : it is not what was written.
        """
        path = f"index/{part_id}"
        try:
            part = Part(self._read(path, limit))
        except ValueError as e:
            raise self.unusable(path, str(e)) from e
        if part.has_deltas:
            raise self.unusable(path, "it names deltas, which nobody sends")
        return part

    def write_part(self, part_id: str, chunks: Index) -> None:
        """Send a part of the index; what it names is there."""
        self.remote.write(f"index/{part_id}", self.seal.close(part_to_bytes(chunks)))

    def delete_part(self, part_id: str) -> None:
        """Delete a part of the index."""
        self.remote.delete(f"index/{part_id}")

    def parts(self) -> dict[str, int]:
        """Return the ids that have a part of the index, and the sizes of these, in bytes."""
        return {name: size for name, size in self.remote.list("index").items() if is_id(name)}

    def packs(self) -> dict[str, int]:
        """Return the packs that are there, with their sizes in bytes, at an encrypted remote those of the ciphers."""
        return {name: size for name, size in self.remote.list("packs").items() if is_pack(name)}

    def write_pack(self, pack: PackBuilder) -> int:
        """Send a pack; return how long it is at the remote."""
        content = self.seal.close(bytes(pack.content))
        self.remote.write(f"packs/{pack.name}", content)
        return len(content)

    def read_pack(self, pack: str, start: int, size: int) -> bytes:
        """Return at most `size` bytes of a pack from `start` on.

        Raises
        ------
        Damaged : it is missing, or is not what was written.
        """
        with self._whole(f"packs/{pack}") as path:
            if isinstance(self.seal, Plain):
                return self.remote.read(path, start, size)
            return self._read(path, MAX_PACK)[start : start + size]

    @property
    def reads_parts(self) -> bool:
        """Whether a part of a pack can be read without the rest."""
        return isinstance(self.seal, Plain)

    # -- what is to be deleted

    def condemned(self) -> dict[str, float]:
        """Return since when files are known to be needless, by path. A damaged record counts as none."""
        try:
            found = json.loads(self.remote.read_small(CONDEMNED, _CONDEMNED_LIMIT))
            times = {str(path): float(since) for path, since in found.items()}
        except (FileNotFoundError, ValueError, TypeError, AttributeError, RecursionError, OverflowError):
            return {}
        return {path: since for path, since in times.items() if math.isfinite(since)}

    def write_condemned(self, paths: dict[str, float]) -> None:
        """Remember that."""
        if paths:
            self.remote.write(CONDEMNED, json.dumps(paths).encode("ascii"))
        else:
            self.remote.delete(CONDEMNED)

    def _read(self, path: str, limit: int) -> bytes:
        raw = self.remote.read_small(path, self.seal.room(limit))
        try:
            return self.seal.open(raw)
        except ValueError as e:
            raise self.unusable(path, str(e)) from e

    @contextmanager
    def _whole(self, path: str) -> Iterator[str]:
        """Raise `Damaged` where a file is missing that has to be there."""
        try:
            yield path
        except FileNotFoundError:
            raise self.unusable(path, "it is missing") from None
