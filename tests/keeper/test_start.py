"""A kernel's start: it waits for nothing but itself, and one that fails says why and leaves nothing."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import zmq
from jupyter_client import AsyncKernelManager, KernelManager
from keeper_faults import assert_nothing_left, processes_of
from notebooks import PATIENCE, SPEC, Notebook, StartKernel, open_channels, wait_for_ready, wait_until

import jupyter_gpuckpt
from jupyter_gpuckpt import provisioner, settings
from jupyter_gpuckpt.client import keepers
from jupyter_gpuckpt.client.kernel_start import kernel_program
from jupyter_gpuckpt.client.record import LOG, KernelFolder, Launch
from jupyter_gpuckpt.errors import GpuckptError
from jupyter_gpuckpt.linux.foreign_sockets import hold
from jupyter_gpuckpt.linux.listening import listen
from jupyter_gpuckpt.linux.processes import open_files
from jupyter_gpuckpt.linux.reserved_ports import Reserved

pytestmark = pytest.mark.criu

_WRITES_AND_STAYS = ["/bin/sh", "-c", 'echo "$$" > "$MARK"; sleep 1000']


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """The file that the program of `launch` writes when it runs."""
    return tmp_path / "mark"


@pytest.fixture
def launch(tmp_path: Path, mark: Path) -> Launch:
    """A kernel that is a small program."""
    environment = {"PATH": os.environ["PATH"], "MARK": str(mark)}
    return Launch("small", _WRITES_AND_STAYS, environment, str(tmp_path), 0o022, str(tmp_path / "none.json"), False)


def test_a_kernel_runs_before_its_keeper_has_begun(
    launch: Launch, mark: Path, tmp_path: Path, keepers_first: Callable[[str], None]
) -> None:
    let_go = tmp_path / "go"
    keepers_first(f"while not os.path.exists({str(let_go)!r}): time.sleep(0.01)")
    started: list[tuple[subprocess.Popen[bytes], KernelFolder]] = []
    starting = threading.Thread(target=lambda: started.append(keepers.start_keeper(launch)))
    starting.start()
    try:
        wait_until(lambda: mark.exists() and mark.read_text().strip(), what="the kernel waits for its keeper")
        assert not started, "the start ends when the kernel is held"
    finally:
        let_go.touch()
        starting.join()
    process, folder = started[0]
    with keepers.connect(folder) as keeper:
        told = keeper.request("status")
        assert told["keeper_pid"] == process.pid
        assert int(mark.read_text()) == folder.state().kernel_pid
        keeper.request("close")
    process.wait()
    assert_nothing_left(tmp_path)


def test_a_start_whose_folder_is_removed_meanwhile_leaves_nothing(
    launch: Launch, tmp_path: Path, keepers_first: Callable[[str], None]
) -> None:
    keepers_first("import shutil; shutil.rmtree(sys.orig_argv[3])")
    with pytest.raises(GpuckptError):
        keepers.start_keeper(launch)
    wait_until(lambda: not processes_of(tmp_path), what="the kernel or its process 1 is left")


def test_what_comes_before_the_kernel_imports_next_to_nothing() -> None:
    """Python's own beginning, and the little that making namespaces takes: each import more is a user's wait."""
    folder = str(Path(jupyter_gpuckpt.__file__).parent / "linux")
    program = f"import sys; sys.path.append({folder!r}); import starter; print(*sys.modules)"
    bare = ("-I", "-S", "-B", "-c")
    done = subprocess.run([sys.executable, *bare, program], capture_output=True, check=True, text=True)
    early = set(done.stdout.split())
    assert "spawning" in early
    assert early.isdisjoint(
        {"collections", "enum", "json", "logging", "re", "signal", "socket", "subprocess", "typing"}
    )


_LISTENS_WHEN_TOLD = """
import json, os, socket, sys, time
while not os.path.exists(sys.argv[2]): time.sleep(0.01)
told = json.load(open(sys.argv[1]))
listeners = [socket.create_server((told["ip"], port)) for name, port in told.items() if name.endswith("_port")]
time.sleep(1000)
"""


@pytest.fixture
def late(tmp_path: Path, mark: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AsyncKernelManager]:
    """The manager of a kernel that does not listen before there is `mark`."""
    spec = tmp_path / "share" / "kernels" / "late"
    spec.mkdir(parents=True)
    argv = [sys.executable, "-c", _LISTENS_WHEN_TOLD, "{connection_file}", str(mark)]
    metadata = {"kernel_provisioner": {"provisioner_name": "gpuckpt-provisioner"}}
    kernel = {"argv": argv, "display_name": "Late", "language": "none", "metadata": metadata}
    (spec / "kernel.json").write_text(json.dumps(kernel))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share"))
    manager = AsyncKernelManager(kernel_name="late")
    yield manager
    asyncio.run(manager.shutdown_kernel(now=True))


def test_the_first_client_finds_a_kernel_that_listens(
    late: AsyncKernelManager, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would look again after 0.1 to 0.2 s only."""
    monkeypatch.setattr(provisioner, "_TO_LISTEN", PATIENCE)  # the product gives it up after a moment: see below
    starting = threading.Thread(target=lambda: asyncio.run(late.start_kernel()))
    starting.start()
    try:
        wait_until(lambda: any(map(is_attended, settings.kernels_dir().glob("*"))), what="no manager holds it")
        starting.join(0.5)
        assert starting.is_alive(), "the start ends before the kernel listens"
    finally:
        mark.touch()
        starting.join()
    for port in late.ports:
        socket.create_connection((late.ip, port)).close()


def is_attended(kernel: Path) -> bool:
    """Tell whether somebody holds the kernel in this folder, which may have only begun to be there."""
    try:
        with keepers.connect(KernelFolder(kernel)) as keeper:
            return bool(keeper.request("status")["attended"])
    except (GpuckptError, OSError):
        return False


def test_nobody_is_given_the_ports_of_a_kernel_from_its_start_to_its_end(tmp_path: Path, mark: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        f"import os, sys, time\nif 'ipykernel_launcher' in sys.orig_argv:\n"
        f"    while not os.path.exists({str(mark)!r}): time.sleep(0.01)\n"
    )
    manager = KernelManager(kernel_name=SPEC)
    manager.start_kernel(env={**os.environ, "PYTHONPATH": str(tmp_path)})
    try:
        for port in manager.ports:
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind((manager.ip, port))  # without SO_REUSEADDR: what is free for that is what the system gives
        mark.touch()
        connected = manager.client()
        open_channels(connected)
        wait_for_ready(connected)
        connected.stop_channels()
        ports = manager.ports
        manager.restart_kernel(now=True)
        assert manager.ports == ports
        assert ports_bound_here() >= set(ports)
    finally:
        manager.shutdown_kernel(now=True)
    assert not ports_bound_here() & set(ports)


def test_where_no_port_can_be_had_that_is_said_and_nothing_hangs() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            Reserved().free()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_two_kernels_of_one_user_never_listen_at_one_port() -> None:
    """What holds a port for both would let them, and the system would give a client to either."""
    with closing(Reserved()) as reserved, zmq.Context() as context:
        port = reserved.free()
        first, second, client = (context.socket(kind) for kind in (zmq.ROUTER, zmq.ROUTER, zmq.DEALER))
        with first, second, client:
            listen(first, "127.0.0.1", port)
            with pytest.raises(zmq.ZMQError, match="in use"):
                listen(second, "127.0.0.1", port)
            client.connect(f"tcp://127.0.0.1:{port}")
            client.send(b"hello")
            assert first.recv_multipart()[-1] == b"hello"


def test_a_port_is_held_beside_a_kernel_that_listens_and_has_clients() -> None:
    with closing(Reserved()) as reserved, socket.create_server(("127.0.0.1", 0)) as kernel:
        port = int(kernel.getsockname()[1])
        with socket.create_connection(("127.0.0.1", port)), kernel.accept()[0]:
            hold(reserved, [port], [os.getpid()])
            kernel.close()
            for is_shared in (False, True):
                with socket.socket() as other:
                    other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, is_shared)
                    with pytest.raises(OSError, match="in use"):
                        other.bind(("127.0.0.1", port))


def ports_bound_here() -> set[int]:
    """Return the local ports of this process's sockets; one that does not listen is in none of the system's tables."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):  # noqa: PTH208 - file descriptors are not paths
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(fd))) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                found.add(int(one.getsockname()[1]))
    return found


def test_a_kernel_that_does_not_listen_is_not_waited_for_long(late: AsyncKernelManager) -> None:
    asyncio.run(late.start_kernel())
    assert asyncio.run(late.is_alive())
    for port in late.ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((late.ip, port))


def test_a_start_that_is_cancelled_leaves_nothing(tmp_path: Path, keepers_first: Callable[[str], None]) -> None:
    began, go = tmp_path / "began", tmp_path / "go"
    keepers_first(f"while not os.path.exists({str(go)!r}): open({str(began)!r}, 'w').close(); time.sleep(0.01)")

    async def cancel(*, at_once: bool) -> None:
        starting = asyncio.create_task(AsyncKernelManager(kernel_name=SPEC).start_kernel())
        await asyncio.to_thread(wait_until, began.exists if at_once else lambda: list(keepers.folders()))
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting

    asyncio.run(cancel(at_once=True))
    go.touch()
    wait_until(lambda: not list(keepers.folders()), what="the kernel that nobody wants runs on")
    asyncio.run(cancel(at_once=False))
    wait_until(lambda: not list(keepers.folders()), what="the kernel that nobody wants runs on")
    gc.collect()  # what its manager has left open is told when that goes
    assert_nothing_left(tmp_path)


def test_a_kernel_that_cannot_be_held_is_ended_and_a_plain_one_says_why(
    start: StartKernel, keepers_first: Callable[[str], None]
) -> None:
    keepers_first("from jupyter_gpuckpt.keeper.holders import Holders; Holders.add = None")
    notebook = start()
    assert "unexpected error" in notebook.run("%gpuckpt status", allow_error=True).text
    assert list(keepers.folders()) == []


def test_a_keeper_that_is_slow_to_answer_at_a_start_is_waited_for(
    start: StartKernel, keepers_first: Callable[[str], None]
) -> None:
    """As on a machine whose disk is busy: the kernel could not be saved otherwise."""
    slowly = f"lambda *args: (time.sleep({provisioner._ANSWER_TIMEOUT + 1}), add(*args))[1]"
    keepers_first(f"from jupyter_gpuckpt.keeper.holders import Holders; add = Holders.add; Holders.add = {slowly}")
    assert "Saved here" in start().run("%gpuckpt save here").text


_STARTS_AND_IS_INTERRUPTED = """
import json, os, signal, sys
from jupyter_gpuckpt.client import keepers
from jupyter_gpuckpt.client.record import Launch
keepers.start_keeper(Launch(**json.loads(sys.stdin.read())))
os.kill(os.getpid(), signal.SIGINT)
"""


def test_who_starts_a_kernel_is_gone_before_it_holds_it(launch: Launch, tmp_path: Path) -> None:
    program = [sys.executable, "-c", _STARTS_AND_IS_INTERRUPTED]
    subprocess.run(program, input=json.dumps(dataclasses.asdict(launch)).encode(), check=False, capture_output=True)
    assert_nothing_left(tmp_path)


def test_nothing_of_the_server_s_is_in_the_sleeper(notebook: Notebook) -> None:
    (sleeper,) = KernelFolder(notebook.folder).sleepers()
    assert Path(f"/proc/{sleeper}/environ").read_bytes() == b""
    files = {path for path in open_files(sleeper) if path.startswith("/")}
    # What its clients have to say is its own.
    assert files == {"/dev/null", "/memfd:gpuckpt-proof (deleted)"}, "neither a log nor a lock"


def test_a_kernel_s_table_of_files_has_grown_before_it_has_threads(launch: Launch, mark: Path) -> None:
    """Later it would stand still for that, for some tens of milliseconds (`spawning._make_room_for_files`)."""
    process, folder = keepers.start_keeper(launch)
    wait_until(lambda: mark.exists())
    (sleeper,) = folder.sleepers()
    (kernel,) = Path(f"/proc/{sleeper}/task/{sleeper}/children").read_text().split()
    status = dict(line.split(":", 1) for line in Path(f"/proc/{kernel}/status").read_text().splitlines())
    assert int(status["FDSize"]) >= 256
    with keepers.connect(folder) as keeper:
        keeper.request("close")
    process.wait()


def test_a_kernel_that_ends_before_it_is_held_has_ended_with_its_status(
    launch: Launch, mark: Path, keepers_first: Callable[[str], None]
) -> None:
    launch.argv = ["/bin/sh", "-c", 'touch "$MARK"; exit 7']
    keepers_first(f"while not os.path.exists({str(mark)!r}): time.sleep(0.01)")
    process, folder = keepers.start_keeper(launch)
    wait_until(lambda: "the kernel ended" in (folder.path / LOG).read_text(), what="its end was not noticed")
    with keepers.connect(folder) as passer_by:
        passer_by.request("status")
    with keepers.connect(folder) as keeper:
        keeper.request("attach")
        with keepers.connect(folder) as other:
            other.request("close")
        process.wait()
        keeper.listen()  # that the keeper is gone as well is no news
        assert keeper.exit_status == 7


def test_a_keeper_that_dies_at_its_start_leaves_nothing_and_is_quoted(
    launch: Launch, tmp_path: Path, keepers_first: Callable[[str], None]
) -> None:
    keepers_first('sys.exit("the keeper was struck by lightning")')
    with pytest.raises(GpuckptError) as caught:
        keepers.start_keeper(launch)
    assert "struck by lightning" in caught.value.why
    assert_nothing_left(tmp_path)


def test_a_program_that_cannot_be_started_is_named_and_nothing_is_left(launch: Launch, tmp_path: Path) -> None:
    launch.argv = ["/no/such/program"]
    with pytest.raises(GpuckptError) as caught:
        keepers.start_keeper(launch)
    assert "No such file or directory" in caught.value.why
    assert_nothing_left(tmp_path)


def test_a_starter_that_is_killed_leaves_nothing(
    launch: Launch, mark: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo = tmp_path / "output"
    os.mkfifo(fifo)
    # The kernel's program begins when somebody reads what it writes.
    program = kernel_program(launch)
    program.stdout = str(fifo)
    monkeypatch.setattr(keepers, "kernel_program", lambda _: program)
    failed: list[str] = []

    def start() -> None:
        try:
            keepers.start_keeper(launch)
        except GpuckptError as e:
            failed.append(e.what)

    starting = threading.Thread(target=start)
    starting.start()
    # It, process 1 and what is about to be the kernel.
    wait_until(lambda: len(processes_of(tmp_path)) == 3)
    (starter,) = (one for one in psutil.Process().children() if one.pid in processes_of(tmp_path))
    starter.kill()
    starting.join()
    assert failed == ["The kernel's keeper did not start."]
    os.close(os.open(fifo, os.O_RDONLY))
    assert_nothing_left(tmp_path)


_STARTS = """
import json, sys
from jupyter_gpuckpt.client import keepers, kernel_start, record
output, launch = json.loads(sys.stdin.read())
launch = record.Launch(**launch)
program = kernel_start.kernel_program(launch)
program.stdout = output
keepers.kernel_program = lambda _: program
keepers.start_keeper(launch)
"""


def test_where_a_starter_is_killed_with_who_started_it_no_process_is_left(launch: Launch, tmp_path: Path) -> None:
    fifo = tmp_path / "output"
    os.mkfifo(fifo)
    with subprocess.Popen([sys.executable, "-c", _STARTS], stdin=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        server.stdin.write(json.dumps([str(fifo), dataclasses.asdict(launch)]))
        server.stdin.close()
        family = psutil.Process(server.pid)
        # It, process 1 and what is about to be the kernel; the one between them has ended.
        wait_until(lambda: sum(one.status() != "zombie" for one in family.children(recursive=True)) == 3)
        (starter,) = family.children()
        server.kill()
        starter.kill()
    wait_until(lambda: len(processes_of(tmp_path)) == 2, what="process 1 and what is about to be the kernel")
    os.close(os.open(fifo, os.O_RDONLY))
    wait_until(lambda: not processes_of(tmp_path), what="nobody holds this kernel")


_START = """
import json, sys
from jupyter_client import KernelManager
manager = KernelManager(kernel_name="python3-gpuckpt")
manager.start_kernel()
client = manager.client()
client.start_channels()
client.wait_for_ready(60)
shown = []
client.execute_interactive("%gpuckpt status", output_hook=lambda m: shown.append(m["content"]), allow_stdin=False)
client.stop_channels()
manager.shutdown_kernel(now=True)
print(json.dumps(shown))
"""


def test_where_namespaces_cannot_be_made_the_kernel_is_a_plain_one_that_says_so(tmp_path: Path) -> None:
    # The limit is this user namespace's own; the machine's stays.
    forbidden = ("unshare", "--user", "--map-root-user", "sh", "-c", 'echo 0 > /proc/sys/user/max_pid_namespaces; "$@"')
    done = subprocess.run(
        [*forbidden, "sh", sys.executable, "-c", _START], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "make namespaces" in json.dumps(json.loads(done.stdout.splitlines()[-1]))
    assert_nothing_left(tmp_path)


def test_a_kernel_of_a_program_that_ignores_the_ends_of_its_children_is_saved_and_restored(start: StartKernel) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        notebook = start()
    finally:
        signal.signal(signal.SIGCHLD, before)
    notebook.run("x = 1")
    notebook.run("%gpuckpt save here")
    notebook.run("x = 2")
    notebook.run("%gpuckpt restore here")
    assert notebook.value("x") == "1"
    assert notebook.value("__import__('subprocess').run(['false']).returncode") == "1"
