"""A real server hibernates kernels instead of killing them, and brings them back."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from jupyter_servers import SPEC, Server, running
from notebooks import PATIENCE, wait_until

pytestmark = pytest.mark.criu

_CULLS = """
from pathlib import Path
from jupyter_server.services.kernels.kernelmanager import MappingKernelManager

cull = MappingKernelManager.cull_kernel_if_idle

async def cull_from_then_on(self, kernel_id):
    if Path("GO").exists():
        await cull(self, kernel_id)

MappingKernelManager.cull_kernel_if_idle = cull_from_then_on
c.MappingKernelManager.cull_idle_timeout = 1
c.MappingKernelManager.cull_interval = 1
c.MappingKernelManager.cull_connected = True
"""


def _hibernated(server: Server) -> list[dict]:
    found: list[dict] = server.ask("GET", "hibernated")["hibernated"]
    return found


def _kernels(server: Server) -> list[str]:
    return [kernel["id"] for kernel in server.request("GET", "api/kernels").json()]


def test_a_culled_kernel_is_hibernated_and_resumed(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with running(tmp_path, _CULLS.replace("GO", str(go)), GPUCKPT_HIBERNATE_ON="cull") as server:
        with server.notebook("train.ipynb") as (kernel_id, notebook):
            notebook.run("x = 41")
            go.touch()
            wait_until(lambda: kernel_id not in _kernels(server))
        found = _hibernated(server)
        assert [(one["path"], one["held"]) for one in found] == [("train.ipynb", False)]
        assert not list((tmp_path / "runtime" / "gpuckpt").glob("[!.]*"))
        done = server.finish(server.ask("POST", f"hibernated/{found[0]['name']}/resume", {}, 202))
        assert done["state"] == "done", done["error"]
        with server.connected(done["kernel_id"]) as resumed:
            assert resumed.value("x + 1") == "42"
        assert _hibernated(server) == []
        assert server.ask("GET", "snapshots")["snapshots"] == []


@pytest.mark.parametrize(
    "signals",
    [
        pytest.param([signal.SIGTERM, signal.SIGTERM], id="twice, as by Slurm at a time limit"),
        pytest.param([signal.SIGINT], id="as by JupyterHub's own spawners"),
    ],
)
def test_a_server_stops_and_its_kernels_are_resumed_by_the_next(tmp_path: Path, signals: list[signal.Signals]) -> None:
    with running(tmp_path, 'c.Gpuckpt.hibernate_on = "stop"', GPUCKPT_HIBERNATE_ON="cull") as server:
        session = {"path": "a.ipynb", "name": "a.ipynb", "type": "notebook", "kernel": {"name": "python3-gpuckpt"}}
        kernel_id = server.request("POST", "api/sessions", json=session).json()["kernel"]["id"]
        with server.connected(kernel_id) as notebook:
            notebook.run("import os; x, much = 41, os.urandom(200_000_000)")
        base = server.save(kernel_id, "base")["id"]
        for number in signals:
            server.process.send_signal(number)
            wait_until(lambda: "Shutting down" in server.log.read_text(), what="the server does not stop")
        assert server.process.wait(PATIENCE) == 0
    (report,) = (tmp_path / "logs").glob("hibernated-*.json")
    (told,) = json.loads(report.read_text())["kernels"]
    assert (told["kernel_id"], told["saved"]) == (kernel_id, True)
    with running(tmp_path) as server:
        (found,) = _hibernated(server)
        assert found["name"] == told["name"]
        with server.notebook("a.ipynb") as (other, _):
            # The user's notebook is open again, with a fresh kernel: it comes back in that one.
            asked = server.ask("POST", f"hibernated/{found['name']}/resume", {"kernel_id": other}, 202)
            assert asked["kernel_id"] == other
            done = server.finish(asked)
            assert done["state"] == "done", done["error"]
            with server.connected(other) as again:
                assert again.value("x + 1") == "42"
            # The snapshot by which it came is gone: it goes on from the one that it had come from before.
            assert _hibernated(server) == []
            (kernel,) = server.ask("GET", "kernels")["kernels"]
            assert kernel["parent"] == {"name": "base", "id": base}
            assert server.save(other, "later")["parent"] == base


@pytest.mark.parametrize("doing", ["hibernate", "restore", "save"])
def test_a_stop_waits_for_what_is_just_done_with_a_kernel_and_then_hibernates_it(tmp_path: Path, doing: str) -> None:
    with running(tmp_path, GPUCKPT_HIBERNATE_ON="stop") as server:
        kernels = {}
        for name, cell in ("a.ipynb", "import os; x, much = 41, os.urandom(500_000_000)"), ("b.ipynb", "x = 1"):
            session = {"path": name, "name": name, "type": "notebook", "kernel": {"name": "python3-gpuckpt"}}
            kernels[name] = server.request("POST", "api/sessions", json=session).json()["kernel"]["id"]
            with server.connected(kernels[name]) as notebook:
                notebook.run(cell)
        if doing == "restore":
            server.save(kernels["a.ipynb"], "before")
        wanted = {"name": "new"} if doing == "save" else {}
        server.ask("POST", f"kernels/{kernels['a.ipynb']}/{doing}", wanted, 202)
        wait_until(lambda: _state(server, kernels["a.ipynb"]) != "running", what="it does not begin")
        server.process.terminate()
        assert server.process.wait(PATIENCE) == 0
    # What is done goes on while the others have their turn.
    (report,) = (tmp_path / "logs").glob("hibernated-*.json")
    told = json.loads(report.read_text())["kernels"]
    assert [(Path(one["notebook"]).name, one["saved"]) for one in told] == [("b.ipynb", True), ("a.ipynb", True)]
    with running(tmp_path) as server, server.notebook("a.ipynb") as (other, _):
        name = next(one["name"] for one in _hibernated(server) if one["path"] == "a.ipynb")
        done = server.finish(server.ask("POST", f"hibernated/{name}/resume", {"kernel_id": other}, 202))
        assert done["state"] == "done", done["error"]
        with server.connected(other) as again:
            assert again.value("x, len(much)") == "41 500000000"


def _state(server: Server, kernel_id: str) -> str:
    kernels: list[dict] = server.ask("GET", "kernels")["kernels"]
    return str(next(one["state"] for one in kernels if one["kernel_id"] == kernel_id))


def test_none_is_started_anew_while_others_are_being_hibernated(tmp_path: Path) -> None:
    """The kernel manager looks every so often whether its kernels live."""
    with running(tmp_path, "c.KernelRestarter.time_to_dead = 0.1", GPUCKPT_HIBERNATE_ON="stop") as server:
        for name in ("a.ipynb", "b.ipynb", "c.ipynb"):
            session = {"path": name, "name": name, "type": "notebook", "kernel": {"name": "python3-gpuckpt"}}
            kernel_id = server.request("POST", "api/sessions", json=session).json()["kernel"]["id"]
            with server.connected(kernel_id) as notebook:
                notebook.run("import os; much = os.urandom(100_000_000)")
        server.process.terminate()
        assert server.process.wait(PATIENCE) == 0
        assert "restarting kernel" not in server.log.read_text()
    with running(tmp_path) as server:
        assert sorted(one["path"] for one in _hibernated(server)) == ["a.ipynb", "b.ipynb", "c.ipynb"]


def test_a_server_stops_while_a_kernel_that_has_ended_is_started_anew(tmp_path: Path) -> None:
    """Jupyter's own way to end a kernel fails then, and with it the server's end."""
    with running(tmp_path) as server:
        kernel = server.request("POST", "api/kernels", json={"name": SPEC}).json()["id"]
        with server.connected(kernel) as notebook:
            notebook.client.execute("import os; os._exit(1)")
            wait_until(lambda: "restarting kernel" in server.log.read_text(), every=0.001)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(PATIENCE) == 0


def test_a_person_who_shuts_a_kernel_down_ends_it(tmp_path: Path) -> None:
    with running(tmp_path, GPUCKPT_HIBERNATE_ON="cull,stop") as server:
        with server.notebook("a.ipynb") as (kernel_id, notebook):
            notebook.run("x = 41")
        assert _hibernated(server) == []
        with server.notebook("b.ipynb") as (kernel_id, notebook):
            done = server.finish(server.ask("POST", f"kernels/{kernel_id}/hibernate", {}, 202))
            assert done["state"] == "done", done["error"]
            (found,) = _hibernated(server)
            assert found["held"]
            refused = server.ask("POST", f"hibernated/{found['name']}/resume", {}, 409)
            assert "Wake that kernel" in refused["error"]["then"]
        assert _hibernated(server) == []
        assert server.ask("GET", "snapshots")["snapshots"] == []


def test_a_hibernated_kernel_stays_so_when_the_server_stops(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        session = {"path": "a.ipynb", "name": "a.ipynb", "type": "notebook", "kernel": {"name": "python3-gpuckpt"}}
        kernel_id = server.request("POST", "api/sessions", json=session).json()["kernel"]["id"]
        server.finish(server.ask("POST", f"kernels/{kernel_id}/hibernate", {}, 202))
    with running(tmp_path) as server:
        (found,) = _hibernated(server)
        assert not found["held"]


def test_a_notebook_that_is_opened_does_not_wake_it_and_its_cell_does(tmp_path: Path) -> None:
    with running(tmp_path) as server, server.notebook("a.ipynb") as (kernel_id, notebook):
        notebook.run("x = 41")
        server.finish(server.ask("POST", f"kernels/{kernel_id}/hibernate", {}, 202))
        with server.channels(kernel_id) as ask:
            about = ask("kernel_info_request", {})
            assert about["content"]["language_info"]["name"] == "python"
            (kernel,) = server.ask("GET", "kernels")["kernels"]
            assert (kernel["state"], kernel["hibernated"]["size"] > 0) == ("hibernated", True)
            done = ask("execute_request", {"code": "x += 1", "silent": False, "store_history": True})
            assert done["content"]["status"] == "ok"
        assert notebook.value("x") == "42"
