"""Signatures of manifests: Ed25519, over the exact bytes of the manifest, in a line of their own behind it.

The line is ``ed25519 KEY SIGNATURE CHECK``, all in hexadecimal: the public key (32 bytes), the signature (64) of
`MANIFEST` and the manifest, and the first 8 bytes of the BLAKE3 of the line before them, so that damage is told from
deceit. The name of the snapshot is in the manifest, and so under the signature.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from blake3 import blake3

__all__ = ["MANIFEST", "MAX_LINE", "REMOTE", "Signature", "append", "split", "verifies"]

MANIFEST = b"gpuckpt manifest\n"
"""What stands before the manifest in what is signed: no other text that a key signs can pass for a manifest."""

REMOTE = b"gpuckpt remote\n"
"""Likewise, before what is said of a remote and the key that it is encrypted with."""

_LINE = re.compile(rb"(ed25519 ([0-9a-f]{64}) ([0-9a-f]{128})) ([0-9a-f]{16})\n")
MAX_LINE = len("ed25519") + 1 + 64 + 1 + 128 + 1 + 16 + 1
"""How long the line is, in bytes."""


@dataclass(frozen=True)
class Signature:
    """Who signed, by the public key in hexadecimal, and the signature."""

    key: str
    value: bytes


def append(sealed: bytes, signature: Signature) -> bytes:
    """Return a manifest with its signature behind it."""
    line = f"ed25519 {signature.key} {signature.value.hex()}".encode("ascii")
    return sealed + line + b" " + _check(line) + b"\n"


def split(raw: bytes) -> tuple[bytes, Signature | None]:
    """Return the manifest alone, and its signature; None where there is none.

    Raises
    ------
    ValueError : what stands behind the manifest is no signature.
    """
    sealed, end, line = raw.partition(b"\n")
    if not line:
        return raw, None
    found = _LINE.fullmatch(line)
    if found is None or _check(found[1]) != found[4]:
        raise ValueError("the line of its signature is not the one that was written")
    return sealed + end, Signature(found[2].decode("ascii"), bytes.fromhex(found[3].decode("ascii")))


def verifies(domain: bytes, content: bytes, signature: Signature) -> bool:
    """Tell whether the holder of the signature's key signed exactly these bytes, in one of the domains above."""
    # Imported here: listings need no signatures, and should not wait for the library.
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(signature.key)).verify(signature.value, domain + content)
    except (InvalidSignature, ValueError):
        return False
    return True


def _check(line: bytes) -> bytes:
    return blake3(line).hexdigest(8).encode("ascii")
