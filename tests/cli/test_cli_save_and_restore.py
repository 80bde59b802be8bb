"""`jupyter gpuckpt save` and `restore`: real kernels, saved by CRIU, from outside."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
from pathlib import Path

import pytest
from command_line import PROGRAM, Cli
from notebooks import Notebook, wait_until

from jupyter_gpuckpt.client import keepers
from jupyter_gpuckpt.client.record import Launch

pytestmark = pytest.mark.shared_kernel

_HELD_SAVE = """
import jupyter_gpuckpt, os, time
@jupyter_gpuckpt.before_save
def held():
    while not os.path.exists({!r}):
        time.sleep(0.01)
"""


def _id(notebook: Notebook) -> str:
    kernel_id: str = notebook.manager.provisioner.kernel_id
    return kernel_id


@pytest.fixture
def held(notebook: Notebook, tmp_path: Path) -> Path:
    """Have a save of the kernel take until this file is there."""
    notebook.run(_HELD_SAVE.format(str(tmp_path / "go")))
    return tmp_path / "go"


def _until_it_saves(cli: Cli) -> None:
    wait_until(lambda: cli("kernels", "--json").json["kernels"][0]["state"] == "saving")


def _sockets(pid: int) -> int:
    """Return how many sockets a process has."""
    found = 0
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += str(fd.readlink()).startswith("socket:")
    return found


def _names(cli: Cli) -> list[str]:
    return [s["name"] for s in cli("list", "--json").json["snapshots"]]


def test_a_kernel_is_saved_and_restored_from_outside(cli: Cli, notebook: Notebook) -> None:
    notebook.run("x = [1, 2, 3]")
    saved = cli("save", _id(notebook), "outside", "-m", "by hand")
    assert (saved.status, saved.err) == (0, "")
    assert saved.out.startswith("Saved outside: ")
    notebook.run("x.clear()")
    restored = cli("restore", _id(notebook), "outside")
    assert (restored.status, restored.err) == (0, "")
    assert restored.out.startswith("Restored outside (by hand), saved ")
    # The client did not listen during the restore, and hears the first cell all the same.
    assert notebook.value("x") == "[1, 2, 3]"


def test_the_results_as_json(cli: Cli, notebook: Notebook) -> None:
    saved = cli("save", _id(notebook), "first", "--json").json
    assert saved["name"] == "first"
    assert 0 < saved["frozen_seconds"] < saved["seconds"]
    restored = cli("restore", _id(notebook), "--lazy", "--json").json
    assert restored["lazy"] is False, "it has nothing on a GPU that could come later"
    assert (restored["id"], restored["restored"], restored["warnings"]) == (saved["id"], True, [])


def test_a_taken_name_is_refused_unless_it_may_be_replaced(cli: Cli, notebook: Notebook) -> None:
    first = cli("save", _id(notebook), "taken", "--json").json
    refused = cli("save", _id(notebook), "taken", "--json")
    assert (refused.status, refused.json["error"]["kind"]) == (1, "NameTaken")
    assert cli("save", _id(notebook), "taken", "--replace", "--json").json["id"] != first["id"]


def test_a_kernel_that_is_not_there(cli: Cli) -> None:
    for words in (["save", "nobody", "x"], ["restore", "nobody"], ["stop", "nobody"]):
        told = cli(*words)
        assert (told.status, told.out) == (3, "")
        assert "No kernel matches 'nobody'." in told.err
        assert cli(*words, "--json").json["error"]["kind"] == "NoSuchKernel"


def test_a_snapshot_that_is_not_there_leaves_the_kernel_alone(cli: Cli, notebook: Notebook) -> None:
    notebook.run("x = 1")
    assert cli("restore", _id(notebook), "nothing").status == 3
    assert cli("restore", _id(notebook)).status == 3
    assert notebook.value("x") == "1"


def test_a_restore_while_a_cell_runs(cli: Cli, notebook: Notebook) -> None:
    notebook.run("x = 'saved'")
    cli("save", _id(notebook), "calm")
    running = notebook.client.execute("x = 'lost'\nimport time; time.sleep(600)")
    wait_until(lambda: notebook.client.get_iopub_msg(timeout=60)["msg_type"] == "execute_input")
    assert cli("restore", _id(notebook), "calm").status == 0
    # The cell that was running is answered: nobody waits for it for ever.
    reply = notebook.reply()
    assert reply["parent_header"]["msg_id"] == running
    assert notebook.value("x") == "saved"


def test_a_save_while_a_cell_runs(cli: Cli, notebook: Notebook) -> None:
    notebook.client.execute("import time\nfor i in range(20): time.sleep(0.1)\nx = i")
    assert cli("save", _id(notebook), "busy").status == 0
    assert notebook.value("x") == "19"


@pytest.mark.shared_kernel(False)
@pytest.mark.usefixtures("held")
def test_ctrl_c_cancels_a_save_and_says_so_at_once(cli: Cli, notebook: Notebook) -> None:
    terminal, end = pty.openpty()
    words, plain = [PROGRAM, "save", _id(notebook), "never"], {**os.environ, "NO_COLOR": "1"}
    saving = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=end, text=True, env=plain)
    os.close(end)
    _until_it_saves(cli)
    saving.send_signal(signal.SIGINT)
    out, _ = saving.communicate(timeout=60)
    shown = _all_of(terminal)
    assert (saving.returncode, out) == (130, "")
    assert "Saving never: cancelling…\r\x1b[KThe save of 'never' was cancelled." in shown
    assert "Traceback" not in shown
    assert _names(cli) == []
    assert cli("kernels", "--json").json["kernels"][0]["state"] == "running"
    assert notebook.value("1 + 1") == "2"


@pytest.mark.shared_kernel(False)
@pytest.mark.usefixtures("held")
def test_a_second_ctrl_c_stops_the_waiting(cli: Cli, notebook: Notebook) -> None:
    saving = subprocess.Popen([PROGRAM, "save", _id(notebook), "never"], stderr=subprocess.PIPE, text=True)
    _until_it_saves(cli)
    keeper = cli("kernels", "--json").json["kernels"][0]["keeper_pid"]
    os.kill(keeper, signal.SIGSTOP)  # so that nobody hears that it is to be cancelled
    try:
        before = _sockets(saving.pid)
        saving.send_signal(signal.SIGINT)
        wait_until(lambda: _sockets(saving.pid) > before, what="the keeper is not asked to cancel it")
        saving.send_signal(signal.SIGINT)
        _, err = saving.communicate(timeout=60)
    finally:
        os.kill(keeper, signal.SIGCONT)
    assert saving.returncode == 130
    assert "Traceback" not in err
    wait_until(lambda: cli("kernels", "--json").json["kernels"][0]["state"] == "running")
    assert _names(cli) == []


@pytest.mark.shared_kernel(False)
@pytest.mark.usefixtures("held")
def test_ctrl_c_with_json(cli: Cli, notebook: Notebook) -> None:
    saving = subprocess.Popen(
        [PROGRAM, "save", _id(notebook), "never", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    _until_it_saves(cli)
    saving.send_signal(signal.SIGINT)
    out, err = saving.communicate(timeout=60)
    assert (saving.returncode, err) == (130, "")
    assert '"kind": "Cancelled"' in out


@pytest.mark.shared_kernel(False)
def test_a_kernel_that_is_busy_with_another_save(cli: Cli, notebook: Notebook, held: Path) -> None:
    saving = subprocess.Popen([PROGRAM, "save", _id(notebook), "first"], stdout=subprocess.DEVNULL)
    _until_it_saves(cli)
    refused = cli("save", _id(notebook), "second", "--json")
    assert (refused.status, refused.json["error"]["kind"]) == (1, "Busy")
    held.touch()
    assert saving.wait(60) == 0
    assert _names(cli) == ["first"]


@pytest.mark.shared_kernel(False)
@pytest.mark.usefixtures("held")
def test_a_keeper_that_dies_during_a_save_is_noticed(cli: Cli, notebook: Notebook) -> None:
    notebook.run("x = 5")
    saving = subprocess.Popen([PROGRAM, "save", _id(notebook), "never"], stderr=subprocess.PIPE, text=True)
    _until_it_saves(cli)
    os.kill(cli("kernels", "--json").json["kernels"][0]["keeper_pid"], signal.SIGKILL)
    _, err = saving.communicate(timeout=60)
    assert saving.returncode == 1
    assert "The kernel's keeper is not running." in err
    assert cli("kernels", "--json").json["kernels"][0]["state"] == "running"
    assert notebook.value("x") == "5"


def _all_of(terminal: int) -> str:
    """Return all that is shown on a terminal which no program has any more, and close it."""
    shown = b""
    with contextlib.suppress(OSError):  # the end of it
        while True:
            shown += os.read(terminal, 1 << 16)
    os.close(terminal)
    return shown.decode()


@pytest.mark.shared_kernel(False)
def test_progress_is_shown_on_a_terminal_after_a_second(cli: Cli, notebook: Notebook, held: Path) -> None:
    terminal, end = pty.openpty()
    saving = subprocess.Popen([PROGRAM, "save", _id(notebook), "slow"], stdout=subprocess.PIPE, stderr=end)
    os.close(end)
    shown = ""
    while not (said := re.search(r"Saving slow: preparing the kernel \((\d+\.\d) s\)", shown)):
        shown += os.read(terminal, 1 << 16).decode()
    assert float(said[1]) >= 1.0
    held.touch()
    saving.communicate(timeout=60)
    shown += _all_of(terminal)
    assert saving.returncode == 0
    assert shown.endswith("\r\x1b[K"), "the line is gone at the end"


def test_a_machine_without_criu(cli: Cli, tmp_path: Path, notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCKPT_CRIU", str(tmp_path / "no-criu"))
    file = notebook.manager.connection_file
    launch = Launch("no-criu", ["sleep", "60"], dict(os.environ), str(tmp_path), 0o022, file, False)
    process, folder = keepers.start_keeper(launch)
    try:
        told = cli("save", "no-criu", "x", "--json")
    finally:
        with keepers.connect(folder) as keeper:
            keeper.request("close")
        process.wait(60)
    assert (told.status, told.json["error"]["kind"]) == (4, "Unavailable")
