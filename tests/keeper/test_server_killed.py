"""What holds a kernel is killed: a server's kernel outlives it, any other program's ends with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from keeper_faults import assert_nothing_left, processes_of
from notebooks import Notebook, client_of, connected, wait_until

from jupyter_gpuckpt.client import keepers
from jupyter_gpuckpt.client.record import KernelFolder
from jupyter_gpuckpt.errors import NoSuchKernel
from jupyter_gpuckpt.keeper.ports import peers

_SERVER = """
import json, os, sys
from jupyter_client.multikernelmanager import MultiKernelManager
from jupyter_core.paths import jupyter_runtime_dir
os.makedirs(jupyter_runtime_dir())
kernels = MultiKernelManager(default_kernel_name="python3-gpuckpt", connection_dir=jupyter_runtime_dir())
manager = kernels.get_kernel(kernels.start_kernel())
print(json.dumps([manager.connection_file, manager.provisioner.kernel_id]), flush=True)
sys.stdin.read()
"""


@dataclass
class Server:
    process: subprocess.Popen[str]
    notebook: Notebook
    folder: KernelFolder

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def kill_keeper(self) -> None:
        keeper = self.folder.state().keeper
        assert keeper is not None
        os.kill(keeper[0], 9)
        wait_until(lambda: not self.folder.has_keeper())


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        connection_file, kernel_id = json.loads(process.stdout.readline())
        folder = KernelFolder(Path(os.environ["JUPYTER_RUNTIME_DIR"], "gpuckpt", kernel_id))
        with connected(connection_file) as notebook:
            yield Server(process, notebook, folder)
        process.kill()
    keepers.end(folder)
    wait_until(lambda: not processes_of(tmp_path))


def test_the_kernel_goes_on_can_be_found_and_is_saved_restored_and_ended(server: Server, tmp_path: Path) -> None:
    notebook = server.notebook
    notebook.run("x = 1")
    server.kill()
    assert notebook.value("x") == "1"
    assert [folder.path for folder in keepers.folders()] == [server.folder.path]
    notebook.run("%gpuckpt save here")
    notebook.run("x = 2")
    notebook.run("%gpuckpt restore here")
    assert notebook.value("x") == "1"
    with keepers.connect(server.folder) as keeper:
        assert not keeper.request("status")["attended"]
        keeper.request("close")
    assert_nothing_left(tmp_path)


def test_in_the_middle_of_a_save(server: Server) -> None:
    server.notebook.run("import os; x = os.urandom(100_000_000)")
    cell = server.notebook.client.execute("%gpuckpt save here")
    server.kill()
    assert server.notebook.reply()["parent_header"]["msg_id"] == cell
    assert "here" in server.notebook.run("%gpuckpt list").text


def test_the_keeper_too_and_the_next_who_connects_takes_the_kernel_over(server: Server) -> None:
    notebook = server.notebook
    notebook.run("x = 1")
    server.kill()
    server.kill_keeper()
    assert notebook.value("x") == "1"
    assert notebook.fails("%gpuckpt save here").ename == "KeeperGone"
    with keepers.connect(server.folder) as keeper:
        assert keeper.request("status")["state"] == "running"
    wait_until(lambda: notebook.run("%gpuckpt save here --replace", allow_error=True).status == "ok")
    notebook.run("x = 2")
    notebook.run("%gpuckpt restore here")
    assert notebook.value("x") == "1"


def test_all_of_it_is_gone_and_so_is_its_folder(server: Server, tmp_path: Path) -> None:
    server.kill()
    (sleeper,) = server.folder.sleepers()
    server.kill_keeper()
    os.kill(sleeper, 9)
    wait_until(lambda: not list(keepers.folders()))
    with pytest.raises(NoSuchKernel):
        keepers.connect(server.folder)
    assert_nothing_left(tmp_path)


def test_the_kernel_ends_itself_with_nobody_there(server: Server, tmp_path: Path) -> None:
    server.kill()
    server.notebook.client.execute("import os; os._exit(3)")
    wait_until(lambda: not server.folder.path.exists())
    assert_nothing_left(tmp_path)


_BATCH = """
import sys
import time
import nbformat
from nbclient import NotebookClient
cells = [nbformat.v4.new_code_cell(f"open({sys.argv[1]!r}, 'w').close(); import time; time.sleep(1000)")]
NotebookClient(nbformat.v4.new_notebook(cells=cells), kernel_name="python3-gpuckpt").execute()
"""


@pytest.fixture
def batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A run of a notebook that is in the middle of a cell, by a program that is no server."""
    monkeypatch.setenv("GPUCKPT_END_AFTER", "1s")
    reached = tmp_path / "reached"
    with subprocess.Popen([sys.executable, "-c", _BATCH, str(reached)]) as process:
        wait_until(reached.exists)
        yield process
        process.kill()


def test_a_batch_run_is_killed_and_its_kernel_ends(batch: subprocess.Popen[bytes], tmp_path: Path) -> None:
    batch.kill()
    batch.wait()
    assert_nothing_left(tmp_path)


def test_the_keeper_too_and_the_batch_run_s_kernel_ends_when_it_gets_another(
    batch: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    (folder,) = keepers.folders()
    keeper = folder.state().keeper
    assert keeper is not None
    for pid in (batch.pid, keeper[0]):
        os.kill(pid, 9)
    batch.wait()
    wait_until(lambda: not folder.has_keeper())
    keepers.connect(folder).close()
    assert_nothing_left(tmp_path)


def test_it_goes_on_while_somebody_else_looks_at_it_or_holds_it(batch: subprocess.Popen[bytes], tmp_path: Path) -> None:
    (folder,) = keepers.folders()
    connection_file = folder.launch().connection_file
    viewer = client_of(connection_file)
    wait_until(lambda: peers(connection_file)["iopub_port"] == 2)
    batch.kill()
    batch.wait()
    time.sleep(3)  # longer than it would have had
    with keepers.connect(folder) as keeper:
        assert keeper.request("status")["state"] == "running"
        viewer.stop_channels()
        keeper.request("attach")  # as a server does that adopts it
        time.sleep(3)
        assert keeper.request("status")["state"] == "running"
    with keepers.connect(folder) as keeper:
        assert keeper.request("status")["state"] == "running", "who held it was a server"
        keeper.request("close")
    assert_nothing_left(tmp_path)
