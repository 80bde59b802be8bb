"""The quick judgement, and the trials behind it and behind the doctor, on the machine as it is."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import yama
from leaks import mounts
from notebooks import wait_until

from jupyter_gpuckpt.errors import GpuckptError
from jupyter_gpuckpt.freeze.criu_program import CriuProgram, find_criu
from jupyter_gpuckpt.machine.capability import why_unavailable
from jupyter_gpuckpt.machine.trials import try_namespaces, try_save_and_restore

pytestmark = pytest.mark.criu

JUDGE = """
import json
from jupyter_gpuckpt.machine.capability import why_unavailable
unavailable = why_unavailable()
print(json.dumps(unavailable and unavailable.as_dict()))
"""


def judged_under(*wrapper: str) -> GpuckptError:
    """Return the judgement of a process that is started through a wrapper program."""
    done = subprocess.run(
        [*wrapper, sys.executable, "-c", JUDGE], capture_output=True, text=True, timeout=60, check=True
    )
    return GpuckptError.from_dict(json.loads(done.stdout))


@pytest.mark.usefixtures("with_criu")
def test_this_machine_can_and_says_so_quickly() -> None:
    assert why_unavailable() is None
    # Each kernel's start asks: it is to be little beside what a kernel takes to start, on any machine.
    asked: list[float] = []
    started: list[float] = []
    while not asked or (min(asked) > min(started) / 2 and len(asked) < 20):
        begun = processor_time()
        assert why_unavailable() is None
        asked.append(processor_time() - begun)
        begun = processor_time()
        subprocess.run([sys.executable, "-c", "import ipykernel.kernelapp"], check=True)
        started.append(processor_time() - begun)
    assert min(asked) <= min(started) / 2, (asked, started)


def processor_time() -> float:
    """Return what this process and its children have worked, in seconds: other programs do not change it."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


@pytest.mark.usefixtures("without_criu")
def test_without_criu() -> None:
    unavailable = why_unavailable()
    assert unavailable is not None
    assert "CRIU" in unavailable.what


def test_another_user() -> None:
    # Imported before root is given up: the interpreter need not be readable for others.
    script = f"import jupyter_gpuckpt.machine.capability, os; os.setuid(65534)\n{JUDGE}"
    argv = [sys.executable, "-c", script]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    lost = GpuckptError.from_dict(json.loads(done.stdout))
    assert "65534" in lost.why
    assert "as root" in lost.then


def test_namespaces_that_cannot_be_made_are_named() -> None:
    limit = Path("/proc/sys/user/max_pid_namespaces")
    script = f'echo 0 > {limit} && exec "$@"'
    # The limit is this user namespace's own; the machine's stays.
    trial = "from jupyter_gpuckpt.machine.trials import *; print(try_namespaces())"
    user_namespace = ("unshare", "--user", "--map-root-user", "sh", "-c", script, "sh")
    done = subprocess.run(
        [*user_namespace, sys.executable, "-c", trial],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "failed='make namespaces'" in done.stdout, done.stderr
    assert "No space left on device" in done.stdout


@pytest.mark.usefixtures("with_criu")
def test_a_process_is_saved_and_comes_back(tmp_path: Path) -> None:
    before = mounts("self", tmp_path)
    outcome = try_save_and_restore(find_criu())
    assert (outcome.failed, outcome.why) == ("", "")
    assert outcome.seconds > 0
    assert mounts("self", tmp_path) == before


@pytest.mark.usefixtures("with_criu")
def test_a_criu_that_fails_is_quoted(tmp_path: Path) -> None:
    script = tmp_path / "criu"
    script.write_text("#!/bin/sh\necho 'Error (x.c:1): nothing works' >&2\nexit 1\n")
    script.chmod(0o755)
    broken = CriuProgram((str(script),), (4, 2, 0), str(script), "environment")
    outcome = try_save_and_restore(broken)
    assert outcome.failed == "save"
    assert "nothing works" in outcome.why


def test_no_process_is_left() -> None:
    outcome = try_namespaces()
    assert outcome.failed == ""
    lines = Path("/proc").glob
    wait_until(lambda: not any(b"machine/namespace_trial.py" in _content(line) for line in lines("[0-9]*/cmdline")))


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_where_nobody_may_trace_it_says_so() -> None:
    if os.geteuid() != 0:
        pytest.skip("it takes root")
    told = judged_under("unshare", "--mount", "--propagation", "private", *yama.saying(3))
    assert "kernel.yama.ptrace_scope is 3" in told.why
