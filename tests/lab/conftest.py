"""A real JupyterLab in a real browser."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from jupyter_servers import Server, running
from lab_window import CONFIG, OpenWindow, Routes, Window, prepare
from playwright.sync_api import BrowserContext, Error, sync_playwright

_numbers = itertools.count(1)


class SharedLab:
    """One JupyterLab server for all tests, and a window on it that is loaded already: both take long to start.

    Each test leaves them without notebooks, kernels and snapshots; where one fails, the next gets others.
    """

    def __init__(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self._tmp_path_factory = tmp_path_factory
        self._running = contextlib.ExitStack()
        self._server: Server | None = None
        self._window: Window | None = None

    def server(self) -> Server:
        """Return the server, which is started where it does not run."""
        if self._server is None:
            folder = self._tmp_path_factory.mktemp("lab")
            self._server = self._running.enter_context(running(folder, CONFIG, "lab", **prepare(folder)))
        return self._server

    def take_window(self, server: Server) -> Window | None:
        """Return the window, where there is one on this server that nobody uses and nothing is left in."""
        if server is not self._server or self._window is None:
            return None
        window, self._window = self._window, None
        if window.is_clear():
            return window
        window.close()
        return None

    def give_back(self, window: Window) -> None:
        """Leave a window to the next test; one that cannot be cleared is closed."""
        if window.server is self._server and self._window is None:
            with contextlib.suppress(Error):
                window.clear()
                self._window = window
                return
        window.close()

    def tidy(self) -> None:
        """Leave no notebooks, kernels and snapshots on the server; where that fails, stop it."""
        try:
            self._empty(self.server())
        except BaseException:
            self.close()
            raise

    def _empty(self, server: Server) -> None:
        for kind in ("sessions", "kernels"):
            for each in server.request("GET", f"api/{kind}").json():
                server.request("DELETE", f"api/{kind}/{each['id']}")
        for snapshot in server.ask("GET", "snapshots")["snapshots"]:
            if snapshot["pinned"]:
                server.ask("POST", f"snapshots/{snapshot['name']}/pin", {"pinned": False})
            server.ask("DELETE", f"snapshots/{snapshot['name']}")
        for path in server.root.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def close(self) -> None:
        """Stop the server and close the window."""
        if self._window is not None:
            self._window.close()
        self._server = self._window = None
        self._running.close()


@pytest.fixture(scope="session")
def shared_lab(tmp_path_factory: pytest.TempPathFactory, browser: BrowserContext) -> Iterator[SharedLab]:
    """What `lab` and `open_window` take theirs from."""
    shared = SharedLab(tmp_path_factory)
    shared.server()  # before a test's own environment is there
    yield shared
    shared.close()


@pytest.fixture
def lab(request: pytest.FixtureRequest, shared_lab: SharedLab) -> Iterator[Server]:
    """A JupyterLab server that has no notebooks, kernels and snapshots."""
    failed = request.session.testsfailed
    yield shared_lab.server()
    if request.session.testsfailed > failed:
        shared_lab.close()
    else:
        shared_lab.tidy()


@pytest.fixture
def bare_lab(tmp_path: Path) -> Iterator[Server]:
    """A JupyterLab server that finds no CRIU."""
    (tmp_path / "bin").mkdir()
    environment = {
        **prepare(tmp_path),
        "PATH": str(tmp_path / "bin"),
        "GPUCKPT_CRIU_PREFIX": str(tmp_path / "no-criu"),
    }
    with running(tmp_path, CONFIG, "lab", **environment) as started:
        yield started


@pytest.fixture(scope="session")
def browser() -> Iterator[BrowserContext]:
    """The machine's chromium, as one user has it open."""
    program = shutil.which("chromium")
    assert program, "the tests need chromium: `make test` installs it"
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield started.new_context()
        started.close()


@pytest.fixture
def open_window(request: pytest.FixtureRequest, browser: BrowserContext, shared_lab: SharedLab) -> Iterator[OpenWindow]:
    """Open a browser window with JupyterLab; what it complains of in its console fails the test.

    It may have been another test's before. One that is asked for as `fresh`, or with `routes` for what it asks of the
    server, is loaded for this test, and closed after it.
    """
    failed = request.session.testsfailed
    windows: list[Window] = []
    shared: list[Window] = []

    def open_window(
        server: Server,
        notebook: str | None = None,
        spec: str = "python3-gpuckpt",
        fresh: bool = False,
        routes: Routes | None = None,
    ) -> Window:
        window = None if fresh or routes else shared_lab.take_window(server)
        loaded = window is not None
        window = window or Window(browser, server, f"w{next(_numbers)}")
        windows.append(window)
        if not (fresh or routes):
            shared.append(window)
        for address, answer in (routes or {}).items():
            window.page.route(address, answer)
        if not loaded:
            window.load(notebook, spec)
        elif notebook is not None:
            window.open(notebook, spec)
        return window

    yield open_window
    complaints = [complaint for window in windows for complaint in window.complaints]
    for window in windows:
        if window in shared and not complaints and request.session.testsfailed == failed:
            shared_lab.give_back(window)
        else:
            window.close()
    assert complaints == []
