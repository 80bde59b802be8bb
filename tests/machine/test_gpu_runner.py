"""`make test-gpu` runs files of tests one by one: one that hangs is ended and named, and the next one goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

RUNNER = Path(__file__).parents[1] / "gpu" / "file_by_file.py"

HANGS = """
import os, signal, time
from pathlib import Path

if not (child := os.fork()):
    os.setsid()
    if not (daemon := os.fork()):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(10000)
    Path({daemon!r}).write_text(str(daemon))
    os._exit(0)
os.waitpid(child, 0)

def test_for_ever():
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {{signal.SIGUSR1}})
    while True:
        time.sleep(10000)
"""
SOME = """
import pytest

def test_good(): pass
def test_bad(): assert 1 == 2, "for a reason"
@pytest.mark.skip(reason="no such GPU")
def test_skipped(): pass
"""


def test_what_hangs_is_ended_and_named_and_the_next_file_goes_on(tmp_path: Path) -> None:
    daemon = tmp_path / "daemon"
    (tmp_path / "test_hangs.py").write_text(HANGS.format(daemon=str(daemon)))
    (tmp_path / "test_dies.py").write_text("import os\ndef test_dies(): os.kill(os.getpid(), 9)\n")
    (tmp_path / "test_some.py").write_text(SOME)
    files = ["test_hangs.py=1", "test_dies.py", "test_some.py"]
    command = [sys.executable, str(RUNNER), "--folder", str(tmp_path / "out"), *files]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert not Path("/proc", daemon.read_text()).exists()
    told = json.loads((tmp_path / "out" / "results.json").read_text())
    assert told["counts"] == {"crashed": 1, "failed": 1, "hung": 1, "passed": 1, "skipped": 1}
    hung, died, some = told["files"]
    assert (hung["outcome"], died["outcome"], some["outcome"]) == ("hung", "crashed", "failed")
    assert hung["tests"][0]["test"].endswith("test_hangs.py::test_for_ever")
    assert "in test_for_ever" in hung["tests"][0]["why"], "it says where"
    assert any(one.startswith(daemon.read_text()) for one in hung["left"])
    assert died["tests"][0]["test"].endswith("test_dies.py::test_dies")
    assert "for a reason" in some["tests"][1]["why"]
    assert "no such GPU" in some["tests"][2]["why"]
    for word in ("hung", "crashed", "passed", "failed", "skipped"):
        assert f" {word} " in done.stdout
