"""The first process of a job that is one of zdtm's programs: starts it, has it judge itself when told to, says how.

It tells and is told by files, whose paths it is given: `started`, `judge`, and its exit status in `verdict`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

__all__ = ["FAILED", "NOT_STARTED", "PASSED"]

PASSED, FAILED, NOT_STARTED = "passed", "failed", "not started"


def main(started: str, judge: str, verdict: str, pid_file: str, out_file: str, *command: str) -> None:
    """Run `command`, which leaves a daemon behind; when told to, ask that to judge itself."""
    found = NOT_STARTED
    if not subprocess.run(command, check=False).returncode:
        pid = int(Path(pid_file).read_text())
        Path(started).touch()
        while not Path(judge).exists() and not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            time.sleep(0.02)
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
        found = PASSED if "PASS" in _said(out_file).split() else FAILED
    print(_said(out_file), flush=True)
    Path(verdict + ".new").write_text(found)
    Path(verdict + ".new").rename(verdict)


def _said(out_file: str) -> str:
    """Return what the program has written; it renames its file when it ends in order."""
    paths = (Path(out_file), Path(out_file + ".inprogress"))
    return next((path.read_text("utf-8", "replace") for path in paths if path.exists()), "")


if __name__ == "__main__":
    main(*sys.argv[1:])
