"""Runs test files one after another, each in a process of its own, and ends those that hang: `make test-gpu`.

Several programs at a GPU at once make its driver 20 to 40 times slower, and a call of the driver may hang where no
signal gets through. So each file has a time limit; past it, the file's whole tree of processes is killed, the test that
hung is named, and the next file goes on. Each result is told at once, and kept in `results.json`: whatever ends this
program, what it knew is not lost.

Standard library and pytest only, so that it runs where nothing can be installed:
`python tests/gpu/file_by_file.py test_pools test_managed=120`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

_HERE = Path(__file__).resolve()
_ROOT = _HERE.parents[2]
_SET_CHILD_SUBREAPER = 36  # prctl: what loses its parent becomes this process's child
_TO_START = 60.0  # what a file may take beside its limit until its first test begins, in seconds
_LAST_WORDS = 10.0  # for how long a file that hangs may take to write where its threads are, in seconds
_TO_END = 3.0  # for how long what a file has started may take to end after it, in seconds
_TO_DIE = 20.0  # for how long killed processes may take to end: one that hangs in the driver does not, in seconds
_SHOWN = 1500  # bytes of why a test failed that are shown


@dataclass
class Result:
    """What came of a test."""

    test: str
    outcome: str
    seconds: float
    why: str = ""


@dataclass
class FileResult:
    """What came of a file; `outcome` is passed, skipped, failed, hung, crashed, or stopped (with this program)."""

    file: str
    outcome: str = "stopped"
    seconds: float = 0.0
    tests: list[Result] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """Processes that it left behind, and those that it had when it hung."""


# -- inside: the process that runs one file


class _Teller:
    """A plugin of pytest that tells of each test as it begins and ends."""

    def __init__(self, pipe: int) -> None:
        self._pipe, self._began = pipe, 0.0
        self._worst = ("passed", "")

    def _tell(self, **what: Any) -> None:
        os.write(self._pipe, json.dumps(what).encode() + b"\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._began, self._worst = time.monotonic(), ("passed", "")
        self._tell(begins=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == "failed":
            self._worst = ("failed", f"{report.when}: {report.longreprtext}")
        elif report.outcome == "skipped" and self._worst[0] == "passed":
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            self._worst = ("skipped", str(reason))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        outcome, why = self._worst
        self._tell(test=nodeid, outcome=outcome, seconds=round(time.monotonic() - self._began, 2), why=why)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._tell(test=report.nodeid, outcome="failed", seconds=0.0, why=report.longreprtext)


def _run_inside(pipe: int, arguments: list[str]) -> int:
    os.set_inheritable(pipe, False)
    # Beside what pytest captures.
    faulthandler.register(signal.SIGUSR1, os.fdopen(os.dup(2), "wb", buffering=0))
    return int(pytest.main(arguments, plugins=[_Teller(pipe)]))


# -- outside


class _Stop(Exception):
    """This program is to end."""


def _descendants() -> dict[int, str]:
    """Return all processes below this one: pid, and what it is and does."""
    parents, told = dict[int, int](), dict[int, str]()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            parents[int(entry.name)] = int(parent)
            if state != "Z":
                told[int(entry.name)] = f"{entry.name} {state} {_waits_in(entry)} {command[:200]}"
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found and pid not in found}:
        found |= more
    return {pid: told[pid] for pid in sorted(found) if pid in told and pid != os.getpid()}


def _waits_in(process: Path) -> str:
    with contextlib.suppress(OSError):
        return (process / "wchan").read_text() or "-"
    return "-"


def _reap() -> dict[int, int]:
    """Take note of children that have ended, those of others among them; return their exit codes."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while (one := os.waitpid(-1, os.WNOHANG))[0]:
            ended[one[0]] = os.waitstatus_to_exitcode(one[1])
    return ended


def _left_behind() -> list[str]:
    """Return what does not end by itself in a moment."""
    deadline = time.monotonic() + _TO_END
    while (left := _descendants()) and time.monotonic() < deadline:
        _reap()
        time.sleep(0.05)
    return list(left.values())


def _kill_all() -> list[str]:
    """Kill all that is below this process; return what does not end."""
    deadline = time.monotonic() + _TO_DIE
    while (left := _descendants()) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        time.sleep(0.02)
    _reap()
    return list(left.values())


class _File:
    """A file that is run."""

    def __init__(self, name: str, log: Path) -> None:
        self.result, self.running, self._log = FileResult(name), "", log
        self._began, self._first, self._rest = time.monotonic(), 0.0, b""
        self._out, into = os.pipe()
        command = [sys.executable, "-u", str(_HERE), "--inside", str(into), _path_of(name), "-v", "--no-header"]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, cwd=_ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=[into]
            )
        os.close(into)

    def follow(self, limit: float) -> Iterator[Result]:
        """Yield each result as it comes; those of a file that does not end within the limit, too."""
        code = None
        while code is None and time.monotonic() < (self._first or self._began + _TO_START) + limit:
            yield from self._news()
            code = _reap().get(self._process.pid)
        yield from self._news()
        if code is None:
            where = self._say_where()
            self.result.left = list(_descendants().values())
            yield self._end("hung", f"it did not end in {limit:.0f} s; its main thread:\n{where}")
        elif code in (0, 5):  # 5: no tests
            did = any(one.outcome == "passed" for one in self.result.tests)
            self.result.outcome = "passed" if did else "skipped"
        elif any(one.outcome == "failed" for one in self.result.tests):
            self.result.outcome = "failed"
        else:
            yield self._end("crashed", f"pytest ended with {code}:\n{self._output()[-_SHOWN:]}")
        self.result.seconds = round(self.seconds, 2)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def close(self) -> None:
        """End it with all that it started, which it should have done."""
        os.close(self._out)
        if self.result.outcome != "hung":
            self.result.left = _left_behind()
        stuck = _kill_all()
        self.result.left += [f"cannot be ended: {one}" for one in stuck]
        self._process.returncode = 0  # reaped above: nobody is to wait for it

    def _output(self) -> str:
        return self._log.read_text(errors="replace")

    def _say_where(self) -> str:
        """Have it write where its threads are, and return where the first one is."""
        size, deadline = self._log.stat().st_size, time.monotonic() + _LAST_WORDS
        os.kill(self._process.pid, signal.SIGUSR1)
        while self._log.stat().st_size == size and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)
        return self._output().rpartition("(most recent call first):")[2][:_SHOWN]

    def _end(self, outcome: str, why: str) -> Result:
        self.result.outcome = outcome
        return self._add(Result(self.running or self.result.file, outcome, round(self.seconds, 2), why))

    def _add(self, result: Result) -> Result:
        self.result.tests.append(result)
        return result

    def _news(self) -> Iterator[Result]:
        while select.select([self._out], [], [], 0.05)[0]:
            read = os.read(self._out, 1 << 16)
            *lines, self._rest = (self._rest + read).split(b"\n")
            for told in map(json.loads, lines):
                if "begins" in told:
                    self.running = told["begins"]
                    self._first = self._first or time.monotonic()
                else:
                    self.running = ""
                    yield self._add(Result(**told))
            if not read:
                time.sleep(0.05)
                return


def _path_of(name: str) -> str:
    """Return what pytest is to run: `test_pools`, `test_pools::test_one`, or any path."""
    file, colons, test = name.partition("::")
    path = Path(file) if Path(file).exists() else _HERE.parent / file
    path = path if path.suffix else path.with_suffix(".py")
    return f"{path.resolve()}{colons}{test}"


def _limit_of(name: str, default: float) -> tuple[str, float]:
    file, equals, limit = name.rpartition("=")
    return (file, float(limit)) if equals and limit.replace(".", "", 1).isdigit() else (name, default)


class _Run:
    """All files, and what is known of them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, list[FileResult]()
        self._began = time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, names: list[str], limit: float, total: float) -> None:
        for number, asked in enumerate(names):
            name, own = _limit_of(asked, limit)
            left = total - (time.monotonic() - self._began)
            if left < min(own, 30):
                self._say(f"no time is left for: {' '.join(names[number:])}")
                self.files += [FileResult(_limit_of(one, limit)[0]) for one in names[number:]]
                break
            self._say(f"-- {name} ({min(own, left):.0f} s at most)")
            self._run_one(name, min(own, left))

    def _run_one(self, name: str, limit: float) -> None:
        log = self.folder / f"{Path(name.partition('::')[0]).stem}.log"
        file = _File(name, log)
        self.files.append(file.result)
        try:
            for one in file.follow(limit):
                why = f"\n{one.why[-_SHOWN - 100 :]}" if one.outcome not in ("passed", "skipped") else f"  {one.why}"
                self._say(f"{one.outcome:8} {one.seconds:7.1f} s  {one.test.rpartition('/')[2]}{why}".rstrip())
                self.keep()
        finally:
            file.close()
            self.keep()
        for left in file.result.left:
            self._say(f"  {'had' if file.result.outcome == 'hung' else 'left behind'}: {left}")
        self._say(f"   {file.result.outcome} after {file.result.seconds:.1f} s; its output: {log}")

    def keep(self) -> None:
        """Write what is known."""
        new = self.folder / "results.json.new"
        new.write_text(json.dumps({"counts": self.counts(), "files": [asdict(one) for one in self.files]}, indent=1))
        new.replace(self.folder / "results.json")

    def counts(self) -> dict[str, int]:
        outcomes = [test.outcome for file in self.files for test in file.tests]
        return {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f}  {text}", flush=True)

    def summary(self) -> int:
        self.keep()
        self._say(f"{self.counts()}; all of it: {self.folder / 'results.json'}")
        for file in self.files:
            if file.outcome != "passed":
                self._say(f"{file.outcome}: {file.file}")
        return int(any(file.outcome not in ("passed", "skipped") for file in self.files))


def _stop(number: int, frame: FrameType | None) -> None:
    raise _Stop


def main(arguments: list[str]) -> int:
    """Run the files that are named, or all; return 0 where all passed."""
    if arguments[:1] == ["--inside"]:
        return _run_inside(int(arguments[1]), arguments[2:])
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="*", metavar="FILE[=SECONDS]", help="in this order, each with its own limit")
    parser.add_argument("--limit", type=float, default=600, help="seconds for each of the others (%(default)s)")
    parser.add_argument("--total", type=float, default=86400, help="seconds for all of them")
    parser.add_argument("--folder", type=Path, default=_ROOT / "build" / "test-gpu", help="where results and logs go")
    options = parser.parse_args(arguments)
    names = options.files or sorted(path.stem for path in _HERE.parent.glob("test_*.py"))
    if ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError("processes that lose their parent cannot be had as children (prctl)")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _stop)
    run = _Run(options.folder)
    try:
        run.run(names, options.limit, options.total)
    except _Stop:
        print("stopped", flush=True)
    return run.summary()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
