"""A server whose kernels run on a gateway: they are saved there, from their cells."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from job_programs import free_port
from jupyter_servers import SPEC, running
from notebooks import PATIENCE, wait_until

pytestmark = pytest.mark.criu


@contextlib.contextmanager
def _kernel_gateway(folder: Path) -> Iterator[str]:
    """Start Jupyter Kernel Gateway; give its address."""
    port = free_port("tcp")
    words = [sys.executable, "-m", "jupyter", "kernelgateway", f"--KernelGatewayApp.port={port}"]
    own = {"JUPYTER_RUNTIME_DIR": "runtime", "GPUCKPT_STORE": "store", "GPUCKPT_KEYS": "keys", "IPYTHONDIR": "ipython"}
    environment = {**os.environ, **{name: str(folder / path) for name, path in own.items()}}
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
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE)


def test_a_kernel_on_a_gateway_is_saved_there_and_the_server_says_how(tmp_path: Path) -> None:
    with (
        _kernel_gateway(tmp_path / "gateway") as address,
        running(tmp_path / "server", f"c.GatewayClient.url = {address!r}\n") as server,
    ):
        session = {"path": "a.ipynb", "name": "a.ipynb", "type": "notebook", "kernel": {"name": SPEC}}
        kernel_id = server.request("POST", "api/sessions", json=session).json()["kernel"]["id"]
        with server.channels(kernel_id) as ask:
            for cell in (
                "x = 1",
                "%gpuckpt save a",
                "x = 2",
                "%gpuckpt restore a",
                "%gpuckpt hibernate",
                "assert x == 1",
            ):
                done = ask("execute_request", {"code": cell, "silent": False, "store_history": True})
                assert done["content"]["status"] == "ok", done["content"]
        (plain,) = server.ask("GET", "kernels")["plain"]
        assert plain["kernel_id"] == kernel_id
        assert "gateway" in plain["why"]["what"]
        assert "%gpuckpt" in plain["why"]["then"]
        server.request("DELETE", f"api/kernels/{kernel_id}")
