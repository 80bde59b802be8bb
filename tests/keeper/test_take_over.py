"""A kernel whose keeper died gets another one: whatever becomes of that and of its cause, the kernel keeps running."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import COMMAND
from keeper_faults import assert_works, kill_keeper, small_disk, status
from notebooks import Notebook, StartKernel, wait_until

from jupyter_gpuckpt.client.record import KernelFolder
from jupyter_gpuckpt.errors import KeeperGone

pytestmark = pytest.mark.criu

_LISTS = [*COMMAND, "kernels"]
"""It gives every kernel that has none a keeper."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_who_wanted_it_is_gone_before_the_kernel_is_held(
    notebook: Notebook, tmp_path: Path, keepers_first: Callable[[str], None], number: signal.Signals
) -> None:
    notebook.run("x = 1")
    kill_keeper(notebook)
    began, go = tmp_path / "began", tmp_path / "go"
    keepers_first(f"while not os.path.exists({str(go)!r}): open({str(began)!r}, 'w').close(); time.sleep(0.01)")
    with subprocess.Popen(_LISTS, stderr=subprocess.DEVNULL) as wants:
        wait_until(began.exists)
        wants.send_signal(number)
    go.touch()
    wait_until(lambda: KernelFolder(notebook.folder).has_keeper() and status(notebook)["state"] == "running")
    assert notebook.manager.is_alive()
    assert notebook.value("x") == "1"
    assert_works(notebook)


def test_who_wants_it_is_killed_at_any_moment(notebook: Notebook) -> None:
    notebook.run("x = 1")
    for hundredths in range(0, 60, 4):
        kill_keeper(notebook)
        with subprocess.Popen(_LISTS, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as wants:
            time.sleep(hundredths / 100)  # the moment does not matter, what follows must hold after any
            wants.send_signal(signal.SIGINT if hundredths % 8 else signal.SIGKILL)
        assert notebook.manager.is_alive()
        assert notebook.value("x") == "1"
    assert_works(notebook)


def test_while_the_disk_is_full_the_kernel_runs_on_and_gets_its_keeper_when_there_is_room(
    start: StartKernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "small", megabytes=8):
        monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "small" / "runtime"))
        notebook = start()
        notebook.run("x = 1")
        kill_keeper(notebook)
        filler = tmp_path / "small" / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        for _ in range(2):
            assert notebook.manager.is_alive()
            wait_until(lambda: not KernelFolder(notebook.folder).has_keeper())
            with pytest.raises(KeeperGone, match="No space left"):
                _ = notebook.keeper
        assert notebook.value("x") == "1"
        filler.unlink()
        assert notebook.manager.is_alive()
        assert KernelFolder(notebook.folder).has_keeper()
        assert notebook.value("x") == "1"
        assert_works(notebook)
        notebook.close()


def test_in_a_server_with_more_than_1024_open_files(start: StartKernel) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.ExitStack() as files:
        files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while files.enter_context(open(os.devnull)).fileno() < 1024:
            pass
        notebook = start()
        assert "running" in notebook.run("%gpuckpt status").text, "it is a plain kernel"
        notebook.run("x = 1")
        kill_keeper(notebook)
        assert notebook.manager.is_alive()
        assert notebook.value("x") == "1"
        assert_works(notebook)
        notebook.close()
