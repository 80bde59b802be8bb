"""A server that is asked for too much at once does what it has begun, sends the rest away, and stays a server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from jupyter_servers import Server
from notebooks import wait_until

from jupyter_gpuckpt.server.operations import _MOST as MOST_OPERATIONS
from jupyter_gpuckpt.server.service import _MOST_LOOKS as MOST_LOOKS

pytestmark = pytest.mark.criu


@pytest.fixture
def kernel(server: Server) -> Iterator[tuple[str, int]]:
    """A kernel's id, and the pid of its keeper."""
    with server.notebook() as (kernel_id, _):
        state = json.loads((server.folder / "runtime" / "gpuckpt" / kernel_id / "state.json").read_text())
        yield kernel_id, state["keeper"][0]


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process: whoever asks it something waits."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def is_sent_away(response: requests.Response, seconds: str) -> bool:
    if response.status_code != 429:
        return False
    assert response.headers["Retry-After"] == seconds
    assert response.json()["error"]["kind"] == "TooMany"
    return True


def test_more_requests_than_it_works_on_are_sent_away(server: Server, kernel: tuple[str, int]) -> None:
    kernel_id, keeper = kernel
    look = f"api/gpuckpt/kernels/{kernel_id}/executed"
    with ThreadPoolExecutor(MOST_LOOKS) as pool:
        with stopped(keeper):
            waiting = [pool.submit(server.request, "GET", look) for _ in range(MOST_LOOKS)]
            # Which is refused at once where it is let in, too.
            probe = "api/gpuckpt/snapshots/x/pin"
            wait_until(lambda: is_sent_away(server.request("POST", probe, json={"odd": 1}), "1"))
            assert is_sent_away(server.request("GET", "api/gpuckpt/snapshots"), "1")
            # What costs nothing is answered, and so is Jupyter Server's own.
            assert server.request("GET", "api/gpuckpt/operations").status_code == 200
            assert server.request("GET", "api/status").status_code == 200
        assert {one.result().status_code for one in waiting} == {200}
    assert server.ask("GET", "snapshots")["snapshots"] == []


def test_more_operations_than_it_follows_are_not_begun(server: Server, kernel: tuple[str, int]) -> None:
    kernel_id, keeper = kernel
    save = f"api/gpuckpt/kernels/{kernel_id}/wake"
    with stopped(keeper):
        begun = [server.request("POST", save, json={}) for _ in range(MOST_OPERATIONS)]
        assert {one.status_code for one in begun} == {202}
        assert is_sent_away(server.request("POST", save, json={}), "5")
        assert len(server.ask("GET", "operations")["operations"]) == MOST_OPERATIONS
    for one in begun:
        server.finish(one.json())
    server.finish(server.ask("POST", f"kernels/{kernel_id}/wake", {}, 202))
