"""Forks: copies of a kernel come up beside it, and each goes its own way."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from copies import Copy, Fork, forking
from keeper_faults import Criu, Requested, assert_nothing_left, keeper_pid, processes_of
from notebooks import Notebook, wait_until

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.client import keepers
from jupyter_gpuckpt.client.record import KernelFolder
from jupyter_gpuckpt.errors import ForkFailed, KeeperGone, Refused, SaveFailed
from jupyter_gpuckpt.store import Store


@pytest.fixture
def fork() -> Iterator[Fork]:
    with forking() as fork:
        yield fork


def snapshots() -> list[str]:
    return [manifest.name for manifest in Store(settings.store_dir()).list()]


def test_copies_go_on_from_the_same_state_each_on_its_own(notebook: Notebook, fork: Fork) -> None:
    notebook.run("x = [1, 2, 3]")
    first, second = fork(notebook, count=2)
    assert [copy.told["index"] for copy in (first, second)] == [0, 1]
    for kernel, more in ((notebook, 4), (first, 5), (second, 6)):
        kernel.run(f"x.append({more})")
    assert [kernel.value("x[-1], len(x)") for kernel in (notebook, first, second)] == ["4 4", "5 4", "6 4"]
    assert snapshots() == [], "a fork leaves no name behind"


def copies_in(notebook: Notebook) -> list[Copy]:
    """Return clients of the copies that a cell has made and called `f`."""
    return [Copy(told) for told in json.loads(notebook.value("__import__('json').dumps(f.kernels)"))]


def test_a_fork_in_a_cell_returns_in_the_kernel_and_in_every_copy(notebook: Notebook) -> None:
    answer = notebook.run("f = %gpuckpt fork -n 2\nwho = 'original' if f.copy is None else f'copy {f.copy}'")
    copies = copies_in(notebook)
    try:
        assert "\nForked: 2 copies, in " in "\n" + answer.text
        for copy in copies:
            assert f"jupyter console --existing kernel-{copy.told['id']}.json" in answer.text
        assert [kernel.value("who") for kernel in (notebook, *copies)] == ["original", "copy 0", "copy 1"]
    finally:
        for copy in copies:
            copy.close()


def test_a_cell_that_trains_goes_on_in_both_and_what_waits_behind_it_only_in_the_original(
    notebook: Notebook, fork: Fork
) -> None:
    notebook.client.execute(
        "import pathlib\nstep = behind = 0\n"
        "try:\n    while True:\n        step += 1; pathlib.Path('/dev/shm/step').write_text(str(step))\n"
        "except KeyboardInterrupt:\n    pass"
    )
    wait_until(lambda: step_of(notebook))
    last = notebook.client.execute("behind = 1")
    (copy,) = fork(notebook)
    for kernel in (notebook, copy):
        wait_until(partial(goes_on, kernel, step_of(kernel)))
        with kernel.keeper as keeper:
            keeper.request("signal", {"signum": int(signal.SIGINT)})
    while notebook.client.get_shell_msg(timeout=60)["parent_header"]["msg_id"] != last:
        pass
    assert notebook.value("behind") == "1"
    assert copy.value("behind") == "0"


def goes_on(kernel: Notebook, before: int) -> bool:
    return step_of(kernel) > before


def step_of(kernel: Notebook) -> int:
    """Return how far the cell is that writes its steps into the kernel's own /dev/shm."""
    (sleeper,) = KernelFolder(kernel.folder).sleepers()
    try:
        return int(Path(f"/proc/{sleeper}/root/dev/shm/step").read_text() or 0)
    except FileNotFoundError:
        return 0


def test_a_fork_from_a_snapshot_leaves_the_kernel_as_it_is(notebook: Notebook, fork: Fork) -> None:
    notebook.run("x = 'saved'")
    notebook.run("here = %gpuckpt save here\ngoes_on = here.restored")
    notebook.run("x = 'later'")
    first, second = fork(notebook, snapshot="here", count=2)
    assert [kernel.value("x") for kernel in (notebook, first, second)] == ["later", "saved", "saved"]
    # The cell that saved goes on in the copies, as it does after a restore.
    assert [kernel.value("goes_on") for kernel in (notebook, first, second)] == ["False", "True", "True"]
    assert snapshots() == ["here"]


def test_a_fork_with_a_name_saves_the_kernel_too(notebook: Notebook) -> None:
    notebook.run("x = 'now'")
    notebook.run("f = %gpuckpt fork --save kept")
    (copy,) = copies_in(notebook)
    try:
        assert copy.value("x, f.copy, f.restored") == "now 0 True"
    finally:
        copy.close()
    assert snapshots() == ["kept"]
    notebook.run("x = 'later'")
    assert "Restored kept, saved " in notebook.run("%gpuckpt restore kept").text
    assert notebook.value("x, f.copy, f.restored") == "now None True"


def test_a_copy_is_copied_saved_and_restored_like_any_kernel_also_when_the_original_is_gone(
    notebook: Notebook, fork: Fork
) -> None:
    notebook.run("x = 0")
    (child,) = fork(notebook)
    notebook.close()
    child.run("x += 1")
    (grandchild,) = fork(child)
    grandchild.run("x += 1")
    child.run("%gpuckpt save here")
    child.run("x = 'ruined'")
    child.run("%gpuckpt restore here")
    assert [child.value("x"), grandchild.value("x")] == ["1", "2"]
    child.close()
    assert grandchild.value("x") == "2"


def test_a_copy_that_is_shut_down_leaves_nothing(notebook: Notebook, fork: Fork, tmp_path: Path) -> None:
    before = processes_of(tmp_path)
    (copy,) = fork(notebook)
    files = [Path(copy.told["connection_file"]), copy.folder]
    assert all(path.exists() for path in files)
    copy.client.shutdown()
    wait_until(lambda: not any(path.exists() for path in files))
    wait_until(lambda: processes_of(tmp_path) <= before)


def test_what_cannot_be_is_refused_and_nothing_is_touched(notebook: Notebook, fork: Fork) -> None:
    for request in ({"count": 65}, {"count": -1}, {"snapshot": "a", "name": "b"}, {"gpus": [0]}):
        with pytest.raises(Refused):
            fork(notebook, **request)
    assert notebook.value("1") == "1"


def test_a_fork_that_fails_leaves_no_copy_and_the_kernel_unharmed(
    criu: Criu, notebook: Notebook, fork: Fork, tmp_path: Path
) -> None:
    notebook.run("x = 1")
    before, alone = processes_of(tmp_path), runtime_files()
    criu.first("restore", 'mkdir "$0.once" 2>/dev/null || exit 1')  # in all but one of the two
    with pytest.raises(ForkFailed):
        fork(notebook, count=2)
    criu.first("dump", "exit 1")
    with pytest.raises(SaveFailed):
        fork(notebook)
    assert notebook.value("x") == "1"
    wait_until(lambda: processes_of(tmp_path) <= before)
    assert runtime_files() == alone
    criu.honest()
    (copy,) = fork(notebook)
    assert copy.value("x") == "1"


def test_no_other_program_takes_a_port_of_a_copy_that_comes_up(criu: Criu, notebook: Notebook) -> None:
    notebook.run("x = 1")
    alone = set(connection_files())
    with criu.held_at("restore", "start") as reached:
        asked = Requested(notebook, "fork", {})
        reached()
        (file,) = set(connection_files()) - alone
        with socket.socket() as other:
            # As a kernel does that was told of this port before we were.
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", json.loads(file.read_text())["iopub_port"]))
    (told,) = asked.outcome()["kernels"]
    copy = Copy(told)
    try:
        assert copy.value("x") == "1"
    finally:
        copy.close()


def connection_files() -> list[Path]:
    return list(Path(os.environ["JUPYTER_RUNTIME_DIR"]).glob("kernel-*.json"))


def runtime_files() -> list[str]:
    """Return what lies in Jupyter's runtime folder: connection files, and one folder with a folder for each kernel."""
    runtime = Path(os.environ["JUPYTER_RUNTIME_DIR"])
    return sorted(str(path.relative_to(runtime)) for path in [*runtime.glob("*"), *runtime.glob("gpuckpt/[!.]*")])


def test_a_keeper_that_dies_while_copies_come_up_leaves_none_and_the_kernel_gets_another(
    criu: Criu, notebook: Notebook, tmp_path: Path
) -> None:
    notebook.run("x = 1")
    alone = runtime_files()
    killed = keeper_pid(notebook)
    with criu.held_at("restore", "start") as reached:
        asked = Requested(notebook, "fork", {"count": 2})
        reached()
        os.kill(killed, signal.SIGKILL)
        assert isinstance(asked.outcome(), KeeperGone)
    wait_until(lambda: runtime_files() == alone, what="a copy is left")
    with notebook.keeper as keeper:  # another one
        assert keeper.request("status")["keeper_pid"] != killed
    wait_until(lambda: len(processes_of(tmp_path)) == 3, what="processes are left")  # keeper, sleeper, kernel
    assert notebook.value("x") == "1"
    with forking() as fork:
        (copy,) = fork(notebook)
        assert copy.value("x") == "1"


def test_a_copy_that_is_killed_with_its_keeper_leaves_nothing_when_kernels_are_listed(
    notebook: Notebook, fork: Fork
) -> None:
    alone = runtime_files()
    (copy,) = fork(notebook)
    (sleeper,) = KernelFolder(copy.folder).sleepers()
    for pid in (copy.told["keeper_pid"], sleeper):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not KernelFolder(copy.folder).sleepers())
    wait_until(lambda: [folder.path for folder in keepers.folders()] == [notebook.folder])
    assert runtime_files() == alone


def test_ten_copies_at_once_and_nothing_is_left_of_them(notebook: Notebook, fork: Fork, tmp_path: Path) -> None:
    notebook.run("x = 1")
    before, alone = processes_of(tmp_path), runtime_files()
    copies = fork(notebook, count=10)
    for number, copy in enumerate(copies):
        copy.client.execute(f"x += {number}")
    assert [copy.value("x") for copy in copies] == [str(1 + number) for number in range(10)]
    assert notebook.value("x") == "1"
    for copy in copies:
        copy.close()
    wait_until(lambda: processes_of(tmp_path) <= before)
    assert runtime_files() == alone
    notebook.close()
    assert_nothing_left(tmp_path)
