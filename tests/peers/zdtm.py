"""criu's own programs (zdtm) as jobs: each is started, saved, stopped, restored, and then judges itself."""

from __future__ import annotations

import ast
import io
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

from jupyter_gpuckpt.cli import main
from jupyter_gpuckpt.client.record import KernelFolder

from . import zdtm_job

__all__ = ["build", "commands", "run"]

_LEFT_OUT = frozenset({"noauto", "crfail"})
"""Flags of programs that criu does not run by itself, or whose dump has to fail."""
_LIMIT = 180.0
"""Seconds that one step may take."""
_SLOW = 20.0
"""Seconds that a restore of one of these small programs may take: one that takes longer waits for something."""


def build(criu: Path, log: Path) -> None:
    """Compile the programs in criu's sources; those that need libraries which are not here are left out.

    Raises
    ------
    RuntimeError : none could be compiled.
    """
    command = ["make", "--directory", str(criu / "test/zdtm"), "--keep-going", f"--jobs={os.cpu_count()}"]
    with log.open("wb") as output:
        subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False)
    if not (criu / "test/zdtm/lib/libzdtmtst.a").exists():
        raise RuntimeError(f"zdtm's programs could not be compiled; what make says is in {log}")


def commands(criu: Path) -> dict[str, list[str]]:
    """Return how each program is started that is for a process on the machine itself, by ``static/NAME``."""
    found: dict[str, list[str]] = {}
    for folder in (criu / "test/zdtm/static", criu / "test/zdtm/transition"):
        programs = [path for path in sorted(folder.iterdir()) if _is_for_a_job(path)]
        targets = [f"{path.name}.pid" for path in programs]
        asked = ["make", "--no-print-directory", "--dry-run", "--keep-going", "--directory", str(folder), *targets]
        said = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
        for line in said.splitlines():
            if "--pidfile=" in line:
                program, *options = shlex.split(line)
                found[f"{folder.name}/{Path(program).name}"] = [str(folder / program), *options]
    return found


def _is_for_a_job(program: Path) -> bool:
    if program.suffix or not (program.is_file() and os.access(program, os.X_OK)):
        return False
    description = _description(program)
    return (
        "h" in description.get("flavor", "h").split()
        and not _LEFT_OUT & set(description.get("flags", "").split())
        and description.get("arch", platform.machine()) == platform.machine()
    )


def _description(program: Path) -> dict[str, str]:
    """Return what criu's runner is told of a program; nothing for most."""
    path = program.with_name(program.name + ".desc")
    try:
        found: dict[str, str] = ast.literal_eval(path.read_text().strip())
    except (OSError, ValueError, SyntaxError):
        return {}
    return found


def run(commands: Mapping[str, list[str]], log: Path) -> Iterator[tuple[str, str | None]]:
    """Run programs, one after the other; yield what is wrong with each: nothing, or None of one that was not tried.

    Some do not start here, for lack of something that this machine lacks.
    """
    with log.open("w") as output:
        for name, command in commands.items():
            with tempfile.TemporaryDirectory(prefix="gpuckpt-zdtm-", ignore_cleanup_errors=True) as folder:
                trial = _Trial(command, Path(folder))
                with _in(Path(folder)):
                    try:
                        wrong = trial.run()
                    finally:
                        trial.end()
            said = "not tried" if wrong is None else wrong or f"passed, restored in {trial.restored_in:.1f} s"
            print(f"{name}: {said.strip()}", file=output, flush=True)
            yield name, wrong


_JOB = "zdtm"


class _Trial:
    """One program, in folders of its own."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self._command, self._folder = command, folder
        self._started, self._judge, self._verdict = folder / "started", folder / "judge", folder / "verdict"
        (folder / "work").mkdir()
        self.restored_in = 0.0

    def run(self) -> str | None:
        """Return what is wrong with it: nothing, or None where it does not start."""
        options = dict(word[2:].partition("=")[::2] for word in self._command[1:])
        first = [sys.executable, "-S", "-E", zdtm_job.__file__, *map(str, (self._started, self._judge, self._verdict))]
        wrong = self._ask("exec", _JOB, "--", *first, options["pidfile"], options["outfile"], *self._command)
        if not wrong:
            self._wait_for(self._started, self._verdict)
            if not self._started.exists():
                return None
            wrong = self._ask("save", _JOB) or self._ask("stop", _JOB, "--force")
        if wrong:
            return wrong
        began = time.monotonic()
        wrong = self._ask("restore", _JOB)
        self.restored_in = time.monotonic() - began
        if wrong:
            return wrong
        if self.restored_in > _SLOW:
            return f"its restore took {self.restored_in:.0f} s"
        self._judge.touch()
        self._wait_for()
        if not self._verdict.exists():
            return "it does not judge itself"
        return "" if self._verdict.read_text() == zdtm_job.PASSED else f"it has failed: {self._said()}"

    def end(self) -> None:
        """End what is left of it."""
        self._ask("stop", _JOB, "--force")

    def _wait_for(self, *paths: Path) -> None:
        """Wait until the job has ended, or one of these files is there, or for long."""
        deadline = time.monotonic() + _LIMIT
        while not any(path.exists() for path in paths) and time.monotonic() < deadline:
            if self._has_ended():
                break
            time.sleep(0.02)

    def _has_ended(self) -> bool:
        return KernelFolder(self._folder / f"runtime/gpuckpt/job-{_JOB}").has_ended()

    def _said(self) -> str:
        logs = self._folder.glob("runtime/gpuckpt/job-*/output")
        return " / ".join(line for log in logs for line in log.read_text("utf-8", "replace").splitlines())

    def _ask(self, *words: str) -> str:
        """Run a command of ours; return what is wrong, nothing where all is well."""
        said = io.StringIO()
        with redirect_stdout(io.StringIO()), redirect_stderr(said):
            status = main(words)
        return f"{words[0]}: {' / '.join(said.getvalue().splitlines())}" if status else ""


@contextmanager
def _in(folder: Path) -> Iterator[None]:
    """Be where nobody else's jobs and snapshots are seen: the commands run in this process, which is much faster."""
    places = {"JUPYTER_RUNTIME_DIR": "runtime", "GPUCKPT_STORE": "store", "GPUCKPT_LOGS": "logs"}
    before, was_in = dict(os.environ), Path.cwd()
    os.environ.update({variable: str(folder / name) for variable, name in places.items()})
    os.chdir(folder / "work")
    try:
        yield
    finally:
        os.chdir(was_in)
        os.environ.clear()
        os.environ.update(before)
