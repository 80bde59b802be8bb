"""Kernels whose channels are encrypted (CurveZMQ), and such that clients reach by Unix sockets (ipc)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from copies import Fork, forking
from notebooks import PATIENCE, Notebook, StartKernel, wait_until

from jupyter_gpuckpt.errors import Refused

pytestmark = pytest.mark.criu

Start = Callable[[], Notebook]


@pytest.fixture
def fork() -> Iterator[Fork]:
    with forking() as fork:
        yield fork


@pytest.fixture
def curve(start: StartKernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Start a kernel with keys of its own."""
    spec = tmp_path / "share" / "kernels" / "curve"
    spec.mkdir(parents=True)
    metadata = {
        "supported_encryption": ["curve"],
        "kernel_provisioner": {"provisioner_name": "gpuckpt-provisioner"},
    }
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    about = {"argv": argv, "display_name": "Curve", "language": "python", "metadata": metadata}
    (spec / "kernel.json").write_text(json.dumps(about))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share"))

    def start_one() -> Notebook:
        return start("curve", transport_encryption="required")

    return start_one


def connection(notebook: Notebook) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(notebook.manager.connection_file).read_text())
    return found


def assert_beats(notebook: Notebook) -> None:
    heart = notebook.client.hb_channel
    if not heart.is_alive():
        heart.start()
    wait_until(heart.is_beating)


def assert_serves(notebook: Notebook) -> None:
    """All five channels are served: shell and iopub, the heartbeat, control, and stdin."""
    client = notebook.client
    assert_beats(notebook)
    client.control_channel.send(client.session.msg("kernel_info_request", {}))
    assert client.get_control_msg(timeout=PATIENCE)["content"]["status"] == "ok"
    client.execute("answer = input('?')")
    assert client.get_stdin_msg(timeout=PATIENCE)["content"]["prompt"] == "?"
    client.input("yes")
    assert notebook.reply()["content"]["status"] == "ok"
    assert notebook.value("answer") == "yes"


def test_an_encrypted_kernel_goes_back_to_its_own_snapshot_also_after_a_restart(curve: Start) -> None:
    notebook = curve()
    assert "curve_secretkey" in connection(notebook)
    notebook.run("x = 1")
    notebook.run("%gpuckpt save here")
    notebook.run("x = 2")
    assert "Restored here" in notebook.run("%gpuckpt restore here").text
    assert notebook.value("x") == "1"
    notebook.manager.restart_kernel(now=True)
    # The manager has just read the file, so the kernel must be done with it.
    written = Path(notebook.manager.connection_file).stat().st_mtime_ns
    notebook.wait_for_ready()
    assert Path(notebook.manager.connection_file).stat().st_mtime_ns == written
    notebook.run("%gpuckpt restore here")
    assert notebook.value("x") == "1"


def test_an_encrypted_kernel_is_hibernated_and_woken_by_a_cell(curve: Start) -> None:
    notebook = curve()
    notebook.run("x = 1")
    with notebook.keeper as keeper:
        keeper.request("hibernate")
    assert_beats(notebook)
    assert notebook.value("x") == "1"
    assert_serves(notebook)


def test_an_encrypted_kernel_is_forked(curve: Start, fork: Fork) -> None:
    notebook = curve()
    notebook.run("x = 1")
    (copy,) = fork(notebook)
    copy.run("x += 1")
    assert [copy.value("x"), notebook.value("x")] == ["2", "1"]


def test_a_kernel_comes_back_with_the_keys_of_the_one_that_it_takes_the_place_of(
    curve: Start, start: StartKernel, fork: Fork
) -> None:
    """With other keys, with keys where it had none, and without."""
    first, second, plain = curve(), curve(), start()
    first.run("r = %gpuckpt save encrypted\nprint('here', r.restored)", timeout=PATIENCE)
    plain.run("r = %gpuckpt save plain\nprint('here', r.restored)")
    for notebook, name in ((second, "encrypted"), (plain, "encrypted"), (first, "plain"), (second, "plain")):
        notebook.run("lost = 1")
        answer = notebook.run(f"%gpuckpt restore {name}").text
        assert f"Restored {name}" in answer
        assert "here True" in answer
        assert notebook.value("'lost' in globals()") == "False"
        assert_serves(notebook)
    (copy,) = fork(second, snapshot="encrypted")
    assert copy.value("r.restored") == "True"
    assert connection(second)["curve_publickey"] == copy.client.curve_publickey.decode()


def test_a_saved_cell_that_waits_for_an_answer_asks_those_who_have_the_new_keys(curve: Start) -> None:
    first, second = curve(), curve()
    first.client.execute("answer = input('?')")
    first.client.get_stdin_msg(timeout=PATIENCE)
    with first.keeper as keeper:
        keeper.request("save", {"name": "asking"})
    second.client.execute("%gpuckpt restore asking")
    assert second.client.get_stdin_msg(timeout=PATIENCE)["content"]["prompt"] == "?"
    second.client.input("yes")
    assert second.reply()["content"]["status"] == "ok"
    assert second.value("answer") == "yes"


def test_what_cannot_be_with_unix_sockets_is_refused_beforehand_and_the_kernel_is_untouched(start: StartKernel) -> None:
    start().run("%gpuckpt save by_tcp")
    notebook = start(transport="ipc")
    pid = notebook.value("__import__('os').getpid()")
    for request in ("save by_ipc", "restore by_tcp", "fork"):
        refused = notebook.fails(f"%gpuckpt {request}")
        assert refused.ename == "Refused"
        assert "Unix sockets (transport ipc)" in refused.text
        assert "tcp" in refused.text.partition("Next: ")[2]
    with notebook.keeper as keeper:
        for operation in ("hibernate", "fork"):
            with pytest.raises(Refused, match="Unix sockets"):
                keeper.request(operation)
    assert notebook.value("__import__('os').getpid()") == pid
    assert_serves(notebook)


def test_a_kernel_that_cannot_change_its_keys_is_not_restored_where_others_are_needed(
    curve: Start, start: StartKernel
) -> None:
    """Such as one of before ipykernel 7.3."""
    plain, encrypted = start(), curve()
    plain.run("from jupyter_gpuckpt.kernel import rebinding; rebinding.can_rebind = lambda kernel: False")
    plain.run("%gpuckpt save older")
    encrypted.run("x = 1")
    refused = encrypted.fails("%gpuckpt restore older")
    assert refused.ename == "Refused"
    assert "CurveZMQ" in refused.text
    assert encrypted.value("x") == "1"
    plain.run("%gpuckpt restore older")


def test_nothing_of_a_restored_kernel_is_signed_with_the_key_of_the_one_that_was_saved(start: StartKernel) -> None:
    """Clients of another kernel reject what is: also what it prints, or greets them with, before it knows its key."""
    notebook = start()
    notebook.run(
        "import threading, time\n"
        "from jupyter_gpuckpt.kernel import cpu_time\n"
        "go_on = cpu_time.go_on\n"
        "cpu_time.go_on = lambda names: (time.sleep(1), go_on(names))  # it is long in coming to its key\n"
        "def tell():\n"
        "    while True:\n"
        "        print('.', end='', flush=True)\n"
        "        time.sleep(0.01)\n"
        "threading.Thread(target=tell, daemon=True).start()"
    )
    notebook.run("%gpuckpt save here")
    notebook.close()
    notebook = start()
    assert "Restored here" in notebook.run("%gpuckpt restore here").text  # which looks at every signature
