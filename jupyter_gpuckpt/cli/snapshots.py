"""`list`, `show` and `rm`: commands that need the store and no kernel."""

from __future__ import annotations

import argparse

from .. import settings
from ..errors import GpuckptError
from ..keeper.naming import find
from ..keeper.summary import details, listing
from ..kernel import show
from ..store import Store
from . import output


def list_snapshots(args: argparse.Namespace) -> int:
    """List all snapshots, newest first."""
    document = listing(_store())
    output.result(args.json, document, show.snapshots(document).text())
    return output.DONE


def show_snapshot(args: argparse.Namespace) -> int:
    """Show all about one snapshot."""
    store = _store()
    found = details(store.get(find(store, args.name)))
    output.result(args.json, found, show.snapshot(found).text())
    return output.DONE


def remove_snapshots(args: argparse.Namespace) -> int:
    """Remove the snapshots that can be removed, and say of the others why not."""
    store = _store()
    removed = []
    errors: list[GpuckptError] = []
    for name in dict.fromkeys(args.names):
        try:
            removed.append({"name": name, "freed": store.remove(find(store, name))})
        except GpuckptError as e:
            errors.append(e)
    text = "\n".join(f"Removed {one['name']}: {show.size(one['freed'])} freed." for one in removed)
    output.result(args.json, {"removed": removed, "errors": [e.as_dict() for e in errors]}, text)
    if not args.json:
        for error in errors:
            output.note(str(error))
    return output.exit_status(errors[0]) if errors else output.DONE


def _store() -> Store:
    return Store(settings.store_dir())
