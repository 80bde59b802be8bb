"""Checks of CRIU: which one there is, what it says of this kernel, and whether it does its work."""

from __future__ import annotations

from jupyter_gpuckpt.errors import Unavailable
from jupyter_gpuckpt.freeze.criu_program import CriuProgram, check, find_criu, refuse_open_sockets, version_text

from .checks import Check, judge
from .trials import try_save_and_restore

__all__ = ["criu_checks"]

_CHECK_MEANS = "CRIU checks the kernel features and rights that it needs."
_TRIAL_MEANS = "A small process was saved, ended, and restored with its memory."


def criu_checks(deep: bool) -> list[Check]:
    """Return the checks of CRIU; with `deep`, a process is saved and brought back too."""
    try:
        program = find_criu()
    except Unavailable as unavailable:
        found = _missing(unavailable)
        return [found, *(_not_tried(name) for name in ("kernel features", "trial")[: 1 + deep])]
    checks = [_found(program), _features(program), _sockets(program)]
    return [*checks, _trial(program)] if deep else checks


def _missing(unavailable: Unavailable) -> Check:
    return judge("criu", False, unavailable.why, _found_means(), unavailable.then)


def _found(program: CriuProgram) -> Check:
    found = f"{version_text(program.version)}, {program.path}"
    return judge("criu", True, found, _found_means(), "")


def _found_means() -> str:
    return "CRIU writes the kernel's processes to disk and restores them."


def _features(program: CriuProgram) -> Check:
    try:
        check(program)
    except Unavailable as unavailable:
        return judge(
            "kernel features",
            False,
            unavailable.why,
            _CHECK_MEANS,
            "Mend the rights and the filter above first. If they are good, this Linux kernel lacks options that CRIU "
            "needs (CONFIG_CHECKPOINT_RESTORE and others, see https://criu.org/Linux_kernel).",
        )
    return judge("kernel features", True, "`criu check` passed", _CHECK_MEANS, "")


def _sockets(program: CriuProgram) -> Check:
    found, means, mend = "protected from other users", "No other user can disturb saves and restores through them.", ""
    try:
        refuse_open_sockets(program)
    except Unavailable as unavailable:
        found, means, mend = unavailable.why, unavailable.what, unavailable.then
    return judge("criu's sockets", program.private_sockets, found, means, mend, required=False)


def _trial(program: CriuProgram) -> Check:
    outcome = try_save_and_restore(program)
    return judge(
        "trial",
        outcome.failed == "",
        f"cannot {outcome.failed}: {outcome.why}"
        if outcome.failed
        else f"saved and restored in {outcome.seconds:.2f} s",
        _TRIAL_MEANS if outcome.failed == "" else "A small process could not be saved and restored.",
        "Fix the problems above first; if there are none, report this with the details found.",
    )


def _not_tried(name: str) -> Check:
    return judge(name, False, "not tried, because there is no criu", "", "Install criu first.")
