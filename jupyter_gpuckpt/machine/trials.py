"""Try on this machine what a save and a restore need, and say which step failed and why."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from jupyter_gpuckpt.freeze.criu_errors import in_log
from jupyter_gpuckpt.freeze.criu_program import CriuProgram
from jupyter_gpuckpt.linux.root_only import temporary_folder

__all__ = ["Outcome", "try_namespaces", "try_save_and_restore"]

_NAMESPACES_TIMEOUT = 10.0
_SAVE_TIMEOUT = 90.0  # longer than what the program waits for criu, and then for an answer
_TRIAL = Path(__file__).absolute().with_name("namespace_trial.py")
"""A program: the package does not import it."""


@dataclass(frozen=True)
class Outcome:
    """How a trial went: the step that failed (empty when none did), why, and how long it took.

    `seconds` is the time of the whole trial.
    """

    failed: str
    why: str
    seconds: float


def try_namespaces() -> Outcome:
    """Make and furnish a fresh PID and mount namespace, choose a pid in it, and leave it again."""
    begun = time.monotonic()
    failed, why = _in_namespace((), {}, _NAMESPACES_TIMEOUT)
    return Outcome(failed, why, time.monotonic() - begun)


def try_save_and_restore(program: CriuProgram) -> Outcome:
    """Save a small process in one namespace and have it back, with its memory, in another."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpuckpt-trial-", dir=temporary_folder()) as folder:
        for step in ("save", "restore"):
            failed, why = _in_namespace((step, folder, *program.argv), program.environment(), _SAVE_TIMEOUT)
            if failed:
                why = in_log(Path(folder, f"{failed}.log")).words or why
                return Outcome(failed, why, time.monotonic() - begun)
    return Outcome("", "", time.monotonic() - begun)


def _in_namespace(arguments: tuple[str, ...], environment: dict[str, str], timeout: float) -> tuple[str, str]:
    # A process of its own, because making namespaces is for single-threaded processes.
    argv = [sys.executable, "-I", "-S", str(_TRIAL), *arguments]
    try:
        done = subprocess.run(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return arguments[0] if arguments else "make namespaces", f"no end within {timeout:.0f} s"
    except OSError as error:
        return "start a process", f"{sys.executable}: {error.strerror}"
    try:
        told = json.loads(done.stdout)
    except ValueError:
        said = done.stderr.strip().splitlines()
        return "start a process", said[-1] if said else f"it ended with {done.returncode}"
    return str(told["failed"]), str(told["why"])
