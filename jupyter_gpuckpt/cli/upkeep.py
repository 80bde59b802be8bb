"""`log`, `diff`, `mv`, `note`, `pin`, `unpin`, `tag`, `keep`, `gc`, `check` and `repair`: the store in order."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from .. import settings
from ..client.based_on import based
from ..errors import GpuckptError
from ..kernel import show
from ..kernel.chosen import newest, renamed_as
from ..kernel.histories import Histories
from ..snapshots.naming import find, new_key, of_notebook
from ..snapshots.summary import labels, summaries, summary
from ..spelling import in_a_terminal
from ..store import Manifest, Store
from ..store.upkeep.retention import beyond_last, beyond_size
from . import output
from .removal import remove
from .transfer import collect_at


def _store() -> Store:
    return Store(settings.store_dir())


def _chosen(manifests: Iterable[Manifest], args: argparse.Namespace) -> list[Manifest]:
    return list(manifests) if args.notebook is None else of_notebook(manifests, args.notebook)


# -- what there is


def log(args: argparse.Namespace) -> int:
    """Draw which snapshot came from which."""
    manifests, faults = _store().scan()
    snapshots, older = newest(summaries(_chosen(manifests, args)), args.last)
    here, told = based(), [output.told(fault) for fault in faults]
    document = {"snapshots": snapshots, "here": here, "faults": told}
    output.paged(args, document, Histories(snapshots, here, older, [fault["what"] for fault in told]))
    return output.DONE


def diff(args: argparse.Namespace) -> int:
    """Say what is in one snapshot and not in another."""
    from ..snapshots.comparison import compare  # it reads criu's images, which no other command here does

    store = _store()
    document = compare(store, find(store, args.old), find(store, args.new))
    output.paged(args, document, show.comparison(document))
    return output.DONE


# -- names, tags and pins


def move(args: argparse.Namespace) -> int:
    """Give a snapshot another name."""
    return _rename(args, args.name, args.new)


def _rename(args: argparse.Namespace, name: str, new: str) -> int:
    store = _store()
    key = find(store, name)
    renamed = store.rename(key, new_key(store, key, new))
    output.result(args.json, summary(renamed), f"{name} is now {new}.")
    return output.DONE


def note(args: argparse.Namespace) -> int:
    """Give a snapshot another note."""
    store = _store()
    noted = store.note(find(store, args.name), " ".join(args.message))
    output.result(args.json, summary(noted), f"{args.name}: {noted.message or 'no note'}")
    return output.DONE


def pin(args: argparse.Namespace) -> int:
    """Pin snapshots."""
    return _pin(args, True)


def unpin(args: argparse.Namespace) -> int:
    """Unpin snapshots."""
    return _pin(args, False)


def _pin(args: argparse.Namespace, pinned: bool) -> int:
    store = _store()
    done: list[dict[str, Any]] = []
    errors: list[GpuckptError] = []
    for name in dict.fromkeys(args.names):
        try:
            store.pin(find(store, name), pinned)
            done.append({"name": name, "pinned": pinned})
        except GpuckptError as e:
            errors.append(e)
    verb = "Pinned" if pinned else "Unpinned"
    text = "\n".join(f"{verb} {one['name']}." for one in done)
    output.result(args.json, {"pins": done, "errors": [output.told(e) for e in errors]}, text)
    if not args.json:
        for error in errors:
            output.failure(False, error)
    return output.exit_status(errors[0]) if errors else output.DONE


def tag(args: argparse.Namespace) -> int:
    """Add tags and take them away."""
    store = _store()
    labels = store.tag(find(store, args.name), args.tags, args.remove)
    text = f"{args.name}: {' '.join(labels.tags) or 'no tags'}"
    output.result(args.json, {"name": args.name, "tags": list(labels.tags), "pinned": labels.pinned}, text)
    return output.DONE


# -- room


def keep(args: argparse.Namespace) -> int:
    """Remove old snapshots by a rule; or have one stay under another name."""
    if args.renamed:
        return _rename(args, *renamed_as(args.renamed, in_a_terminal))
    store = _store()
    meant = {manifest.id for manifest in _chosen(store.list(), args)}
    if args.last is not None:
        names = beyond_last(store, args.last, lambda manifest: manifest.id in meant)
    else:
        names = beyond_size(store, args.under, lambda manifest: manifest.id in meant)
    shown = labels(store.list())
    document, text, errors = remove(args, store, {name: shown.get(name, name) for name in names}, asks=True)
    if not args.dry_run:
        document["removed"] = [one["key"] for one in document["removed"]]
    document = {**document, "used": store.used(), "errors": [output.told(e) for e in errors]}
    output.result(args.json, document, text if names else "Nothing had to be removed.")
    if not args.json:
        for error in errors:
            output.failure(False, error)
    return output.exit_status(errors[0]) if errors else output.DONE


def collect(args: argparse.Namespace) -> int:
    """Free what no snapshot needs."""
    if args.url is not None:
        done = collect_at(args)
    else:
        store = _store()
        done = store.would_compact() if args.dry_run else store.compact(args.grace or 0.0)
    verb = "would be freed" if args.dry_run else "freed"
    text = f"{show.size(done.freed)} {verb}."
    if done.waiting:
        text += (
            f" {show.size(done.waiting)} more may be freed later: they may be in use, or the grace period is not over."
        )
    if done.obstacle:
        text += f" No more could be freed: {done.obstacle}. `jupyter gpuckpt check` says what is damaged."
    output.result(args.json, asdict(done), text)
    return output.FAILED if done.obstacle else output.DONE


# -- damage


def check(args: argparse.Namespace) -> int:
    """Say what is damaged."""
    with output.Progress("Checking") as progress:
        found = _store().check(args.read_data, progress.amount)
    lines = [
        f"{fault.what}: {fault.why}" + (f" (needed by {', '.join(fault.snapshots)})" if fault.snapshots else "")
        for fault in found.faults
    ]
    touched = sorted({name for fault in found.faults for name in fault.snapshots})
    looked = f"{found.snapshots} {'snapshot' if found.snapshots == 1 else 'snapshots'}, {found.chunks} chunks" + (
        f", {show.size(found.read)} read" * bool(found.read)
    )
    if not lines:
        lines = [f"No damage found: {looked}."]
    elif touched:
        lines.append(f"Affected: {', '.join(touched)}. `jupyter gpuckpt repair` repairs what can be repaired.")
    output.result(args.json, {**asdict(found), "touched": touched}, "\n".join(lines))
    return output.FAILED if found.faults else output.DONE


def repair(args: argparse.Namespace) -> int:
    """Repair what can be repaired."""
    done = _store().repair()
    lines = [f"The index of {name} was rebuilt." for name in done.mended if name not in done.lost]
    lines += [f"{name} cannot be restored: {why}. `rm` removes it." for name, why in done.lost.items()]
    output.result(args.json, asdict(done), "\n".join(lines) or "Nothing needed repair.")
    return output.FAILED if done.lost else output.DONE
