"""CUDA IPC of memory that can be parked: another process opens it, and both see the same bytes."""

from __future__ import annotations

import os
import platform
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_up import Process

from jupyter_gpuckpt.freeze import parking_channel

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="parking is for x86-64"),
    pytest.mark.timeout(120),
]

MIB = 1 << 20
SHARE = (
    "(lambda handle, a: [cu.cuIpcGetMemHandle(handle, ctypes.c_uint64(a)), handle.raw.hex()])"
    "(ctypes.create_string_buffer(64), {address})"
)
OPEN = (
    "(lambda H, a: [cu.cuIpcOpenMemHandle_v2(ctypes.byref(a), H.from_buffer_copy(bytes.fromhex({handle!r})), 1), "
    "a.value])"
    "(type('H', (ctypes.Structure,), {{'_fields_': [('bytes', ctypes.c_char * 64)]}}), ctypes.c_uint64())"
)
CLOSE = "cu.cuIpcCloseMemHandle(ctypes.c_uint64({address}))"
READ = "ctypes.string_at({address}, 16)[7]"


@pytest.fixture
def both(tmp_path: Path, made_up_driver: Path) -> Iterator[tuple[Process, Process]]:
    """Two processes of one tree."""
    owner, other = Process(tmp_path, made_up_driver), Process(tmp_path, made_up_driver)
    yield owner, other
    owner.close()
    other.close()


def _shared(owner: Process, size: int) -> tuple[int, str]:
    """Make a block; return its address and its handle."""
    assert owner.ask(f"alloc({size})") == 0
    address = owner.ask("blocks[-1][0]")
    result, handle = owner.ask(SHARE.format(address=address + MIB))
    assert result == 0
    return address, handle


def test_a_process_can_be_asked_from_when_it_has_memory(both: tuple[Process, Process]) -> None:
    """On one processor the thread that answers begins only when the one that makes it waits."""
    owner, _ = both
    (processor, *_) = os.sched_getaffinity(owner.pid)
    os.sched_setaffinity(owner.pid, {processor})
    names = "[open(f'/proc/self/task/{task}/comm').read().strip() for task in os.listdir('/proc/self/task')]"
    result, there = owner.ask(f"[alloc({MIB}), {names}]")
    assert result == 0
    assert parking_channel.THREAD in there


def test_what_one_process_shares_another_has_at_once(both: tuple[Process, Process]) -> None:
    owner, other = both
    other.ask("enter()")
    address, handle = _shared(owner, 1100 * MIB)  # in two parts
    owner.ask("mark(0, 7)")
    result, there = other.ask(OPEN.format(handle=handle))
    assert result == 0
    for offset in (0, 550 * MIB, 1100 * MIB - 16):
        assert other.ask(READ.format(address=there + offset)) == 7
    other.ask(f"ctypes.memset({there} + {1100 * MIB - 16}, 9, 16)")
    assert owner.ask("marks(0)") == [7, 7, 9]
    # The same again is the same, until it has been closed as often.
    assert other.ask(OPEN.format(handle=handle)) == [0, there]
    assert parking_channel.sharing(other.run_dir, other.pid) == parking_channel.Sharing(1, False, (owner.pid,))
    assert other.ask(CLOSE.format(address=there)) == 0
    assert other.ask(READ.format(address=there)) == 7
    assert other.ask(CLOSE.format(address=there)) == 0
    assert parking_channel.sharing(other.run_dir, other.pid).imports == 0
    assert other.ask(CLOSE.format(address=there)) == 13, "the driver's"
    assert address != 0
    assert not list(other.run_dir.glob("share-*"))


def test_what_is_gone_cannot_be_opened_and_others_handles_are_the_drivers(both: tuple[Process, Process]) -> None:
    owner, other = both
    other.ask("enter()")
    address, handle = _shared(owner, 4 * MIB)
    assert owner.ask(OPEN.format(handle=handle))[0] == 201, "by its own process"
    assert owner.ask(f"cu.cuMemFree_v2(ctypes.c_uint64({address}))") == 0
    assert other.ask(OPEN.format(handle=handle))[0] == 304
    assert other.ask(OPEN.format(handle="ab" * 64))[0] == 12, "the driver's"
    _, handle = _shared(owner, 4 * MIB)
    os.kill(owner.pid, signal.SIGKILL)
    assert other.ask(OPEN.format(handle=handle))[0] == 304
    assert parking_channel.sharing(other.run_dir, other.pid).imports == 0
    assert not list(other.run_dir.glob("share-*"))
