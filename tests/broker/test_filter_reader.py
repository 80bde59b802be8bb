"""Reading the filter of a process that another traces, or may have done so a moment ago."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from filtered import under_a_filter
from notebooks import wait_until

from jupyter_gpuckpt.broker.filter_reader import filter_of

pytestmark = pytest.mark.criu  # as root, and with its rights

_READ = """
import sys
from jupyter_gpuckpt.broker.filter_reader import filter_of
print(len({filter_of(int(sys.argv[1])) for _ in range(300)}))
"""
_HOLD = """
import ctypes, sys
assert ctypes.CDLL(None).ptrace(0x4206, int(sys.argv[1]), None, None) == 0  # PTRACE_SEIZE
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def pid() -> Iterator[int]:
    """A process under a filter."""
    with subprocess.Popen([*under_a_filter(), "sleep", "600"]) as process:
        wait_until(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n")
        yield process.pid
        process.kill()


def other(program: str, pid: int) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", program, str(pid)]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_several_read_it_at_once(pid: int) -> None:
    """The broker does, where a keeper asks for several things."""
    reading = [other(_READ, pid) for _ in range(4)]
    assert [one.communicate()[0] for one in reading] == ["1\n"] * 4


def test_one_that_a_debugger_traces_is_waited_for_some_seconds(pid: int) -> None:
    with other(_HOLD, pid) as holding:
        assert holding.stdout is not None
        assert holding.stdout.readline() == "held\n"
        with pytest.raises(PermissionError, match=f"process {holding.pid} traces it"):
            filter_of(pid)
        holding.communicate("")
        assert filter_of(pid)
