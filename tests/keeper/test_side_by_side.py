"""A snapshot comes up beside the running kernel; in its place only where the two cannot be there at once."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import timeit
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from jupyter_client import BlockingKernelClient
from jupyter_client.multikernelmanager import MultiKernelManager
from jupyter_client.session import Session
from keeper_faults import Asked, Criu, Requested, status
from late_client import late_client, mute_client
from notebooks import PATIENCE, SPEC, Notebook, StartKernel, connected, open_channels, wait_until
from zmq.constants import Event
from zmq.utils.monitor import recv_monitor_message

from jupyter_gpuckpt.client.in_progress import RestoreInProgress
from jupyter_gpuckpt.client.record import KernelFolder
from jupyter_gpuckpt.errors import Cancelled, RestoreFailed
from jupyter_gpuckpt.keeper import ports
from jupyter_gpuckpt.kernel.clients import COMING_BACK
from jupyter_gpuckpt.linux import socket_ports

pytestmark = [pytest.mark.criu, pytest.mark.shared_kernel]

# A thread writes all the time which kernel it is of, in lines of its own.
_WRITING = """
import threading, time
which = "saved"
def write():
    while True:
        with open({path!r}, "a") as file: file.write(which + chr(10))
        time.sleep(0.001)
threading.Thread(target=write, daemon=True).start()
"""


def log(notebook: Notebook) -> str:
    return (notebook.folder / "keeper.log").read_text()


@pytest.mark.shared_kernel(False)
def test_it_runs_until_the_other_one_is_there_and_never_do_both(criu: Criu, notebook: Notebook, tmp_path: Path) -> None:
    path = tmp_path / "written"
    notebook.run(_WRITING.format(path=str(path)))
    notebook.run("%gpuckpt save here")
    notebook.run("which = 'running'")
    with criu.held_at("restore", "post-resume") as until_there:
        asked = Asked(notebook, "%gpuckpt restore here")
        until_there()
        before = path.read_text().count("running")
        wait_until(lambda: path.read_text().count("running") > before)
    assert asked.answer()["status"] == "ok"
    count = path.read_text().count("saved")
    wait_until(lambda: path.read_text().count("saved") > count)
    lines = path.read_text().split()
    last = len(lines) - lines[::-1].index("running")
    assert set(lines[lines.index("running") : last]) == {"running"}
    assert set(lines[last:]) == {"saved"}
    assert "is given up before" not in log(notebook)


_HOLDING = """
import os, time, jupyter_gpuckpt
@jupyter_gpuckpt.after_restore
def hold(resumed):
    if resumed.restored:
        open({reached!r}, "w").close()
        while not os.path.exists({go!r}): time.sleep(0.01)
"""


@pytest.mark.shared_kernel(False)
@pytest.mark.parametrize("how", ["", "--in-place"])
def test_a_kernel_waits_for_its_clients_and_not_for_itself(notebook: Notebook, tmp_path: Path, how: str) -> None:
    """ipykernel has a connection to its own shell port, which it makes again 0.1 s after it has come up."""
    reached, go = tmp_path / "reached", tmp_path / "go"
    notebook.run(_HOLDING.format(reached=str(reached), go=str(go)))
    notebook.run("%gpuckpt save here")
    asked = Asked(notebook, f"%gpuckpt restore here {how}")
    wait_until(reached.exists)
    operation = KernelFolder(notebook.folder).state().operation
    assert isinstance(operation, RestoreInProgress)
    assert operation.peers == {"shell_port": 1, "iopub_port": 1, "stdin_port": 1}
    go.touch()
    assert asked.answer()["status"] == "ok"


def test_a_connection_of_its_own_is_none_of_a_client_however_new(tmp_path: Path) -> None:
    """One client more than there are is waited for, for ten seconds: by one that is restored twice at once, say."""
    file = tmp_path / "kernel.json"
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as connected:
        where = listener.getsockname()
        file.write_text(json.dumps({**dict.fromkeys(ports.CHANNELS, 1), "shell_port": where[1]}))
        connected.enter_context(socket.create_connection(where))
        assert ports.peers(str(file), os.getpid())["shell_port"] == 0
        connected.enter_context(listener.accept()[0])
        assert ports.peers(str(file), os.getpid())["shell_port"] == 0
        client = f"import socket; one = socket.create_connection({where}); input()"
        with subprocess.Popen([sys.executable, "-c", client], stdin=subprocess.PIPE) as other:
            connected.enter_context(listener.accept()[0])
            assert ports.peers(str(file), os.getpid()) == {"shell_port": 1, "iopub_port": 0, "stdin_port": 0}
            assert ports.peers(str(file))["shell_port"] == 2
            other.communicate(b"\n")


def test_a_client_that_comes_back_while_it_is_counted_counts_once(tmp_path: Path) -> None:
    file = tmp_path / "kernel.json"
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as client:
        where = listener.getsockname()
        file.write_text(json.dumps({**dict.fromkeys(ports.CHANNELS, 1), "shell_port": where[1]}))

        def come_back(after: float) -> socket.socket:
            time.sleep(after)
            return socket.create_connection(where)

        def count() -> int:
            return ports.peers(str(file), away=Counter({where[1]: 1}), of=[os.getpid()])["shell_port"]

        counts, took = Counter[int](), timeit.timeit(count, number=20) / 20
        for _ in range(100):
            back = client.submit(come_back, random.uniform(0, took))
            counts[count()] += 1
            back.result().close()
            listener.accept()[0].close()
            wait_until(lambda: not ports.peers(str(file))["shell_port"])
    assert counts[1], counts
    assert max(counts) == 1, f"one more than there are was counted: {counts}"


def test_children_go_on_but_for_those_that_stood_still(notebook: Notebook) -> None:
    notebook.run(
        """
import os, signal, subprocess
runs, stands = (subprocess.Popen(["sleep", "1000"]) for _ in range(2))
os.kill(stands.pid, signal.SIGSTOP)
def state(process):
    with open(f"/proc/{process.pid}/stat") as file: return file.read().rpartition(")")[2].split()[0]
"""
    )
    notebook.run("%gpuckpt save here")
    for _ in range(2):
        notebook.run("%gpuckpt restore here")
        assert notebook.value("state(runs), state(stands)") == "S T"
    notebook.run("[(one.kill(), one.wait()) for one in (runs, stands)]")


_NAMED = "import socket; one = socket.socket({kind}); one.bind({name}); name = one.getsockname()"
_UNSHARED = [
    (
        "locks of files",
        "import fcntl; one = open({path!r}, 'w'); fcntl.flock(one, fcntl.LOCK_EX)",
        "fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB) is None",
    ),
    ("terminals", "import os; one, other = os.openpty()", "os.write(one, b'x\\n') == len(os.read(other, 9))"),
    (
        "UDP ports",
        _NAMED.format(kind="type=socket.SOCK_DGRAM", name="('127.0.0.1', 0)"),
        "one.getsockname() == name",
    ),
    (
        "a Unix socket's name",
        _NAMED.format(kind="socket.AF_UNIX", name="{path!r}"),
        "one.getsockname() == name",
    ),
    (
        "a Unix socket's name",
        _NAMED.format(kind="socket.AF_UNIX", name="chr(0) + {path!r}"),
        "one.getsockname() == name",
    ),
]


@pytest.mark.shared_kernel(False)
@pytest.mark.parametrize(("what", "have", "has"), _UNSHARED)
def test_what_two_cannot_both_have_is_given_up_first(
    notebook: Notebook, tmp_path: Path, what: str, have: str, has: str
) -> None:
    notebook.run(have.format(path=str(tmp_path / "one")))
    notebook.run("%gpuckpt save here")
    for _ in range(2):
        notebook.run("marker = 1")
        notebook.run("%gpuckpt restore here")
        assert notebook.value("'marker' in globals()") == "False"
        assert notebook.value(has) == "True"
    assert log(notebook).count("is given up before the snapshot comes up: ") == 2
    assert what in log(notebook)


def test_one_that_ends_meanwhile_is_not_brought_back(criu: Criu, start: StartKernel) -> None:
    """Its end is what its person sees, as at any other time."""
    notebook = start()
    notebook.run("%gpuckpt save here")
    pid = status(notebook)["pid"]
    with criu.held_at("restore", "post-resume") as until_there:
        Asked(notebook, "%gpuckpt restore here")
        until_there()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not notebook.manager.is_alive())


def test_clients_that_come_while_both_listen_are_served(criu: Criu, notebook: Notebook) -> None:
    notebook.run("x = 1")
    notebook.run("%gpuckpt save here")
    notebook.run("x = 2")
    clients = []
    port = ports.of_connection_file(notebook.manager.connection_file)["shell_port"]

    def its_clients() -> set[bytes]:
        return {one.there for one in socket_ports.established() if one.port == port}

    before = its_clients()
    with criu.held_at("restore", "post-resume") as until_there:
        asked = Asked(notebook, "%gpuckpt restore here")
        until_there()
        wait_until(lambda: its_clients() - before)  # the asking client is back
        for _ in range(4):
            # Each with a session of its own, as other programs have.
            client = BlockingKernelClient(connection_file=notebook.manager.connection_file)
            client.load_connection_file()
            client.start_channels()
            clients.append(client)
    assert asked.answer()["status"] == "ok"
    for client in clients:
        client.wait_for_ready(60)
        reply = client.execute("assert x == 1", reply=True, timeout=60)
        assert reply["content"]["status"] == "ok", reply
        client.stop_channels()


@pytest.mark.parametrize("how", ["", " --in-place"])
def test_a_cell_that_is_under_way_to_the_kernel_before_is_executed(notebook: Notebook, how: str) -> None:
    """It comes to that one only with the end of its client's connection."""
    notebook.run("x = 1")
    notebook.run("%gpuckpt save here")
    notebook.run("x = 2")
    with late_client(notebook) as (client, hold):
        hold()
        msg_id = client.execute("x += 1")
        assert "Restored here" in notebook.run(f"%gpuckpt restore here{how}").text
        reply = client.get_shell_msg(timeout=PATIENCE)
        assert (reply["parent_header"]["msg_id"], reply["content"]["status"]) == (msg_id, "ok")
        assert notebook.value("x") == "2"


def test_clients_come_back_to_a_kernel_that_could_not_be_given_up(notebook: Notebook) -> None:
    notebook.run("x = 1")
    notebook.run("%gpuckpt save here")
    notebook.run("x = 2")
    state = notebook.folder / "state.json"
    subprocess.run(["mount", "--bind", state, state], check=True)  # it can be read, and not replaced
    try:
        failed = Requested(notebook, "restore", {"name": "here", "in_place": True}).outcome()
    finally:
        subprocess.run(["umount", state], check=True)
    assert isinstance(failed, RestoreFailed)
    assert "The snapshot and the kernel are as they were" in failed.what
    assert notebook.value("x") == "2"
    with connected(notebook.manager.connection_file) as other:
        assert other.value("x") == "2"


def test_only_the_cell_that_was_saved_answers_for_another(notebook: Notebook) -> None:
    """One that a restored kernel has begun in the meantime answers for itself."""
    notebook.run("cells = get_ipython().kernel.agent.cells; cells.come_back(); asked = cells.describe()")
    assert notebook.value("cells.adopt(asked)") == "False"


@contextlib.contextmanager
def ending_without_its_client(criu: Criu, notebook: Notebook, folder: Path) -> Iterator[tuple[Asked, Requested]]:
    """Give a cell that has ended when its client had left the kernel, and the restore for which it left, under way."""
    go, ended = folder / "go", folder / "ended"
    notebook.run(f"import pathlib, time; go, ended = pathlib.Path({str(go)!r}), pathlib.Path({str(ended)!r})")
    with notebook.keeper as keeper:
        keeper.request("save", {"name": "here"})
    port = ports.of_connection_file(notebook.manager.connection_file)["shell_port"]

    def its_clients() -> set[bytes]:
        return {one.there for one in socket_ports.established() if one.port == port}

    before = its_clients()
    cell = Asked(notebook, "while not go.exists(): time.sleep(0.01)\nended.touch()")
    with criu.held_at("restore", "post-resume") as until_there:
        restore = Requested(notebook, "restore", {"name": "here", "operation": "this"})
        until_there()
        wait_until(lambda: its_clients() - before)
        go.touch()
        wait_until(ended.exists)
        yield cell, restore


def test_a_cell_that_ends_when_its_client_has_left_is_answered(criu: Criu, notebook: Notebook, tmp_path: Path) -> None:
    with ending_without_its_client(criu, notebook, tmp_path) as (cell, restore):
        pass
    assert isinstance(restore.outcome(), dict)
    assert cell.answer()["ename"] == "RestoreFailed", "it ended in a kernel that is not there any more"


def test_its_own_answer_comes_where_the_kernel_stays(criu: Criu, notebook: Notebook, tmp_path: Path) -> None:
    with ending_without_its_client(criu, notebook, tmp_path) as (cell, restore), notebook.keeper as keeper:
        assert keeper.request("cancel", {"operation": "this"})
    assert isinstance(restore.outcome(), Cancelled)
    assert cell.answer()["status"] == "ok"
    assert notebook.value("ended.exists()") == "True"


_TELLS_WHEN_IT_IS_BACK = """
import pathlib, time, jupyter_gpuckpt
back, begun, go, ran = map(pathlib.Path, {paths})
jupyter_gpuckpt.after_restore(lambda resumed: back.touch() if resumed.restored else None)
"""


@contextlib.contextmanager
def busy_when_it_answers(notebook: Notebook, folder: Path) -> Iterator[Callable[[str], Asked]]:
    """Save a kernel as "here"; gives what has another client's cell run when that kernel is restored.

    It has not answered yet, since it waits for a client that is there and silent.
    """
    paths = [str(folder / name) for name in ("back", "begun", "go", "ran")]
    notebook.run(_TELLS_WHEN_IT_IS_BACK.format(paths=paths))
    with notebook.keeper as keeper:
        keeper.request("save", {"name": "here"})
    with connected(notebook.manager.connection_file) as other, mute_client(notebook) as (_, speaks):
        speaks.clear()

        def run(code: str) -> Asked:
            wait_until((folder / "back").exists)
            cell = Asked(other, f"begun.touch()\n{code}")
            wait_until((folder / "begun").exists)
            speaks.set()
            return cell

        yield run


@pytest.mark.shared_kernel(False)  # its functions are called at every save and restore
def test_what_a_restored_kernel_has_to_answer_yet_is_answered_after_the_next_restore(
    notebook: Notebook, tmp_path: Path
) -> None:
    """Another client's cell runs before the kernel comes to that."""
    with busy_when_it_answers(notebook, tmp_path) as run:
        cell = Asked(notebook, "while True: time.sleep(0.01)")
        restore = Requested(notebook, "restore", {"name": "here"})
        next_cell = run("while True: time.sleep(0.01)")
        assert isinstance(restore.outcome(), dict)
        assert not cell.is_answered()
        with notebook.keeper as keeper:
            keeper.request("restore", {"name": "here"})
        assert next_cell.answer()["ename"] == "RestoreFailed"
        assert cell.answer()["ename"] == "RestoreFailed"


@pytest.mark.shared_kernel(False)  # its functions are called at every save and restore
def test_what_a_restored_kernel_had_to_execute_yet_is_not_executed_again(notebook: Notebook, tmp_path: Path) -> None:
    """It is saved before it comes to that; the kernel that goes on executes it."""
    with busy_when_it_answers(notebook, tmp_path) as run, notebook.keeper as keeper:
        cells = [Asked(notebook, "%gpuckpt restore here"), Asked(notebook, "ran.open('a').write('once ')")]
        cells.append(run("while not go.exists(): time.sleep(0.01)"))
        keeper.request("save", {"name": "before"})
        (tmp_path / "go").touch()
        assert [cell.answer()["status"] for cell in cells] == ["ok", "ok", "ok"]
        keeper.request("restore", {"name": "before"})
    notebook.run("1")
    assert (tmp_path / "ran").read_text() == "once "


@pytest.mark.shared_kernel(False)  # its functions are called at every save and restore
def test_one_that_was_saved_while_it_waited_for_clients_waits_for_those_it_has_now(notebook: Notebook) -> None:
    """While its client does not look at its outputs, it waits for two seconds: after a restore, and before a cell."""
    client = notebook.client
    notebook.run("import jupyter_gpuckpt, time; jupyter_gpuckpt.before_save(lambda: time.sleep(0.9))")
    with notebook.keeper as keeper:
        keeper.request("save", {"name": "here"})
        keeper.request("restore", {"name": "here"})
        time.sleep(1.5)
        waiting = client.execute("1")
        keeper.request("save", {"name": "waiting"})  # when half a second of the second wait is left
        keeper.request("restore", {"name": "waiting"})
        client.execute("print('heard')")
    time.sleep(0.9)
    notebook.until_printed("heard")
    assert client.get_shell_msg(timeout=PATIENCE)["parent_header"]["msg_id"] == waiting


@pytest.fixture
def of_server(folders: None) -> Iterator[Notebook]:
    """A kernel of a manager of many, as servers have one; a client of its own looks at it."""
    kernels = MultiKernelManager()
    manager = kernels.get_kernel(kernels.start_kernel(kernel_name=SPEC))
    notebook = Notebook(manager, manager.client())
    open_channels(notebook.client)
    try:
        notebook.wait_for_ready()
        yield notebook
    finally:
        notebook.close()
        kernels.context.destroy(linger=0)


def test_clients_of_a_server_are_back_at_once_and_counted_once(of_server: Notebook) -> None:
    notebook, manager = of_server, of_server.manager
    notebook.run("%gpuckpt save here")
    before = ports.peers(manager.connection_file)
    clients = {"shell": manager.connect_shell(), "iopub": manager.connect_iopub(), "stdin": manager.connect_stdin()}
    again = clients["shell"].socket.get_monitor_socket(Event.CONNECT_RETRIED)
    try:
        more = {f"{channel}_port": before[f"{channel}_port"] + 1 for channel in clients}
        wait_until(lambda: ports.peers(manager.connection_file) == more)
        reached = ports.reached_by([os.getpid()])
        assert reached is not None
        assert reached[manager.iopub_port] == more["iopub_port"]
        assert ports.reached_by([os.getpid(), 0]) is None, "of another pid namespace, nothing can be told"
        began = time.monotonic()
        assert "Restored here" in notebook.run("%gpuckpt restore here").text
        assert time.monotonic() < began + COMING_BACK, "those that were back were waited for once more"
        assert recv_monitor_message(again)["value"] < 100
    finally:
        clients["shell"].socket.disable_monitor()
        again.close(linger=0)
        for client in clients.values():
            client.close(linger=0)


def test_clients_that_are_back_at_once_stay_with_the_running_kernel_where_the_other_one_fails(
    criu: Criu, of_server: Notebook
) -> None:
    manager = of_server.manager
    client = manager.client(context=manager.context, session=Session(key=manager.session.key))
    open_channels(client)
    again = client.shell_channel.socket.get_monitor_socket(Event.CONNECT_RETRIED)
    quick = Notebook(manager, client)
    try:
        quick.wait_for_ready()
        quick.run("%gpuckpt save here")
        quick.run("x = 'running'")
        criu.at("restore", "post-restore", "sleep 0.3; exit 1")
        assert quick.fails("%gpuckpt restore here").ename == "RestoreFailed"
        assert quick.value("x") == "running"
        assert again.poll(0), "they were not sent away"
    finally:
        client.shell_channel.socket.disable_monitor()
        again.close(linger=0)
        client.stop_channels()


def test_its_ports_are_its_own_again_when_a_restore_has_failed(criu: Criu, notebook: Notebook) -> None:
    notebook.run("import socket; listener = socket.socket(); listener.bind(('127.0.0.1', 0)); listener.listen()")
    port = int(notebook.value("listener.getsockname()[1]"))
    notebook.run("%gpuckpt save here")
    criu.first("restore", "exit 7")
    assert notebook.fails("%gpuckpt restore here").ename == "RestoreFailed"
    assert notebook.value("listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT)") == "0"
    with socket.create_connection(("127.0.0.1", port)) as one:
        one.sendall(b"hello")
        assert notebook.value("listener.accept()[0].recv(5)") == "b'hello'"
    criu.honest()
    notebook.run("%gpuckpt restore here")
    assert notebook.value("listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT)") == "0"
    with socket.create_connection(("127.0.0.1", port)) as one:
        one.sendall(b"again")
        assert notebook.value("listener.accept()[0].recv(5)") == "b'again'"


_A_CLIENT = """
import sys
from notebooks import connected
with connected(sys.argv[1]) as notebook:
    print("connected", flush=True)
    sys.stdin.readline()
    print(notebook.run("%gpuckpt restore here").status, flush=True)
"""


def test_a_client_that_gets_no_processor_for_seconds_is_answered(criu: Criu, notebook: Notebook) -> None:
    """It connects again late, and is to hear nevertheless that its cell has ended."""
    notebook.run("%gpuckpt save here")
    program = [sys.executable, "-c", _A_CLIENT, notebook.manager.connection_file]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(program, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
        try:
            assert client.stdin is not None
            assert client.stdout is not None
            assert client.stdout.readline() == "connected\n"
            before = status(notebook)["pid"]
            with criu.held_at("restore", "post-resume") as until_there:
                client.stdin.write("\n")
                client.stdin.flush()
                until_there()
                client.send_signal(signal.SIGSTOP)
            wait_until(lambda: status(notebook)["pid"] != before)
            time.sleep(4)  # longer than the kernel waits for clients that are connected and say nothing
            client.send_signal(signal.SIGCONT)
            answered, _ = client.communicate(timeout=PATIENCE)
            assert answered == "ok\n"
        finally:
            client.kill()


def test_a_client_that_looks_late_at_its_outputs_hears_its_first_cell_all_the_same(notebook: Notebook) -> None:
    """It subscribes again when it looks; what it asks before that, without wanting outputs, is not its first cell."""
    notebook.run("x = 1")
    notebook.run("%gpuckpt save here")
    with notebook.keeper as keeper:
        keeper.request("restore", {"name": "here"})
    client = notebook.client
    silent = client.execute("", silent=True)
    # The cell that saved may be answered once more before that: the restored kernel has the rest of it to run.
    while (reply := notebook.reply())["parent_header"]["msg_id"] != silent:
        pass
    assert reply["content"]["status"] == "ok"
    asked = client.execute("print('heard')")
    assert not client.shell_channel.socket.poll(300), "the kernel does not wait"
    said = ""
    while True:
        message = client.get_iopub_msg(timeout=PATIENCE)
        if message["parent_header"].get("msg_id") != asked:
            continue
        said += message["content"].get("text", "")
        if message["content"].get("execution_state") == "idle":
            break
    assert said == "heard\n"
