"""A real Jupyter server in a process of its own, and what a program asks of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import websocket
from job_programs import free_port
from notebooks import PATIENCE, Notebook, connected, wait_until

SPEC = "python3-gpuckpt"
TOKEN = "token-of-the-tests"
_OTHERS = ("jupyterlab", "jupyter_lsp", "jupyter_server_terminals", "nbclassic", "notebook", "notebook_shim")
_ALONE = f"c.ServerApp.jpserver_extensions = {dict.fromkeys(_OTHERS, False)}\n"
"""For a server that no browser looks at: the extensions of others take it longer to start than all else."""


class Server:
    """A running server; every request carries its token unless told otherwise."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes], url: str) -> None:
        self.folder, self.process, self.url = folder, process, url
        self.root, self.store, self.log = folder / "work", folder / "store", folder / "server.log"

    def request(self, method: str, path: str, **how: Any) -> requests.Response:
        """Ask for a path below the server's base address."""
        headers = {"Authorization": f"token {TOKEN}", **how.pop("headers", {})}
        return requests.request(method, self.url + path, headers=headers, timeout=PATIENCE, **how)

    def ask(self, method: str, path: str, body: Any = None, status: int = 200) -> Any:
        """Ask our API for something, and return the answer, which must have this status."""
        response = self.request(method, f"api/gpuckpt/{path}", json=body)
        assert response.status_code == status, f"{response.text}\n{self._plain_kernels()}"
        return response.json()

    def _plain_kernels(self) -> str:
        """Return what the server says of the kernels that it started without save and restore."""
        return "\n".join(
            line for line in self.log.read_text("utf-8", "replace").splitlines() if " as a plain one" in line
        )

    def finish(self, operation: dict[str, Any]) -> dict[str, Any]:
        """Wait until an operation has ended."""

        def look() -> dict[str, Any] | None:
            found: dict[str, Any] = self.ask("GET", f"operations/{operation['id']}")
            return found if found["ended"] else None

        ended: dict[str, Any] = wait_until(look)
        return ended

    def save(self, kernel_id: str, name: str) -> dict[str, Any]:
        """Save a kernel and wait for it."""
        done = self.finish(self.ask("POST", f"kernels/{kernel_id}/save", {"name": name}, 202))
        assert done["state"] == "done", done["error"]
        result: dict[str, Any] = done["result"]
        return result

    @contextlib.contextmanager
    def notebook(self, path: str = "train.ipynb", spec: str = SPEC) -> Iterator[tuple[str, Notebook]]:
        """Open a notebook's session as JupyterLab does; give its kernel's id and a client of it."""
        wanted = {"path": path, "name": path, "type": "notebook", "kernel": {"name": spec}}
        session = self.request("POST", "api/sessions", json=wanted).json()
        kernel_id = session["kernel"]["id"]
        try:
            with self.connected(kernel_id) as notebook:
                yield kernel_id, notebook
        finally:
            self.request("DELETE", f"api/sessions/{session['id']}")

    def connected(self, kernel_id: str) -> contextlib.AbstractContextManager[Notebook]:
        """Give a client of one of its kernels."""
        return connected(self.folder / "runtime" / f"kernel-{kernel_id}.json")

    @contextlib.contextmanager
    def channels(self, kernel_id: str) -> Iterator[Callable[[str, dict[str, Any]], dict[str, Any]]]:
        """Open a kernel's WebSocket, as JupyterLab does; give what sends a request and returns the reply to it."""
        url = f"{self.url}api/kernels/{kernel_id}/channels".replace("http", "ws", 1)
        opened = websocket.create_connection(url, header=[f"Authorization: token {TOKEN}"], timeout=PATIENCE)

        def ask(kind: str, content: dict[str, Any]) -> dict[str, Any]:
            header = {"msg_id": uuid.uuid4().hex, "msg_type": kind, "session": "s", "username": "", "version": "5.3"}
            message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
            opened.send(json.dumps(message))
            while True:
                answer: dict[str, Any] = json.loads(opened.recv())
                ours = answer["parent_header"].get("msg_id") == header["msg_id"]
                if ours and answer["header"]["msg_type"] == kind.replace("_request", "_reply"):
                    return answer

        try:
            yield ask
        finally:
            opened.close()


@contextlib.contextmanager
def running(folder: Path, config: str = "", app: str = "server", port: int = 0, **environment: str) -> Iterator[Server]:
    """Start a server whose folders all lie in `folder`; `config` is Python for its configuration file."""
    for name in ("work", "config"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    alone = _ALONE if app == "server" else ""
    (folder / "config" / "jupyter_server_config.py").write_text(alone + config)
    own = {
        "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTERLAB_SETTINGS_DIR": "lab/settings",
        "JUPYTERLAB_WORKSPACES_DIR": "lab/workspaces",
        "GPUCKPT_STORE": "store",
        "GPUCKPT_KEYS": "keys",
        "GPUCKPT_LOGS": "logs",
        "IPYTHONDIR": "ipython",
    }
    words = [
        *(sys.executable, "-m", "jupyter", app, "--allow-root", "--no-browser", "--ip=127.0.0.1"),
        f"--port={port or free_port('tcp')}",  # of port 0, Jupyter Server 2.18 does not say where it is
        *(f"--ServerApp.root_dir={folder / 'work'}", f"--IdentityProvider.token={TOKEN}"),
        *("--ServerApp.answer_yes=True",),
    ]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            words,
            env={**os.environ, **{name: str(folder / path) for name, path in own.items()}, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield Server(folder, process, _url(folder, process))
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the server did not end:\n{(folder / 'server.log').read_text('utf-8', 'replace')}")
        finally:
            process.kill()
            process.wait()


def _url(folder: Path, process: subprocess.Popen[bytes]) -> str:
    def look() -> str | None:
        assert process.poll() is None, (folder / "server.log").read_text()
        with contextlib.suppress(OSError, ValueError):
            about = json.loads((folder / "runtime" / f"jpserver-{process.pid}.json").read_text())
            url = str(about["url"])
            if requests.get(f"{url}api", timeout=10).ok:
                return url
        return None

    found: str = wait_until(look)
    return found
