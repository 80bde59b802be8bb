"""The commands about snapshots and the store that has them: their words."""

from __future__ import annotations

import argparse

from ..kernel.chosen import add_last, add_new_name, add_options
from ..operations.requests import Diff, Keep, List, Note, Pin, Remove, Rename, Show, Tag
from .adding import Group

__all__ = ["add_snapshot_commands", "add_store_commands"]


def add_snapshot_commands(group: Group) -> None:
    """Add what is done with snapshots."""
    listing = group.add_request(List, "snapshots.list_snapshots", "list")
    add_options(listing)
    group.add_request(Show, "snapshots.show_snapshot")
    log = group.add_request(List, "upkeep.log", "log")
    log.add_argument("--notebook", metavar="NOTEBOOK", help="only those of this notebook: its name or path")
    add_last(log)
    diff = group.add_request(Diff, "upkeep.diff")
    for long in (listing, log, diff):
        long.add_argument("--no-pager", action="store_true", help="no pager (PAGER, or less) on a terminal")
    group.add_request(Rename, "upkeep.move")
    group.add_request(Note, "upkeep.note")
    group.add_request(Pin, "upkeep.pin", "pin")
    group.add_request(Pin, "upkeep.unpin", "unpin")
    group.add_request(Tag, "upkeep.tag")
    removing = group.add_request(Remove, "snapshots.remove_snapshots")
    removing.add_argument("--dry-run", action="store_true", help="only say what would go, and how much that would free")
    _add_yes(removing)


def add_store_commands(group: Group) -> None:
    """Add what keeps the store in order."""
    keep = group.add_request(Keep, "upkeep.keep")
    add_new_name(keep)
    _add_yes(keep)
    keep.add_argument("--notebook", metavar="NOTEBOOK", help="remove only those of this notebook: its name or path")
    gc = group.add(
        "gc",
        "upkeep.collect",
        "free what no snapshot needs",
        "Delete what no snapshot needs and nobody at work may rely on, and rewrite packs of which little is needed.",
    )
    gc.add_argument("url", metavar="URL", nargs="?", help="a remote; without it, the store of this machine")
    gc.add_argument("--dry-run", action="store_true", help="only say how much that is")
    gc.add_argument(
        "--grace",
        metavar="SECONDS",
        type=float,
        help="how long it stays at least, found so (0; at a remote, where others may be sending, a day)",
    )
    check = group.add(
        "check",
        "upkeep.check",
        "say what is damaged, and which snapshots that affects",
        "Look for damage in the store, and for the snapshots that it affects; nothing is changed.\n"
        "The exit status is 1 where there is any.",
    )
    check.add_argument("--read-data", action="store_true", help="read every byte of every snapshot")
    group.add(
        "repair",
        "upkeep.repair",
        "repair a damaged store as far as possible",
        "Make the index of the store again from its packs. Every byte is read, and no snapshot is removed.\n"
        "The exit status is 1 where some cannot be restored all the same.",
    )


def _add_yes(command: argparse.ArgumentParser) -> None:
    command.add_argument("--yes", "-y", action="store_true", help="do not ask (without a terminal nothing is asked)")
