"""What all tests share: folders of their own, real kernels, and a look at what is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client import KernelManager
from notebooks import SPEC, Notebook, StartKernel, wait_for_ready
from remote_servers import S3, Sftp, s3_server, sftp_server

from jupyter_gpuckpt.errors import GpuckptError
from jupyter_gpuckpt.keeper import client
from jupyter_gpuckpt.keeper.record import KernelFolder

_KEPT = ("GPUCKPT_CRIU", "GPUCKPT_CRIU_PREFIX", "GPUCKPT_SCREENSHOTS")


def _be_started_by_nobody_in_particular() -> None:
    """Leave aside what whoever runs the tests has set for themselves, or what a job in the background has."""
    for name in list(os.environ):
        set_by_them = name.startswith("GPUCKPT_") and name not in _KEPT and not name.startswith("GPUCKPT_TEST_")
        if set_by_them or name.startswith("JPY_") or name in ("COLUMNS", "FORCE_COLOR"):
            del os.environ[name]
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1", "localhost"]))
    os.umask(0o022)
    signal.signal(signal.SIGINT, signal.default_int_handler)


_be_started_by_nobody_in_particular()


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of a test lands in the person's own folders, and no test sees another's kernels or snapshots.

    Kernels that a test leaves when it fails in the middle, copies above all, are ended with it.
    """
    for variable, name in (
        ("JUPYTER_RUNTIME_DIR", "runtime"),
        ("GPUCKPT_STORE", "store"),
        ("GPUCKPT_KEYS", "keys"),
        ("GPUCKPT_LOGS", "logs"),
        ("IPYTHONDIR", "ipython"),
    ):
        monkeypatch.setenv(variable, str(tmp_path / name))
    # Elsewhere than in the tests of it, what is said to be saved is on the disk at once.
    monkeypatch.setenv("GPUCKPT_SAVE_WAIT", "600")
    yield
    for folder in tmp_path.glob("runtime/gpuckpt/*/"):
        with contextlib.suppress(GpuckptError, OSError), client.connect(KernelFolder(folder)) as keeper:
            keeper.request("close")


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """A server of S3 for all tests; each makes a bucket of its own."""
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as server:
        yield server


@pytest.fixture(scope="session")
def sftp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sftp]:
    """A server of SFTP for all tests; each uses a folder of its own."""
    with sftp_server(tmp_path_factory.mktemp("sftp")) as server:
        yield server


@pytest.fixture
def start(folders: None) -> Iterator[StartKernel]:
    """Start kernels; they are ended with the test."""
    started: list[Notebook] = []

    def start(spec: str = SPEC, transport: str = "tcp", **kwargs: Any) -> Notebook:
        manager = KernelManager(kernel_name=spec, transport=transport)
        manager.start_kernel(**kwargs)
        connected = manager.client()
        connected.start_channels()
        notebook = Notebook(manager, connected)
        started.append(notebook)
        try:
            wait_for_ready(connected)
        except AssertionError as e:
            logs = "\n".join(path.read_text() for path in sorted(notebook.folder.rglob("*.log")))
            raise AssertionError(f"{e}; its logs say:\n{logs}") from e
        return notebook

    yield start
    for notebook in started:
        with contextlib.suppress(Exception):
            notebook.close()


@pytest.fixture
def notebook(start: StartKernel) -> Notebook:
    """One kernel of ours."""
    return start()
