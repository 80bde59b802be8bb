"""The command `jupyter gpuckpt`: from the words on the command line to an exit status."""

from __future__ import annotations

import functools
import os
import shlex
import sys
import traceback
from collections.abc import Sequence

from ..errors import Cancelled, GpuckptError
from ..spelling import in_a_terminal
from . import output
from .adding import run
from .parsers import program


def main(words: Sequence[str] | None = None) -> int:
    """Do what the command line says, and return the exit status."""
    if "_ARGCOMPLETE" in os.environ:  # a shell asks, and reads the answer elsewhere
        from .completion import complete

        complete()
    words, behind = _parted(sys.argv[1:] if words is None else words)
    try:
        status = _obey(words, behind)
        output.finish()
        return status
    except BrokenPipeError:
        return output.FAILED
    except (Exception, KeyboardInterrupt) as e:  # noqa: BLE001 - nobody should meet a traceback who did not ask for it
        if "--debug" in words:
            traceback.print_exc()
        error = _as_told(e)
        output.failure("--json" in words, error)
        return output.exit_status(error)


def _parted(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return our own words, and those of a command that is to be started, which stand behind two dashes."""
    if "--" not in words or next(w for w in words if not w.startswith("-") or w == "--") not in ("exec", "run"):
        return words, []
    at = list(words).index("--")
    return words[:at], words[at + 1 :]


def _obey(words: Sequence[str], behind: Sequence[str]) -> int:
    here = program()
    try:
        args = here.parser.parse(words, here.commands)
    # After --help and --version, which until Python 3.11 raise also where nobody reads them; an error is a `Usage`.
    except (SystemExit, BrokenPipeError):
        return output.DONE
    if args.command is None:
        output.note(here.parser.format_help())
        return output.USAGE
    if behind:
        args.words = list(behind)
    if getattr(args, "store", None):
        os.environ["GPUCKPT_STORE"] = args.store  # for this command, and a job that it brings up
    try:
        return run(args)
    except GpuckptError as e:
        named = shlex.quote(getattr(args, "kernel", None) or "KERNEL")
        e.spelled(functools.partial(in_a_terminal, kernel=named))
        raise


def _as_told(error: BaseException) -> GpuckptError:
    """Return an exception as what happened, why, and what to do."""
    if isinstance(error, GpuckptError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return Cancelled(
            "The command was interrupted.",
            "It got SIGINT (Ctrl-C).",
            "A save or restore may still be running: see `jupyter gpuckpt kernels`. Finished transfers are not "
            "repeated.",
        )
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        return GpuckptError(
            f"{error.filename} is not there.", "There is no file or folder of that name.", "Check the path."
        )
    if isinstance(error, OSError):
        where = f": {error.filename}" if error.filename is not None else ""
        return GpuckptError(
            "The system refused an operation that the command needs.",
            f"{error.strerror or error}{where}",
            "Check that the file or folder is yours and that the disk has free space. Snapshots are in "
            "GPUCKPT_STORE, files of running kernels in JUPYTER_RUNTIME_DIR.",
        )
    return GpuckptError(
        "The command failed with an unexpected error.",
        f"{type(error).__name__}: {error}",
        "Please report it to the project, with the output of the same command with --debug.",
    )
