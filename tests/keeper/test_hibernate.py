"""A hibernated kernel is on the disk alone, and comes back as it was, whatever happens on the way."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client import BlockingKernelClient
from keeper_faults import (
    Asked,
    Criu,
    Requested,
    assert_no_litter,
    assert_nothing_left,
    keeper_pid,
    kill_keeper,
    names,
    small_disk,
    state,
    status,
    store,
)
from late_client import late_client, mute_client, slow_client
from notebooks import PATIENCE, Notebook, StartKernel, wait_until

from jupyter_gpuckpt.client.listing import hibernated
from jupyter_gpuckpt.client.record import KernelFolder
from jupyter_gpuckpt.errors import Busy, GpuckptError, KeeperGone, Refused
from jupyter_gpuckpt.keeper.connections import Connections
from jupyter_gpuckpt.keeper.ports import of_connection_file
from jupyter_gpuckpt.linux import processes
from jupyter_gpuckpt.store import Store

pytestmark = [pytest.mark.criu, pytest.mark.shared_kernel]


def hibernate(notebook: Notebook) -> str:
    with notebook.keeper as keeper:
        return str(keeper.request("hibernate")["name"])


def wake(notebook: Notebook) -> None:
    with notebook.keeper as keeper:
        keeper.request("wake")


def reply_to(notebook: Notebook, msg_id: str) -> dict[str, Any]:
    """Return the content of the next reply to this request; others may be left of the kernel's start."""
    while True:
        reply = notebook.client.get_shell_msg(timeout=60)
        if reply["parent_header"].get("msg_id") == msg_id:
            content: dict[str, Any] = reply["content"]
            return content


def assert_awake(notebook: Notebook) -> None:
    """It is a running kernel, and nothing of its hibernation is left."""
    wait_until(lambda: status(notebook)["state"] == "running")
    wait_until(lambda: not names(), what=f"snapshots are left: {names()}")
    # Its removal goes on for a moment.
    wait_until(lambda: {path.name for path in store().glob("locks/*")} <= {"collect"})
    wait_until(lambda: list(store().glob("contents/*")) == [])
    if store().exists():
        assert_no_litter()
    assert len(list(notebook.folder.glob("run-*.sock"))) == 1


def test_it_holds_nothing_until_a_cell_wakes_it(notebook: Notebook) -> None:
    notebook.run(
        "import os, jupyter_gpuckpt; x = os.urandom(1000); y = hash(x); before = jupyter_gpuckpt.generation_id"
    )
    name = hibernate(notebook)
    found = status(notebook)
    assert (found["state"], found["pids"], found["memory"], found["pid"]) == ("hibernated", [], 0, None)
    assert found["hibernated"]["name"] == name
    assert processes.descendants(keeper_pid(notebook)) == []
    assert (Store(store()).labels(Store(store()).get(name))).tags == ("hibernated",)
    assert notebook.value("hash(x) == y") == "True"
    assert_awake(notebook)


def test_looking_at_it_does_not_wake_it(notebook: Notebook) -> None:
    hibernate(notebook)
    client = notebook.client
    assert reply_to(notebook, client.kernel_info())["language_info"]["name"] == "python"
    assert reply_to(notebook, client.comm_info()) == {"status": "ok", "comms": {}}
    client.hb_channel.start()
    wait_until(client.hb_channel.is_beating)
    assert notebook.manager.is_alive()
    with notebook.keeper as keeper:
        assert keeper.request("executed")["cells"] == {}
        with pytest.raises(Refused, match="hibernated"):
            keeper.request("save", {"name": "x"})
    assert status(notebook)["state"] == "hibernated"


def test_cells_that_come_are_executed_once_and_in_order(notebook: Notebook) -> None:
    notebook.run("done = []")
    hibernate(notebook)
    cells = [notebook.client.execute(f"done.append({n}); print({n})") for n in range(20)]
    assert {reply_to(notebook, cell)["status"] for cell in cells} == {"ok"}
    assert notebook.value("done") == str(list(range(20)))
    assert_awake(notebook)


def test_what_is_not_signed_is_not_listened_to(notebook: Notebook) -> None:
    import zmq

    hibernate(notebook)
    connection = json.loads(Path(notebook.manager.connection_file).read_text())
    header = json.dumps(
        {"msg_id": "1", "session": "s", "msg_type": "execute_request", "username": "", "version": "5.3"}
    )
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(f"tcp://127.0.0.1:{connection['shell_port']}")
        stranger.send_multipart([b"<IDS|MSG>", b"0" * 64, header.encode(), b"{}", b"{}", b'{"code": "x = 1"}'])
        reply_to(notebook, notebook.client.kernel_info())  # comes behind it
        assert state(notebook)["hibernated"]["requests"] == []
        assert status(notebook)["state"] == "hibernated"
        stranger.linger = 0


def test_from_a_cell(notebook: Notebook) -> None:
    notebook.run("x = 1\n%gpuckpt hibernate")
    wait_until(lambda: status(notebook)["state"] == "hibernated")
    assert notebook.value("x") == "1"
    assert_awake(notebook)


def test_cells_that_are_run_right_behind_it_break_it_off_and_are_executed(notebook: Notebook) -> None:
    """As by "Run All": nobody would wake a kernel that is hibernated in their middle."""
    notebook.client.execute("%gpuckpt hibernate")
    cells = [Asked(notebook, code) for code in ("import time; time.sleep(3); x = 1", "x += 1", "time.sleep(1)")]
    assert [cell.answer()["status"] for cell in cells] == ["ok"] * 3
    assert notebook.value("x") == "2"
    assert_awake(notebook)


def test_a_cell_that_runs_goes_on_when_it_is_woken(notebook: Notebook, tmp_path: Path) -> None:
    go = tmp_path / "go"
    go.write_bytes(b"\0")
    # It sees in memory that it may go on, and its end waits for no output: the agent may come later.
    notebook.run(f"import mmap, sys\nwith open({str(go)!r}, 'r+b') as file: go = mmap.mmap(file.fileno(), 1)")
    code = """
print('begun', flush=True)
sys.stdout.flush = sys.stderr.flush = lambda: None
while not go[0]: pass
"""
    cell = Asked(notebook, code)
    notebook.until_printed("begun")
    hibernate(notebook)
    assert not cell.is_answered()
    with go.open("r+b") as file:
        file.write(b"\1")
    wake(notebook)
    assert cell.answer()["status"] == "ok"
    notebook.run("del sys.stdout.flush, sys.stderr.flush")
    assert_awake(notebook)


def test_nothing_is_lost_of_what_a_cell_says_before_its_kernel_is_frozen(notebook: Notebook) -> None:
    """A client that is slow to take it has time for that."""
    with slow_client(notebook) as (client, takes):

        def is_asked() -> bool:
            for one in (notebook.client, client):
                one.iopub_channel.socket.poll(0)  # who does not look at what is printed is waited for
            return bool(client.stdin_channel.socket.poll(0))

        takes.clear()
        cell = client.execute("for n in range(20): print(str(n % 10) * 1_000_000)\ninput()", allow_stdin=True)
        client.get_stdin_msg(timeout=PATIENCE)
        hibernated = Requested(notebook, "hibernate", {}, lambda stage: takes.set() if stage == "freezing" else None)
        hibernated.outcome()
        woken, printed = Requested(notebook, "wake", {}), ""
        wait_until(is_asked)
        client.get_stdin_msg()
        client.input("")
        while (message := client.get_iopub_msg(timeout=PATIENCE))["content"].get("execution_state") != "idle":
            if message["msg_type"] == "stream" and message["parent_header"]["msg_id"] == cell:
                printed += message["content"]["text"]
        woken.outcome()
        assert printed.split() == [str(n % 10) * 1_000_000 for n in range(20)]


def test_a_request_that_the_kernel_had_not_read_is_answered_to_who_asked(notebook: Notebook, tmp_path: Path) -> None:
    """Its client has connected anew when it is read."""
    go = tmp_path / "go"
    code = f"""
import time
from pathlib import Path
def wait():
    while not Path({str(go)!r}).exists(): time.sleep(0.01)
get_ipython().kernel.shell_channel_thread.io_loop.add_callback(wait)
print("begun", flush=True)
wait()
"""
    cell = Asked(notebook, code)
    notebook.until_printed("begun")
    later = Asked(notebook, "later = 1")
    hibernate(notebook)
    woken = Requested(notebook, "wake", {})

    def is_awake() -> bool:
        notebook.client.iopub_channel.socket.poll(0)  # who does not look at what is printed is waited for
        return not woken.is_alive()

    wait_until(is_awake)
    go.touch()
    assert cell.answer()["status"] == "ok"
    assert later.answer()["status"] == "ok"
    assert_awake(notebook)


_CHILDREN = """
import os, signal, subprocess
x = 1
runs, still = (subprocess.Popen(["sleep", "10000"]) for _ in range(2))
still.send_signal(signal.SIGSTOP)
os.waitid(os.P_PID, still.pid, os.WSTOPPED | os.WNOWAIT)
def states():
    return [open(f"/proc/{child.pid}/stat").read().rpartition(")")[2].split()[0] for child in (runs, still)]
"""


def assert_children_are_as_they_were(notebook: Notebook) -> None:
    """The one that was stopped still is, and the other one is not."""
    assert notebook.value("states()") == "['S', 'T']"


def test_a_cell_that_comes_meanwhile_breaks_it_off(criu: Criu, notebook: Notebook) -> None:
    notebook.run(_CHILDREN)
    pid = status(notebook)["pid"]
    with criu.held_at("dump", "post-dump") as reached:
        asked = Requested(notebook, "hibernate", {})
        reached()
        cell = Asked(notebook, "x += 1; print(x)")
    assert isinstance(asked.outcome(), Busy)
    assert cell.answer()["status"] == "ok"
    assert notebook.value("x") == "2"
    assert_children_are_as_they_were(notebook)
    assert status(notebook)["pid"] == pid
    assert_awake(notebook)


def test_a_cell_that_has_begun_before_the_pause_breaks_it_off(start: StartKernel, tmp_path: Path) -> None:
    looks, notebook = tmp_path / "looks", start()
    notebook.run("import time, pathlib, jupyter_gpuckpt")
    # A hook holds the save up before the pause, for as long as the cell takes to begin.
    notebook.run(
        f"""
def hold():
    pathlib.Path({str(looks)!r}).touch()
    while not begun: time.sleep(0.01)
begun = False
jupyter_gpuckpt.before_save(hold)
"""
    )
    asked = Requested(notebook, "hibernate", {})
    wait_until(looks.exists)
    cell = Asked(notebook, "begun = True; time.sleep(3)")
    assert isinstance(asked.outcome(), Busy)
    assert cell.answer()["status"] == "ok"
    assert_awake(notebook)


_BLOCK = """
import asyncio, pathlib, time
def block():
    blocked.touch()
    while not go.exists(): time.sleep(0.01)
loop = asyncio.get_running_loop()
"""


def test_a_cell_that_waits_inside_the_kernel_breaks_it_off(notebook: Notebook, tmp_path: Path) -> None:
    """Where no cell runs, but something else has the main thread."""
    blocked, go = tmp_path / "blocked", tmp_path / "go"
    notebook.run(f"{_BLOCK}\nblocked, go = pathlib.Path({str(blocked)!r}), pathlib.Path({str(go)!r})")
    notebook.run("asyncio.get_running_loop().call_later(0.1, block)")
    wait_until(blocked.exists)
    cell = read_by_kernel(notebook, "x = 1")
    with pytest.raises(Busy):
        hibernate(notebook)
    go.touch()
    assert cell.answer()["status"] == "ok"
    assert_awake(notebook)


def test_a_cell_that_was_read_before_the_pause_breaks_it_off(start: StartKernel, tmp_path: Path) -> None:
    """And has not begun: to the keeper, that kernel is idle."""
    notebook, blocked, asked, go = start(), tmp_path / "blocked", tmp_path / "asked", tmp_path / "go"
    paths = ", ".join(f"pathlib.Path({str(path)!r})" for path in (blocked, asked, go))
    notebook.run(f"import jupyter_gpuckpt\n{_BLOCK}\nblocked, asked, go = {paths}")
    notebook.run(
        """
def hold():
    loop.call_soon_threadsafe(block)
    while not asked.exists(): time.sleep(0.01)
jupyter_gpuckpt.before_save(hold)
"""
    )
    hibernation = Requested(notebook, "hibernate", {})
    wait_until(blocked.exists)
    cell = read_by_kernel(notebook, "x = 1")
    asked.touch()
    assert isinstance(hibernation.outcome(), Busy)
    go.touch()
    assert cell.answer()["status"] == "ok"
    assert_awake(notebook)


def test_a_cell_that_comes_when_all_is_written_is_answered(notebook: Notebook) -> None:
    hibernation = Requested(notebook, "hibernate", {})
    wait_until(names)
    cell = Asked(notebook, "x = 1")
    assert isinstance(hibernation.outcome(), (dict, Busy))  # it was woken, or not left
    assert cell.answer()["status"] == "ok"
    assert notebook.value("x") == "1"
    assert_awake(notebook)


def test_a_cell_that_is_under_way_when_connections_end_is_answered(notebook: Notebook) -> None:
    """It has been sent, and comes only with the end of its client's connection."""
    with late_client(notebook) as (client, hold):
        hold()
        msg_id = client.execute("x = 1")
        hibernation = Requested(notebook, "hibernate", {})
        assert isinstance(hibernation.outcome(), Busy)
        assert client.get_shell_msg(timeout=PATIENCE)["parent_header"]["msg_id"] == msg_id
        assert notebook.value("x") == "1"
    assert_awake(notebook)


def read_by_kernel(notebook: Notebook, code: str) -> Asked:
    """Send a cell; return it when the kernel has read it from its socket, and has not begun with it."""

    def received() -> tuple[int, int]:
        with contextlib.closing(Connections(status(notebook)["pid"], {connection["shell_port"]})) as connections:
            return sum(connections.received().values()), connections.unread()

    connection = of_connection_file(notebook.manager.connection_file)
    before, _ = received()
    cell = Asked(notebook, code)
    wait_until(lambda: received()[0] > before and received()[1] == 0)
    return cell


def test_a_wake_that_fails_leaves_it_hibernated(criu: Criu, notebook: Notebook) -> None:
    notebook.run("x = 1")
    name = hibernate(notebook)
    criu.fault("restore", 1)
    criu.first("restore", "exit 7")
    failed = notebook.fails("x += 1")
    assert "could not be woken" in failed.evalue
    assert status(notebook)["state"] == "hibernated"
    assert names() == {name}
    criu.honest()
    assert notebook.value("x") == "1"
    assert_awake(notebook)


def test_a_client_that_is_slow_to_greet_hears_all_the_same_why_a_wake_failed(criu: Criu, notebook: Notebook) -> None:
    """It is connected again, as the system sees it, before zmq knows whose connection that is."""
    with mute_client(notebook) as (client, speaks):
        hibernate(notebook)
        criu.fault("restore", 1)
        criu.first("restore", "exit 7")
        asked = client.execute("x = 1")
        while announced(client) != "waking":
            pass
        speaks.clear()
        while (told := client.get_iopub_msg(timeout=PATIENCE))["msg_type"] != "error":
            pass
        speaks.set()
        assert told["parent_header"]["msg_id"] == asked
        while (reply := client.get_shell_msg(timeout=PATIENCE))["parent_header"]["msg_id"] != asked:
            pass
        assert "could not be woken" in reply["content"]["evalue"]
    criu.honest()
    assert notebook.value("1") == "1"
    assert_awake(notebook)


def announced(client: BlockingKernelClient) -> str:
    """Return what a client is told next of what the kernel is."""
    while True:
        content = client.get_iopub_msg(timeout=PATIENCE)["content"]
        if "gpuckpt" in content:
            return str(content["gpuckpt"])


def test_a_client_that_begins_to_listen_while_it_wakes_is_told_so(notebook: Notebook) -> None:
    with mute_client(notebook, "iopub_port") as (client, speaks):
        client.kernel_info()
        client.get_iopub_msg(timeout=PATIENCE)  # it listens
        speaks.clear()
        hibernate(notebook)
        cell = Asked(notebook, "1")
        while announced(notebook.client) != "waking":
            pass
        speaks.set()
        heard = [announced(client)]
        while heard[-1] != "awake":
            heard.append(announced(client))
        assert cell.answer()["status"] == "ok"
    assert "hibernated" not in heard
    assert_awake(notebook)


def test_its_snapshot_is_taken_away(notebook: Notebook) -> None:
    notebook.run("x = 1")
    manifest = store() / "snapshots" / f"{hibernate(notebook)}.json"
    with notebook.keeper as keeper, pytest.raises(GpuckptError, match="pinned"):
        keeper.request("rm", {"name": manifest.stem})
    away = manifest.rename(store().parent / "away")
    failed = notebook.fails("x")
    assert failed.ename == "NoSuchSnapshot"
    assert announced(notebook.client) == "hibernated"
    assert status(notebook)["state"] == "hibernated"
    away.rename(manifest)
    assert notebook.value("x") == "1"
    assert_awake(notebook)


@pytest.mark.shared_kernel(False)
def test_a_snapshot_that_somebody_renames_stays(notebook: Notebook) -> None:
    notebook.run("x = 1")
    name = hibernate(notebook)
    with notebook.keeper as keeper:
        keeper.request("mv", {"name": name, "new": "kept"})
    assert notebook.value("x") == "1"
    wait_until(lambda: not Store(store()).labels(Store(store()).get("kept")).tags)


@pytest.fixture
def full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The store lies on a disk with little room."""
    monkeypatch.setenv("GPUCKPT_STORE", str(tmp_path / "disk" / "store"))
    with small_disk(tmp_path / "disk", 20):
        yield tmp_path / "disk"


@pytest.mark.shared_kernel(False)
def test_no_room_for_it(full_disk: Path, notebook: Notebook) -> None:
    notebook.run("import os; x = os.urandom(30_000_000)")
    with notebook.keeper as keeper, pytest.raises(GpuckptError, match="disk"):
        keeper.request("hibernate")
    assert notebook.value("len(x)") == "30000000"
    assert_awake(notebook)


# -- the keeper is killed


@pytest.mark.parametrize("stage", ["preparing the kernel", "writing", "post-dump"])
def test_the_keeper_is_killed_on_the_way_there(criu: Criu, notebook: Notebook, stage: str) -> None:
    notebook.run(_CHILDREN)

    def kill(entered: str) -> None:
        if entered == stage:
            kill_keeper(notebook)

    if stage == "post-dump":
        with criu.held_at("dump", stage) as reached:
            asked = Requested(notebook, "hibernate", {})
            reached()
            kill_keeper(notebook)
    else:
        asked = Requested(notebook, "hibernate", {}, kill)
    assert isinstance(asked.outcome(), KeeperGone)
    assert notebook.manager.is_alive()
    assert notebook.value("x") == "1"
    assert_children_are_as_they_were(notebook)
    assert_awake(notebook)


@pytest.mark.parametrize("stage", ["verifying", "pre-restore", "post-resume"])
def test_the_keeper_is_killed_on_the_way_back(criu: Criu, notebook: Notebook, stage: str) -> None:
    """The cell that wakes the kernel is executed once all the same."""
    notebook.run("x = 1")
    hibernate(notebook)
    if stage == "verifying":
        killed: list[str] = []

        def kill(entered: str) -> None:
            if entered == stage and not killed:
                killed.append(stage)
                kill_keeper(notebook)

        asked = Requested(notebook, "wake", {}, kill)
        asked.outcome()
        assert killed
        assert notebook.manager.is_alive()
        cell = Asked(notebook, "x += 1")
    else:
        with criu.held_at("restore", stage) as reached:
            cell = Asked(notebook, "x += 1")
            reached()
            kill_keeper(notebook)
        assert notebook.manager.is_alive()
    assert cell.answer()["status"] == "ok"
    assert notebook.value("x") == "2"
    assert_awake(notebook)


def test_the_keeper_of_a_hibernated_kernel_is_killed(notebook: Notebook) -> None:
    notebook.run("x = 1")
    hibernate(notebook)
    kill_keeper(notebook)
    cell = Asked(notebook, "x += 1")  # nobody is there to take it
    assert notebook.manager.is_alive()
    assert status(notebook)["state"] == "hibernated" or cell.answer()["status"] == "ok"
    assert cell.answer()["status"] == "ok"
    assert notebook.value("x") == "2"
    assert_awake(notebook)


@pytest.mark.shared_kernel(False)
def test_the_machine_was_restarted_meanwhile(notebook: Notebook) -> None:
    """No kernel is there then; what is left of it is its snapshot, to be resumed."""
    name = hibernate(notebook)
    kill_keeper(notebook)
    (notebook.folder / "state.json").write_text(json.dumps({**state(notebook), "boot": "another"}))
    wait_until(lambda: not notebook.manager.is_alive())
    assert not notebook.folder.exists()
    assert names() == {name}
    assert Store(store()).labels(Store(store()).get(name)).tags == ("hibernated",)


@pytest.mark.parametrize("moment", range(2))
def test_the_keeper_is_killed_at_any_time(notebook: Notebook, moment: int) -> None:
    notebook.run("x = 1")
    if moment % 2:
        hibernate(notebook)
    asked = Requested(notebook, "wake" if moment % 2 else "hibernate", {})
    asked.join(0.25)  # the moment does not matter, what follows must hold after any
    kill_keeper(notebook)
    assert notebook.manager.is_alive()
    assert notebook.value("x") == "1"
    assert_awake(notebook)


# -- its end


@pytest.mark.shared_kernel(False)
@pytest.mark.parametrize("now", [True, False])
def test_it_is_shut_down(notebook: Notebook, tmp_path: Path, now: bool) -> None:
    hibernate(notebook)
    notebook.manager.shutdown_kernel(now=now)
    assert_nothing_left(tmp_path)
    assert not names()


def test_it_is_restarted(notebook: Notebook) -> None:
    notebook.run("x = 1")
    hibernate(notebook)
    notebook.manager.restart_kernel(now=True)
    notebook.wait_for_ready()
    assert notebook.value("'x' in globals()") == "False"
    assert_awake(notebook)


def test_five_rounds_leave_nothing(notebook: Notebook) -> None:
    notebook.run("n = 0")

    def held() -> tuple[int, int, int, int]:
        keeper = keeper_pid(notebook)
        descriptors = sorted(map(os.fsdecode, processes.open_files(keeper)))
        mounts = Path("/proc/self/mountinfo").read_text().count(str(notebook.folder))
        return len(descriptors), len(processes.descendants(keeper)), mounts, len(list(notebook.folder.iterdir()))

    hibernate(notebook)
    notebook.run("n += 1")
    wait_until(lambda: not names())
    before = held()
    for _ in range(4):
        hibernate(notebook)
        notebook.run("n += 1")
    assert notebook.value("n") == "5"
    assert_awake(notebook)
    wait_until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)), what=f"more than {before}")


def test_its_ports_are_held_until_then(notebook: Notebook) -> None:
    hibernate(notebook)
    connection = json.loads(Path(notebook.manager.connection_file).read_text())
    for channel in ("shell", "iopub", "stdin", "control", "hb"):
        with socket.socket() as s, pytest.raises(OSError, match="in use"):
            s.bind(("127.0.0.1", connection[f"{channel}_port"]))


def test_it_ends_with_its_snapshot_left(start: StartKernel) -> None:
    notebook = start()
    notebook.run("x = 1")
    folder = KernelFolder(notebook.folder)
    with notebook.keeper as keeper:
        name = keeper.request("hibernate", {"end": True})["name"]
    wait_until(lambda: not notebook.manager.is_alive())
    notebook.close()
    assert not folder.path.exists()
    assert names() == {name}
    other = start()
    other.run(f"%gpuckpt restore {name}")
    assert other.value("x") == "1"


@pytest.mark.shared_kernel(False)
def test_a_signal_ends_it(notebook: Notebook, tmp_path: Path) -> None:
    hibernate(notebook)
    notebook.manager.signal_kernel(signal.SIGINT)
    assert notebook.manager.is_alive()
    notebook.manager.signal_kernel(signal.SIGTERM)
    wait_until(lambda: not notebook.manager.is_alive())


# -- a cell of many megabytes wakes it


def large(code: str) -> str:
    """Return a cell that does this, and takes a while on its way: a FIFO holds 64 kB."""
    return f"y = {'a' * (15 << 20)!r}\n{code}"


def command(pid: int) -> bytes:
    """Return a process's arguments; none where it has just ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@contextlib.contextmanager
def standing_still(notebook: Notebook) -> Iterator[None]:
    """Have the kernel, which is about to be woken, stand still."""
    named = os.fsencode(notebook.manager.connection_file)
    (kernel,) = (pid for pid in processes.descendants(keeper_pid(notebook)) if named in command(pid))
    os.kill(kernel, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(kernel, signal.SIGCONT)


@pytest.mark.parametrize("keeper_dies", [False, True])
def test_a_large_cell_is_executed_once_however_long_it_is_on_its_way(
    criu: Criu, start: StartKernel, monkeypatch: pytest.MonkeyPatch, keeper_dies: bool
) -> None:
    monkeypatch.setenv("GPUCKPT_HOOK_TIMEOUT", "1")
    notebook = start()
    notebook.run("x = 1")
    name = hibernate(notebook)
    with contextlib.ExitStack() as still:
        with criu.held_at("restore", "post-resume") as reached:
            cell = Asked(notebook, large("x += 1"))
            reached()
            still.enter_context(standing_still(notebook))
        # It is not waited for any longer, but it is not given up.
        wait_until(lambda: status(notebook)["state"] == "running")
        assert names() == {name}
        if keeper_dies:
            kill_keeper(notebook)
            assert notebook.manager.is_alive()
    assert cell.answer()["status"] == "ok"
    assert notebook.value("x, len(y)") == f"2 {15 << 20}"
    assert_awake(notebook)
    assert "untold" not in state(notebook)


def test_it_comes_back_on_one_machine_only(
    notebook: Notebook, start: StartKernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook.run("x = 41")
    name = hibernate(notebook)
    resume = {"key": name, "resume": True}
    with monkeypatch.context() as elsewhere:
        # What another machine sees that shares the store: not the kernels that run here.
        elsewhere.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "other machine"))
        other = start()
        (listed,) = hibernated(Store(store()))
        assert (listed.held, listed.host) == (True, socket.gethostname())
        with other.keeper as keeper, pytest.raises(Busy, match=f"It belongs to .* on {listed.host}"):
            keeper.request("restore", resume)
    notebook.kill_keeper()  # the next one has the lease
    assert notebook.look("x") == "41"
    assert_awake(notebook)
    wait_until(lambda: list(store().glob("leases/*")) == [])

    name = hibernate(notebook)
    with notebook.keeper as keeper:
        keeper.request("hibernate", {"end": True})
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "other machine"))
        with other.keeper as keeper:
            keeper.request("restore", {**resume, "key": name})
        assert other.look("x + 1") == "42"
        assert_awake(other)
    wait_until(lambda: list(store().glob("leases/*")) == [])
