"""The key with which a user signs snapshots: made at first use, in a folder that is that user's alone."""

from __future__ import annotations

import os
import stat
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import StoreError
from .durable import make_folder, make_parents, name_new, read_small, sync_folder, write_new
from .signatures import Signature

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

__all__ = ["OwnKey", "check_private", "private_folder"]

_LIMIT = 64 * 1024


class OwnKey:
    """The key in ``signing.key``, in PEM as other programs know it.

    It is read each time: another process may have put it aside.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "signing.key"

    def public(self) -> str:
        """Return the public key in hexadecimal; the key is made where there is none. Raises `StoreError`, `OSError`."""
        return self._load().public_key().public_bytes_raw().hex()

    def exists(self) -> bool:
        """Tell whether there is one already."""
        return self._path.exists()

    def sign(self, domain: bytes, content: bytes) -> Signature:
        """Sign what counts in one of the domains of `signatures`. Errors as `public`."""
        key = self._load()
        return Signature(key.public_key().public_bytes_raw().hex(), key.sign(domain + content))

    def retire(self) -> None:
        """Put the key aside, so that the next signature makes a new one. Errors as `public`."""
        self._path.rename(self._path.with_name(f"revoked-{self.public()[:16]}.key"))
        sync_folder(self._path.parent)

    def _load(self) -> Ed25519PrivateKey:
        private_folder(self._path.parent)
        with suppress(FileExistsError):  # another process was first
            self._make()
        return self._read()

    def _make(self) -> None:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        if self._path.exists():
            return
        pem = Ed25519PrivateKey.generate().private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        draft = self._path.with_name(f"{uuid.uuid4().hex}.tmp")
        write_new(draft, pem)
        try:
            name_new(draft, self._path)
        finally:
            draft.unlink(missing_ok=True)
        sync_folder(self._path.parent)

    def _read(self) -> Ed25519PrivateKey:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        if self._path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise _refused(self._path, "other users can read or write it", f"chmod 600 {self._path}")
        try:
            key = load_pem_private_key(read_small(self._path, _LIMIT), password=None)
        except (ValueError, TypeError) as e:
            key, why = None, str(e)
        else:
            why = "it is not a regular file"
        if not isinstance(key, Ed25519PrivateKey):
            raise StoreError(
                "The key that snapshots are signed with cannot be read.",
                f"{self._path}: {why}",
                "Restore it from a copy, or move it away: a new one is made, and `gpuckpt trust` with the "
                "old public key keeps older snapshots trusted.",
                file=str(self._path),
            )
        return key


def private_folder(path: Path) -> None:
    """Create the folder `path` for its owner alone, or refuse one that others can write in.

    Raises
    ------
    StoreError : it belongs to somebody else, or other users can write to it.
    OSError : it cannot be created.
    """
    make_parents(path)
    if make_folder(path):
        sync_folder(path.parent)
    check_private(path)


def check_private(path: Path) -> None:
    """Refuse a folder that is not the user's own; errors as `private_folder`."""
    about = path.stat()
    if about.st_uid != os.geteuid():
        raise _refused(path, f"it belongs to uid {about.st_uid}", "Set GPUCKPT_KEYS to a folder of your own.")
    if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _refused(path, "other users can write to it", f"chmod 700 {path}")


def _refused(path: Path, why: str, then: str) -> StoreError:
    return StoreError("The list of trusted keys is not safe to use.", f"{path}: {why}", then)
