"""`list`, `show` and `rm`: commands that need the store and no kernel."""

from __future__ import annotations

import argparse

from .. import settings
from ..checked import to_json
from ..client.based_on import based
from ..errors import GpuckptError
from ..kernel import show
from ..kernel.chosen import choose, shown
from ..snapshots.naming import find
from ..snapshots.summary import details, listing
from ..spelling import in_a_terminal
from ..store import Store
from . import output
from .removal import remove


def list_snapshots(args: argparse.Namespace) -> int:
    """List all snapshots, newest first."""
    found, here = listing(_store(), in_a_terminal), based()
    document = {**to_json(choose(found, args)), "here": here}
    output.paged(args, document, shown(found, here, args, in_a_terminal))
    return output.DONE


def show_snapshot(args: argparse.Namespace) -> int:
    """Show all about one snapshot."""
    store = _store()
    found = details(store.get(find(store, args.name)))
    output.result(args.json, found, show.snapshot(found))
    return output.DONE


def remove_snapshots(args: argparse.Namespace) -> int:
    """Remove the snapshots that can be removed, and say of the others why not."""
    store = _store()
    named: dict[str, str] = {}
    unknown: list[GpuckptError] = []
    for name in dict.fromkeys(args.names):
        try:
            named[find(store, name)] = name
        except GpuckptError as e:
            unknown.append(e)
    document, text, errors = remove(args, store, named, asks=len(named) > 1)
    errors = [*unknown, *errors]
    output.result(args.json, {**document, "errors": [output.told(e) for e in errors]}, text)
    if not args.json:
        for error in errors:
            output.failure(False, error)
    return output.exit_status(errors[0]) if errors else output.DONE


def _store() -> Store:
    return Store(settings.store_dir())
