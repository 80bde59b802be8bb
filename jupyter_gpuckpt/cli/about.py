"""`help` and `version`: the program itself."""

from __future__ import annotations

import argparse

from .. import __version__
from . import output
from .parsers import program


def tell(args: argparse.Namespace) -> int:
    """Print the help, or that of one command."""
    here = program()
    about = here.parser.of(args.topic, here.commands) if args.topic else here.parser
    text = about.format_help()
    output.result(args.json, {"help": text}, text.rstrip("\n"))
    return output.DONE


def version(args: argparse.Namespace) -> int:
    """Print the version."""
    output.result(args.json, {"version": __version__}, f"jupyter_gpuckpt {__version__}")
    return output.DONE
