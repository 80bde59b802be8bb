"""Snapshots sent, fetched and downloaded by way of the REST API."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
import requests
from jupyter_servers import TOKEN, Server, running
from notebooks import wait_until
from quick_passphrase import passphrases_are_quick

from jupyter_gpuckpt.store import Store
from jupyter_gpuckpt.store.transfer.container import export_snapshot, import_snapshot
from jupyter_gpuckpt.store.transfer.sealing import Secrets
from jupyter_gpuckpt.store.trust import Trust


@pytest.fixture
def keep(server: Server) -> Iterator[Callable[[bytes], Path]]:
    """Put a snapshot with such memory into the server's store, and return the file where its chunks lie."""
    store = Store(server.store, Trust(server.folder / "keys"))

    def keep(memory: bytes) -> Path:
        with store.writer("it") as writer:
            (writer.directory / "pages").write_bytes(memory)
            kernel = {"notebook": "a.ipynb", "kernel_id": "k"}
            writer.commit(message="", parent=None, kernel=kernel, machine={}, cuda={}, process={})
        return max((path for path in server.store.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)

    yield keep
    if store.list():
        store.remove("it")
    store.collect(grace=0)


@pytest.fixture
def saved(keep: Callable[[bytes], Path]) -> str:
    """A snapshot in the server's store."""
    keep(b"x" * 100_000)
    return "it"


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
    assert pushed["result"]["encrypted"] is False
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


def download(server: Server, name: str = "it", **how: Any) -> requests.Response:
    return server.request("GET", f"api/gpuckpt/snapshots/{name}/export", **how)


def test_a_snapshot_is_downloaded_as_the_file_that_import_reads(
    server: Server, keep: Callable[[bytes], Path], tmp_path: Path
) -> None:
    memory = os.urandom(5_000_000)
    keep(memory)
    answer = download(server)
    assert answer.status_code == 200
    assert answer.headers["Content-Type"] == "application/octet-stream"
    assert answer.headers["Content-Disposition"] == 'attachment; filename="it.gpuckpt"'
    assert int(answer.headers["Content-Length"]) == len(answer.content), "a browser says how much is left"
    other = Store(tmp_path / "other", Trust(server.folder / "keys"))
    import_snapshot(other, io.BytesIO(answer.content), "the file", Secrets(tmp_path))
    assert other.read_files("it", ["pages"])[2] == {"pages": memory}


def test_what_cannot_be_downloaded_is_an_error_of_the_api(server: Server, keep: Callable[[bytes], Path]) -> None:
    for name, status, kind in (("none", 404, "NoSuchSnapshot"), (".x", 400, "BadName")):
        answer = download(server, name)
        assert (answer.status_code, answer.json()["error"]["kind"]) == (status, kind)
    spoil(keep(os.urandom(5_000_000)), 1_000)
    answer = download(server)  # no byte of it was good
    assert (answer.status_code, answer.json()["error"]["kind"]) == (409, "Damaged")
    assert "Content-Disposition" not in answer.headers


def test_a_download_that_meets_damage_is_broken_off(server: Server, keep: Callable[[bytes], Path]) -> None:
    spoil(keep(os.urandom(8_000_000)), 5_000_000)
    with pytest.raises(requests.exceptions.ChunkedEncodingError):
        download(server)
    wait_until(lambda: "it was broken off" in server.log.read_text())
    assert server.ask("GET", "snapshots")["snapshots"]


def spoil(pack: Path, at: int) -> None:
    with pack.open("r+b") as file:
        file.seek(at)
        file.write(bytes(64))


def test_a_download_takes_little_memory_and_ends_with_its_client(server: Server, keep: Callable[[bytes], Path]) -> None:
    keep(b"x" * 100_000)
    assert download(server).ok  # what it imports is there from now on
    Store(server.store, Trust(server.folder / "keys")).remove("it")
    keep(os.urandom(160_000_000))  # the system's buffers of a connection may hold some tens of megabytes
    before = memory_of(server)
    with download(server, stream=True) as answer:
        pieces = answer.iter_content(1 << 20)  # has a name: an iterator that nobody holds closes the connection
        got = 0
        while got < 32_000_000:
            got += len(next(pieces))
        assert reads_its_store(server)
        assert memory_of(server) - before < 24_000_000
    wait_until(lambda: not reads_its_store(server))


def memory_of(server: Server) -> int:
    """Return the most memory that a server has had, in bytes."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def reads_its_store(server: Server) -> bool:
    """Tell whether a server has anything of its store open, if only the lock of one who reads."""
    found = set()
    for fd in Path(f"/proc/{server.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add(fd.readlink())
    return any(path.is_relative_to(server.store) for path in found)


def test_a_client_that_takes_nothing_of_its_download_is_hung_up_on(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    impatient = "import jupyter_gpuckpt.server.handlers\njupyter_gpuckpt.server.handlers._PATIENCE = 2.0\n"
    with running(tmp_path_factory.mktemp("impatient"), impatient) as server:
        store = Store(server.store, Trust(server.folder / "keys"))
        with store.writer("it") as writer:
            (writer.directory / "pages").write_bytes(os.urandom(160_000_000))
            writer.commit(message="", parent=None, kernel={}, machine={}, cuda={}, process={})
        with download(server, stream=True) as answer:
            pieces = answer.iter_content(1 << 20)
            next(pieces)
            assert reads_its_store(server)
            wait_until(lambda: not reads_its_store(server))
            with pytest.raises(requests.exceptions.ChunkedEncodingError):
                list(pieces)
        wait_until(lambda: "it was broken off" in server.log.read_text())


def _exported(server: Server, tmp_path: Path, secrets: Secrets | None = None) -> bytes:
    """Return the file of a snapshot `gift` that somebody made whom nobody trusts here; each time a new one."""
    theirs = Store(tmp_path / "theirs", Trust(tmp_path / "their keys"))
    with theirs.writer("gift", replace=True) as writer:
        (writer.directory / "pages").write_bytes(os.urandom(3_000_000))
        writer.commit(message="for you", parent=None, kernel={"notebook": "b.ipynb"}, machine={}, cuda={}, process={})
    file = io.BytesIO()
    export_snapshot(theirs, "gift", file, secrets or Secrets(tmp_path))
    return file.getvalue()


def _send(server: Server, path: str, content: bytes, status: int = 200, passphrase: str | bytes | None = None) -> Any:
    headers = {} if passphrase is None else {"Gpuckpt-Passphrase": quote(passphrase, safe="")}
    response = server.request("POST", f"api/gpuckpt/{path}", data=content, headers=headers)
    assert response.status_code == status, response.text
    return response.json()


def test_a_file_is_judged_by_how_it_begins_and_brought_in(server: Server, tmp_path: Path) -> None:
    store = Store(server.store, Trust(server.folder / "keys"))
    content = _exported(server, tmp_path)
    look = f"import/look?size={len(content)}"
    for path, body in ((look, content[:200_000]), ("import", content)):
        refused = _send(server, path, body, 409)["error"]
        assert refused["kind"] == "UnknownKey"
    assert store.list() == []
    server.ask("POST", "trust", {"key": "nonsense"}, 409)
    assert server.ask("POST", "trust", {"key": refused["data"]["key"], "comment": "Bob"})["revoked"] is False
    # Too few bytes to say: as many as it says are enough.
    needs = _send(server, look, content[:100])["needs"]
    assert 100 < needs < 200_000
    found = _send(server, look, content[:needs])
    while found["snapshot"] is None:
        found = _send(server, look, content[: found["needs"]])
    assert (found["snapshot"]["name"], found["here"], found["taken"]) == ("gift", False, False)
    assert _send(server, "import", content)["message"] == "for you"
    assert store.trusted("gift").message == "for you"
    assert _send(server, look, content[:200_000])["here"] is True
    # What is amiss with it, or has no room, leaves the store as it was.
    store.remove("gift")
    for odd, kind in ((content[:-100], "Damaged"), (content[:-50] + b"x" * 50, "Damaged"), (b"no snapshot", "Damaged")):
        assert _send(server, "import?older=true", odd, 409)["error"]["kind"] == kind
    assert _send(server, "import/look?size=99999999999999999", content, 409)["error"]["kind"] == "Refused"
    _send(server, "import?older=perhaps", content, 400)
    assert store.list() == []


def test_an_encrypted_file_and_an_older_one_are_brought_in_where_that_is_asked_for(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passphrases_are_quick(monkeypatch)
    store = Store(server.store, Trust(server.folder / "keys"))
    secrets = Secrets(tmp_path, passphrase=lambda: "geheim für 100 %", with_passphrase=True)
    older, newer = (_exported(server, tmp_path, secrets) for _ in range(2))
    store.trust.add(Trust(tmp_path / "their keys").own())
    look = f"import/look?size={len(newer)}"
    for path in (look, "import"):
        for given in (None, "wrong"):
            refused = _send(server, path, newer, 409, given)["error"]
            assert (refused["kind"], refused["data"]["passphrase"]) == ("Sealed", True)
    _send(server, look, newer, 400, b"\xff")
    assert _send(server, look, newer, passphrase="geheim für 100 %")["snapshot"]["name"] == "gift"
    assert _send(server, "import", newer, passphrase="geheim für 100 %")["name"] == "gift"
    assert _send(server, look, older, 409, "geheim für 100 %")["error"]["kind"] == "Replayed"
    assert _send(server, f"{look}&older=true", older, passphrase="geheim für 100 %")["taken"] is True
    store.remove("gift")
    assert _send(server, "import?older=true", older, passphrase="geheim für 100 %")["name"] == "gift"
    store.remove("gift")
    assert "geheim" not in server.log.read_text()


def test_an_upload_that_is_broken_off_leaves_nothing_and_lets_others_in(server: Server, tmp_path: Path) -> None:
    store = Store(server.store, Trust(server.folder / "keys"))
    content = _exported(server, tmp_path)
    store.trust.add(Trust(tmp_path / "their keys").own())
    where = urlsplit(server.url)
    for _ in range(20):  # more than are worked on at once
        with socket.create_connection((where.hostname, where.port), 60) as client:
            head = f"POST {where.path}api/gpuckpt/import HTTP/1.1\r\nHost: {where.netloc}\r\n"
            head += f"Authorization: token {TOKEN}\r\nContent-Length: {len(content)}\r\n\r\n"
            client.sendall(head.encode() + content[: len(content) // 2])
    wait_until(lambda: server.request("GET", "api/gpuckpt/snapshots").ok)
    wait_until(lambda: not [*(server.store / "locks").glob("?" * 32)])
    assert store.list() == []
    assert _send(server, "import", content)["name"] == "gift"
    store.remove("gift")
