"""A Jupyter Kernel Gateway in a process of its own, and the kernels that a server has on it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import requests
from job_programs import free_port
from jupyter_servers import Server
from notebooks import PATIENCE, wait_until

Ask = Callable[[str, dict[str, Any]], dict[str, Any]]
"""Sends a request to a kernel, and returns the reply (`jupyter_servers.Server.channels`)."""


def own_folders(folder: Path) -> dict[str, str]:
    """Return what says where a gateway in a folder, and its kernels, have their files."""
    own = {"JUPYTER_RUNTIME_DIR": "runtime", "GPUCKPT_STORE": "store", "GPUCKPT_KEYS": "keys", "IPYTHONDIR": "ipython"}
    return {name: str(folder / path) for name, path in own.items()}


@contextlib.contextmanager
def kernel_gateway(folder: Path, **more: str) -> Iterator[str]:
    """Start Jupyter Kernel Gateway, with more in its environment; give its address."""
    port = free_port("tcp")
    words = [sys.executable, "-m", "jupyter", "kernelgateway", f"--KernelGatewayApp.port={port}"]
    environment = {**os.environ, **own_folders(folder), **more}
    environment.pop("PYTEST_CURRENT_TEST", None)  # gateway_provisioners looks at it, and leaves Kubernetes alone
    folder.mkdir()
    with (folder / "gateway.log").open("wb") as log:
        process = subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def answers() -> bool:
        assert process.poll() is None, (folder / "gateway.log").read_text()
        with contextlib.suppress(requests.ConnectionError):
            return requests.get(f"http://127.0.0.1:{port}/api", timeout=10).ok
        return False

    try:
        wait_until(answers)
        yield f"http://127.0.0.1:{port}"
    except BaseException:
        for path in (folder / "gateway.log", *folder.parent.glob("kernel-*.log")):
            print(f"{path}:\n{path.read_text('utf-8', 'replace')}")
        raise
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE)


def started(server: Server, spec: str) -> str:
    """Have a server start a kernel for a notebook; return its id."""
    session = {"path": "a.ipynb", "name": "a.ipynb", "type": "notebook", "kernel": {"name": spec}}
    answer = server.request("POST", "api/sessions", json=session)
    assert answer.ok, answer.text
    kernel_id: str = answer.json()["kernel"]["id"]
    return kernel_id


def save_restore_and_hibernate(ask: Ask, store: Path) -> None:
    """Run cells that go through only where the kernel is saved in this store, restored, hibernated and woken."""
    for cell in ("x = 1", "%gpuckpt save a", "x = 2", "%gpuckpt restore a", "assert x == 1", "%gpuckpt hibernate"):
        assert outcome(ask, cell) == "ok"
    wait_until(lambda: any(store.glob("snapshots/hibernated-*")))
    assert outcome(ask, "assert x == 1") == "ok"


def interrupt(ask: Ask, do: Callable[[], object]) -> None:
    """Have a cell interrupted; the kernel may be on its way back yet when it is asked for first."""
    over = threading.Event()

    def keep_at_it() -> None:
        while not over.wait(1):
            do()

    thread = threading.Thread(target=keep_at_it)
    thread.start()
    try:
        assert outcome(ask, "import time; time.sleep(100)").startswith("KeyboardInterrupt")
    finally:
        over.set()
        thread.join()


def outcome(ask: Ask, cell: str) -> str:
    """Run a cell by a kernel's WebSocket; return `ok`, or its error."""
    done = ask("execute_request", {"code": cell, "silent": False, "store_history": True})["content"]
    status: str = done["status"]
    return status if status == "ok" else f"{done['ename']}: {done['evalue']}"
