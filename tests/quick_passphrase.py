"""What age encrypts with a passphrase, made so that trying one costs next to nothing.

pyrage has each cost seconds and a gigabyte, as it should; it opens what is made here as it opens its own.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os

import pyrage
import pytest
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

__all__ = ["passphrases_are_quick"]

_WORK = 4  # the logarithm of how much there is to do


def passphrases_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process encrypt with passphrases that are tried at once."""
    monkeypatch.setattr(pyrage.passphrase, "encrypt", _encrypted)


def _encrypted(content: bytes, passphrase: str) -> bytes:
    """Return one short text as https://age-encryption.org/v1 has it."""
    key, salt, nonce = os.urandom(16), os.urandom(16), os.urandom(16)
    wrapping = hashlib.scrypt(
        passphrase.encode(), salt=b"age-encryption.org/v1/scrypt" + salt, n=1 << _WORK, r=8, p=1, dklen=32
    )
    wrapped = ChaCha20Poly1305(wrapping).encrypt(bytes(12), key, None)
    header = b"age-encryption.org/v1\n-> scrypt %b %d\n%b\n---" % (_text(salt), _WORK, _text(wrapped))
    mark = hmac.digest(_derived(key, b"", b"header"), header, "sha256")
    body = ChaCha20Poly1305(_derived(key, nonce, b"payload")).encrypt(bytes(11) + b"\x01", content, None)
    return header + b" " + _text(mark) + b"\n" + nonce + body


def _derived(key: bytes, salt: bytes, purpose: bytes) -> bytes:
    """Return the one key of 32 bytes that HKDF derives."""
    return hmac.digest(hmac.digest(salt, key, "sha256"), purpose + b"\x01", "sha256")


def _text(content: bytes) -> bytes:
    return base64.b64encode(content).rstrip(b"=")
