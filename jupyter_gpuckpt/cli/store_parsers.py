"""The commands about snapshots and the store that has them: their words."""

from __future__ import annotations

import argparse

from ..kernel.chosen import add_last, add_options
from ..kernel.words import number, size
from .adding import Group

__all__ = ["add_snapshot_commands", "add_store_commands"]


def add_snapshot_commands(group: Group) -> None:
    """Add what is done with snapshots."""
    listing = group.add("list", "snapshots.list_snapshots", "list the snapshots, newest first")
    add_options(listing)
    one = group.add("show", "snapshots.show_snapshot", "show all about one snapshot")
    one.add_argument("name", metavar="NAME", help="the snapshot")
    log = group.add("log", "upkeep.log", "draw which snapshot came from which")
    log.add_argument("--notebook", metavar="NOTEBOOK", help="only those of this notebook: its name or path")
    add_last(log)
    diff = group.add(
        "diff",
        "upkeep.diff",
        "say what differs between two snapshots",
        "Say which variables changed from the first to the second, by how much they differ, and which files they use.",
    )
    diff.add_argument("old", metavar="A", help="a snapshot")
    diff.add_argument("new", metavar="B", help="another one")
    for long in (listing, log, diff):
        long.add_argument("--no-pager", action="store_true", help="no pager (PAGER, or less) on a terminal")
    move = group.add("mv", "upkeep.move", "give a snapshot another name")
    move.add_argument("name", metavar="NAME", help="the snapshot")
    move.add_argument("new", metavar="NEW", help="its name from now on")
    note = group.add("note", "upkeep.note", "give a snapshot another note")
    note.add_argument("name", metavar="NAME", help="the snapshot")
    note.add_argument("text", metavar="TEXT", nargs="+", help="its note from now on; '' for none")
    for name, summary in (
        ("pin", "keep snapshots from being removed or replaced"),
        ("unpin", "let snapshots be removed and replaced again"),
    ):
        pin = group.add(name, f"upkeep.{name}", summary)
        pin.add_argument("names", metavar="NAME", nargs="+", help="a snapshot")
    tag = group.add("tag", "upkeep.tag", "add tags to a snapshot, or take them away")
    tag.add_argument("name", metavar="NAME", help="the snapshot")
    tag.add_argument("tags", metavar="TAG", nargs="*", help="a tag to add: letters, digits, and . _ -")
    tag.add_argument("--remove", metavar="TAG", action="append", default=[], help="a tag to take away")
    removing = group.add("rm", "snapshots.remove_snapshots", "remove snapshots")
    removing.add_argument("names", metavar="NAME", nargs="+", help="a snapshot")
    _add_removal_options(removing)


def add_store_commands(group: Group) -> None:
    """Add what keeps the store in order."""
    keep = group.add(
        "keep",
        "upkeep.keep",
        "remove old snapshots by a rule",
        "Remove the oldest snapshots, and keep the newest ones and those that are pinned.",
    )
    rule = keep.add_mutually_exclusive_group(required=True)
    rule.add_argument("--last", metavar="N", type=number, help="keep the newest N")
    rule.add_argument("--under", metavar="SIZE", type=size, help="keep what fits: 500M, 20G, 1.5T")
    _add_removal_options(keep)
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


def _add_removal_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--dry-run", action="store_true", help="only say what would go, and how much that would free")
    command.add_argument("--yes", "-y", action="store_true", help="do not ask (without a terminal nothing is asked)")
