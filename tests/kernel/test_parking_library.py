"""The library in the driver's place, in kernels: it is there where there is a driver, and changes nothing."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from notebooks import Notebook, StartKernel

pytestmark = [
    pytest.mark.criu,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="parking is for x86-64"),
]

IS_THERE = "hasattr(__import__('ctypes').CDLL(None), 'gpuckpt_parkable')"
LOADED = "any('libcuda' in line for line in open('/proc/self/maps'))"


@pytest.fixture
def with_driver(made_up_driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(made_up_driver.parent))


@pytest.mark.usefixtures("with_driver")
def test_a_kernel_has_it_and_loads_no_driver_by_it(start: StartKernel) -> None:
    notebook = start()
    assert notebook.value(IS_THERE) == "True"
    notebook.run("import ctypes; from jupyter_gpuckpt.kernel import devices, parking")
    notebook.run("%gpuckpt save before")
    assert notebook.value("parking.has_gate(), parking.is_driver_loaded()") == "True False"
    assert notebook.value(LOADED) == "False"
    notebook.run("cuda = ctypes.CDLL('libcuda.so.1'); n = ctypes.c_int()")
    assert notebook.value("cuda.cuDeviceGetCount(ctypes.byref(n)), n.value") == "0 1"
    assert notebook.value("parking.is_driver_loaded(), parking.has_gate()") == "True True"
    notebook.run("%gpuckpt restore before")
    assert notebook.value("parking.is_driver_loaded()") == "False"


@pytest.mark.usefixtures("with_driver")
def test_a_driver_that_something_loads_past_it_is_not_behind_the_gate(start: StartKernel, made_up_driver: Path) -> None:
    notebook = start()
    notebook.run(f"import ctypes; past = ctypes.CDLL({str(made_up_driver)!r}); past.cuInit(0)")
    assert notebook.value("__import__('jupyter_gpuckpt.kernel.parking').kernel.parking.has_gate()") == "False"


def _has_it(notebook: Notebook) -> bool:
    return notebook.value(IS_THERE) == "True"


@pytest.mark.usefixtures("with_driver")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GPUCKPT_PARKING", "off"),
        ("CUDA_INJECTION64_PATH", "libtool.so"),
        ("NV_SANITIZER_INJECTION_TRANSPORT_TYPE", "uds"),
    ],
)
def test_a_kernel_does_without_where_it_is_switched_off_or_a_tool_wants_the_driver(
    start: StartKernel, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert not _has_it(start())


def test_a_kernel_does_without_where_there_is_no_driver(start: StartKernel) -> None:
    assert not _has_it(start())
