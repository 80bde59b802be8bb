"""The commands that move snapshots between machines: their words; what they do is in `transfer`."""

from __future__ import annotations

import argparse

from .adding import Group

__all__ = ["add_transfer_commands"]

_URL = "a folder's path, or an address such as s3://bucket/folder"


def add_transfer_commands(group: Group) -> None:
    """Add what moves snapshots, and says whose are used."""
    push = group.add(
        "push",
        "transfer.push",
        "send a snapshot elsewhere",
        "Send a snapshot to a folder, an object store or another machine. Only what is not there yet travels, and what "
        "has\narrived is not sent again.",
    )
    push.add_argument("name", metavar="NAME", help="the snapshot")
    push.add_argument("url", metavar="URL", help=_URL)
    push.add_argument("--replace", action="store_true", help="replace another snapshot of that name there")
    _add_encrypting(push, "the first snapshot that is sent there decides for whom all are encrypted")
    pull = group.add(
        "pull",
        "transfer.pull",
        "fetch a snapshot from elsewhere",
        "Fetch a snapshot that was sent elsewhere by `push`. Every byte is verified, and it must be signed by somebody "
        "who is\ntrusted (`jupyter gpuckpt trust`).",
    )
    pull.add_argument("url", metavar="URL", help=f"{_URL} or https://host/folder")
    pull.add_argument("name", metavar="NAME", nargs="?", default="", help="the snapshot; without it the only one there")
    _add_receiving(pull)
    remote = group.add("remote", "transfer.remote", "list the snapshots at a remote, or remove one there")
    remote.add_argument("url", metavar="URL", help=_URL)
    remote.add_argument(
        "--remove", metavar="NAME", help="remove this one there; `gc URL` frees what it needed, a day later"
    )
    remote.add_argument(
        "--accept",
        metavar="KEY",
        help="send there what is encrypted with this key, which an error has named; none: forget how it was encrypted",
    )
    _add_opening(remote)
    export = group.add("export", "transfer.export", "write a snapshot into one file")
    export.add_argument("name", metavar="NAME", help="the snapshot")
    export.add_argument("file", metavar="FILE", help="the file to make; - is standard output")
    export.add_argument("--replace", action="store_true", help="replace a file that exists")
    _add_encrypting(export, "")
    importing = group.add(
        "import",
        "transfer.bring_in",
        "bring in a snapshot from a file",
        "Bring in a snapshot from a file that `export` wrote. Every byte is verified, and it must be signed by "
        "somebody who is\ntrusted (`jupyter gpuckpt trust`).",
    )
    importing.add_argument("file", metavar="FILE", help="the file; - is standard input")
    _add_receiving(importing)
    trust = group.add(
        "trust",
        "transfer.trust",
        "say whose snapshots may be restored here",
        "A snapshot is code that runs in your name. Yours are trusted; those of others only when you trust their key.",
    )
    what = trust.add_mutually_exclusive_group(required=True)
    what.add_argument("key", metavar="KEY", nargs="?", help="the key to trust, or a file with it")
    what.add_argument("--own", action="store_true", help="print your own key, for others to trust")
    what.add_argument("--list", action="store_true", help="list the keys that are trusted or revoked")
    what.add_argument("--revoke", metavar="KEY", help="trust nothing any more that was signed with this key")
    trust.add_argument("--comment", metavar="TEXT", default="", help="whose key it is")
    sign = group.add(
        "sign",
        "transfer.sign",
        "sign snapshots that you made before snapshots were signed",
        "Sign snapshots that have no signature: from then on they count as yours. Only sign what you made yourself.",
    )
    sign.add_argument("names", metavar="NAME", nargs="+", help="a snapshot")
    group.add(
        "recipient",
        "transfer.recipient",
        "print the key for which others can encrypt what they send you",
        "Print your public key of age. `push --encrypt-to` and `export --encrypt-to` take it, and `pull` and `import` "
        "here\nopen what was encrypted for it.",
    )


def _add_encrypting(parser: argparse.ArgumentParser, note: str) -> None:
    parser.add_argument(
        "--encrypt-to",
        metavar="KEY",
        action="append",
        default=[],
        help="encrypt for the holder of this key (age1..., ssh-ed25519 ..., or a file with such); may be repeated"
        + (f"; {note}" if note else ""),
    )
    _add_opening(parser)


def _add_receiving(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replace", action="store_true", help="replace a snapshot of that name here")
    parser.add_argument(
        "--older", action="store_true", help="also where it is older than one of that name that was here before"
    )
    _add_opening(parser)


def _add_opening(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--identity",
        metavar="FILE",
        action="append",
        default=[],
        help="a file with a secret key of age or SSH that opens what is encrypted; may be repeated",
    )
    parser.add_argument("--passphrase", action="store_true", help="ask for a passphrase that it is encrypted with")
    parser.add_argument("--passphrase-file", metavar="FILE", help="read that passphrase from a file")
