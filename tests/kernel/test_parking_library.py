"""The library that parks GPU memory, where there is no GPU: it is there, and it changes nothing."""

from __future__ import annotations

import platform

import pytest
from notebooks import StartKernel

pytestmark = [
    pytest.mark.criu,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="parking is for x86-64"),
]

IS_THERE = "hasattr(__import__('ctypes').CDLL(None), 'gpuckpt_parkable')"


def test_a_kernel_has_it_and_nothing_to_park(start: StartKernel) -> None:
    notebook = start()
    assert notebook.value(IS_THERE) == "True"
    notebook.run("import ctypes")
    assert notebook.value("ctypes.CDLL(None).gpuckpt_parkable()") == "0"
    # 801: cudaErrorNotSupported, since no CUDA runtime is loaded here.
    assert notebook.value("ctypes.CDLL(None).cudaMalloc(ctypes.byref(ctypes.c_void_p()), 1 << 30)") == "801"


def test_a_kernel_does_without_where_it_is_switched_off(start: StartKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCKPT_PARKING", "off")
    assert start().value(IS_THERE) == "False"


@pytest.mark.parametrize("module", ["cupy", "jax", "numba.cuda"])
def test_a_kernel_with_a_module_that_calls_the_driver_itself_does_not_say_that_all_its_calls_wait(
    start: StartKernel, module: str
) -> None:
    notebook = start()
    notebook.run("import sys, types; from jupyter_gpuckpt.kernel import parking")
    assert notebook.value("parking.has_gate()") == "True"
    notebook.run(f"sys.modules[{module!r}] = types.ModuleType({module!r})")
    assert notebook.value("parking.has_gate()") == "False"
