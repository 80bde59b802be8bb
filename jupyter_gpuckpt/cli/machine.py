"""`setup` and `doctor`: commands about the machine."""

from __future__ import annotations

import argparse
import dataclasses
import os
import textwrap
from collections.abc import Sequence

from .. import settings
from ..errors import Unavailable
from ..freeze.criu_program import CriuProgram, check, find_criu, version_text
from ..kernel.tables import Line, Marked, Shown
from ..machine.capabilities import may_run_criu
from ..machine.capability import why_unavailable
from ..machine.checks import Check, works
from ..machine.criu_install import install_criu
from . import output

_WIDTH, _NARROWEST = 100, 40
_WORKS = "Kernels can be saved and restored here."


def setup(args: argparse.Namespace) -> int:
    """Install CRIU where none works, try it, and say whether kernels can be saved now.

    Raises
    ------
    Unavailable : there is no CRIU that works, and none could be installed.
    """
    program = _working_criu()
    version = version_text(program.version)
    unavailable = why_unavailable()
    document = {
        "ok": True,
        "criu": dataclasses.asdict(program) | {"version": version},
        "unavailable": output.told(unavailable) if unavailable else None,
    }
    text = ""
    if not args.json:
        text = f"CRIU {version} is installed: {program.path}\n{unavailable or _tried()}"
    output.result(args.json, document, text)
    return output.DONE


def _tried() -> str:
    """Return what stands between this machine and saves, and where nothing does, how to begin."""
    # Imported here: the checks bring in Jupyter, which nobody is to wait for while CRIU is installed.
    from ..machine.doctor import examine

    lacking = [check for check in examine(deep=True) if check.required and not check.ok]
    if lacking:
        return _Judged(lacking).text()
    as_root = " --allow-root" if os.geteuid() == 0 else ""
    return f"{_WORKS}\nNext: Start `jupyter lab{as_root}`, and choose the kernel Python 3 (gpuckpt)."


def _working_criu() -> CriuProgram:
    """Return the CRIU that will be used, installed if there was none that works."""
    try:
        return _checked(find_criu())
    except Unavailable:
        if settings.named_criu():
            # Whatever is installed, the program that is named there is the one that is used.
            raise
        install_criu(settings.criu_prefix(), output.note)
    return _checked(find_criu())


def _checked(program: CriuProgram) -> CriuProgram:
    # Without these rights criu refuses to look at the kernel at all, which says nothing about the program.
    if may_run_criu():
        check(program)
    return program


def doctor(args: argparse.Namespace) -> int:
    """Judge the machine; the status says whether a save and a restore would work."""
    from ..machine.doctor import examine  # which brings in Jupyter

    checks = examine(deep=not args.quick, engine=args.engine or "")
    document = {"works": works(checks), "checks": [dataclasses.asdict(c) for c in checks]}
    output.result(args.json, document, _Judged(checks))
    return output.DONE if works(checks) else output.UNAVAILABLE


class _Judged(Shown):
    """Checks as aligned lines; what a check means and how to mend it stands below one that failed."""

    def __init__(self, checks: Sequence[Check]) -> None:
        self._checks = checks

    def text(self) -> str:
        return "\n".join(map("".join, self.lines(_WIDTH)))

    def lines(self, width: int) -> list[Line]:
        width = min(max(width, _NARROWEST), _WIDTH)
        of_names = max(len(check.name) for check in self._checks)
        indent = " " * (8 + of_names)
        lines: list[Line] = []
        for one in self._checks:
            mark = Marked("ok", "good") if one.ok else Marked("FAIL", "bad") if one.required else Marked("note", "busy")
            start = " " * (6 - len(mark)) + f"{one.name:<{of_names}}  "
            first, *more = _wrapped(" " * len(mark) + start, one.found, indent, width)
            lines += [[mark, first[len(mark) :]], *([line] for line in more)]
            if not one.ok:
                told = (text for text in (one.means, f"Next: {one.mend}") if text)
                lines += [[line] for text in told for line in _wrapped(indent, text, indent, width)]
        amiss = [check.name for check in self._checks if check.required and not check.ok]
        verdict = Marked(f"Kernels cannot be saved here yet: {', '.join(amiss)}.", "bad") if amiss else _WORKS
        return [*lines, [], [verdict]]


def _wrapped(start: str, text: str, indent: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=start,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [start]
