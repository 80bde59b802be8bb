"""The commands `jupyter gpuckpt setup` and `jupyter gpuckpt doctor`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.errors import Unavailable
from jupyter_gpuckpt.freeze.criu_program import CriuProgram, check, find_criu, version_text

from .checks import Check, works
from .criu_install import install_criu

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["add_doctor_parser", "add_setup_parser"]

_WIDTH = 100


def add_setup_parser(subparsers: Subparsers) -> None:
    """Add the command that installs what is missing."""
    parser = subparsers.add_parser(
        "setup",
        help="install CRIU for this project alone, where the machine has none that works",
        description="Look for a CRIU that works, and where there is none, install one into a folder of "
        "its own (GPUCKPT_CRIU_PREFIX). Nothing else of the system changes.",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=_setup)


def add_doctor_parser(subparsers: Subparsers) -> None:
    """Add the command that judges the machine."""
    parser = subparsers.add_parser(
        "doctor",
        help="say whether kernels can be saved and restored on this machine, and what is missing",
        description="Check everything that a save and a restore need. The exit status is 0 only when they would work.",
    )
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")
    parser.add_argument("--quick", action="store_true", help="do not save and restore a small process for a trial")
    parser.set_defaults(run=_doctor)


def _setup(args: argparse.Namespace) -> int:
    try:
        program = _working_criu(to_stderr=args.json)
    except Unavailable as unavailable:
        if args.json:
            _print_json({"ok": False, "error": unavailable.as_dict()})
        else:
            print(unavailable, file=sys.stderr)
        return 1
    if args.json:
        described = dataclasses.asdict(program) | {"version": version_text(program.version)}
        _print_json({"ok": True, "criu": described})
    else:
        print(f"CRIU {version_text(program.version)} is ready: {program.path}")
        print("Next: `jupyter gpuckpt doctor` checks the rest of this machine.")
    return 0


def _working_criu(to_stderr: bool) -> CriuProgram:
    """Return the CRIU that will be used, installed if there was none that works."""
    try:
        return _checked(find_criu())
    except Unavailable:
        if settings.named_criu():
            # Whatever is installed, the program that is named there is the one that is used.
            raise
        stream = sys.stderr if to_stderr else sys.stdout
        install_criu(settings.criu_prefix(), lambda line: print(line, file=stream, flush=True))
    return _checked(find_criu())


def _checked(program: CriuProgram) -> CriuProgram:
    # Without root criu refuses to look at the kernel at all, which says nothing about the program.
    if os.geteuid() == 0:
        check(program)
    return program


def _doctor(args: argparse.Namespace) -> int:
    # Imported here: the checks bring in Jupyter, which `setup` must not wait for.
    from .doctor import examine

    checks = examine(deep=not args.quick)
    if args.json:
        _print_json({"works": works(checks), "checks": [dataclasses.asdict(c) for c in checks]})
    else:
        print(_as_text(checks))
    return 0 if works(checks) else 1


def _as_text(checks: Sequence[Check]) -> str:
    """Return the checks as aligned lines; what a check means and how to mend it stands below one that failed."""
    width = max(len(check.name) for check in checks)
    indent = " " * (8 + width)
    lines = []
    for one in checks:
        mark = "ok" if one.ok else "FAIL" if one.required else "note"
        lines.append(_wrapped(f"{mark:<4}  {one.name:<{width}}  ", one.found, indent))
        if not one.ok:
            lines += [_wrapped(indent, text, indent) for text in (one.means, f"Next: {one.mend}") if text]
    amiss = [check.name for check in checks if check.required and not check.ok]
    verdict = (
        f"Kernels cannot be saved here yet: {', '.join(amiss)}." if amiss else "Kernels can be saved and restored here."
    )
    return "\n".join([*lines, "", verdict])


def _wrapped(start: str, text: str, indent: str) -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=start,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _print_json(document: dict[str, Any]) -> None:
    print(json.dumps(document, indent=2))
