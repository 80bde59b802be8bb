"""Snapshots sent and fetched by way of the REST API."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from jupyter_servers import Server

from jupyter_gpuckpt.store import Store
from jupyter_gpuckpt.store.trust import Trust


@pytest.fixture
def saved(server: Server) -> Iterator[str]:
    """A snapshot in the server's store."""
    store = Store(server.store, Trust(server.folder / "keys"))
    with store.writer("it") as writer:
        (writer.directory / "pages").write_bytes(b"x" * 100_000)
        kernel = {"notebook": "a.ipynb", "kernel_id": "k"}
        writer.commit(message="", parent=None, kernel=kernel, machine={}, cuda={}, process={})
    yield "it"
    if store.list():
        store.remove("it")


def begin(server: Server, path: str, **body: Any) -> dict[str, Any]:
    begun: dict[str, Any] = server.ask("POST", path, body, 202)
    return begun


def test_a_snapshot_is_pushed_and_pulled(server: Server, saved: str, tmp_path: Path) -> None:
    url = str(tmp_path / "remote")
    begun = begin(server, "snapshots/it/push", url=url)
    assert (begun["kind"], begun["kernel_id"], begun["name"]) == ("push", "", "it")
    pushed = server.finish(begun)
    assert (pushed["state"], pushed["result"]["name"], pushed["result"]["url"]) == ("done", "it", url)
    assert pushed["result"]["sent"] > 0
    server.ask("DELETE", "snapshots/it")
    pulled = server.finish(begin(server, "pull", url=url))
    assert (pulled["state"], pulled["name"]) == ("done", "it")
    assert pulled["result"]["fetched"] == pushed["result"]["sent"]
    assert server.ask("GET", "snapshots/it")["notebook"] == "a.ipynb"
    failed = server.finish(begin(server, "pull", url=url, name="none"))
    assert (failed["state"], failed["error"]["kind"]) == ("failed", "NoSuchSnapshot")


def test_what_cannot_be_sent_or_fetched_is_refused_at_once(server: Server, saved: str, tmp_path: Path) -> None:
    assert server.ask("POST", "snapshots/none/push", {"url": "/x"}, 404)["error"]["kind"] == "NoSuchSnapshot"
    assert server.ask("POST", "snapshots/it/push", {"url": "x"}, 400)["error"]["kind"] == "BadRequest"
    assert server.ask("POST", "pull", {}, 400)["error"]["kind"] == "BadRequest"
    assert server.ask("POST", "pull", {"url": "ftp://host/x"}, 409)["error"]["kind"] == "Refused"
    assert server.ask("POST", "pull", {"url": "/x", "name": "../x"}, 400)["error"]["kind"] == "BadName"
    assert not Path("x").exists()


def test_a_pull_can_be_cancelled(server: Server, saved: str, tmp_path: Path) -> None:
    assert server.finish(begin(server, "snapshots/it/push", url=str(tmp_path)))["state"] == "done"
    server.ask("DELETE", "snapshots/it")
    reached, go_on = threading.Event(), threading.Event()

    class Slow(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if "/packs/" in self.path:
                reached.set()
                go_on.wait(60)
            super().do_GET()

        def log_message(self, *_: Any) -> None:
            pass

    web = ThreadingHTTPServer(("127.0.0.1", 0), partial(Slow, directory=str(tmp_path)))
    thread = threading.Thread(target=web.serve_forever)
    thread.start()
    try:
        pulling = begin(server, "pull", url=f"http://127.0.0.1:{web.server_port}", name="it")
        assert reached.wait(60)
        assert server.ask("DELETE", f"operations/{pulling['id']}")["cancelling"] is True
        go_on.set()
        ended = server.finish(pulling)
    finally:
        go_on.set()
        web.shutdown()
        thread.join()
        web.server_close()
    assert (ended["state"], ended["error"]["kind"]) == ("cancelled", "Cancelled")
    assert server.ask("GET", "snapshots/it", status=404)["error"]["kind"] == "NoSuchSnapshot"
