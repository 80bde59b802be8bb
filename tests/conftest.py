"""What all tests share: folders of their own, real kernels, and a look at what is left behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from notebooks import SPEC, Notebook, StartKernel, start_kernel, wait_until
from remote_servers import S3, Sftp, s3_server, sftp_server

from jupyter_gpuckpt.client import keepers
from jupyter_gpuckpt.client.record import KernelFolder
from jupyter_gpuckpt.errors import GpuckptError, NoSuchSnapshot
from jupyter_gpuckpt.snapshots.summary import HIBERNATED

_KEPT = ("GPUCKPT_BROKER", "GPUCKPT_CRIU", "GPUCKPT_CRIU_PREFIX", "GPUCKPT_SCREENSHOTS")


def _be_started_by_nobody_in_particular() -> None:
    """Leave aside what whoever runs the tests has set for themselves, or what a job in the background has."""
    for name in list(os.environ):
        set_by_them = name.startswith("GPUCKPT_") and name not in _KEPT and not name.startswith("GPUCKPT_TEST_")
        if set_by_them or name.startswith("JPY_") or name in ("COLUMNS", "FORCE_COLOR"):
            del os.environ[name]
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1", "localhost"]))
    # What a restore is to keep first is kept, however slow the machine is while many tests run.
    os.environ["GPUCKPT_KEEP_UNSAVED"] = "60s"
    os.umask(0o022)
    signal.signal(signal.SIGINT, signal.default_int_handler)


_be_started_by_nobody_in_particular()


class SharedKernel:
    """The kernel of the tests of a file that are marked `shared_kernel`, and the folder that all of its own lies in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notebook: Notebook | None = None

    def given(self) -> Notebook:
        """Return it, or another where a test has ended it."""
        if self.notebook is not None and not self.notebook.manager.is_alive():
            self.close()
        if self.notebook is None:
            self.notebook = start_kernel()
        return self.notebook

    def tidy(self) -> None:
        """Leave no variables and no snapshots to the next test."""
        if self.notebook is None or not self.notebook.manager.is_alive():
            return
        try:
            self.notebook.run("%reset -f")  # it wakes one that is hibernated, whose snapshot goes then
            with self.notebook.keeper as keeper:
                wait_until(lambda: all(HIBERNATED not in one["tags"] for one in keeper.request("list")["snapshots"]))
                for manifest in keeper.request("list")["snapshots"]:
                    with contextlib.suppress(NoSuchSnapshot):
                        keeper.request("rm", {"name": manifest["name"]})
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End it, and remove what it saved."""
        notebook, self.notebook = self.notebook, None
        if notebook is not None:
            with contextlib.suppress(Exception):
                notebook.close()
            shutil.rmtree(self.folder / "store", ignore_errors=True)


def _shares_kernel(request: pytest.FixtureRequest) -> bool:
    mark = request.node.get_closest_marker("shared_kernel")
    return mark is not None and False not in mark.args and "notebook" in request.fixturenames


@pytest.fixture(scope="module")
def shared_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedKernel]:
    """The kernel that the file's tests share: started by the first that asks for `notebook`."""
    shared = SharedKernel(tmp_path_factory.mktemp("shared"))
    yield shared
    shared.close()
    shutil.rmtree(shared.folder)


@pytest.fixture(autouse=True)
def folders(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of a test lands in the user's own folders, and no test sees another's kernels or snapshots.

    Kernels that a test leaves when it fails in the middle, copies above all, are ended with it.
    """
    shared: SharedKernel | None = request.getfixturevalue("shared_kernel") if _shares_kernel(request) else None
    folder = tmp_path if shared is None else shared.folder
    failed = request.session.testsfailed
    for variable, name in (
        ("JUPYTER_RUNTIME_DIR", "runtime"),
        ("GPUCKPT_STORE", "store"),
        ("GPUCKPT_KEYS", "keys"),
        ("GPUCKPT_LOGS", "logs"),
        ("IPYTHONDIR", "ipython"),
    ):
        monkeypatch.setenv(variable, str(folder / name))
    # Elsewhere than in the tests of it, what is said to be saved is on the disk at once.
    monkeypatch.setenv("GPUCKPT_SAVE_WAIT", "600")
    yield
    if shared is not None:
        if request.session.testsfailed > failed:
            shared.close()
        shared.tidy()
    kept = shared.notebook.folder if shared is not None and shared.notebook is not None else None
    for left in folder.glob("runtime/gpuckpt/*/"):
        if left != kept:
            with contextlib.suppress(GpuckptError, OSError), keepers.connect(KernelFolder(left)) as keeper:
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
        started.append(start_kernel(spec, transport, **kwargs))
        return started[-1]

    yield start
    for notebook in started:
        with contextlib.suppress(Exception):
            notebook.close()


@pytest.fixture
def notebook(request: pytest.FixtureRequest, start: StartKernel) -> Notebook:
    """One kernel of ours: the test's own, or where it is marked `shared_kernel` that of the file."""
    if _shares_kernel(request):
        shared: SharedKernel = request.getfixturevalue("shared_kernel")
        return shared.given()
    return start()
