"""`recipe`: configuration files that are tested, to begin with one's own."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from importlib.resources import files

from ..kernel.tables import Listing
from ..kernel.words import Usage
from . import output

__all__ = ["recipe", "summaries"]

_FOLDER = files(__package__.rpartition(".")[0]) / "recipes"
_HOW = "`jupyter gpuckpt recipe NAME > FILE` writes one into a file. Its comments say what to change."
_SUMMARY = re.compile(r'^(?:#(?!!)|\s*"comment":\s*")\s*(.+?)\s*(?:",?)?$', re.MULTILINE)
"""The first comment of a file. JSON has none; there it is the first member of that name."""


def recipe(args: argparse.Namespace) -> int:
    """Print a recipe as it is, or which there are.

    Raises
    ------
    Usage : there is none of that name.
    """
    if not args.recipe:
        found = summaries()
        rows = [{"name": name, "summary": summary} for name, summary in found.items()]
        listing = Listing(["", ""], [*found.items()], "", ["", _HOW])
        output.result(args.json, {"recipes": rows}, listing)
        return output.DONE
    if args.recipe not in summaries():
        raise Usage(
            f"There is no recipe {args.recipe}.",
            f"There are {', '.join(summaries())}.",
            "Run `jupyter gpuckpt recipe` to see what each is for.",
        )
    text = (_FOLDER / args.recipe).read_text(encoding="utf-8")
    output.result(args.json, {"name": args.recipe, "text": text}, text.rstrip("\n"))
    return output.DONE


def summaries() -> Mapping[str, str]:
    """Return what each recipe is for, in a line, by their names."""
    texts = {one.name: one.read_text(encoding="utf-8") for one in _FOLDER.iterdir() if one.is_file()}
    return {name: found[1] for name, text in sorted(texts.items()) if (found := _SUMMARY.search(text))}
