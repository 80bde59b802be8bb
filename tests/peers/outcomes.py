"""What became of each test of a pytest run: a plugin of the pytest that runs another project's suite."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = ["FILE", "PLUGIN", "read"]

PLUGIN = "peers.outcomes"
FILE = "PEERS_OUTCOMES"
"""The variable that names the file which it is written to, a line a test and phase."""


def pytest_runtest_logreport(report: Any) -> None:
    """Write down how a phase of a test ended, at once: the whole run may be killed."""
    words = str(getattr(report, "longreprtext", "")).strip().splitlines()
    line = json.dumps([report.nodeid, report.outcome, words[-1] if words else ""]) + "\n"
    file = os.open(os.environ[FILE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)  # tests have Path.open mocked
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def read(path: Path) -> dict[str, tuple[str, str]]:
    """Return the outcome of each test, ``passed``, ``skipped`` or ``failed``, and the last line of what it says."""
    found: dict[str, tuple[str, str]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        test, outcome, said = json.loads(line)
        if test not in found or found[test][0] == "passed":
            found[test] = outcome, said
    return found
