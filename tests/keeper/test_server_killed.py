"""Row 18: the server (here a program with a kernel manager) is killed, and its kernel outlives it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from jupyter_client import BlockingKernelClient
from keeper_faults import assert_nothing_left, processes_of
from notebooks import Notebook, wait_for_ready, wait_until

from jupyter_gpuckpt.errors import NoSuchKernel
from jupyter_gpuckpt.keeper import client
from jupyter_gpuckpt.keeper.record import KernelFolder

_SERVER = """
import json, sys
from jupyter_client import KernelManager
manager = KernelManager(kernel_name="python3-gpuckpt")
manager.start_kernel()
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
        notebook_client = BlockingKernelClient(connection_file=connection_file)
        notebook_client.load_connection_file()
        notebook_client.start_channels()
        wait_for_ready(notebook_client, 60)
        folder = KernelFolder(Path(os.environ["JUPYTER_RUNTIME_DIR"], "gpuckpt", kernel_id))
        yield Server(process, Notebook(None, notebook_client), folder)  # type: ignore[arg-type]
        notebook_client.stop_channels()
        process.kill()
    client.end(folder)
    wait_until(lambda: not processes_of(tmp_path))


def test_the_kernel_goes_on_can_be_found_and_is_saved_restored_and_ended(server: Server, tmp_path: Path) -> None:
    notebook = server.notebook
    notebook.run("x = 1")
    server.kill()
    assert notebook.value("x") == "1"
    assert [folder.path for folder in client.folders()] == [server.folder.path]
    notebook.run("%gpuckpt save here")
    notebook.run("x = 2")
    notebook.run("%gpuckpt restore here")
    assert notebook.value("x") == "1"
    with client.connect(server.folder) as keeper:
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
    with client.connect(server.folder) as keeper:
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
    wait_until(lambda: not list(client.folders()))
    with pytest.raises(NoSuchKernel):
        client.connect(server.folder)
    assert_nothing_left(tmp_path)


def test_the_kernel_ends_itself_with_nobody_there(server: Server, tmp_path: Path) -> None:
    server.kill()
    server.notebook.client.execute("import os; os._exit(3)")
    wait_until(lambda: not server.folder.path.exists())
    assert_nothing_left(tmp_path)
