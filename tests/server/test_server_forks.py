"""Forks that a server holds: by the REST API, by a cell, and by the command line."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from copies import Copy
from jupyter_core.paths import jupyter_runtime_dir
from jupyter_servers import Server
from notebooks import StartKernel, wait_for_ready

from jupyter_gpuckpt.client import adoption

PROGRAM = str(Path(sys.executable).with_name("jupyter-gpuckpt"))


def of_server(server: Server) -> set[str]:
    """Return the ids of the kernels that the server holds."""
    return {kernel["id"] for kernel in server.request("GET", "api/kernels").json()}


def test_the_token_of_a_server_is_told_to_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append((self.server, self.headers["Authorization"]))
            self.send_response(200)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Answer) as here, HTTPServer(("127.0.0.1", 0), Answer) as proxy:
        for one in (here, proxy):
            threading.Thread(target=one.serve_forever).start()
        try:
            for name in ("no_proxy", "NO_PROXY"):
                monkeypatch.delenv(name, raising=False)
            monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.server_port}")
            about = {"url": f"http://127.0.0.1:{here.server_port}/", "token": "secret"}
            runtime = Path(jupyter_runtime_dir())
            runtime.mkdir(parents=True, exist_ok=True)
            (runtime / f"jpserver-{os.getpid()}.json").write_text(json.dumps(about))
            assert adoption.ask([os.getpid()], "kernel")
        finally:
            here.shutdown()
            proxy.shutdown()
    assert asked == [(here, "token secret")]


@contextlib.contextmanager
def clients(kernels: list[dict[str, Any]]) -> Iterator[list[Copy]]:
    """Give clients of copies."""
    copies = [Copy(kernel) for kernel in kernels]
    try:
        yield copies
    finally:
        for copy in copies:
            copy.client.stop_channels()


def notebook_of(server: Server, kernel: dict[str, Any]) -> str:
    """Return which notebook a kernel belongs to."""
    (found,) = (one for one in server.ask("GET", "kernels")["kernels"] if one["kernel_id"] == kernel["id"])
    return Path(found["notebook"]).relative_to(server.root).as_posix() if found["notebook"] else ""


def forget(server: Server, kernels: list[dict[str, Any]]) -> None:
    """Shut kernels down by the server, as its own."""
    for kernel in kernels:
        assert server.request("DELETE", f"api/kernels/{kernel['id']}").status_code == 204
    for kernel in kernels:
        assert not Path(kernel["connection_file"]).exists()


def test_copies_are_kernels_of_the_server(server: Server) -> None:
    with server.notebook() as (kernel_id, notebook):
        notebook.run("x = 1")
        base = server.save(kernel_id, "base")["id"]
        notebook.run("y = 1")
        done = server.finish(server.ask("POST", f"kernels/{kernel_id}/fork", {"count": 2}, 202))
        assert (done["state"], done["kind"]) == ("done", "fork"), done["error"]
        kernels = done["result"]["kernels"]
        assert [kernel["held"] for kernel in kernels] == [True, True]
        assert {kernel["id"] for kernel in kernels} < of_server(server)
        known = {kernel["kernel_id"]: kernel for kernel in server.ask("GET", "kernels")["kernels"]}
        assert {known[kernel["id"]]["copy_of"] for kernel in kernels} == {kernel_id}
        assert all(known[kernel["id"]]["attended"] for kernel in kernels)
        # They are what their original was: based on its snapshot, with what it has done since, which none has.
        for kernel in kernels:
            assert known[kernel["id"]]["parent"] == {"name": "base", "id": base}
            assert known[kernel["id"]]["unsaved"]["cells"] == 1
        with clients(kernels) as copies:
            copies[0].run("x += 1")
            assert [kernel.value("x") for kernel in (notebook, *copies)] == ["1", "2", "1"]
            # A notebook is opened on it as on any kernel that runs.
            wanted = {"path": "copy.ipynb", "name": "", "type": "notebook", "kernel": {"id": kernels[0]["id"]}}
            session = server.request("POST", "api/sessions", json=wanted).json()
            assert session["kernel"]["id"] == kernels[0]["id"]
            # It belongs to that notebook from then on, and stays there where another one looks in, and at a restart.
            looks_in = {**wanted, "path": "other.ipynb"}
            assert server.request("POST", "api/sessions", json=looks_in).status_code == 201
            assert notebook_of(server, kernels[0]) == "copy.ipynb"
            saved = server.save(kernels[0]["id"], "base")
            assert (saved["parent"], Path(saved["notebook"]).name) == (base, "copy.ipynb")
            assert server.request("POST", f"api/kernels/{kernels[0]['id']}/restart").status_code == 200
            assert notebook_of(server, kernels[0]) == "copy.ipynb"
            assert server.request("POST", f"api/kernels/{kernels[1]['id']}/interrupt").status_code == 204
            # A restart starts it fresh, as any kernel.
            assert server.request("POST", f"api/kernels/{kernels[1]['id']}/restart").status_code == 200
            wait_for_ready(copies[1].client, 60)
            assert copies[1].fails("x").ename == "NameError"
        forget(server, kernels)
        assert notebook.value("x") == "1"


def test_a_fork_in_a_cell_of_a_notebook_is_held_by_its_server(server: Server) -> None:
    with server.notebook() as (_, notebook):
        assert "a Jupyter server holds it" in notebook.run("f = %gpuckpt fork\n").text
        kernels = json.loads(notebook.value("__import__('json').dumps(f.kernels)"))
        assert {kernel["id"] for kernel in kernels} < of_server(server)
        forget(server, kernels)


def test_a_fork_by_the_command_line_is_held_by_the_server_of_the_kernel(server: Server) -> None:
    environment = {**os.environ, "JUPYTER_RUNTIME_DIR": str(server.folder / "runtime")}
    with server.notebook() as (kernel_id, notebook):
        notebook.run("x = 1")
        words = [PROGRAM, "fork", kernel_id, "-n", "2", "--json"]
        ran = subprocess.run(words, capture_output=True, text=True, timeout=60, env=environment, check=True)
        kernels = json.loads(ran.stdout)["kernels"]
        assert {kernel["id"] for kernel in kernels} < of_server(server)
        with clients(kernels) as copies:
            assert [copy.value("x") for copy in copies] == ["1", "1"]
        forget(server, kernels)


def test_a_kernel_that_nobody_holds_is_adopted_and_one_that_is_held_stays_where_it_is(
    server: Server, start: StartKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(server.folder / "runtime"))
    notebook = start()
    held = notebook.manager.provisioner.kernel_id
    assert server.ask("POST", f"kernels/{held}/adopt", status=409)["error"]["kind"] == "Refused"
    notebook.run("x = 1")
    with notebook.keeper as keeper:
        (kernel,) = keeper.request("fork", {})["kernels"]
    assert kernel["held"] is False
    for _ in range(2):  # more than once is harmless
        assert server.ask("POST", f"kernels/{kernel['id']}/adopt") == {"id": kernel["id"]}
    assert kernel["id"] in of_server(server)
    with clients([kernel]) as (copy,):
        assert copy.value("x") == "1"
    forget(server, [kernel])
    assert server.ask("POST", f"kernels/{kernel['id']}/adopt", status=404)["error"]["kind"] == "NoSuchKernel"


@pytest.mark.parametrize(
    "body", [{"count": 0}, {"count": 65}, {"count": True}, {"gpu": -1}, {"snapshot": "a", "name": "b"}, {"more": 1}]
)
def test_odd_forks_are_refused(server: Server, body: dict[str, Any]) -> None:
    assert server.ask("POST", "kernels/0/fork", body, 400)["error"]["kind"] == "BadRequest"


def test_a_copy_of_a_snapshot_that_is_not_there(server: Server) -> None:
    with server.notebook() as (kernel_id, _):
        done = server.finish(server.ask("POST", f"kernels/{kernel_id}/fork", {"snapshot": "nothing"}, 202))
        assert (done["state"], done["error"]["kind"]) == ("failed", "NoSuchSnapshot")
