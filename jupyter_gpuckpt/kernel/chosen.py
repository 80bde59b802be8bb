"""Which snapshots `list` shows, and how scripts have them: the same in a cell and in a terminal."""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from .. import setting
from ..checked import to_json
from ..operations.results import AUTOMATIC, Labelled, Snapshots, Summary
from ..operations.values import number
from ..spelling import Spell
from . import show
from .tables import Listing
from .words import Usage

__all__ = ["add_last", "add_new_name", "add_options", "choose", "newest", "renamed_as", "shown"]

S = TypeVar("S", bound=Summary)


def add_last(command: argparse.ArgumentParser) -> None:
    """Add what chooses the newest snapshots."""
    command.add_argument("-n", "--last", metavar="N", type=number, help="only the newest N")


def add_options(command: argparse.ArgumentParser) -> None:
    """Add what chooses snapshots, and --format."""
    add_last(command)
    command.add_argument("--notebook", metavar="NOTEBOOK", help="only those of this notebook (name or path)")
    command.add_argument("--tag", metavar="TAG", action="append", default=[], help="only those with this tag")
    command.add_argument(
        "--since",
        metavar="WHEN",
        type=_since,
        help="only those saved since: 45s, 30m, 2h, 7d ago, or a date (2026-11-20)",
    )
    command.add_argument("--auto", action="store_true", help="also those that were saved by themselves after cells")
    command.add_argument("--pinned", action="store_true", help="only those that are pinned")
    command.add_argument(
        "--format",
        metavar="TEXT",
        help="for scripts: one line each, such as '{name} {created} {size}'; json for one JSON object per line",
    )


def add_new_name(keep: argparse.ArgumentParser) -> None:
    """Have `keep` take, in place of a rule, which snapshot is to stay, and what it is called from now on."""
    (rule,) = keep._mutually_exclusive_groups
    rule.add_argument(
        "renamed",
        metavar="NAME as NEW",
        nargs="*",
        default=[],
        help="give an automatic snapshot a name of your own, so that it stays",
    )


def renamed_as(words: Sequence[str], spell: Spell) -> tuple[str, str]:
    """Return which snapshot is to stay, and what it is called from now on, of such words.

    Raises
    ------
    Usage : they do not say it, or it would not stay by that name.
    """
    said, then = "Nothing was renamed.", spell("Type it like this: `gpuckpt keep auto-12 as before_merge`.")
    if len(words) != 3 or words[1] != "as":
        raise Usage(said, f"`{' '.join(words)}` does not say what is to stay under which name.", then)
    name, _, new = words
    if new.startswith(AUTOMATIC):
        raise Usage(said, f"Names that begin with {AUTOMATIC} are those of snapshots that go by themselves.", then)
    return name, new


def _since(text: str) -> float:
    """Return the time, in seconds since 1970, that a text such as ``2h`` (ago) or ``2026-11-20`` means."""
    try:
        return time.time() - (setting.parse_duration(text) or 0.0)
    except ValueError:
        pass
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither an age such as 2h or 7d nor a date") from None


def choose(found: Snapshots, args: argparse.Namespace) -> Snapshots:
    """Return of a list of snapshots what was asked for."""
    return replace(found, snapshots=[one for one in found.snapshots if _fits(one, args)][: args.last])


def newest(found: Sequence[S], last: int | None) -> tuple[Sequence[S], set[str]]:
    """Return the newest of some snapshots, and the ids of the others; all where no number is given."""
    snapshots = sorted(found, key=lambda one: (one.created, one.name), reverse=True)
    cut = snapshots[last:] if last is not None else []
    return snapshots[:last], {one.id for one in cut}


def _fits(one: Labelled, args: argparse.Namespace) -> bool:
    notebook = f"/{one.notebook}"
    return (
        (args.auto or not one.automatic)
        and (args.notebook is None or notebook.endswith((f"/{args.notebook}", f"/{args.notebook}.ipynb")))
        and set(args.tag) <= set(one.tags)
        and (args.since is None or datetime.datetime.fromisoformat(one.created).timestamp() >= args.since)
        and (one.pinned or not args.pinned)
    )


def shown(found: Snapshots, here: Mapping[str, Sequence[str]], args: argparse.Namespace, spell: Spell) -> Listing:
    """Return what was asked for, as a table or as lines for a script; `here` as `show.snapshots` has it.

    Raises
    ------
    Usage : the format names what a snapshot has not.
    """
    chosen = choose(found, args)
    if args.format is not None:
        return Listing([""], [[_line(one, args.format)] for one in chosen.snapshots], "", [])
    if found.snapshots and not chosen.snapshots:
        some = any(one.automatic for one in found.snapshots) and not args.auto
        hidden = "" if not some else " `--auto` also shows those that were saved by themselves."
        return Listing([], [], f"None of the {len(found.snapshots)} snapshots matches.{hidden}", [])
    return show.snapshots(chosen, here, spell)


def _line(one: Labelled, template: str) -> str:
    said = to_json(one)
    if template == "json":
        return json.dumps(said)
    texts = {name: _text(value) for name, value in said.items()}
    try:
        return template.format_map(texts)
    except (KeyError, ValueError, IndexError, AttributeError) as e:
        raise Usage(
            f"The format {template!r} cannot be used.",
            f"There is no field {e}." if isinstance(e, KeyError) else f"{e}.",
            f"The fields in braces can be: {', '.join(texts)}.",
        ) from None


def _text(value: Any) -> str:
    """Return a value as a script has it in a line."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
