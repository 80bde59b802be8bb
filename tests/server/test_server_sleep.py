"""Sleep and wake by way of the REST API, with real kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from jupyter_servers import Server, running
from notebooks import Notebook, wait_until
from test_metrics import scraped, value

pytestmark = pytest.mark.criu


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose kernels go to sleep by themselves, but not as long as a test takes."""
    with running(tmp_path_factory.mktemp("sleeps"), 'c.GpuckptProvisioner.sleep_after = "2h"') as started:
        yield started


def kernel(server: Server, kernel_id: str) -> dict[str, Any]:
    """Return what the API tells of one kernel."""
    (found,) = [k for k in server.ask("GET", "kernels")["kernels"] if k["kernel_id"] == kernel_id]
    return dict(found)


def said(notebook: Notebook, last: str) -> list[str]:
    """Return what a kernel tells of itself from now to this word."""
    told: list[str] = []
    while last not in told:
        content = notebook.client.get_iopub_msg(timeout=60)["content"]
        told += filter(None, [content.get("gpuckpt")])
    return told


def do(server: Server, kernel_id: str, kind: str) -> dict[str, Any]:
    return server.finish(server.ask("POST", f"kernels/{kernel_id}/{kind}", status=202))


def test_a_kernel_is_put_to_sleep_and_woken(server: Server) -> None:
    with server.notebook() as (kernel_id, notebook):
        notebook.run("x = 1")
        slept = do(server, kernel_id, "sleep")
        assert (slept["kind"], slept["state"], slept["result"]["already"]) == ("sleep", "done", False)
        found = kernel(server, kernel_id)
        assert (found["state"], found["gpu_memory"], found["woken"]) == ("sleeping", 0, None)
        assert found["asleep_since"] >= found["last_active"]
        scraped(server, lambda metrics: value(metrics, "gpuckpt_kernels", state="sleeping") == 1)
        woken = do(server, kernel_id, "wake")
        assert (woken["state"], woken["result"]["already"]) == ("done", False)
        found = kernel(server, kernel_id)
        assert (found["state"], found["asleep_since"]) == ("running", None)
        assert found["woken"]["seconds"] >= 0
        scraped(server, lambda metrics: value(metrics, "gpuckpt_wake_seconds_count") == 1)
        assert do(server, kernel_id, "wake")["result"]["already"]
        assert notebook.value("x") == "1"


def test_a_cell_wakes_it_and_the_kernel_tells_that(server: Server) -> None:
    with server.notebook() as (kernel_id, notebook):
        notebook.run("x = 2")
        do(server, kernel_id, "sleep")
        notebook.client.execute("x")
        assert said(notebook, "awake") == ["asleep", "waking", "awake"]
        wait_until(lambda: kernel(server, kernel_id)["state"] == "running")  # recorded when the kernel is awake
        assert kernel(server, kernel_id)["woken"] is not None
        # Where there is nothing to wake, nobody is left to believe that it wakes.
        notebook.client.execute("%gpuckpt wake")
        said(notebook, "waking")
        assert said(notebook, "awake") == ["awake"]


def test_a_kernel_is_hibernated_and_a_cell_brings_it_back(server: Server) -> None:
    with server.notebook() as (kernel_id, notebook):
        notebook.run("x = 3")
        assert do(server, kernel_id, "hibernate")["state"] == "done"
        found = kernel(server, kernel_id)
        assert (found["state"], found["pid"], found["memory"]) == ("hibernated", None, 0)
        assert found["hibernated"]["size"] > 1_000_000
        scraped(server, lambda metrics: value(metrics, "gpuckpt_kernels", state="hibernated") == 1)
        assert notebook.value("x").endswith("3")
        wait_until(lambda: kernel(server, kernel_id)["state"] == "running")  # the cell is answered first
        assert kernel(server, kernel_id)["hibernated"] is None


def test_a_busy_kernel_is_not_put_to_sleep(server: Server) -> None:
    with server.notebook() as (kernel_id, notebook):
        notebook.client.execute("import time\nwhile not globals().get('enough'): time.sleep(0.01)")
        wait_until(lambda: kernel(server, kernel_id)["busy"])
        refused = do(server, kernel_id, "sleep")
        assert (refused["state"], refused["error"]["kind"]) == ("failed", "Busy")
        assert server.request("POST", f"api/kernels/{kernel_id}/interrupt").ok


def test_when_it_sleeps_by_itself_is_changed(server: Server) -> None:
    with server.notebook() as (kernel_id, notebook):
        path = f"kernels/{kernel_id}"
        as_set = {"kernel_id": kernel_id, "pinned": False, "sleep_after": 7200}
        assert server.ask("PATCH", path, {}) == as_set
        assert server.ask("PATCH", path, {"sleep_after": 1800})["sleep_after"] == 1800
        assert server.ask("PATCH", path, {"pinned": True}) == {**as_set, "pinned": True, "sleep_after": 1800}
        found = kernel(server, kernel_id)
        assert (found["pinned"], found["sleep_after"]) == (True, 1800)
        assert server.ask("PATCH", path, {"pinned": False, "sleep_after": 0}) == {**as_set, "sleep_after": None}
        for wrong in ({"sleep_after": -1}, {"sleep_after": "30m"}, {"pinned": 1}, {"awake": True}):
            assert server.ask("PATCH", path, wrong, 400)["error"]["kind"] == "BadRequest"
        assert "15 min" in notebook.run("%gpuckpt autosleep 15m").text
        assert kernel(server, kernel_id)["sleep_after"] == 900
