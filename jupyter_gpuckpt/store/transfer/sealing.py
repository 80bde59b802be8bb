"""What leaves the machine, as it is or encrypted with age (https://age-encryption.org), so that only some can read it.

An encrypted remote has a key of its own: an age identity, made by whoever writes there first and kept at the remote in
its mark, encrypted for the recipients or with the passphrase. Everything else there is encrypted for that identity, and
names that would tell something are replaced by keyed hashes of them. Whoever keeps the remote can put another mark in
its place: whether this one is the right one is judged by `known_remotes`.
"""

from __future__ import annotations

import base64
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from ... import settings
from ...errors import Refused, Sealed, StoreError
from ..durable import read_small, sync_folder, write_new
from ..own_key import private_folder

__all__ = [
    "KEY",
    "Encrypted",
    "Plain",
    "Seal",
    "Secrets",
    "keep_key",
    "key_of_mark",
    "make_seal",
    "named_recipients",
    "open_seal",
    "own_recipient",
    "own_secrets",
    "recipients_of",
]

_NAMES = "jupyter_gpuckpt 2025 names of snapshots at an encrypted remote"
_RECIPIENT = "# recipient: "
_LIMIT = 64 * 1024
KEY = re.compile(r"age1[0-9a-z]{1,200}", re.ASCII)
"""A public key of age, as it is written."""
_IDENTITY = "identity.txt"
_WORK = re.compile(rb"age-encryption\.org/v1\n-> scrypt \S+ ([0-9]{1,9})\n")
_MOST_WORK = 21
"""The logarithm of how much work, and memory in KiB, a passphrase may be made to cost: 2 GiB, twice what is usual."""


class Seal(ABC):
    """How bytes leave the machine."""

    @abstractmethod
    def close(self, content: bytes) -> bytes:
        """Return what is to be written for these bytes."""

    @abstractmethod
    def open(self, content: bytes) -> bytes:
        """Return the bytes for which this was written. Raises `ValueError` where it is not for this seal."""

    @abstractmethod
    def name(self, name: str) -> str | None:
        """Return what stands for the name of a snapshot; None where the name itself does."""

    @abstractmethod
    def room(self, size: int) -> int:
        """Return how long what is written for so many bytes can be."""


class Plain(Seal):
    """As it is."""

    def close(self, content: bytes) -> bytes:
        return content

    def open(self, content: bytes) -> bytes:
        return content

    def name(self, name: str) -> str | None:
        return None

    def room(self, size: int) -> int:
        return size


class Encrypted(Seal):
    """Encrypted with age, for the holders of one identity."""

    def __init__(self, identity: Any, text: str, *, by_passphrase: bool = False) -> None:
        self._identity = identity
        self.text = text
        """The identity as it lies in the mark, with the recipients, and what is vouched for (`vouching`)."""
        self.by_passphrase = by_passphrase
        """Whether a passphrase has opened the mark, and not a key: nobody makes such a mark without knowing it."""
        self._recipient = identity.to_public()
        self.key = str(self._recipient)
        """The public key that everything is encrypted for."""
        self._key = blake3(str(identity).encode("ascii"), derive_key_context=_NAMES).digest()

    def close(self, content: bytes) -> bytes:
        sealed: bytes = _pyrage().encrypt(content, [self._recipient])
        return sealed

    def open(self, content: bytes) -> bytes:
        pyrage = _pyrage()
        try:
            opened: bytes = pyrage.decrypt(content, [self._identity])
        except pyrage.DecryptError as e:
            raise ValueError(f"it cannot be decrypted: {e}") from e
        return opened

    def name(self, name: str) -> str | None:
        return blake3(name.encode("ascii"), key=self._key).hexdigest()

    def room(self, size: int) -> int:
        # Each 64 KiB has a tag of 16 bytes; before them stands a header of some hundred.
        return size + size // 4096 + 4096


@dataclass(frozen=True)
class Secrets:
    """What a user has and says to encrypt and decrypt."""

    folder: Path
    """The folder of the user's keys: the keys of remotes are kept there as well."""
    recipients: Sequence[str] = ()
    """For whom a new remote is encrypted: public keys of age or SSH, or files with such."""
    identities: Sequence[Path] = ()
    """Files with secret keys of age or SSH."""
    passphrase: Callable[[], str] | None = None
    """Asks for the passphrase; None where there is none."""
    with_passphrase: bool = False
    """Whether a new remote is encrypted with the passphrase."""

    @property
    def encrypting(self) -> bool:
        """Whether something new is to be encrypted."""
        return bool(self.recipients) or self.with_passphrase


def own_secrets(
    recipients: Sequence[str] = (),
    identities: Sequence[Path] = (),
    ask: Callable[[], str] | None = None,
    *,
    with_passphrase: bool = False,
) -> Secrets:
    """Return what the settings say, and what was said besides; `ask` is for where they name no passphrase."""
    return Secrets(
        folder=settings.keys_dir(),
        recipients=recipients,
        identities=[*identities, *settings.identities()],
        passphrase=settings.passphrase if settings.passphrase() else ask,
        with_passphrase=with_passphrase,
    )


def make_seal(secrets: Secrets, vouch: Callable[[str, str], str] | None = None) -> tuple[dict[str, Any], Seal]:
    """Make a seal with a new key; return as well the members of the mark that say how to open it.

    `vouch` returns what is to be said beside the key, by the text that names the recipients, and the public key.

    Raises
    ------
    Refused : there are no recipients that can be used.
    """
    if not secrets.encrypting:
        return {"features": []}, Plain()
    pyrage = _pyrage()
    if secrets.recipients and secrets.with_passphrase:
        raise Refused(
            "Nothing was encrypted.", "both recipients and a passphrase were given", "Give only one of the two."
        )
    identity = pyrage.x25519.Identity.generate()
    texts = named_recipients(secrets)
    key, named = str(identity.to_public()), "".join(f"{_RECIPIENT}{one}\n" for one in texts)
    text = named + (vouch(named, key) if vouch is not None else "") + f"{identity}\n"
    if secrets.with_passphrase:
        sealed = pyrage.passphrase.encrypt(text.encode("ascii"), _ask(secrets))
    else:
        sealed = pyrage.encrypt(text.encode("ascii"), [_recipient(one) for one in texts])
    members = {"features": ["age"], "key": base64.b64encode(sealed).decode("ascii"), "recipient": key}
    return members, Encrypted(identity, text)


def key_of_mark(mark: dict[str, Any], where: str) -> str:
    """Return the public key of age that a mark names, which stands at `where`; empty where nothing is encrypted.

    Raises
    ------
    Sealed : it names none.
    """
    if "age" not in mark["features"]:
        return ""
    key = str(mark.get("recipient"))
    if not KEY.fullmatch(key):
        raise Sealed(f"{where} cannot be opened.", "its mark does not name an age key", "Ask whoever runs it.")
    return key


def open_seal(mark: dict[str, Any], secrets: Secrets, where: str) -> Seal:
    """Return the seal that a mark describes, which stands at `where`.

    Raises
    ------
    Sealed : no key on this machine fits opens it; or it is not for the recipients, or not encrypted where it is to be.
    """
    key = key_of_mark(mark, where)
    if not key:
        if secrets.encrypting:
            raise Sealed(
                "Nothing was sent.",
                f"{where} is not encrypted, and what is already there stays unencrypted",
                "Use another folder.",
            )
        return Plain()
    try:
        sealed = base64.b64decode(str(mark["key"]), validate=True)
    except (KeyError, ValueError) as e:
        raise Sealed(f"{where} cannot be opened.", f"its mark is damaged: {e}", "Ask whoever runs it.") from e
    kept = _kept(secrets, key)
    text, by_passphrase = (kept, False) if kept is not None else _open_key(sealed, secrets, where)
    seal = Encrypted(_identity(text, key, where), text, by_passphrase=by_passphrase)
    strangers = [one for one in named_recipients(secrets) if one not in recipients_of(text)]
    if strangers:
        raise Sealed(
            "Nothing was sent.",
            f"{where} is encrypted for others, and not for {strangers[0]}",
            "Use another folder: recipients are fixed when a remote is first used.",
        )
    if secrets.with_passphrase and recipients_of(text):
        raise Sealed(
            "Nothing was sent.",
            f"{where} is encrypted for {', '.join(recipients_of(text))}, and not with a passphrase",
            "Leave out the passphrase, or use another folder.",
        )
    return seal


def recipients_of(text: str) -> list[str]:
    """Return for whom the text of a mark was encrypted, as it says itself; none where that was with a passphrase."""
    return [line.removeprefix(_RECIPIENT) for line in text.splitlines() if line.startswith(_RECIPIENT)]


def keep_key(seal: Encrypted, secrets: Secrets) -> None:
    """Keep the key of a remote among the user's own, so that it is opened the next time without being asked for.

    Raises
    ------
    StoreError : the folder of keys cannot be written.
    """
    path = _kept_at(secrets, seal.key)
    try:
        private_folder(secrets.folder)
        private_folder(path.parent)
        with suppress(FileExistsError):
            write_new(path, seal.text.encode("ascii"))
            sync_folder(path.parent)
    except OSError as e:
        raise StoreError(
            "The key of the remote cannot be kept.",
            f"{e.strerror or e}: {path}",
            "Make that folder writable for you, or set GPUCKPT_KEYS to another one.",
        ) from e


def own_recipient(folder: Path) -> str:
    """Return the public key of age for which others can encrypt what they send; the secret one is made at first use.

    Raises
    ------
    StoreError : the folder of keys cannot be used.
    """
    pyrage = _pyrage()
    path = folder / _IDENTITY
    try:
        private_folder(folder)
        if not path.exists():
            with suppress(FileExistsError):  # another process was first
                write_new(path, f"{pyrage.x25519.Identity.generate()}\n".encode("ascii"))
                sync_folder(folder)
        (identity,) = _identities_of(path)
    except (OSError, ValueError) as e:
        raise StoreError(
            "Your decryption key cannot be used.",
            f"{path}: {e}",
            "Restore it from a copy, or move it away: a new one is made for what others send you from then on.",
        ) from e
    return str(identity.to_public())


def _open_key(sealed: bytes, secrets: Secrets, where: str) -> tuple[str, bool]:
    """Return the text that holds the key, and whether it was the passphrase that has opened it."""
    pyrage = _pyrage()
    own = secrets.folder / _IDENTITY
    identities: list[Any] = []
    for path in ([own] if own.exists() else []) + list(secrets.identities):
        try:
            identities += _identities_of(path)
        except (OSError, ValueError) as e:
            raise Refused(
                "The key cannot be read.", f"{path}: {e}", "Give a file with a secret key of age or SSH."
            ) from e
    with suppress(pyrage.DecryptError, UnicodeDecodeError):
        if identities:
            return str(pyrage.decrypt(sealed, identities).decode("ascii")), False
    if secrets.passphrase is not None:
        work = _WORK.match(sealed)
        if work is not None and int(work[1]) > _MOST_WORK:
            raise Sealed(
                f"{where} cannot be opened.",
                f"its passphrase would have to be tried with 2^{int(work[1])} KiB of memory",
                "Ask whoever runs it what happened to it.",
            )
        with suppress(pyrage.DecryptError, UnicodeDecodeError):
            return str(pyrage.passphrase.decrypt(sealed, _ask(secrets)).decode("ascii")), True
    tried = "neither a key here nor the passphrase fits" if secrets.passphrase else "no key on this machine fits"
    raise Sealed(
        f"{where} is encrypted, and cannot be opened.",
        f"{tried} opens it",
        "Give the file with your key (--identity) or the passphrase (--passphrase), or have it sent for you: "
        "`gpuckpt recipient` prints the key for that.",
        passphrase=_WORK.match(sealed) is not None,
    )


def _identity(text: str, recipient: str, where: str) -> Any:
    pyrage = _pyrage()
    for line in text.splitlines():
        if line.startswith("AGE-SECRET-KEY-"):
            with suppress(pyrage.IdentityError):
                identity = pyrage.x25519.Identity.from_str(line)
                if str(identity.to_public()) == recipient:
                    return identity
    raise Sealed(f"{where} cannot be opened.", "its mark has a different key", "Ask whoever runs it.")


def _identities_of(path: Path) -> list[Any]:
    """Return the secret keys in a file. Raises `OSError`, `ValueError`."""
    pyrage = _pyrage()
    raw = read_small(path, _LIMIT)
    try:
        if b"PRIVATE KEY-----" in raw:
            return [pyrage.ssh.Identity.from_buffer(raw)]
        lines = [line.strip() for line in raw.decode("ascii").splitlines()]
        return [pyrage.x25519.Identity.from_str(line) for line in lines if line and not line.startswith("#")]
    except pyrage.IdentityError as e:
        raise ValueError(str(e)) from e


def named_recipients(secrets: Secrets) -> list[str]:
    """Return the public keys that were given one by one, also those from files. Raises `Refused`."""
    texts: list[str] = []
    for one in secrets.recipients:
        if one.startswith(("age1", "ssh-")):
            texts.append(" ".join(one.split()[:2]))
            continue
        try:
            lines = read_small(Path(one), _LIMIT).decode("ascii").splitlines()
        except (OSError, UnicodeDecodeError) as e:
            raise Refused(
                "Nothing was encrypted.",
                f"{one[:200]!r} is neither a public key nor a file of public keys: {e}",
                "Give keys as `gpuckpt recipient`, age-keygen or ssh-keygen make them.",
            ) from e
        texts += [" ".join(line.split()[:2]) for line in lines if line.strip() and not line.startswith("#")]
    for text in texts:
        _recipient(text)
    return list(dict.fromkeys(texts))


def _recipient(text: str) -> Any:
    pyrage = _pyrage()
    kind = pyrage.ssh if text.startswith("ssh-") else pyrage.x25519
    try:
        return kind.Recipient.from_str(text)
    except pyrage.RecipientError as e:
        raise Refused(
            "Nothing was encrypted.",
            f"{text[:200]!r} is no public key: {e}",
            "Give keys as `gpuckpt recipient`, age-keygen or ssh-keygen make them.",
        ) from e


def _ask(secrets: Secrets) -> str:
    text = secrets.passphrase() if secrets.passphrase else ""
    if not text:
        raise Refused("There is no passphrase.", "an empty one was given", "Give one, or recipients.")
    return text


def _kept_at(secrets: Secrets, recipient: str) -> Path:
    return secrets.folder / "remotes" / f"{recipient}.txt"


def _kept(secrets: Secrets, recipient: str) -> str | None:
    """Return the key of a remote that was opened or made here before."""
    try:
        return read_small(_kept_at(secrets, recipient), _LIMIT).decode("ascii")
    except (OSError, UnicodeDecodeError):
        return None


def _pyrage() -> Any:
    try:
        import pyrage
    except ImportError:
        raise Refused(
            "Nothing can be encrypted or decrypted yet.", "the package pyrage is needed for that", "pip install pyrage"
        ) from None
    return pyrage
