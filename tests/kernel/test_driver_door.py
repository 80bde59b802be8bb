"""The library in the driver's place: every call passes through it, unchanged, and waits where it has to."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_up import NAMES, OTHERS, Process

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="written for x86-64"),
]

ARGUMENTS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
SUM = sum(place * value for place, value in enumerate(ARGUMENTS, 1))
ANSWERED = ["cuCtxGetApiVersion", "cuCtxGetDevice_v2", "cuGetErrorName", "cuGetErrorString"]
"""Of those that the made-up driver has no more of than of others, the ones that the driver answers without a GPU."""
LOADED = "any('driver/libcuda' in line for line in open('/proc/self/maps'))"


@pytest.fixture
def process(tmp_path: Path, made_up_driver: Path) -> Iterator[Process]:
    process = Process(tmp_path, made_up_driver)
    yield process
    process.close()


def _next_tick() -> None:
    """Wait until the clock has ticked by which the library looks at the gate: CLOCK_MONOTONIC_COARSE."""
    now = time.clock_gettime(6)
    while time.clock_gettime(6) == now:
        pass


def test_all_functions_go_on_to_the_driver_with_all_their_arguments(process: Process) -> None:
    results = process.ask(f"[call(name, *{ARGUMENTS}) for name in {OTHERS}]")
    assert results == [100_000 * number + SUM for number in range(len(OTHERS))]
    assert len(OTHERS) > 550


def test_the_driver_is_loaded_by_the_first_call(process: Process) -> None:
    assert process.ask("is_ours(ctypes.cast(cu.cuCtxGetId, ctypes.c_void_p).value)") is True
    assert process.ask(f"{LOADED}, ours.gpuckpt_is_open()") == [False, 0]
    process.ask("call('cuCtxGetId', 1)")
    assert process.ask(f"{LOADED}, ours.gpuckpt_is_open()") == [True, 1]


def test_where_the_driver_cannot_be_loaded_there_is_no_device(process: Process) -> None:
    process.driver.unlink()
    assert process.ask("call('cuInit', 0)") == 100
    assert process.ask("ours.gpuckpt_is_open()") == 0


def test_functions_that_are_asked_for_by_name_are_ours_too(process: Process) -> None:
    for name in ("cuMemAlloc", "cuMemFree", "cuCtxGetId", "cuGetProcAddress", "cuMemCreate"):
        assert process.ask(f"is_ours(found({name!r}))") is True, name
    number = OTHERS.index("cuCtxGetId")
    assert process.ask("ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_long] * 10)(found('cuCtxGetId'))(*[0] * 10)") == (
        100_000 * number
    )
    assert process.ask("found('cuNobodyHasThis')") == 500


def test_a_function_of_a_later_driver_is_its_own(process: Process) -> None:
    assert process.ask("is_ours(found('cuOfALaterDriver'))") is False
    assert process.ask("ctypes.CFUNCTYPE(ctypes.c_int)(found('cuOfALaterDriver'))()") == 4711


def test_all_calls_wait_at_the_gate_while_it_is_shut(process: Process) -> None:
    names = [name for name in OTHERS[::7] if name not in ANSWERED]
    process.ask("call('cuCtxGetId', 1)")
    process.gate.touch()
    assert process.ask(f"call('cuCtxGetId', *{ARGUMENTS}) % 100000") == SUM, "nobody looks at it but around a save"
    process.ask("ours.gpuckpt_watch(1)")
    _next_tick()
    for name in names:
        process.ask(f"beside(lambda: call({name!r}, *{ARGUMENTS}) % 100000)")
    process.ask("beside(lambda: [alloc(4 << 20), 'allocated'])")
    process.ask("ours.gpuckpt_watch(0)")  # of no consequence as long as it is shut
    process.ask(f"beside(lambda: call('cuCtxGetFlags', *{ARGUMENTS}) % 100000)")
    assert process.ask("'still here'") == "still here"
    process.gate.unlink()
    answers = [process.answer() for _ in range(len(names) + 2)]
    assert sorted(answers, key=str) == sorted([SUM] * (len(names) + 1) + [[0, "allocated"]], key=str)
    process.ask("ours.gpuckpt_watch(0)")
    process.gate.touch()
    assert process.ask(f"call('cuCtxGetId', *{ARGUMENTS}) % 100000") == SUM


def test_what_the_driver_answers_without_a_gpu_does_not_wait(process: Process) -> None:
    """torch asks it with Python's lock held: no other thread of the kernel would run, nor say why the cell waits."""
    process.ask("call('cuCtxGetId', 1)")
    process.gate.touch()
    process.ask("ours.gpuckpt_watch(1)")
    _next_tick()
    assert process.ask(f"[call(name, *{ARGUMENTS}) % 100000 for name in {ANSWERED}]") == [SUM] * len(ANSWERED)
    assert process.ask("[n := ctypes.c_int(), cu.cuDeviceGetCount(ctypes.byref(n)), n.value][1:]") == [0, 1]
    for name in ("cuMemAlloc", "cuGetProcAddress"):
        assert process.ask(f"is_ours(found({name!r}))") is True, name


def test_the_first_call_of_all_waits_too(process: Process) -> None:
    process.ask("ours.gpuckpt_watch(1)")
    process.gate.touch()
    process.ask(f"beside(lambda: call('cuCtxGetId', *{ARGUMENTS}) % 100000)")
    assert process.ask("'still here'") == "still here"
    process.gate.unlink()
    assert process.answer() == SUM


def test_a_call_takes_the_short_way_while_no_save_is_near(process: Process) -> None:
    """The two instructions leave the function's number in r11, which the made-up driver tells; the long way none."""
    way = "[way := cu.cuProfilerStop, setattr(way, 'restype', ctypes.c_long), way(), way()][3]"
    number = NAMES.index("cuProfilerStop")
    assert process.ask(way) == number
    process.ask("ours.gpuckpt_watch(1)")
    assert process.ask(way) != number
    process.ask("ours.gpuckpt_watch(0)")
    assert process.ask(way) == number
