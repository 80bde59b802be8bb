"""What a sleeper is asked is checked where it enters: an odd request is refused, and the kernel lives."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest
from notebooks import StartKernel

from jupyter_gpuckpt.client.sleeper_messages import NotSpawned, Spawned, request, told_in
from jupyter_gpuckpt.linux import proof
from jupyter_gpuckpt.linux.spawning import Program
from jupyter_gpuckpt.linux.unix_sockets import peer_pid, short_path


def said_to(path: Path, line: bytes) -> bytes:
    """Say one line to the sleeper at this socket; return its answer, nothing if it hangs up."""
    with socket.socket(socket.AF_UNIX) as connection, short_path(path) as short:
        connection.settimeout(60)
        connection.connect(short)
        connection.sendall(proof.first_line(peer_pid(connection)) + line)
        with connection.makefile("rb") as answer:
            return answer.readline()


@pytest.mark.criu
def test_odd_requests_are_refused_and_the_kernel_lives(start: StartKernel, tmp_path: Path) -> None:
    notebook = start()
    (sleeper,) = notebook.folder.glob("run-*.sock")
    for line in (b"no json\n", b"[]\n", b'{"tag": 1}\n', b'{"tag": [], "spawn": {}}\n', b'{"tag": 1, "spawn": 1}\n'):
        assert said_to(sleeper, line) == b"", line
    program = vars(Program([sys.executable, "-c", ""], {}, "/dev/null"))
    odd = [
        {"argv": "ls"},
        {"argv": [1]},
        {"env": {"x": 1}},
        {"stdout": None},
        {"umask": "077"},
        {"cwd": 1},
        {"io_uring": 0},
    ]
    for what in ({}, {"adopt": "1"}, {"later": 1}, *({**program, **one} for one in odd)):
        told = told_in(said_to(sleeper, json.dumps({"tag": 7, "spawn": what}).encode() + b"\n"))
        assert isinstance(told, NotSpawned), what
        assert told.tag == 7
        assert told.failed.startswith("ValueError"), told
    assert isinstance(told_in(said_to(sleeper, request(Program(["/bin/true"], {}, "/dev/null"), 8))), Spawned)
    assert notebook.run("print(6 * 7)").text == "42"
