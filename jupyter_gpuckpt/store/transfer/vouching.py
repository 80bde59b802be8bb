"""For whom a remote is encrypted, and at which address: said and signed by who sent there first, inside of its mark.

In the text that only the readers of a remote can open stand, behind the recipients and before the secret key, the
lines ``# address: ADDRESS`` (in JSON) and ``# signed: KEY SIGNATURE`` (Ed25519, in hexadecimal). Signed are
`signatures.REMOTE`, the lines before that one, and the remote's public key.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from ..signatures import REMOTE, Signature, verifies
from ..trust import Trust

__all__ = ["Vouched", "vouch", "vouched"]

_ADDRESS, _SIGNED = "# address: ", "# signed: "
_SIGNATURE = re.compile(r"([0-9a-f]{64}) ([0-9a-f]{128})", re.ASCII)


@dataclass(frozen=True)
class Vouched:
    """What somebody has signed."""

    address: str
    """The address as its maker called it."""
    signer: str
    """The public key of whoever signed it, in hexadecimal."""


def vouch(named: str, key: str, address: str, trust: Trust) -> str:
    """Return the lines for a remote at `address` with the public key `key`; `named` are those of its recipients."""
    line = f"{_ADDRESS}{json.dumps(address)}\n"
    signature = trust.sign_as(REMOTE, _signed(named + line, key))
    return f"{line}{_SIGNED}{signature.key} {signature.value.hex()}\n"


def vouched(text: str, key: str) -> Vouched | None:
    """Return what was signed in the text of a mark whose public key is `key`; None where that is nothing."""
    said, _, rest = text.partition(_SIGNED)
    found = _SIGNATURE.fullmatch(rest.partition("\n")[0])
    _, _, address = said.rpartition(_ADDRESS)
    if found is None or not verifies(REMOTE, _signed(said, key), Signature(found[1], bytes.fromhex(found[2]))):
        return None
    try:
        called = json.loads(address)
    except (ValueError, RecursionError):
        return None
    return Vouched(called, found[1]) if isinstance(called, str) else None


def _signed(said: str, key: str) -> bytes:
    return f"{said}{key}\n".encode("ascii")
