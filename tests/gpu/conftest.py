"""Tests on a real GPU: skipped, and saying so, only where there is no NVIDIA driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cells import Cells
from keeper_faults import Criu

from jupyter_gpuckpt.freeze.cuda import CudaWorker

HERE = Path(__file__).parent
CONTROL = Path("/dev/nvidiactl")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not CONTROL.exists():
                item.add_marker(pytest.mark.skip(reason=f"no NVIDIA driver here: {CONTROL} is missing"))


@pytest.fixture
def worker() -> Iterator[CudaWorker]:
    with CudaWorker() as worker:
        yield worker


@pytest.fixture
def criu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Criu:
    """A criu that does as it is told, for kernels that are started after this."""
    criu = Criu(tmp_path / "criu")
    monkeypatch.setenv("GPUCKPT_CRIU", str(criu.program))
    return criu


@pytest.fixture
def cells() -> Iterator[Callable[..., Cells]]:
    """Start processes that run cells, each in a process group of its own; all end with the test."""
    started: list[Cells] = []

    def start(source: str = "") -> Cells:
        started.append(Cells())
        started[-1].run(source)
        return started[-1]

    yield start
    for one in started:
        one.close()
