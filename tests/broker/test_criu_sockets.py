"""A user of the machine meets somebody else's criu at its sockets (number 39 in docs/security.md).

In a network namespace of its own: the sockets of all criu's that run on the machine are told of in theirs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from people import GROUP, Machine, Person

from jupyter_gpuckpt.installed import CRIU_SOCKETS_LIBRARY

pytestmark = pytest.mark.criu

_STRANGER = Path(__file__).parents[1] / "stranger.py"
# criu's own code in each of many processes connects to criu, and each that is restored is sent files.
_TREE = """
import os, subprocess
os.pipe()
children = [subprocess.Popen(["sleep", "1000"]) for _ in range(12)]
x = 1
"""


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    begin = ["/bin/sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    machine = Machine.or_skip(namespaces=("--mount", "--net"), furnishing=begin)
    yield machine
    machine.close()


@pytest.fixture(scope="module")
def carol(machine: Machine) -> Person:
    """Carol, who is not of the broker's group."""
    return machine.person("carol")


def met(carol: Person, act: Callable[[], object]) -> dict[str, Any]:
    """Do something, until Carol's program has seen sockets of criu's meanwhile; return what she had."""
    argv = [sys.executable, str(_STRANGER)]
    while True:
        carol.does(
            "import subprocess",
            f"looking = subprocess.Popen({argv!r}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)",
            "looking.stdout.readline()",
        )
        try:
            act()
        finally:
            told: dict[str, Any] = json.loads(carol.does("looking.communicate()[0]"))
        if told["seen"]:
            return told


@pytest.mark.parametrize("who", ["alice", "root"])
def test_nobody_else_takes_part_in_a_dump_or_restore(machine: Machine, carol: Person, who: str) -> None:
    saver = machine.person(who)
    saver.starts_kernel()
    saver.runs(_TREE)
    saver.runs("%gpuckpt save here")
    for line, x in (("save again --replace", "2"), ("restore here", "1"), ("restore here --in-place", "1")):
        saver.runs("x = 2")
        told = met(carol, lambda line=line: saver.runs(f"%gpuckpt {line}"))  # type: ignore[misc]
        assert [name for name in told.pop("seen") if name.startswith("@")] == []
        assert told == {"connections": 0, "packets": 0, "files": []}
        alive = "sum(child.poll() is None for child in children)"
        assert saver.runs(f"print(x, {alive}, 'gpuckpt-criu' in os.listdir('/dev/shm'))") == f"{x} 12 False"


def test_no_broker_starts_whose_criu_can_be_reached(machine: Machine) -> None:
    without = ["unshare", "--mount", "sh", "-c", f'mount --bind /dev/null {CRIU_SOCKETS_LIBRARY} && exec "$@"', "sh"]
    done = machine.as_root(*without, *machine._broker_argv(GROUP), environment=machine.environment)
    assert done.returncode != 0
    assert "Other users of this machine could disturb saves" in done.stderr
