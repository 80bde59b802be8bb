"""What `rm` and `keep` have in common: what would be removed, the question before it, and what went."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from ..errors import GpuckptError, Refused
from ..kernel import show
from ..kernel.tables import printable
from ..store import Store

__all__ = ["remove"]


def remove(
    args: argparse.Namespace, store: Store, named: Mapping[str, str], *, asks: bool
) -> tuple[dict[str, Any], str, list[GpuckptError]]:
    """Remove snapshots, where that is not only tried and, if it `asks`, is confirmed; `named` are keys and what to say.

    Return what to print as JSON, the same for people, and an error for each that stays.

    Raises
    ------
    Refused : it was not confirmed; nothing was removed.
    """
    going, would, refused = store.would_remove(named)
    errors = [*refused]
    many = f"{len(going)} {'snapshot' if len(going) == 1 else 'snapshots'}"
    if args.dry_run:
        lines = [f"Would remove {named[key]}." for key in going]
        total = [f"{many} would be removed, {show.size(would)} would be freed."] if going else []
        return {"would_remove": [*going], "freed": would}, "\n".join(lines + total), errors
    if asks and going and not args.yes:
        _confirm(f"Remove {many} ({show.size(would)}): {', '.join(named[key] for key in going)}?")
    removed: list[dict[str, Any]] = []
    for key in going:
        try:
            removed.append({"name": named[key], "key": key, "freed": store.remove(key)})
        except GpuckptError as e:
            errors.append(e)
    freed = sum(one["freed"] for one in removed)
    lines = [f"Removed {one['name']}: {show.size(one['freed'])} freed." for one in removed]
    if len(removed) > 1:
        lines.append(f"{len(removed)} snapshots removed, {show.size(freed)} freed.")
    return {"removed": removed, "freed": freed}, "\n".join(lines), errors


def _confirm(question: str) -> None:
    """Ask whoever sits at the terminal; a script, which has none, has said what it wants. Raises `Refused`."""
    if not (sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()):
        return
    sys.stderr.write(f"{printable(question)} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise Refused("Nothing was removed.", "It was not confirmed.", "Answer with y, or add --yes.")
