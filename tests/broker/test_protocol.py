"""What is said at the broker's socket: nothing in a request is passed over, and an odd answer is an error in words."""

from __future__ import annotations

import json
import os
import socket
import threading
from pathlib import Path

import pytest

from jupyter_gpuckpt.broker import protocol
from jupyter_gpuckpt.broker.protocol import Check, Criu, Dump, Hold, NextPid, Restore, Start
from jupyter_gpuckpt.checked import Odd
from jupyter_gpuckpt.client.broker_connection import Deputy
from jupyter_gpuckpt.errors import GpuckptError


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (Criu(), {"do": "criu"}),
        (Start(), {"do": "start"}),
        (Hold(5), {"do": "hold", "pid": 5}),
        (NextPid(9999), {"do": "next_pid", "after": 9999}),
        (Dump(5, "running", 60.5), {"do": "dump", "pid": 5, "left": "running", "seconds": 60.5}),
        (Check(), {"do": "check"}),
        (Restore("stopped", 60), {"do": "restore", "left": "stopped", "seconds": 60}),
    ],
)
def test_a_request_is_said_as_every_version_says_it(asked: protocol.Request, said: object) -> None:
    """Keepers of an earlier version go on when the broker is upgraded, and the other way round."""
    assert json.loads(protocol.message(asked)) == said
    assert protocol.request_in(protocol.message(asked)) == asked


@pytest.mark.parametrize(
    "said",
    [
        {},
        [],
        {"do": "criu", "uid": 0},
        {"do": "shell"},
        {"do": ["criu"]},
        {"do": "hold"},
        {"do": "hold", "pid": 0},
        {"do": "hold", "pid": True},
        {"do": "hold", "pid": 5.0},
        {"do": "hold", "pid": 1 << 22},
        {"do": "next_pid", "after": "5"},
        {"do": "dump", "pid": 5, "left": "killed", "seconds": 60},
        {"do": "dump", "pid": 5, "left": "running", "seconds": 60, "options": ["-v4"]},
        {"do": "restore", "left": "running", "seconds": 0.5},
        {"do": "restore", "left": "running", "seconds": True},
        {"do": "restore", "left": "running", "seconds": float("nan")},
        {"do": "restore", "left": "running", "seconds": float("inf")},
        {"do": "restore", "left": "running", "seconds": 10**400},
    ],
    ids=lambda said: json.dumps(said)[:60],
)
def test_what_is_not_all_known_is_no_request(said: object) -> None:
    with pytest.raises(Odd):
        protocol.request_in(json.dumps(said).encode())


@pytest.mark.skipif(os.geteuid() != 0, reason="clients talk to root's broker alone")
@pytest.mark.parametrize(
    "said",
    [b"no json", b"[]", b'{"did": "criu"}', b'{"done": {"version": "4.2", "path": "/criu"}}', b'{"done": null}'],
)
def test_an_answer_that_a_client_does_not_understand_is_an_error_that_says_what_to_do(
    said: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "broker.sock"
    monkeypatch.setenv("GPUCKPT_BROKER", str(path))

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(protocol.MESSAGE_LIMIT)
            connection.send(said)

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        other = threading.Thread(target=answer)
        other.start()
        deputy = Deputy()
        try:
            with pytest.raises(GpuckptError, match="Upgrade the older of the two"):
                deputy.criu()
        finally:
            deputy.close()
            other.join()
