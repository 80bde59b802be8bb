"""A real JupyterLab in a real browser."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator

import pytest
from jupyter_servers import Server, running
from lab_window import CONFIG, OpenWindow, Window, prepare
from playwright.sync_api import Browser, sync_playwright

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A JupyterLab server of the test file's own."""
    folder = tmp_path_factory.mktemp("lab")
    with running(folder, CONFIG, "lab", **prepare(folder)) as started:
        yield started


@pytest.fixture(scope="module")
def bare_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A JupyterLab server that finds no CRIU."""
    folder = tmp_path_factory.mktemp("bare-lab")
    (folder / "bin").mkdir()
    environment = {**prepare(folder), "PATH": str(folder / "bin"), "GPUCKPT_CRIU_PREFIX": str(folder / "no-criu")}
    with running(folder, CONFIG, "lab", **environment) as started:
        yield started


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The machine's chromium."""
    program = shutil.which("chromium")
    assert program, "the tests need chromium: `make test` installs it"
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


@pytest.fixture
def open_window(browser: Browser) -> Iterator[OpenWindow]:
    """Open JupyterLab in a browser window; what it complains of in its console fails the test."""
    windows: list[Window] = []

    def open_window(server: Server, notebook: str | None = None, spec: str = "python3-gpuckpt") -> Window:
        window = Window(browser, server, f"w{next(_numbers)}")
        windows.append(window)
        window.open(notebook, spec)
        return window

    yield open_window
    complaints = [complaint for window in windows for complaint in window.complaints]
    for window in windows:
        window.close()
    assert complaints == []
