"""Which remotes were used from here, and with which key each is encrypted: nothing is sent where that has changed.

Whoever keeps a remote can replace its mark by one with a key of his own, for the same recipients, or by one that says
that nothing is encrypted. So the first use of an address is remembered, in ``remotes.json`` in the folder of keys:
``{"remotes": {ADDRESS: {"key", "confirmed"}}, "earlier": [KEY, ...]}``, where ``earlier`` are the keys of remotes that
were used from here before addresses were remembered, and not since. What is sent is encrypted for a key only that is
confirmed: vouched for by somebody who is trusted (`vouching`), by the passphrase, by its use in earlier times, or by
word.
"""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Any

from ...errors import Refused, RemoteChanged, Unconfirmed
from ..kept_record import KeptRecord, using_keys
from ..trust import Trust
from .sealing import KEY, Encrypted, Secrets, named_recipients, recipients_of
from .vouching import vouched

__all__ = ["FORGET", "KnownRemotes"]

FORGET = "none"
"""What stands for no key where one is named by word."""


class KnownRemotes:
    """The remotes that one user has used.

    Every method raises `StoreError` where the folder of keys cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._record = KeptRecord(folder / "remotes.json")

    def accept(self, address: str, key: str) -> None:
        """Have a remote be encrypted with this key from now on; with `FORGET`, forget how it was.

        Raises
        ------
        Refused : it is no key.
        """
        if key != FORGET and not KEY.fullmatch(key):
            raise Refused(
                "That is not a remote's key.",
                "a remote's key begins with age1",
                f"Give the key named in the error, or {FORGET} to treat the remote as never used before.",
            )
        self._note(address, "" if key == FORGET else key, confirmed=True)

    def check_same(self, address: str, key: str) -> None:
        """Refuse a remote with another key than it had; `key` is empty where it is not encrypted, or empty.

        Raises
        ------
        RemoteChanged : it was encrypted with another one.
        """
        known = str(self._known(address).get("key", ""))
        if known in ("", key):
            return
        now = f"it has the key {key} now" if key else "nothing there is encrypted now"
        then = "" if key else " (from then on what is sent is not encrypted, unless you add --encrypt-to)"
        raise RemoteChanged(
            f"{address} is not encrypted as it was; nothing was sent or fetched.",
            f"it had the key {known} when it was used from here before, and {now}: somebody may be trying to read "
            "what you send",
            "Ask the others who use it what it should be. If that is right: "
            f"`gpuckpt remote {quote(address)} --accept {key or FORGET}`{then}. If it is not, send to another "
            "folder.",
            remote=address,
            key=key,
            known=known,
        )

    def check(self, address: str, seal: Encrypted, secrets: Secrets, *, sending: bool) -> None:
        """Remember the key of a remote; where something is to be sent there, only if it is confirmed.

        Raises
        ------
        Unconfirmed : it cannot be known who holds the key, or others can read it than those that were named.
        """
        if self._known(address).get("confirmed"):
            return
        doubt = self._doubt(address, seal)
        if sending:
            if doubt:
                raise _unconfirmed(address, seal, doubt)
            self._check_named(address, seal, secrets)
        self._note(address, seal.key, confirmed=not doubt)

    def note_made(self, address: str, seal: Encrypted) -> None:
        """Remember the key of a remote that was made just now."""
        self._note(address, seal.key, confirmed=True)

    def _doubt(self, address: str, seal: Encrypted) -> str:
        """Return why it is not known who holds a key; empty where it is."""
        if seal.by_passphrase:
            return ""
        said = vouched(seal.text, seal.key)
        if said is None:
            if seal.key in self._earlier():
                return ""
            return "its list of recipients is not signed, so whoever runs it may have added a key"
        trust = Trust(self._folder)
        known = trust.known().get(said.signer)
        if known is not None and known.revoked:
            return f"its list of recipients was signed with the key {said.signer}, which you revoked"
        if known is None and not trust.is_own(said.signer):
            return f"its list of recipients was signed with the key {said.signer}, which you do not trust"
        if said.address != address:
            return f"its key was made for {said.address}: it may have been swapped"
        return ""

    def _check_named(self, address: str, seal: Encrypted, secrets: Secrets) -> None:
        """Refuse recipients that were named and are not all."""
        said = vouched(seal.text, seal.key)
        if not secrets.recipients or (said is not None and Trust(self._folder).is_own(said.signer)):
            return
        named = named_recipients(secrets)
        others = [one for one in recipients_of(seal.text) if one not in named]
        if others:
            everybody = " ".join(f"--encrypt-to {quote(one)}" for one in recipients_of(seal.text))
            raise Unconfirmed(
                f"Nothing was sent: {address} is encrypted for other people, too.",
                f"its first user also named {', '.join(others)}",
                f"If they may read it, name them all: {everybody}. If not, send to another folder.",
                remote=address,
            )

    def addresses(self) -> list[str]:
        """Return the addresses of all of them."""
        with using_keys(self._folder):
            return sorted(self._read()["remotes"])

    # -- the record

    def _read(self) -> dict[str, Any]:
        return self._whole(self._record.read())

    def _whole(self, found: dict[str, Any]) -> dict[str, Any]:
        """Return a record that has what it has to have; a new one knows the keys that are kept already."""
        if not found:
            kept = sorted(path.stem for path in (self._folder / "remotes").glob("age1*.txt"))
            found.update(remotes={}, earlier=kept)
        remotes = found.get("remotes")
        if not isinstance(found.get("earlier"), list) or not isinstance(remotes, dict):
            raise self._record.damaged()
        if not all(isinstance(one, dict) for one in remotes.values()):
            raise self._record.damaged()
        return found

    def _known(self, address: str) -> dict[str, Any]:
        with using_keys(self._folder):
            found: dict[str, Any] = self._read()["remotes"].get(address.rstrip("/"), {})
            return found

    def _earlier(self) -> list[str]:
        with using_keys(self._folder):
            return [str(key) for key in self._read()["earlier"]]

    def _note(self, address: str, key: str, *, confirmed: bool) -> None:
        def change(found: dict[str, Any]) -> None:
            self._whole(found)
            found["earlier"] = [one for one in found["earlier"] if one != key]
            if key:
                found["remotes"][address.rstrip("/")] = {"key": key, "confirmed": confirmed}
            else:
                found["remotes"].pop(address.rstrip("/"), None)

        with using_keys(self._folder):
            self._record.change(change)


def _unconfirmed(address: str, seal: Encrypted, doubt: str) -> Unconfirmed:
    readers = ", ".join(recipients_of(seal.text)) or "nobody by name"
    return Unconfirmed(
        f"Nothing was sent: it is not certain who can read what is at {address}.",
        f"{doubt}. It says that it is encrypted for {readers}",
        f"Ask the others who use it for its key (`gpuckpt remote {quote(address)}` shows it there). If that "
        f"is {seal.key}: `gpuckpt remote {quote(address)} --accept {seal.key}`. If it is not, send to another "
        "folder.",
        remote=address,
        key=seal.key,
    )
