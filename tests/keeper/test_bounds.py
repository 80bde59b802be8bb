"""What a client may ask of a keeper is bounded: a flood, or one that does not read, costs others nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from keeper_faults import keeper_pid, processes_of
from notebooks import PATIENCE, Notebook, run_folders, wait_until

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.keeper import criu_logs
from jupyter_gpuckpt.keeper.kernel_log import KERNEL_LOG_LIMIT, cut
from jupyter_gpuckpt.keeper.socket_server import MOST_CLIENTS
from jupyter_gpuckpt.linux import proof
from jupyter_gpuckpt.linux.processes import resident_bytes
from jupyter_gpuckpt.linux.readiness import readable
from jupyter_gpuckpt.linux.unix_sockets import peer_pid, short_path

_MOST_SENT = 4 << 20
"""What a connection takes at most while nothing is read of it, in bytes: the system's buffers, and the keeper's."""


@contextlib.contextmanager
def connected(notebook: Notebook) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as s, short_path(notebook.folder / "keeper.sock") as path:
        s.connect(path)
        with contextlib.suppress(BrokenPipeError):  # it was hung up on
            s.sendall(proof.first_line(peer_pid(s)))
        yield s


def test_one_that_asks_and_does_not_read_is_not_read_from_and_others_are_served(notebook: Notebook) -> None:
    keeper = keeper_pid(notebook)
    before = resident_bytes([keeper])
    with connected(notebook) as flooding:
        flooding.setblocking(False)
        line = json.dumps({"id": 1, "op": "status", "args": {"padding": "x" * 4000}}).encode() + b"\n"
        sent, deadline, stuck_since = 0, time.monotonic() + 20, time.monotonic()
        while time.monotonic() < deadline and time.monotonic() - stuck_since < 1 and sent < 4 * _MOST_SENT:
            try:
                sent += flooding.send(line)
                stuck_since = time.monotonic()
            except BlockingIOError:
                time.sleep(0.01)
        assert sent < _MOST_SENT, "it takes in whatever comes"
        with notebook.keeper as other:
            assert other.request("status", timeout=60)["state"] == "running"
        notebook.run("%gpuckpt save meanwhile")
        assert resident_bytes([keeper]) - before < 60 << 20
        # It is no fault to ask much: all is answered once it is read.
        flooding.setblocking(True)
        flooding.settimeout(60)
        answers = b""
        while answers.count(b"\n") < sent // len(line) and (piece := flooding.recv(1 << 20)):
            answers += piece
        # But on a machine so slow that it was cut off meanwhile.
        assert answers.count(b"\n") == sent // len(line) or time.monotonic() - stuck_since > 30


def test_connections_beyond_the_most_are_hung_up_on_and_come_again_later(notebook: Notebook) -> None:
    with contextlib.ExitStack() as open_ones:
        for _ in range(MOST_CLIENTS + 5):
            open_ones.enter_context(connected(notebook))
        last = open_ones.enter_context(connected(notebook))
        last.settimeout(60)
        with contextlib.suppress(ConnectionResetError):  # what it has said first was not read
            assert last.recv(1) == b""
        assert notebook.value("1 + 1") == "2"

    def served() -> bool:
        with contextlib.suppress(Exception), notebook.keeper as keeper:
            return bool(keeper.request("status", timeout=60)["state"] == "running")
        return False

    wait_until(served)
    assert notebook.manager.is_alive()


def test_a_keeper_ends_without_errors_in_its_log_while_a_client_is_connected(notebook: Notebook) -> None:
    with connected(notebook) as client, (notebook.folder / "keeper.log").open() as log:
        client.sendall(json.dumps({"id": 1, "op": "status"}).encode() + b"\n")
        client.settimeout(PATIENCE)
        assert client.recv(1)
        keeper = os.pidfd_open(keeper_pid(notebook))
        notebook.manager.shutdown_kernel(now=True)
        assert readable(keeper, seconds=PATIENCE)
        os.close(keeper)
        assert " ERROR " not in (said := log.read()), said


def test_what_a_cell_writes_into_the_fifo_in_great_number_is_bounded(notebook: Notebook) -> None:
    notebook.run(
        """
import array, fcntl, json, os, termios, time
fifo = os.open("/dev/shm/gpuckpt/from-kernel", os.O_WRONLY)
for n in range(3000):
    os.write(fifo, json.dumps({"request": 10**9 + n, "op": "list", "args": {}}).encode() + b"\\n")
unread = array.array("i", [1])
while unread[0]:
    time.sleep(0.01)
    fcntl.ioctl(fifo, termios.FIONREAD, unread)
os.close(fifo)
"""
    )
    with notebook.keeper as keeper:
        keeper.request("list")  # which comes after those that it has taken in: while it has as many, it takes no others
    notebook.run("%gpuckpt save here")
    notebook.run("%gpuckpt restore here")
    assert notebook.value("1 + 1") == "2"


def test_the_log_of_a_keeper_is_put_aside_when_it_is_long(notebook: Notebook) -> None:
    log = notebook.folder / "keeper.log"
    with log.open("a") as file:
        file.write("x" * (1 << 20) + "\n")
    for _ in range(2):
        with notebook.keeper as keeper:
            keeper._socket.sendall(b"no request\n")  # noted in the log
            with contextlib.suppress(Exception):
                keeper.request("status")
    wait_until(lambda: log.exists() and log.stat().st_size < 10_000, what="the log was not put aside")
    aside = notebook.folder / "keeper.log.1"
    assert aside.stat().st_size > 1 << 20
    assert (aside.stat().st_mode | log.stat().st_mode) & 0o077 == 0
    keeper_stderr = Path(f"/proc/{keeper_pid(notebook)}/fd/2").readlink()
    assert keeper_stderr == log


def test_a_kernel_s_log_loses_its_beginning_and_is_written_on(notebook: Notebook) -> None:
    notebook.run(f"import os; os.write(1, b'begin\\n' + (b'y' * 999 + b'\\n') * {KERNEL_LOG_LIMIT // 1000 + 10})")
    (run_dir,) = run_folders(notebook.folder)
    log = run_dir / "kernel.log"
    cut(log)  # unless the keeper has
    notebook.run("os.write(1, b'end\\n')")
    wait_until(lambda: log.read_bytes().endswith(b"end\n"))
    assert log.stat().st_size < 2 << 20
    assert log.read_bytes().startswith(b"[cut off here")
    notebook.run("%gpuckpt save here")
    notebook.run("%gpuckpt restore here")
    assert notebook.value("1 + 1") == "2"


def test_logs_of_criu_are_so_many_also_where_the_clock_was_set_back(tmp_path: Path) -> None:
    settings.logs_dir().mkdir()
    for n in range(criu_logs.KEPT + 5):
        (settings.logs_dir() / f"2999-01-01T00-00-{n:02}.000000-1-dump.log").write_text("of a clock that was ahead")
    log = tmp_path / "dump.log"
    log.write_text("the newest")
    kept = criu_logs.keep(log)
    assert kept is not None
    assert kept.read_text() == "the newest"
    assert len(list(settings.logs_dir().iterdir())) == criu_logs.KEPT


_SERVER = """
import sys, time
from jupyter_client import KernelManager
manager = KernelManager(kernel_name="python3-gpuckpt")
manager.start_kernel()
client = manager.client()
client.start_channels()
client.wait_for_ready(60)
print(manager.provisioner.kernel_id, flush=True)
for line in sys.stdin:
    print(manager.is_alive(), client.execute_interactive(line, timeout=60)["content"]["status"], flush=True)
manager.shutdown_kernel(now=True)
"""


def test_a_server_that_is_stopped_and_goes_on_finds_its_kernel_as_it_left_it(tmp_path: Path) -> None:
    from command_line import run

    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ.copy()
    )
    assert server.stdin is not None
    assert server.stdout is not None
    with server.stdin, server.stdout:
        kernel_id = server.stdout.readline().strip()

        def cell(code: str) -> str:
            assert server.stdin is not None
            assert server.stdout is not None
            server.stdin.write(code + "\n")
            server.stdin.flush()
            return server.stdout.readline().strip()

        assert cell("x = 1") == "True ok"
        server.send_signal(signal.SIGSTOP)
        try:
            # Meanwhile the kernel is saved, restored, and its keeper replaced, all without the server.
            assert run("save", kernel_id, "here").status == 0
            assert run("restore", kernel_id, "here").status == 0
            (kernel,) = run("kernels", "--json").json["kernels"]
            os.kill(kernel["keeper_pid"], signal.SIGKILL)
            assert run("save", kernel_id, "there").status == 0
        finally:
            server.send_signal(signal.SIGCONT)
        assert cell("assert x == 1") == "True ok"
        server.stdin.close()
        assert server.wait(60) == 0
    wait_until(lambda: not processes_of(tmp_path), what="processes are left")
