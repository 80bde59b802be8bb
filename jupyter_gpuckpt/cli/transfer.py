"""`push`, `pull`, `remote`, `export`, `import`, `trust`, `sign` and `recipient`: snapshots on their way, and whose."""

from __future__ import annotations

import argparse
import getpass
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

from .. import settings
from ..checked import to_json
from ..errors import GpuckptError, Refused
from ..kernel import show
from ..kernel.tables import Listing
from ..kernel.words import Usage
from ..snapshots.naming import find, find_among
from ..snapshots.summary import summaries, summary
from ..store import Manifest, Store, name_of
from ..store.transfer.container import export_snapshot, import_snapshot, write_file
from ..store.transfer.known_remotes import FORGET, KnownRemotes
from ..store.transfer.pull import pull as fetch
from ..store.transfer.push import push as send
from ..store.transfer.remote_collect import GRACE, collect_remote
from ..store.transfer.remote_listing import Listed, listed
from ..store.transfer.remote_store import RemoteStore
from ..store.transfer.remotes.remote import remote_at
from ..store.transfer.sealing import Secrets, own_recipient, own_secrets
from ..store.trust import parse_key
from ..store.upkeep.collect import Collected
from . import output


def _store() -> Store:
    return Store(settings.store_dir())


# -- to and from remotes


def push(args: argparse.Namespace) -> int:
    """Send a snapshot to a remote."""
    store = _store()
    key = find(store, args.name)
    store.trusted(key)  # first: nothing is made at the remote for what is not there
    at = RemoteStore(remote_at(args.url), _secrets(args), create=True)
    how = _encryption(at)
    with output.Progress(f"Pushing {args.name}, {how}") as progress:
        done = send(store, key, at, replace=args.replace, progress=progress.amount)
    document = {
        **to_json(summary(done.manifest)),
        "url": at.shown,
        "sent": done.sent,
        "found": done.found,
        **vars(at.encryption),
    }
    text = (
        f"Pushed {args.name} to {at.shown}, {how}: {show.size(done.sent)}; {show.size(done.found)} were already there."
    )
    output.result(args.json, document, text)
    return output.DONE


def pull(args: argparse.Namespace) -> int:
    """Fetch a snapshot from a remote."""
    at = RemoteStore(remote_at(args.url), _secrets(args))
    with output.Progress(f"Pulling {args.name or 'the snapshot'}") as progress:
        done = fetch(
            _store(),
            at,
            _at_remote(at, args.name),
            replace=args.replace,
            older=args.older,
            quota=settings.store_quota(),
            progress=progress.amount,
        )
    document = {**to_json(summary(done.manifest)), "url": at.shown, "fetched": done.fetched, "found": done.found}
    name = name_of(done.manifest.name)
    text = f"Pulled {name} from {at.shown}: {show.size(done.fetched)}; {show.size(done.found)} were already here."
    output.result(args.json, document, text)
    return output.DONE


def remote(args: argparse.Namespace) -> int:
    """List what a remote holds, remove a snapshot there, or say which key it is to be encrypted with."""
    place = remote_at(args.url)
    if args.accept is not None:
        KnownRemotes(settings.keys_dir()).accept(place.shown, args.accept)
        if args.accept == FORGET:
            text = f"The encryption of {place.shown} is forgotten: its next use counts as the first."
            output.result(args.json, {"url": place.shown, "accepted": None}, text)
            return output.DONE
    at = RemoteStore(place, _secrets(args))
    if args.accept is not None:
        text = f"From now on what is sent to {at.shown} is {_encryption(at)}."
        output.result(args.json, {"url": at.shown, "accepted": args.accept, **vars(at.encryption)}, text)
        return output.DONE
    if args.remove is not None:
        key = _at_remote(at, args.remove)
        at.manifest(key)
        at.remove_manifest(key)
        text = f"Removed {args.remove} at {at.shown}. `jupyter gpuckpt gc` with that address frees its space."
        output.result(args.json, {"removed": [args.remove], "url": at.shown}, text)
        return output.DONE
    found = listed(at, _store().trust)
    snapshots = summaries(_usable(found))
    document = {
        "url": at.shown,
        **vars(at.encryption),
        "snapshots": snapshots,
        "faults": [{"name": one.name, **output.told(one.error)} for one in found if one.error is not None],
    }
    shown = {said.name: said.label for said in snapshots}
    rows = [_row(one, shown.get(one.name, one.name)) for one in found]
    head = ["name", "saved", "size", "note"]
    table = Listing(head, rows, f"No snapshots at {at.shown}.", [_sentence(at)], elastic=head[3:])
    output.result(args.json, document, table)
    return output.DONE


def _encryption(at: RemoteStore) -> str:
    """Return whether and for whom it is encrypted what lies at a remote."""
    how = at.encryption
    if not how.encrypted:
        return "not encrypted"
    return f"encrypted for {', '.join(how.recipients)}" if how.recipients else "encrypted with a passphrase"


def _sentence(at: RemoteStore) -> str:
    """Return all that there is to say of how a remote is encrypted."""
    how, text = at.encryption, _encryption(at)
    if not how.encrypted:
        return "It is not encrypted: whoever runs it can read everything."
    signed = f"signed by {how.signed}" if how.signed else "not signed, so it must be confirmed"
    return f"It is {text}, by the key {how.key}; that was {signed}."


def _usable(found: Sequence[Listed]) -> list[Manifest]:
    return [one.manifest for one in found if one.manifest is not None]


def _at_remote(at: RemoteStore, name: str) -> str:
    """Return the key of the snapshot at a remote that the user means. Raises as `find_among`."""
    return find_among(_usable(listed(at, _store().trust)), name) if ":" in name else name


def _row(one: Listed, label: str) -> list[str]:
    if one.manifest is None:
        return [label, "", "", f"(cannot be used: {type(one.error).__name__})"]
    m = one.manifest
    return [label, show.moment(m.created), show.size(m.size), m.message]


def collect_at(args: argparse.Namespace) -> Collected:
    """Free what no snapshot needs at a remote."""
    at = RemoteStore(remote_at(args.url), _secrets(args))
    return collect_remote(at, GRACE if args.grace is None else args.grace, dry_run=args.dry_run)


# -- to and from files


def export(args: argparse.Namespace) -> int:
    """Write a snapshot into a file."""
    store, secrets = _store(), _secrets(args)
    with output.Progress(f"Exporting {args.name}") as progress:

        def fill(out: BinaryIO) -> Manifest:
            return export_snapshot(store, find(store, args.name), out, secrets, progress.amount)

        if args.file == "-":
            if args.json:
                raise Usage("--json and a snapshot cannot both go to standard output.", "", "Leave out one of the two.")
            fill(sys.stdout.buffer)
            return output.DONE
        manifest = write_file(Path(args.file), fill, replace=args.replace)
    size = Path(args.file).stat().st_size
    how = "encrypted" if secrets.encrypting else "not encrypted"
    text = f"Exported {args.name} to {args.file}, {how}: {show.size(size)}."
    document = {**to_json(summary(manifest)), "file": args.file, "bytes": size, "encrypted": secrets.encrypting}
    output.result(args.json, document, text)
    return output.DONE


def bring_in(args: argparse.Namespace) -> int:
    """Bring in a snapshot from a file."""
    store, secrets = _store(), _secrets(args)
    here = {manifest.id for manifest in store.list()}

    def take(source: BinaryIO, shown: str) -> Manifest:
        with output.Progress(f"Importing {shown}") as progress:
            return import_snapshot(
                store,
                source,
                shown,
                secrets,
                replace=args.replace,
                older=args.older,
                quota=settings.store_quota(),
                progress=progress.amount,
            )

    if args.file == "-":
        manifest = take(sys.stdin.buffer, "standard input")
    else:
        with Path(args.file).open("rb") as source:
            manifest = take(source, args.file)
    name = name_of(manifest.name)
    text = f"{name} is here already" if manifest.id in here else f"Imported {name}"
    output.result(args.json, summary(manifest), f"{text}: {show.size(manifest.size)}.")
    return output.DONE


# -- whose snapshots


def trust(args: argparse.Namespace) -> int:
    """Say whose snapshots may be used, or list that."""
    trusting = _store().trust
    if args.own:
        output.result(args.json, {"key": trusting.own()}, trusting.own())
        return output.DONE
    if args.list:
        known, own = trusting.known(), trusting.own()
        rows = [
            [key, "revoked" if said.revoked else "trusted", show.moment(said.since), said.comment]
            for key, said in known.items()
        ]
        text = Listing(["key", "", "since", "whose"], rows, "No other keys are trusted.", []).text()
        document = {"own": own, "keys": [{"key": key, **asdict(said)} for key, said in known.items()]}
        output.result(args.json, document, f"{text}\nYour own key: {own}")
        return output.DONE
    key = _key(args.revoke or args.key)
    if args.revoke is not None:
        trusting.revoke(key)
        text = f"Revoked {key}: snapshots signed with it are no longer used."
    else:
        trusting.add(key, args.comment)
        text = f"Snapshots signed with this key are now trusted: {key}."
    output.result(args.json, {"key": key, "revoked": args.revoke is not None}, text)
    return output.DONE


def _key(text: str) -> str:
    path = Path(text)
    try:
        return parse_key(path.read_bytes()[:65536].decode("ascii", "replace") if path.is_file() else text)
    except OSError as e:
        raise Refused("The key cannot be read.", f"{e.strerror or e}: {text}", "Give the key itself.") from e


def sign(args: argparse.Namespace) -> int:
    """Sign snapshots that have no signature."""
    store = _store()
    signed: list[str] = []
    errors: list[GpuckptError] = []
    for name in dict.fromkeys(args.names):
        try:
            signed.append(store.sign(find(store, name)).name)
        except GpuckptError as e:
            errors.append(e)
    text = "\n".join(f"Signed {name}." for name in signed)
    output.result(args.json, {"signed": signed, "errors": [output.told(e) for e in errors]}, text)
    if not args.json:
        for error in errors:
            output.failure(False, error)
    return output.exit_status(errors[0]) if errors else output.DONE


def recipient(args: argparse.Namespace) -> int:
    """Print one's own public key of age."""
    key = own_recipient(settings.keys_dir())
    output.result(args.json, {"recipient": key}, key)
    return output.DONE


# -- what they share


def _secrets(args: argparse.Namespace) -> Secrets:
    """Return what was said for encryption; a passphrase is asked for only when it is needed."""
    words = vars(args)
    file, asking = words.get("passphrase_file"), bool(words.get("passphrase"))
    return own_secrets(
        words.get("encrypt_to", []),
        [Path(path) for path in words.get("identity", [])],
        _from_file(file) if file else _from_terminal if asking else None,
        with_passphrase=(asking or bool(file)) and "encrypt_to" in words,
    )


def _from_file(path: str) -> Callable[[], str]:
    def ask() -> str:
        try:
            return Path(path).read_text().rstrip("\n")
        except (OSError, UnicodeDecodeError) as e:
            raise Refused("The passphrase cannot be read.", f"{path}: {e}", "Give a file with it.") from e

    return ask


def _from_terminal() -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("error", getpass.GetPassWarning)
        try:
            return getpass.getpass("Passphrase: ")
        except (EOFError, getpass.GetPassWarning):
            raise Refused(
                "The passphrase cannot be asked for.",
                "there is no terminal",
                "Give it by --passphrase-file, or set GPUCKPT_PASSPHRASE.",
            ) from None
