"""`jupyter gpuckpt kernels` and `stop`: real kernels, with and without a server."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from command_line import Cli, Orphan
from notebooks import Notebook, StartKernel, connected, wait_until

from jupyter_gpuckpt.client import keepers
from jupyter_gpuckpt.errors import NoSuchKernel
from jupyter_gpuckpt.linux.processes import start_time


def _kill(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: all(start_time(pid) is None for pid in pids))


def test_no_kernels(cli: Cli) -> None:
    assert cli("kernels").out.startswith("No kernels that can be saved are running.")
    assert cli("kernels", "--json").json == {"kernels": [], "elsewhere": [], "faults": []}


def test_status_of_nothing_says_that_there_is_nothing_and_how_much_room(cli: Cli) -> None:
    nothing, _, room = cli("status").out.splitlines()
    assert nothing == cli("kernels").out.rstrip()
    store = cli("status", "--json").json["store"]
    assert (store["snapshots"], store["used"]) == (0, 0)
    assert room.startswith(f"0 snapshots in {store['folder']}: 0 B used, ")
    assert "free on its disk" in room


def test_a_kernel_is_listed_with_where_it_is_and_where_it_came_from(cli: Cli, notebook: Notebook) -> None:
    notebook.run("%gpuckpt save base")
    (kernel,) = cli("kernels", "--json").json["kernels"]
    assert kernel["kernel_id"] == notebook.manager.provisioner.kernel_id
    assert (kernel["state"], kernel["attended"]) == ("running", True)
    assert kernel["parent"]["name"] == "base"
    assert kernel["snapshots"] == ["base"]
    assert kernel["memory"] > 10_000_000
    assert kernel["gpu_memory"] == 0
    assert Path(f"/proc/{kernel['pid']}/cmdline").read_bytes().find(b"ipykernel_launcher") > 0
    head, row = cli("kernels").out.splitlines()
    assert head.split()[0] == "kernel"
    assert row.startswith(kernel["kernel_id"][:8])
    assert "base" in row
    assert "unattended" not in row
    assert cli("status").out.splitlines()[:2] == [head, row]
    one = dict(line.split(None, 1) for line in cli("status", kernel["kernel_id"][:6]).out.splitlines())
    assert (one["kernel"], one["state"], one["pid"]) == (kernel["kernel_id"], "running", str(kernel["pid"]))
    assert one["based"].split() == ["on", "base"]


def test_a_kernel_that_is_being_saved_is_listed_as_such(cli: Cli, notebook: Notebook) -> None:
    notebook.run("import jupyter_gpuckpt, time\njupyter_gpuckpt.before_save(lambda: time.sleep(600))")
    notebook.client.execute("%gpuckpt save slow")
    wait_until(lambda: cli("kernels", "--json").json["kernels"][0]["state"] == "saving")


def test_a_kernel_whose_server_crashed_is_listed_with_how_to_go_on(cli: Cli, orphan: Orphan) -> None:
    (kernel,) = cli("kernels", "--json").json["kernels"]
    assert (kernel["kernel_id"], kernel["attended"]) == (orphan.kernel_id, False)
    text = cli("kernels").out
    assert "unattended" in text
    assert f"jupyter console --existing {orphan.connection_file}" in text
    assert f"jupyter gpuckpt stop {orphan.kernel_id[:8]}" in text


def test_a_kernel_whose_keeper_died_gets_a_new_one(cli: Cli, orphan: Orphan) -> None:
    (before,) = cli("kernels", "--json").json["kernels"]
    _kill(before["keeper_pid"])
    (after,) = cli("kernels", "--json").json["kernels"]
    assert after["pid"] == before["pid"]
    assert after["keeper_pid"] != before["keeper_pid"]
    assert cli("save", orphan.kernel_id, "kept").status == 0


def test_a_kernel_that_is_gone_leaves_nothing(cli: Cli, orphan: Orphan) -> None:
    (kernel,) = cli("kernels", "--json").json["kernels"]
    folder = keepers.find(orphan.kernel_id)
    sleeper = folder.state().sleeper
    assert sleeper is not None
    _kill(kernel["keeper_pid"], sleeper[0])
    assert cli("kernels", "--json").json["kernels"] == []
    assert not folder.path.exists()
    assert cli("save", orphan.kernel_id, "x").status == 3


def test_a_silent_keeper_does_not_hold_up_the_listing(cli: Cli, orphan: Orphan, notebook: Notebook) -> None:
    keeper = keepers.find(orphan.kernel_id).state().keeper
    assert keeper is not None
    os.kill(keeper[0], signal.SIGSTOP)
    try:
        document = cli("kernels", "--json").json
    finally:
        os.kill(keeper[0], signal.SIGCONT)
    assert [k["kernel_id"] for k in document["kernels"]] == [notebook.manager.provisioner.kernel_id]
    assert orphan.kernel_id in document["faults"][0]["what"]


def test_an_orphan_is_stopped_with_all_that_it_had(cli: Cli, orphan: Orphan) -> None:
    (kernel,) = cli("kernels", "--json").json["kernels"]
    folder = keepers.find(orphan.kernel_id)
    stopped = cli("stop", orphan.kernel_id[:8])
    assert (stopped.status, stopped.out) == (0, f"Stopped kernel {orphan.kernel_id}.\n")
    wait_until(lambda: start_time(kernel["pid"]) is None and start_time(kernel["keeper_pid"]) is None)
    assert not folder.path.exists()
    assert not Path(orphan.connection_file).exists()
    assert cli("stop", orphan.kernel_id).status == 3


def test_a_kernel_that_a_server_holds_is_stopped_only_by_force(cli: Cli, notebook: Notebook) -> None:
    kernel_id = notebook.manager.provisioner.kernel_id
    refused = cli("stop", kernel_id)
    assert refused.status == 1
    assert "--force" in refused.err
    assert notebook.value("1 + 1") == "2"
    assert cli("stop", kernel_id, "--force", "--json").json == {"kernel_id": kernel_id, "stopped": True}
    wait_until(lambda: not notebook.manager.is_alive())


def test_a_kernel_whose_keeper_is_silent_is_stopped_by_force(cli: Cli, orphan: Orphan) -> None:
    (kernel,) = cli("kernels", "--json").json["kernels"]
    os.kill(kernel["keeper_pid"], signal.SIGSTOP)
    silent = cli("stop", orphan.kernel_id)
    assert silent.status == 1
    assert "does not answer" in silent.err
    assert cli("stop", orphan.kernel_id, "--force").status == 0
    wait_until(lambda: start_time(kernel["pid"]) is None and start_time(kernel["keeper_pid"]) is None)
    assert cli("kernels", "--json").json == {"kernels": [], "elsewhere": [], "faults": []}


def test_a_kernel_answers_to_each_of_its_names(orphan: Orphan, notebook: Notebook) -> None:
    state = keepers.find(orphan.kernel_id).state()
    assert state.keeper is not None
    with keepers.connect(keepers.find(orphan.kernel_id)) as keeper:
        pid = keeper.request("status")["pid"]
    for name in (
        orphan.kernel_id[:6],
        "/home/me/deep/train.ipynb",
        "deep/train.ipynb",
        "train.ipynb",
        "train",
        orphan.connection_file,
        Path(orphan.connection_file).name,
        str(state.keeper[0]),
        str(pid),
    ):
        assert keepers.find(name).path.name == orphan.kernel_id, name
    for name in ("", ".", "/", "other/train.ipynb", "rain.ipynb", "0" * 40, orphan.kernel_id[1:]):
        with pytest.raises(NoSuchKernel):
            keepers.find(name)


def test_several_kernels_of_one_name_are_named(cli: Cli, start: StartKernel) -> None:
    environment = {**os.environ, "JPY_SESSION_NAME": "twice.ipynb"}
    both = [start(env=environment).manager.provisioner.kernel_id for _ in range(2)]
    told = cli("save", "twice.ipynb", "x", "--json")
    assert told.status == 3
    assert sorted(told.json["error"]["data"]["kernels"]) == sorted(both)


def test_listing_kernels_does_not_disturb_those_that_are_starting(start: StartKernel) -> None:
    started = threading.Event()

    def look() -> int:
        looks = 0
        while not started.is_set():
            looks += len(list(keepers.folders()))
        return looks

    with ThreadPoolExecutor(2) as pool:
        looking = [pool.submit(look) for _ in range(2)]
        try:
            notebook = start()
        finally:
            started.set()
    assert all(look.result() for look in looking)
    assert notebook.value("1 + 1") == "2"
    assert keepers.find(notebook.manager.provisioner.kernel_id).has_keeper()


def test_one_can_go_on_with_an_orphan(orphan: Orphan) -> None:
    with connected(orphan.connection_file) as going_on:
        assert going_on.value("1 + 1") == "2"
