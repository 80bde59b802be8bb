"""Servers: one that can save kernels, and one on a machine that lacks CRIU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from jupyter_servers import Server, running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the test file's own."""
    with running(tmp_path_factory.mktemp("server")) as started:
        yield started


@pytest.fixture(scope="module")
def bare_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that finds no CRIU."""
    folder: Path = tmp_path_factory.mktemp("bare")
    (folder / "bin").mkdir()
    with running(folder, PATH=str(folder / "bin"), GPUCKPT_CRIU_PREFIX=str(folder / "no-criu")) as started:
        yield started
