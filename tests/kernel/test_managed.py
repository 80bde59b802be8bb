"""Managed memory is ordinary memory while its process is saved, and managed again at the same addresses afterwards."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_up import Process
from test_parked_memory import HeldProcess

from jupyter_gpuckpt.freeze.parking_channel import run_on

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="written for x86-64"),
    pytest.mark.timeout(300),
]

MIB = 1 << 20

PROGRAM = """
def managed(size):
    enter()
    at = ctypes.c_uint64()
    result = cu.cuMemAllocManaged(ctypes.byref(at), ctypes.c_size_t(size), 1)
    if not result: blocks.append((at.value, size))
    return result
def remaining(): return ctypes.CDLL(driver).made_up_managed()
def free_at(n): return cu.cuMemFree_v2(ctypes.c_uint64(blocks[n][0]))
def take_below(n):
    import mmap
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    size, flags = 1 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000
    return libc.mmap(blocks[n][0] - size, size, 0, flags, -1, 0) == blocks[n][0] - size
"""


@pytest.fixture
def held(tmp_path: Path, made_up_driver: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldProcess]:
    monkeypatch.setenv("GPUCKPT_MANAGED", "on")
    monkeypatch.setenv("MADE_UP_ELSEWHERE", str(tmp_path / "elsewhere"))
    process = Process(tmp_path, made_up_driver)
    for name, value in process.environment.items():
        monkeypatch.setenv(name, value)
    held = HeldProcess(process, tmp_path)
    process.ask(f"exec({PROGRAM!r}, globals())")
    yield held
    held.close()


def test_it_is_away_while_its_process_is_saved_and_comes_back_to_its_place(held: HeldProcess) -> None:
    process = held.process
    assert process.ask("[managed(size) for size in (100, 5 << 20, 64 << 20, 3 << 20)]") == [0] * 4
    assert process.ask("[mark(n, n + 1) for n in range(1, 4)], free_at(0), remaining()") == [[None] * 3, 0, 3]
    assert process.ask("take_below(3)") is True, "where the driver would look for addresses again"
    for _ in range(2):
        held.parks()
        run_on(process.run_dir, process.pid)
        assert process.ask("remaining(), [marks(n) for n in range(1, 4)]") == [0, [[n + 1] * 3 for n in range(1, 4)]]
        process.ask("mark(1, 9)")
        held.comes_back()
        assert process.ask("remaining(), marks(1)") == [3, [9] * 3]
        process.ask("mark(1, 2)")
        assert process.ask("[marks(n) for n in range(1, 4)]") == [[n + 1] * 3 for n in range(1, 4)]
    assert process.ask("[free_at(n) for n in range(1, 4)], remaining()") == [[0] * 3, 0]


def test_where_its_place_is_refused_it_stays_ordinary_memory_there(held: HeldProcess) -> None:
    process = held.process
    process.ask("managed(5 << 20), mark(0, 7)")
    held.parks()
    (held.folder / "elsewhere").touch()
    held.comes_back()
    assert process.ask("remaining(), marks(0), free_at(0)") == [0, [7] * 3, 0]


def test_without_host_memory_for_it_nothing_is_changed(held: HeldProcess) -> None:
    process = held.process
    process.ask("managed(5 << 20), managed(1 << 44), mark(0, 7)")
    held.shows()
    assert held.parking is not None
    assert held.parking.halt(process.pid)
    assert not held.parking.park(process.pid, lambda parked: None)
    held.parking.go_on()
    assert process.ask("remaining(), marks(0), len(blocks)") == [2, [7] * 3, 2]


def test_without_the_setting_it_is_the_drivers(held: HeldProcess) -> None:
    process = held.process
    process.ask("os.environ.pop('GPUCKPT_MANAGED'), managed(5 << 20)")
    assert process.ask("remaining(), ours.gpuckpt_parkable()") == [1, 0]


def test_what_a_program_asks_about_it_is_answered_for_what_it_asked_for(held: HeldProcess) -> None:
    process = held.process
    process.ask("managed(5000)")
    asked = (
        "(lambda base, size: [cu.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size),"
        " ctypes.c_uint64(blocks[0][0] + 100)), base.value == blocks[0][0], size.value])"
        "(ctypes.c_uint64(), ctypes.c_size_t())"
    )
    assert process.ask(asked) == [0, True, 5000]
