"""`broker`: the command for whoever has root on a machine of several users."""

from __future__ import annotations

import argparse

from ..broker.install import install, uninstall
from ..broker.service import run
from . import output


def broker(args: argparse.Namespace) -> int:
    """Run the broker in the foreground, or make it a service, or take that away.

    Raises
    ------
    GpuckptError : it was not done.
    """
    if args.action == "run":
        run(args.group, args.containers)
        return output.DONE
    text = install(args.group, output.note, args.containers) if args.action == "install" else uninstall()
    output.result(args.json, {"ok": True, "said": text}, text)
    return output.DONE
