"""The commands that keep the store in order: their words; what they do is in `upkeep`, imported when one runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from typing import Protocol

from ..kernel.words import number, size
from .removal import add_removal_options

__all__ = ["add_store_parsers"]

_Run = Callable[[argparse.Namespace], int]


class _Command(Protocol):
    def __call__(self, name: str, run: _Run, summary: str, description: str = "") -> argparse.ArgumentParser: ...


def _later(name: str) -> _Run:
    def run(args: argparse.Namespace) -> int:
        do: _Run = getattr(import_module("jupyter_gpuckpt.cli.upkeep"), name)
        return do(args)

    return run


def add_store_parsers(command: _Command) -> None:
    """Add the parsers by `command`, which makes one."""
    log = command("log", _later("log"), "draw which snapshot came from which")
    log.add_argument("--notebook", metavar="NOTEBOOK", help="only those of this notebook: its name or path")
    diff = command(
        "diff",
        _later("diff"),
        "say what differs between two snapshots",
        "Say which variables changed from the first to the second, by how much they differ, and which files they use.",
    )
    diff.add_argument("old", metavar="A", help="a snapshot")
    diff.add_argument("new", metavar="B", help="another one")
    move = command("mv", _later("move"), "give a snapshot another name")
    move.add_argument("name", metavar="NAME", help="the snapshot")
    move.add_argument("new", metavar="NEW", help="its name from now on")
    note = command("note", _later("note"), "give a snapshot another note")
    note.add_argument("name", metavar="NAME", help="the snapshot")
    note.add_argument("text", metavar="TEXT", nargs="+", help="its note from now on; '' for none")
    for name, summary in (
        ("pin", "keep snapshots from being removed or replaced"),
        ("unpin", "let snapshots be removed and replaced again"),
    ):
        pin = command(name, _later(name), summary)
        pin.add_argument("names", metavar="NAME", nargs="+", help="a snapshot")
    tag = command("tag", _later("tag"), "add tags to a snapshot, or take them away")
    tag.add_argument("name", metavar="NAME", help="the snapshot")
    tag.add_argument("tags", metavar="TAG", nargs="*", help="a tag to add: letters, digits, and . _ -")
    tag.add_argument("--remove", metavar="TAG", action="append", default=[], help="a tag to take away")
    keep = command(
        "keep",
        _later("keep"),
        "remove old snapshots by a rule",
        "Remove the oldest snapshots, and keep the newest ones and those that are pinned.",
    )
    rule = keep.add_mutually_exclusive_group(required=True)
    rule.add_argument("--last", metavar="N", type=number, help="keep the newest N")
    rule.add_argument("--under", metavar="SIZE", type=size, help="keep what fits: 500M, 20G, 1.5T")
    add_removal_options(keep)
    keep.add_argument("--notebook", metavar="NOTEBOOK", help="remove only those of this notebook: its name or path")
    gc = command(
        "gc",
        _later("collect"),
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
    check = command(
        "check",
        _later("check"),
        "say what is damaged in the store, and which snapshots are affected",
        "Look for damage; nothing is changed. The exit status is 1 where there is any.",
    )
    check.add_argument("--read-data", action="store_true", help="read every byte of every snapshot")
    command(
        "repair",
        _later("repair"),
        "repair a damaged store as far as possible",
        "Make the index of the store again from its packs. Every byte is read, and no snapshot is removed.\n"
        "The exit status is 1 where some cannot be restored all the same.",
    )
