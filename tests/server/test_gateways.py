"""A server whose kernels run on a gateway: they are saved there, from their cells."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import COMMAND
from jupyter_servers import SPEC, running
from kernel_gateway import interrupt, kernel_gateway, outcome, own_folders, save_restore_and_hibernate, started
from notebooks import wait_until

from jupyter_gpuckpt.linux import proc, processes

pytestmark = pytest.mark.criu


def test_a_kernel_on_a_gateway_is_saved_there_and_the_server_says_how(tmp_path: Path) -> None:
    with (
        kernel_gateway(tmp_path / "gateway") as address,
        running(tmp_path / "server", f"c.GatewayClient.url = {address!r}\n") as server,
    ):
        kernel_id = started(server, SPEC)
        with server.channels(kernel_id) as ask:
            save_restore_and_hibernate(ask, tmp_path / "gateway" / "store")
        (plain,) = server.ask("GET", "kernels")["plain"]
        assert plain["kernel_id"] == kernel_id
        assert "gateway" in plain["why"]["what"]
        assert "%gpuckpt" in plain["why"]["then"]
        server.request("DELETE", f"api/kernels/{kernel_id}")


@pytest.fixture
def spec_of_provisioners(tmp_path: Path) -> Path:
    """A kernel spec of gateway_provisioners, with our launcher; return where Jupyter finds it."""
    app = "from gateway_provisioners.cli.ssh_specapp import SshProvisionerApp; SshProvisionerApp.launch_instance()"
    install = [sys.executable, "-c", app, "install", "--kernel-name=saved"]
    subprocess.run([*install, f"--prefix={tmp_path / 'prefix'}"], check=True)
    found = tmp_path / "prefix" / "share" / "jupyter"
    recipe = subprocess.run([*COMMAND, "recipe", "gateway_launcher.py"], check=True, stdout=subprocess.PIPE).stdout
    saved = found / "kernels" / "saved"
    (saved / "scripts" / "launch_ipykernel.py").write_bytes(recipe)
    spec = json.loads((saved / "kernel.json").read_text())
    (saved / "kernel.json").write_text(json.dumps(spec | {"env": own_folders(tmp_path / "gateway")}))
    return found


def test_a_kernel_that_gateway_provisioners_have_started_is_saved_there(
    spec_of_provisioners: Path, tmp_path: Path
) -> None:
    own = {
        "JUPYTER_PATH": str(spec_of_provisioners),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "GP_UNAUTHORIZED_USERS": "nobody",
        "GP_KERNEL_LOG_DIR": str(tmp_path),
    }
    with (
        kernel_gateway(tmp_path / "gateway", **own) as address,
        running(tmp_path / "server", f"c.GatewayClient.url = {address!r}\n") as server,
    ):
        kernel_id = started(server, "saved")

        def launchers() -> list[int]:
            return [pid for pid in processes.descendants(os.getpid()) if _launches(pid, kernel_id)]

        wait_until(lambda: len(launchers()) == 2, what="it, and who listens to the gateway")  # others become programs
        listening = launchers()
        with server.channels(kernel_id) as ask:
            save_restore_and_hibernate(ask, tmp_path / "gateway" / "store")
            interrupt(ask, lambda: server.request("POST", f"api/kernels/{kernel_id}/interrupt"))
            assert outcome(ask, "assert x == 1") == "ok"
        server.request("DELETE", f"api/kernels/{kernel_id}")
        wait_until(lambda: not any(_launches(pid, kernel_id) for pid in listening))
        assert not list((tmp_path / "gateway" / "runtime" / "gpuckpt").glob("[!.]*"))


def _launches(pid: int, kernel_id: str) -> bool:
    with contextlib.suppress(OSError):
        words = proc.read(f"/proc/{pid}/cmdline")
        return kernel_id in words and "launch_ipykernel" in words
    return False
