"""Tests on a real GPU: skipped, and saying so, only where there is no NVIDIA driver."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cells import Cells
from keeper_faults import Criu
from notebooks import Notebook

from jupyter_gpuckpt.freeze.cuda import CudaWorker

HERE = Path(__file__).parent
CONTROL = Path("/dev/nvidiactl")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not CONTROL.exists():
                item.add_marker(pytest.mark.skip(reason=f"no NVIDIA driver here: {CONTROL} is missing"))


_GIVE_BACK = """
import gc, sys
gc.collect()
if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
    sys.modules["torch"].cuda.empty_cache()
"""


@pytest.fixture
def notebook(notebook: Notebook) -> Notebook:
    """The kernel; one that tests share has given the GPU back what the test before had there."""
    notebook.run(_GIVE_BACK)
    return notebook


def _of_the_driver() -> list[str]:
    if not shutil.which("dmesg"):
        return []
    said = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=60, check=False).stdout
    return [line for line in said.splitlines() if "NVRM" in line]


@pytest.fixture(autouse=True)
def _what_the_driver_says() -> Iterator[None]:
    """Show, where a test fails, what the driver has logged meanwhile (Xid): which GPU failed, and at which address."""
    before = len(_of_the_driver())
    yield
    for line in _of_the_driver()[before:]:
        print(line)


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
