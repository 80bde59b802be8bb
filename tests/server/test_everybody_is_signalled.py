"""What stops a server by a signal to every process of its control group ends no kernel: they are hibernated."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from jupyter_servers import SPEC, Server, running
from keeper_faults import processes_of
from notebooks import PATIENCE, Notebook, wait_until

from jupyter_gpuckpt.client import keepers
from jupyter_gpuckpt.client.record import KernelFolder
from jupyter_gpuckpt.linux import processes
from jupyter_gpuckpt.operations.requests import Signal

pytestmark = pytest.mark.criu

_STOP = {"GPUCKPT_HIBERNATE_ON": "stop", "GPUCKPT_RESUME": "auto"}
_CHILDREN = """
import os, signal, subprocess, sys, time
forked = os.fork()
if forked == 0:
    while True: time.sleep(1)
started = subprocess.Popen([sys.executable, '-c', 'while True: __import__("time").sleep(1)'])
shell = subprocess.Popen(['sh', '-c', 'sleep 1000; true'])
x = 41
"""

_COMPUTES = "threading.Thread(target=lambda: all(n >= 0 for n in itertools.count()), daemon=True).start()"


@contextlib.contextmanager
def _notebook(server: Server, path: str = "a.ipynb") -> Iterator[tuple[str, Notebook]]:
    wanted = {"path": path, "name": path, "type": "notebook", "kernel": {"name": SPEC}}
    kernel = str(server.request("POST", "api/sessions", json=wanted).json()["kernel"]["id"])
    with server.connected(kernel) as notebook:
        yield kernel, notebook


def _everybody(server: Server) -> list[int]:
    """Return the server, and all there is of its kernels: keepers, sleepers, kernels and what they have started."""
    of_kernels = processes_of(server.folder)
    return sorted({server.process.pid, *of_kernels, *(one for pid in of_kernels for one in processes.descendants(pid))})


def test_all_are_signalled_and_the_kernel_is_hibernated_with_its_children(tmp_path: Path) -> None:
    with running(tmp_path, **_STOP) as server:
        with _notebook(server) as (_, notebook):
            notebook.run(_CHILDREN)
            wait_until(lambda: len(_everybody(server)) >= 8)  # server, keeper, sleeper, kernel, and four of its own
        for _ in range(2):  # as Slurm does at a time limit
            for pid in _everybody(server):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            wait_until(lambda: "Shutting down" in server.log.read_text())
        assert server.process.wait(PATIENCE) == 0
        wait_until(lambda: not processes_of(tmp_path))
    with running(tmp_path, **_STOP) as server, _notebook(server) as (_, notebook):
        assert notebook.value("x + 1") == "42"
        assert notebook.value("os.waitpid(forked, os.WNOHANG), started.poll(), shell.poll()") == "(0, 0) None None"


def test_signals_that_are_meant_for_a_kernel_or_come_from_it_end_it_as_always(tmp_path: Path) -> None:
    with running(tmp_path, **_STOP) as server:
        with _notebook(server) as (_, notebook):
            notebook.run(_CHILDREN)
            assert notebook.value("signal.getsignal(signal.SIGTERM) is signal.SIG_DFL") == "True"
            assert notebook.value("signal.signal(signal.SIGTERM, signal.SIG_DFL) is signal.SIG_DFL") == "True"
            ends = "os.kill(forked, 15), started.terminate(), os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])"
            assert notebook.value(f"({ends}, started.wait())[-2:]") == "(-15, -15)"
            own = "import signal, time; signal.signal(15, lambda *_: print('heard', flush=True) or exit(3)); print(1)"
            notebook.run(f"own = subprocess.Popen([sys.executable, '-uc', {own!r} + '; time.sleep(100)'], stdout=-1)")
            assert notebook.value("own.stdout.readline(), own.terminate(), own.wait()") == r"b'1\n' None 3"
        with _notebook(server, "b.ipynb") as (kernel, _):
            folder = KernelFolder(tmp_path / "runtime" / "gpuckpt" / kernel)
            sleeper = folder.head().sleeper
            assert sleeper is not None
            with keepers.connect(folder) as keeper:
                assert keeper.ask(Signal(signum=signal.SIGTERM))
            wait_until(lambda: processes.start_time(sleeper[0]) != sleeper[1])
        with _notebook(server, "c.ipynb") as (kernel, notebook):
            assert server.request("DELETE", f"api/kernels/{kernel}").status_code == 204
        assert server.ask("GET", "hibernated")["hibernated"] == []


def test_a_kernel_that_is_just_being_started_anew_is_not_started_again_when_it_is_hibernated(tmp_path: Path) -> None:
    """A server that starts a kernel while it ends them does not end."""
    config = "c.KernelRestarter.time_to_dead = 0.01"
    startup = tmp_path / "ipython" / "profile_default" / "startup"
    with running(tmp_path, config, **_STOP) as server:
        with _notebook(server) as (_, notebook):
            notebook.run("import jupyter_gpuckpt, time; jupyter_gpuckpt.before_save(lambda: time.sleep(1))")
            notebook.run("%gpuckpt save here")
        (startup / "computes.py").write_text("import threading, itertools\n" + _COMPUTES)  # so that its turn is first
        with _notebook(server, "b.ipynb") as (kernel, _):
            head = KernelFolder(tmp_path / "runtime" / "gpuckpt" / kernel).head()
            assert head.sleeper is not None
            os.kill(head.sleeper[0], signal.SIGKILL)
            wait_until(lambda: "restarting kernel" in server.log.read_text())
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0
        assert "InvalidStateError" not in server.log.read_text()
        assert server.log.read_text().count("restarting kernel") == 1


def test_without_hibernation_kernels_end_as_the_system_has_it(tmp_path: Path) -> None:
    with running(tmp_path) as server, _notebook(server) as (_, notebook):
        assert "GPUCKPT_SHIELDED_FROM" not in notebook.value("dict(__import__('os').environ)")
        pid = int(notebook.value("__import__('os').getpid()"))
        outer = next(one for one in _everybody(server) if processes.inner_pid(one) == pid)
        began = processes.start_time(outer)
        os.kill(outer, signal.SIGTERM)
        wait_until(lambda: processes.start_time(outer) != began)
