"""GPU memory leaves its process and comes back at the same addresses, whoever made it, and whoever waits meanwhile.

The GPU here is made up: its memory is files. The library, the holder and what commands both are the real ones; that the
real driver does as much is seen in `tests/gpu`.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from blake3 import blake3
from cgroups import memory_cgroup
from made_up import Process
from notebooks import wait_until

from jupyter_gpuckpt import installed
from jupyter_gpuckpt.errors import DriverError
from jupyter_gpuckpt.freeze.parking import HASH, Elsewhere, Parked, Parking, Seen, giving_back
from jupyter_gpuckpt.freeze.parking_channel import (
    THREAD,
    bring_gpus_together,
    keep_gpus_apart,
    parkable,
    peer_access_asked_for,
    run_on,
)
from jupyter_gpuckpt.freeze.ptrace import Tracer

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="parking is for x86-64"),
    pytest.mark.timeout(300),
]

MIB, GIB = 1 << 20, 1 << 30
CHUNK = 2 << 20
ANSWERS = 60
"""For how long the library waits for a holder, in seconds (parking.c)."""
Start = Callable[..., "HeldProcess"]


class HeldProcess:
    """A process with memory on the made-up GPU, and its parking."""

    def __init__(self, process: Process, folder: Path) -> None:
        self.process, self.folder = process, folder
        self.memory = Path(tempfile.mkdtemp(dir="/dev/shm"))
        self.parking: Parking | None = None

    def shows(self, elsewhere: Elsewhere | None = None, told: list[list[Any]] | None = None) -> Seen | None:
        """Have the memory opened and seen, where it can be, and memory made ready for what is new."""
        places = tuple((gpu, size) for gpu, size in told or self.process.ask("places()"))
        at = self.memory
        parked = Parked(self.process.pid, 0, places)
        self.parking = Parking(self.folder, at, str(at), parked, "new", elsewhere=elsewhere)
        assert self.parking.get_ready()
        seen = self.parking.see(self.process.pid)
        assert self.parking.stage()
        return seen

    def parks(self, elsewhere: Elsewhere | None = None, told: list[list[Any]] | None = None) -> Parking:
        """Park it, which it was shown for now or before."""
        if self.parking is None:
            self.shows(elsewhere, told)
        assert self.parking is not None
        assert self.parking.halt(self.process.pid)
        assert self.parking.park(self.process.pid, lambda parked: None)
        self.parking.let_go()
        return self.parking

    def comes_back(self) -> None:
        assert self.parking is not None
        with giving_back({self.process.pid: self.parking}):
            pass
        self.parking.close()
        self.parking = None

    def close(self) -> None:
        if self.parking is not None:
            self.parking.close()
        self.process.close()
        shutil.rmtree(self.memory)


@pytest.fixture
def start(tmp_path: Path, made_up_driver: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    started: list[HeldProcess] = []

    def start(free: int = 1 << 40, gpus: int = 1) -> HeldProcess:
        process = Process(tmp_path, made_up_driver, free, gpus)
        for name, value in process.environment.items():
            monkeypatch.setenv(name, value)
        started.append(HeldProcess(process, tmp_path))
        return started[-1]

    yield start
    for one in started:
        one.close()


STACKS = """[(ctypes.CDLL(driver).cuCtxSetCurrent(ctypes.c_void_p(gpu + 1)), s := ctypes.c_size_t(),
ctypes.CDLL(driver).cuCtxGetLimit(ctypes.byref(s), 0), s.value)[-1] for gpu in range(2)]""".replace("\n", " ")


def free_bytes(process: Process) -> int:
    return int(process.ask("free()[0]"))


def test_many_blocks_come_back_with_what_was_in_them(start: Start) -> None:
    held = start()
    process = held.process
    assert process.ask("[alloc(2 + n % 3 << 20) for n in range(130)]") == [0] * 130
    process.ask("[mark(n, n + 1) for n in range(130)]")
    free = free_bytes(process)
    addresses = process.ask("blocks")
    for _ in range(2):
        held.parks()
        held.comes_back()
        assert process.ask("[marks(n) for n in range(130)]") == [[n + 1] * 3 for n in range(130)]
    assert process.ask("blocks") == addresses
    wait_until(lambda: free_bytes(process) == free, what="the holder has memory on the GPU")
    assert process.ask("[cu.cuMemFree_v2(ctypes.c_uint64(a)) for a, _ in blocks]") == [0] * 130
    wait_until(lambda: free_bytes(process) == 1 << 40, what="the holder has memory on the GPU")
    assert process.ask("ours.gpuckpt_parkable()") == 0


def test_what_a_program_made_by_itself_comes_back_too(start: Start) -> None:
    """As torch's expandable segments do it, in pieces of 20 MiB, and JAX, in one that is most of the GPU."""
    held = start()
    process = held.process
    process.ask(
        "[create(20 << 20) for _ in range(20)], create(1088 << 20), create(20 << 20, exported=1), alloc(30 << 20)"
    )
    process.ask("[mark(n, n + 1) for n in range(23)]")
    assert process.ask("ours.gpuckpt_parkable()") == 20 * 20 * MIB + 1088 * MIB + 50 * MIB
    held.parks()
    held.comes_back()
    assert process.ask("[marks(n) for n in range(23)]") == [[n + 1] * 3 for n in range(23)]
    # The handles are still good.
    again = (
        "[cu.cuMemUnmap(ctypes.c_uint64(blocks[20][0]), ctypes.c_size_t(blocks[20][1])),"
        " cu.cuMemMap(ctypes.c_uint64(blocks[20][0]), ctypes.c_size_t(1088 << 20), ctypes.c_size_t(0),"
        " ctypes.c_uint64(handles[20]), ctypes.c_uint64(0)),"
        " cu.cuMemSetAccess(ctypes.c_uint64(blocks[20][0]), ctypes.c_size_t(1088 << 20), (ctypes.c_int * 3)(1, 0, 3),"
        " 1)]"
    )
    assert process.ask(again) == [0, 0, 0]
    assert process.ask("marks(20)") == [21] * 3
    # Memory lives as long as its handle or a mapping does.
    assert process.ask("cu.cuMemRelease(ctypes.c_uint64(handles[20]))") == 0
    assert process.ask("marks(20)") == [21] * 3
    # It is one, however it is made: by what is said of it programs unmap it, as XLA does.
    size = "ctypes.byref(n := ctypes.c_size_t())"
    at = "ctypes.c_uint64(blocks[20][0])"
    assert process.ask(f"cu.cuMemGetAddressRange_v2(None, {size}, {at}), n.value") == [0, 1088 * MIB]
    assert process.ask(f"cu.cuPointerGetAttribute({size}, 12, {at}), n.value") == [0, 1088 * MIB]
    assert process.ask(f"cu.cuMemUnmap({at}, ctypes.c_size_t(1 << 30)), marks(20)") == [1, [21] * 3], "not a part"
    before = free_bytes(process)
    assert process.ask(f"cu.cuMemUnmap({at}, n)") == 0
    assert free_bytes(process) - before == 1088 * MIB


def test_memory_that_a_program_handed_to_others_stays_where_it_is(start: Start) -> None:
    held = start()
    process = held.process
    process.ask("create(20 << 20, exported=1), alloc(30 << 20), mark(0, 9), mark(1, 8)")
    export = "cu.cuMemExportToShareableHandle(ctypes.byref(ctypes.c_int()), ctypes.c_uint64(handles[0]), 1, 0)"
    assert process.ask(export) == 0
    assert process.ask("ours.gpuckpt_parkable()") == 30 * MIB
    held.parks()
    run_on(process.run_dir, process.pid)
    assert process.ask("marks(0)") == [9] * 3
    held.comes_back()
    assert process.ask("marks(0), marks(1)") == [[9] * 3, [8] * 3]


def test_what_is_asked_about_memory_is_answered_for_ours_and_by_the_driver_for_other(start: Start) -> None:
    process = start().process
    process.ask("alloc(5 << 20), alloc(1 << 10), create(20 << 20, exported=1)")
    (block, _), (small, _), (mapped, _) = process.ask("blocks")
    address, size = "ctypes.c_uint64(a)", "ctypes.c_size_t()"
    asked = (
        f"(lambda base, size, a: [cu.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), {address}),"
        f" base.value, size.value])(ctypes.c_uint64(), {size}, "
    )
    assert process.ask(f"{asked}{block + 4 * MIB})") == [0, block, 6 * MIB]
    assert process.ask(f"{asked}{small})")[0] == 8, "the driver's"
    share = "(lambda a: cu.cuIpcGetMemHandle(ctypes.create_string_buffer(64), ctypes.c_uint64(a)))"
    assert process.ask(f"{share}({block}), {share}({small})") == [0, 9]
    pitched = (
        "(lambda width, height, a, pitch: [cu.cuMemAllocPitch_v2(ctypes.byref(a), ctypes.byref(pitch),"
        " ctypes.c_size_t(width), ctypes.c_size_t(height), 4), pitch.value])"
    )
    new = f"ctypes.c_uint64(), {size}"
    assert process.ask(f"{pitched}(1000, 10, {new})")[0] == 7, "the driver's"
    assert process.ask(f"{pitched}(1000, 8192, {new}), ours.gpuckpt_parkable()") == [[0, 1024], 34 * MIB]
    retained = (
        "(lambda h, a: [cu.cuMemRetainAllocationHandle(ctypes.byref(h), ctypes.c_void_p(a)), h.value == handles[0]])"
    )
    assert process.ask(f"{retained}(ctypes.c_uint64(), {mapped})") == [0, True]
    properties = "(lambda p, h: [cu.cuMemGetAllocationPropertiesFromHandle(p, ctypes.c_uint64(h)), p[1], p[2], p[3]])"
    assert process.ask(f"{properties}((ctypes.c_int * 8)(), handles[0])") == [0, 1, 1, 0]
    # It is named twice now, so it lives until both names are given up, as its mapping is.
    release = "cu.cuMemRelease(ctypes.c_uint64(handles[0]))"
    assert process.ask(f"{release}, mark(2, 5), {release}, marks(2), {release}") == [0, None, 0, [5] * 3, 1]
    assert process.ask("cu.cuMulticastBindMem(*[ctypes.c_uint64(1)] * 6)") == 10, "the driver's"


def test_what_is_in_a_multicast_object_stays_where_it_is(start: Start) -> None:
    process = start().process
    process.ask("alloc(4 << 20), alloc(8 << 20)")
    bind = "cu.cuMulticastBindAddr(*map(ctypes.c_uint64, (%d, 0, blocks[0][0] + 4096, 4096, 0)))"
    assert process.ask(f"{bind % 2}, ours.gpuckpt_parkable()") == [1, 12 * MIB], "it failed"
    assert process.ask(f"{bind % 1}, ours.gpuckpt_parkable()") == [0, 8 * MIB]


@pytest.mark.parametrize("free", [0, 100 * MIB, GIB], ids=["none", "some", "all"])
def test_the_gpu_need_not_have_room_for_anything_twice(start: Start, free: int) -> None:
    held = start(free=600 * MIB + free)
    process = held.process
    process.ask("alloc(280 << 20), [alloc(16 << 20) for _ in range(16)], [mark(n, n + 1) for n in range(17)]")
    held.parks()
    held.comes_back()
    assert process.ask("[marks(n) for n in range(17)]") == [[n + 1] * 3 for n in range(17)]


IN_CHILD = """
def in_child():
    if not (child := os.fork()):
        os._exit(cu.cuMemFree_v2(ctypes.c_uint64(1 << 40)))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""


def test_python_runs_on_while_the_memory_is_away_and_a_call_with_pythons_lock_goes_on_later(start: Start) -> None:
    held = start()
    process = held.process
    process.ask("alloc(32 << 20), alloc(32 << 20), mark(0, 7), mark(1, 8)")
    parking = held.parks()
    run_on(process.run_dir, process.pid)
    assert process.ask("'echo'") == "echo"
    # A forked child waits for none of its parent's threads: the driver refuses what it asks for.
    assert process.ask(f"exec({IN_CHILD!r}), in_child()") == [None, 1]
    parking.finish_copy()
    # As a thread does that has Python's lock in the call.
    process.begin("ctypes.PyDLL('libcuda.so.1').cuMemFree_v2(ctypes.c_uint64(blocks[1][0]))")
    answers: list[object] = []
    reader = threading.Thread(target=lambda: answers.append(process.answer()))
    reader.start()
    with giving_back({process.pid: parking}):
        pass
    reader.join(30)
    assert answers == [0]
    assert process.ask("marks(0)") == [7] * 3


def parks_and_may_run(held: HeldProcess, before_parking: Callable[[], object] | None = None) -> bool:
    """Park the memory of a process, see whether it runs before it is let go, and give its memory back.

    `before_parking` is called when the gate is shut.
    """
    if held.parking is None:
        held.shows()
    assert held.parking is not None
    assert held.parking.halt(held.process.pid)
    held.process.gate.touch()
    if before_parking is not None:
        before_parking()
    assert held.parking.park(held.process.pid, lambda parked: None)
    runs = held.parking.let_run()
    if runs:
        assert held.process.ask("'echo'") == "echo"
    held.parking.let_go()
    held.comes_back()
    held.process.gate.unlink()
    return runs


def test_a_process_runs_on_where_no_thread_of_it_is_in_a_call(start: Start) -> None:
    held = start()
    process = held.process
    process.ask("alloc(32 << 20), mark(0, 7)")
    assert parks_and_may_run(held)
    process.in_a_call.touch()
    process.ask("beside(lambda: cu.cuMemsetD16_v2(*[ctypes.c_uint64(0)] * 3))")
    reached = process.in_a_call.with_name(f"{process.in_a_call.name}.reached")
    wait_until(reached.exists)
    assert not parks_and_may_run(held)
    process.in_a_call.unlink()
    assert process.answer() == 0
    assert parks_and_may_run(held)
    assert process.ask("marks(0)") == [7] * 3


def test_a_process_runs_on_while_it_gives_up_what_it_has_handed_over(start: Start) -> None:
    held = start()
    process = held.process
    process.ask("[alloc(32 << 20) for _ in range(3)], [mark(n, n + 7) for n in range(3)]")
    held.shows()
    parking = held.parking
    assert parking is not None
    assert parking.halt(process.pid)
    process.gate.touch()
    process.releases.touch()
    with ThreadPoolExecutor(1) as beside:
        parked = beside.submit(parking.park, process.pid, lambda parked: None, lambda: None)
        try:
            wait_until(process.releases.with_name("gpu.releases.reached").exists)
            assert process.ask("'echo'") == "echo"
            assert not parked.done()
        finally:
            process.releases.unlink()
        assert parked.result()
    assert parking.runs_since is not None
    held.comes_back()
    process.gate.unlink()
    assert process.ask("[marks(n) for n in range(3)]") == [[n + 7] * 3 for n in range(3)]


CALLS_ALL_THE_TIME = """
#include <unistd.h>
void call_all_the_time(int (*function)(size_t *, size_t *), volatile long *calls) {
  for (size_t free, total;; ++*calls, usleep(1000)) function(&free, &total);
}
"""
THREE_OF_THESE = """
calls = ctypes.c_long()
for _ in range(3):
    arguments = ctypes.cast(cu.cuMemGetInfo_v2, ctypes.c_void_p), ctypes.byref(calls)
    threading.Thread(target=ctypes.CDLL({!r}).call_all_the_time, args=arguments, daemon=True).start()
"""


def test_a_process_runs_on_where_threads_wait_at_the_gate(start: Start, tmp_path: Path) -> None:
    """As those do that need no Python to use the GPU.

    Some are found outside of it: that they were in the library a moment before is taken for a call.
    """
    library = tmp_path / "calls.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", library, "-x", "c", "-"], input=CALLS_ALL_THE_TIME, text=True, check=True
    )
    held = start()
    process = held.process
    process.ask(f"alloc(32 << 20), exec({THREE_OF_THESE.format(str(library))!r}, globals())")
    place = process.ask("ctypes.addressof(calls)")

    def calls() -> bytes:  # Python does not run in it
        with open(f"/proc/{process.pid}/mem", "rb") as memory:
            memory.seek(place)
            return memory.read(8)

    def all_wait() -> bool:
        before = calls()
        time.sleep(0.05)
        return calls() == before

    assert any(parks_and_may_run(held, lambda: wait_until(all_wait)) for _ in range(20))
    before = process.ask("calls.value")
    wait_until(lambda: process.ask("calls.value") > before)


ON_HOST = "cu.cuMemCreate(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(2 << 20), (ctypes.c_int * 8)(1, 0, 2, 0), 0)"


def test_a_process_with_memory_elsewhere_than_on_gpus_does_not_run_on(start: Start) -> None:
    """Its threads can touch that without a call."""
    held = start()
    held.process.ask(f"alloc(32 << 20), {ON_HOST}")
    assert not parks_and_may_run(held)


def test_pinned_memory_stays_where_it_is(start: Start) -> None:
    """The driver would take write-combined memory away while a process is frozen: nobody gets any."""
    process = start().process
    flags = "ctypes.c_uint.in_dll(ctypes.CDLL(driver), 'made_up_host_flags').value"
    asked = "cu.cuMemHostAlloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(4096), {})"
    assert process.ask(f"enter(), {asked.format(7)}, {flags}") == [None, 0, 3]
    assert process.ask(f"{asked.format(0)}, {flags}") == [0, 0]


def test_where_there_is_no_room_for_it_nothing_is_kept_and_it_comes_back_later(start: Start) -> None:
    held = start(free=GIB)
    process = held.process
    process.ask("[alloc(200 << 20) for _ in range(4)], [mark(n, n + 1) for n in range(4)]")
    parking = held.parks()
    run_on(process.run_dir, process.pid)
    parking.finish_copy()
    parking.rest()
    assert (
        process.ask(
            "[plain := ctypes.c_uint64(), cu.cuMemCreate(ctypes.byref(plain), ctypes.c_size_t(900 << 20),"
            " (ctypes.c_int * 8)(9), 0)][1]"
        )
        == 0
    )
    given_up = []
    with (
        pytest.raises(DriverError),
        giving_back({process.pid: parking}, otherwise=lambda: given_up.append(True)),
    ):
        pass
    assert given_up
    assert process.ask(STACKS) == [16, 1024]
    assert process.ask("ctypes.CDLL(driver).cuMemRelease(plain)") == 0
    held.comes_back()
    assert process.ask("[marks(n) for n in range(4)]") == [[n + 1] * 3 for n in range(4)]


OPENED = "ctypes.CDLL(driver).made_up_imports()"


def test_many_parts_come_back_from_few_pieces_where_the_gpu_has_room_for_both(start: Start) -> None:
    """The process opens what the holder has gathered, and copies; afterwards it has nothing of the holder's."""
    held = start(gpus=2)
    process = held.process
    process.ask("on(0), [alloc(20 << 20) for _ in range(70)], alloc(1088 << 20)")
    process.ask("on(1), [alloc(2 << 20) for _ in range(64)], on(0), [create(2 << 20) for _ in range(3)]")
    process.ask("[mark(n, n + 1) for n in range(0, 138, 2)]")
    # What the GPU cannot write where the program has it, or what the program has nowhere.
    read_only = "(ctypes.c_int * 3)(1, 0, 1), ctypes.c_size_t(1)"
    process.ask(f"cu.cuMemSetAccess(ctypes.c_uint64(blocks[136][0]), ctypes.c_size_t(2 << 20), {read_only})")
    process.ask("cu.cuMemUnmap(ctypes.c_uint64(blocks[137][0]), ctypes.c_size_t(2 << 20))")
    expected = [[n + 1 if n % 2 == 0 else 0] * 3 for n in range(137)]
    free, maps = process.ask("free()"), process.ask("ctypes.CDLL(driver).made_up_maps()")
    for times in (1, 2):
        held.parks().finish_copy()
        held.comes_back()
        assert process.ask("[marks(n) for n in range(137)]") == expected
        assert process.ask(OPENED) == 4 * times, "the pieces of two GPUs, 3 and 1"
        assert process.ask("ctypes.CDLL(driver).made_up_maps()") == maps, "a piece is open here"
        wait_until(lambda: process.ask("free()") == free, what="somebody has more memory on the GPUs than before")


def test_the_holder_fills_where_another_program_has_taken_the_room_for_both(start: Start) -> None:
    held = start()
    process = held.process
    process.ask("[alloc(2 << 20) for _ in range(70)], [mark(n, n + 1) for n in range(70)]")
    free = free_bytes(process)
    held.parks().finish_copy()  # the holder has its pieces
    process.is_full.touch()
    held.comes_back()
    assert not process.is_full.exists()
    assert process.ask("[marks(n) for n in range(70)]") == [[n + 1] * 3 for n in range(70)]
    assert process.ask(OPENED) == 1
    wait_until(lambda: free_bytes(process) == free, what="somebody has more memory on the GPU than before")


def test_a_context_has_the_least_local_memory_while_its_process_is_frozen(start: Start) -> None:
    held = start(gpus=2)
    process = held.process
    process.ask("on(0), alloc(4 << 20), mark(0, 5), on(1), alloc(4 << 20), mark(1, 6)")
    process.ask("on(1), cu.cuCtxSetLimit(0, ctypes.c_size_t(8192))")
    for _ in range(2):
        parking = held.parks()
        run_on(process.run_dir, process.pid)
        assert process.ask(STACKS) == [16, 16]
        parking.finish_copy()
        held.comes_back()
        assert process.ask(STACKS) == [1024, 8192]
    assert process.ask("marks(0), marks(1)") == [[5] * 3, [6] * 3]


def test_a_process_with_much_local_memory_parks_however_little_else_it_has(start: Start) -> None:
    held = start()
    process = held.process
    process.ask("alloc(2 << 20), mark(0, 5)")
    assert [size for _, size in parkable(process.run_dir, process.pid)] == [2 * MIB]
    process.ask("cu.cuCtxSetLimit(0, ctypes.c_size_t(2048))")
    told = parkable(process.run_dir, process.pid)
    assert [size for _, size in told] == [256 * MIB]
    parking = held.parks(told=[list(place) for place in told])
    run_on(process.run_dir, process.pid)
    assert process.ask(STACKS)[0] == 16
    parking.finish_copy()
    held.comes_back()
    assert process.ask("marks(0)") == [5] * 3


def test_a_process_can_be_asked_before_its_thread_has_begun(start: Start) -> None:
    """On a busy machine the library's thread may not run for a while."""
    process = start().process
    assert process.ask("cu.cuInit(0)") == 0  # under a debugger the library would leave the driver alone
    is_there = threading.Event()

    def hold_it() -> None:
        tracer = Tracer()
        tracer.seize(process.pid)
        process.begin("enter()")
        while not (thread := _thread_of(process)):
            call = tracer.next_call()
            assert call is not None
            if call.tid == process.pid:
                tracer.go_on(call)
        is_there.set()
        wait_until(lambda: "SigPnd:\t0000000000000000" not in (thread / "status").read_text(), what="it is not asked")
        # All threads go on when this one, which traces them, ends.

    holding = threading.Thread(target=hold_it)
    holding.start()
    assert is_there.wait(60)
    assert peer_access_asked_for(process.run_dir, process.pid) is False
    holding.join()


def _thread_of(process: Process) -> Path | None:
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    return next((task for task in tasks if (task / "comm").read_text() == f"{THREAD}\n"), None)


def test_memory_waits_for_room_for_local_memory_too(start: Start) -> None:
    held = start(free=GIB, gpus=2)
    process = held.process
    process.ask("alloc(200 << 20), mark(0, 5)")
    parking = held.parks()
    run_on(process.run_dir, process.pid)
    parking.finish_copy()
    parking.rest()
    take = "cu.cuMemCreate(ctypes.byref(plain), ctypes.c_size_t(1 << 30), (ctypes.c_int * 8)(9), 0)"
    assert process.ask(f"[plain := ctypes.c_uint64(), on(0), {take}][2]") == 0
    with pytest.raises(DriverError), giving_back({process.pid: parking}, otherwise=lambda: None):
        pass
    assert process.ask(STACKS) == [16, 1024]
    assert process.ask("ctypes.CDLL(driver).cuMemRelease(plain)") == 0
    held.comes_back()
    assert process.ask(STACKS) == [1024, 1024]
    assert process.ask("marks(0)") == [5] * 3


def test_a_holder_that_fails_while_it_fills_leaves_the_whole_file(start: Start) -> None:
    held = start()
    process = held.process
    process.ask("[alloc(2 << 20) for _ in range(70)], [mark(n, n + 1) for n in range(70)]")
    held.parks()
    process.no_imports.touch()
    began = time.monotonic()
    held.comes_back()
    assert time.monotonic() - began < ANSWERS, "it was noticed at once"
    assert process.ask("[marks(n) for n in range(70)]") == [[n + 1] * 3 for n in range(70)]


def test_the_file_does_where_the_holder_has_ended(start: Start) -> None:
    held = start()
    process = held.process
    process.ask("alloc(100 << 20), create(20 << 20), mark(0, 7), mark(1, 8)")
    parking = held.parks()
    parking.finish_copy()
    parking.do_without_holder()
    held.comes_back()
    assert process.ask("marks(0), marks(1)") == [[7] * 3, [8] * 3]


def test_more_than_there_is_is_the_drivers_own_error_and_leaves_nothing(start: Start) -> None:
    process = start(free=GIB).process
    assert process.ask("alloc(2 << 30)") == 2
    assert process.ask("create(2 << 30)") == 2
    assert free_bytes(process) == GIB
    assert process.ask("alloc(1 << 30)") == 0


def _blocks(process: Process) -> bytes:
    return b"".join(
        bytes.fromhex(process.ask(f"ctypes.string_at({address}, {size}).hex()"))
        for address, size in process.ask("blocks")
    )


def _hashes(data: bytes) -> list[bytes]:
    return [blake3(data[at : at + CHUNK]).digest() for at in range(0, len(data), CHUNK)]


def _found(known: list[bytes], put_back: Callable[[Path, bytes], None] = lambda *_: None) -> Elsewhere:
    return Elsewhere(b"".join(known), put_back)


def test_the_hash_made_on_a_gpu_is_the_stores(tmp_path: Path) -> None:
    """Its source, as plain C; and what is in the package was made of it."""
    source = Path(installed.__file__).parent / "freeze/vram_hashes.cu"
    library, data = tmp_path / "hashes.so", os.urandom(3 * CHUNK)
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), "-x", "c", str(source)], check=True)
    made = ctypes.create_string_buffer(3 * HASH)
    ctypes.CDLL(str(library)).hash_chunks(data, made, 3)
    assert made.raw == b"".join(_hashes(data))
    first, _ = source.with_suffix(".ptx").read_text().split("\n", 1)
    assert first.endswith(blake3(source.read_bytes()).hexdigest())


def test_what_is_known_and_zeros_are_not_copied_and_take_no_memory(start: Start) -> None:
    held = start()
    process = held.process
    process.ask("[alloc(2 + 2 * (n % 3) << 20) for n in range(12)]")
    process.ask("[mark(n, n + 1) for n in range(0, 12, 2)]")
    before = _blocks(process)
    hashes = _hashes(before)
    known = hashes[:6]
    parking = held.parks(_found(known))
    parking.finish_copy()
    assert parking.hashes == b"".join(hashes)
    held.comes_back()
    assert _blocks(process) == before
    new = 0
    with (held.memory / parking.parked.file).open("rb") as f:
        for key in hashes:
            chunk = f.read(CHUNK)
            is_copied = key not in known and any(chunk)
            assert blake3(chunk).digest() == key if is_copied else not any(chunk)
            new += is_copied
        assert not f.read()
        assert 0 < new < len(hashes)
        assert os.fstat(f.fileno()).st_blocks * 512 <= new * CHUNK


def test_a_gpu_without_room_for_anything_twice_has_all_copied(start: Start) -> None:
    """The holder gives up what it holds, so the file has to have all of it: also what was known."""
    held = start(free=30 * MIB)
    process = held.process
    process.ask("[alloc(6 << 20) for _ in range(4)]")
    process.ask("[mark(n, n + 1) for n in range(4)]")
    before = _blocks(process)
    held.parks(_found(_hashes(before)))
    held.comes_back()
    assert _blocks(process) == before


def test_the_memory_of_a_keeper_that_was_killed_is_whole(start: Start) -> None:
    held = start()
    process = held.process
    process.ask("[alloc(6 << 20) for _ in range(4)]")
    process.ask("[mark(n, n + 1) for n in range(4)]")
    before = _blocks(process)
    parking = held.parks(_found(_hashes(before)))
    parking.finish_copy()
    assert not (held.memory / parking.parked.file).exists()
    parking.close()  # all that the holder sees of it is the end of its input
    held.parking = Parking(held.folder, held.memory, str(held.memory), parking.parked, "kept")
    held.comes_back()
    assert _blocks(process) == before


def test_what_a_holder_that_was_killed_had_not_copied_is_read_from_where_it_is(start: Start) -> None:
    held = start()
    process = held.process
    process.ask("[alloc(6 << 20) for _ in range(4)]")
    process.ask("[mark(n, n + 1) for n in range(4)]")
    before = _blocks(process)
    hashes = _hashes(before)

    def put_back(file: Path, made: bytes) -> None:
        assert made == b"".join(hashes)
        with file.open("r+b") as f:
            f.write(before[: 4 * CHUNK])

    parking = held.parks(_found(hashes[:4], put_back))
    parking.finish_copy()
    assert parking.holder is not None
    psutil.Process(parking.holder).kill()
    wait_until(lambda: parking.holder is None)
    held.comes_back()
    assert _blocks(process) == before


ON_TWO = "[(on(n % 2), alloc((2 + 2 * (n % 3) << 20) if n else 300 << 20)) for n in range(150)]"
"""One of 300 MiB, which is parked in two parts, among many, on two GPUs."""
MAPS = "ctypes.CDLL(driver).made_up_maps()"
MARK = "[mark(n, n % 250 + 1) for n in range(150)]"
MARKS = [[n % 250 + 1] * 3 for n in range(150)]
OWN, BOTH = {0: [0b01] * 2, 1: [0b10] * 2}, [0b11] * 2


def test_memory_of_two_gpus_comes_back_to_each_with_access_for_both(start: Start) -> None:
    held = start(gpus=2)
    process = held.process
    process.ask(f"{ON_TWO}, {MARK}")
    sizes = [sum(size for _, size in process.ask("blocks")[gpu::2]) for gpu in (0, 1)]
    assert [size for _, size in process.ask("places()")] == sizes
    assert process.ask(MAPS) == 151, "one has two parts"
    free = process.ask("free()")
    assert [(1 << 40) - left for left in free] == sizes
    for _ in range(2):
        held.parks()
        held.comes_back()
        assert process.ask("[access(n) for n in range(150)]") == [BOTH] * 150
        assert process.ask("[marks(n) for n in range(150)]") == MARKS
        wait_until(lambda: process.ask("free()") == free, what="the holder has memory on a GPU")
    process.ask("[cu.cuMemFree_v2(ctypes.c_uint64(a)) for a, _ in blocks]")
    wait_until(lambda: process.ask("free()") == [1 << 40] * 2, what="the holder has memory on a GPU")


def test_a_gpu_has_access_to_anothers_memory_once_it_has_memory_itself(start: Start) -> None:
    process = start(gpus=2).process
    process.ask("on(1), alloc(4 << 20), alloc(4 << 20)")
    assert process.ask("access(0)") == OWN[1]
    process.ask("on(0), alloc(1 << 10)")
    assert process.ask("access(0), access(1)") == [BOTH] * 2


def test_to_free_a_block_waits_for_all_gpus_that_may_use_it(start: Start) -> None:
    process = start(gpus=3).process
    process.ask("on(2), alloc(4 << 20), on(0), alloc(4 << 20)")
    waits = "[ctypes.CDLL(driver).made_up_waits(gpu) > 0 for gpu in range(3)]"
    assert process.ask(f"cu.cuMemFree_v2(ctypes.c_uint64(blocks[0][0])), {waits}") == [0, [True, False, True]]


LARGE = "cu.cuMemCreate(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(600 << 20), (ctypes.c_int * 8)(9), 0)"
PEERS = "[ctypes.CDLL(driver).made_up_peer(a, b) for a, b in ((0, 1), (1, 0))]"


def test_the_drivers_own_peer_access_is_off_while_memory_is_parked(start: Start) -> None:
    """Nobody else sees to it in a job; the blocks' own access goes and comes with them."""
    held = start(gpus=2)
    process = held.process
    process.ask("on(0), alloc(4 << 20), cu.cuCtxEnablePeerAccess(ctypes.c_void_p(2), 0), on(1), alloc(4 << 20)")
    process.ask("create(20 << 20), mark(0, 5), mark(1, 6)")
    both = "(ctypes.c_int * 6)(1, 0, 3, 1, 1, 3), ctypes.c_size_t(2)"
    process.ask(f"cu.cuMemSetAccess(ctypes.c_uint64(blocks[2][0]), ctypes.c_size_t(blocks[2][1]), {both})")
    process.ask("cu.cuMemExportToShareableHandle(ctypes.byref(ctypes.c_int()), ctypes.c_uint64(handles[0]), 1, 0)")
    assert process.ask(f"{PEERS}, [access(n) for n in range(3)]") == [[1, 0], [BOTH] * 3]
    held.parks()
    run_on(process.run_dir, process.pid)
    nobody, own = [0] * 2, OWN[0]
    assert process.ask(f"{PEERS}, [access(n) for n in range(3)]") == [[0, 0], [nobody, nobody, own]]
    held.comes_back()
    assert process.ask(f"{PEERS}, [access(n) for n in range(3)]") == [[1, 0], [BOTH] * 3]
    assert process.ask("marks(0), marks(1)") == [[5] * 3, [6] * 3]


AGAIN = """
def again(n, gpu):  # at other addresses, for this GPU alone, as NCCL does with what another of its GPUs has
    handle, address = ctypes.c_uint64(), ctypes.c_uint64()
    size = ctypes.c_size_t(blocks[n][1])
    said = [cu.cuMemRetainAllocationHandle(ctypes.byref(handle), ctypes.c_void_p(blocks[n][0]))]
    cu.cuMemAddressReserve(ctypes.byref(address), size, *[ctypes.c_size_t(0)] * 3)
    said.append(cu.cuMemMap(address, size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0)))
    said.append(cu.cuMemSetAccess(address, size, (ctypes.c_int * 3)(1, gpu, 3), ctypes.c_size_t(1)))
    said.append(cu.cuMemRelease(handle))
    blocks.append((address.value, size.value))
    return said
"""


def test_memory_that_is_mapped_twice_comes_back_at_both_places_with_the_access_of_each(start: Start) -> None:
    held = start(gpus=2)
    process = held.process
    process.ask(f"exec({AGAIN!r}), on(0), alloc(4 << 20), create(20 << 20), create(300 << 20)")
    assert process.ask("[again(n, 1) for n in (1, 2)]") == [[0] * 4] * 2
    process.ask("mark(3, 7), mark(4, 8)")
    expected = [OWN[0], OWN[0], OWN[1], OWN[1]]
    assert process.ask("[access(n) for n in (1, 2, 3, 4)]") == expected
    for _ in range(2):
        held.parks()
        held.comes_back()
        assert process.ask("[access(n) for n in (1, 2, 3, 4)]") == expected
        assert process.ask("[marks(n) for n in (1, 2, 3, 4)]") == [[7] * 3, [8] * 3] * 2
        process.ask("mark(1, 7)")
        assert process.ask("marks(3)") == [7] * 3, "it is the same memory at both"


def test_between_several_gpus_what_can_be_exported_is_parked_but_for_small_pieces(start: Start) -> None:
    """NCCL's, when its GPUs are in one process; torch's and JAX's are larger."""
    held = start(gpus=2)
    process = held.process
    process.ask(f"exec({AGAIN!r}), on(0), create(10 << 20, exported=1), alloc(4 << 20), mark(0, 7), mark(1, 8)")
    assert process.ask("ours.gpuckpt_parkable(), handles[0] < 1 << 16") == [4 * MIB, True], "its handle is the driver's"
    access, handle = "(ctypes.c_int * 3)(1, 1, 3), ctypes.c_size_t(1)", "ctypes.c_uint64(handles[0])"
    at, size = "address := ctypes.c_uint64()", "ctypes.c_size_t(10 << 20)"
    process.ask(f"cu.cuMemAddressReserve(ctypes.byref({at}), {size}, *[ctypes.c_size_t(0)] * 3)")
    assert process.ask(f"cu.cuMemMap(address, {size}, ctypes.c_size_t(0), {handle}, ctypes.c_uint64(0))") == 0
    assert process.ask(f"cu.cuMemSetAccess(address, {size}, {access}), blocks.append((address.value, 10 << 20))") == [
        0,
        None,
    ]
    before = process.ask(MAPS)
    process.ask("create(20 << 20, exported=1), create(600 << 20, exported=1), mark(3, 9), mark(4, 6)")
    assert process.ask("ours.gpuckpt_parkable()") == 624 * MIB
    assert process.ask(MAPS) == before + 4, "in parts of 256 MiB, so that access comes back"
    held.parks()
    run_on(process.run_dir, process.pid)
    assert process.ask("marks(0), access(0), marks(2), access(2)") == [[7] * 3, OWN[0], [7] * 3, OWN[1]]
    held.comes_back()
    assert process.ask("[marks(n) for n in (1, 2, 3, 4)]") == [[8] * 3, [7] * 3, [9] * 3, [6] * 3]


def test_peer_access_beside_a_large_piece_of_the_drivers_is_not_parked(start: Start) -> None:
    """The driver would not give it back."""
    held = start(gpus=2)
    process = held.process
    process.ask("on(0), alloc(4 << 20), cu.cuCtxEnablePeerAccess(ctypes.c_void_p(2), 0), mark(0, 5)")
    assert process.ask(LARGE) == 0
    with pytest.raises(AssertionError):
        held.parks()
    assert process.ask(f"{PEERS}, access(0), marks(0)") == [[1, 0], BOTH, [5] * 3]


def test_access_that_was_asked_for_is_given(start: Start) -> None:
    process = start(gpus=3).process
    process.ask("on(2), alloc(4 << 20), on(0), cu.cuCtxEnablePeerAccess(ctypes.c_void_p(3), 0)")
    assert process.ask("access(0), cu.cuCtxGetDevice(at := ctypes.byref(ctypes.c_int())), at._obj.value") == [
        [0b101] * 2,
        0,
        0,
    ]


def test_what_is_not_parked_has_access_again_afterwards_and_what_is_made_meanwhile_later(start: Start) -> None:
    process = start(gpus=2).process
    process.ask("on(0), alloc(4 << 20), on(1), alloc(4 << 20), create(20 << 20)")
    both = "(ctypes.c_int * 6)(1, 0, 3, 1, 1, 3), ctypes.c_size_t(2)"
    set_access = (
        "(lambda n: cu.cuMemSetAccess(ctypes.c_uint64(blocks[n][0]), ctypes.c_size_t(blocks[n][1]), " + both + "))"
    )
    assert process.ask(f"{set_access}(2), access(2)") == [0, BOTH]
    process.gate.touch()
    assert keep_gpus_apart(process.run_dir, process.pid, 5.0) == 0
    process.ask(f"alloc(4 << 20), create(20 << 20), {set_access}(4)")
    own = [OWN[0], OWN[1], OWN[0], OWN[1], OWN[0]]
    assert process.ask("[access(n) for n in range(5)]") == own
    bring_gpus_together(process.run_dir, process.pid)
    assert process.ask("[access(n) for n in range(5)]") == [BOTH] * 5


def test_gpus_are_not_kept_apart_when_the_gate_is_open_or_access_would_not_come_back(start: Start) -> None:
    process = start(gpus=2).process
    process.ask("on(0), alloc(4 << 20), on(1), alloc(4 << 20)")
    assert peer_access_asked_for(process.run_dir, process.pid) is False
    process.ask("on(0), cu.cuCtxEnablePeerAccess(ctypes.c_void_p(2), 0)")
    assert peer_access_asked_for(process.run_dir, process.pid) is True
    now = process.ask(f"{PEERS}, access(0), access(1)")
    assert now == [[1, 0], BOTH, BOTH]
    assert keep_gpus_apart(process.run_dir, process.pid, 5.0) == -1, "a call may be under way"
    assert process.ask(f"{PEERS}, access(0), access(1)") == now
    process.gate.touch()
    assert keep_gpus_apart(process.run_dir, process.pid, 5.0) == 0
    assert process.ask(f"{PEERS}, access(0), access(1)") == [[0, 0], OWN[0], OWN[1]]
    assert keep_gpus_apart(process.run_dir, process.pid, 5.0) == 0, "by a keeper that does not know of it"
    bring_gpus_together(process.run_dir, process.pid)
    assert process.ask(f"{PEERS}, access(0), access(1)") == now
    assert process.ask(LARGE) == 0
    assert keep_gpus_apart(process.run_dir, process.pid, 5.0) == 801
    assert process.ask(f"{PEERS}, access(0), access(1)") == now


@pytest.mark.parametrize("free", [0, 20 * MIB, GIB], ids=["none", "some", "all"])
def test_two_gpus_need_not_have_room_for_anything_twice(start: Start, free: int) -> None:
    held = start(free=600 * MIB + free, gpus=2)
    process = held.process
    process.ask(f"{ON_TWO}, {MARK}")
    with_room = [600 * MIB + free - size for _, size in process.ask("places()")]
    process.ask(f"[(on(n), alloc(left - {free})) for n, left in enumerate({with_room}) if left > {free}]")
    assert process.ask("free()") == [free] * 2
    held.parks(_found([]))
    held.comes_back()
    assert process.ask("[marks(n) for n in range(150)]") == MARKS


def test_of_two_gpus_what_is_known_and_zeros_are_not_copied(start: Start) -> None:
    held = start(gpus=2)
    process = held.process
    process.ask("[(on(n % 2), alloc(2 + 2 * (n % 3) << 20)) for n in range(12)]")
    process.ask("[mark(n, n + 1) for n in range(0, 12, 3)]")
    in_file = [n for gpu in (0, 1) for n in range(gpu, 12, 2)]
    blocks = [_hashes(bytes.fromhex(one)) for one in process.ask("[ctypes.string_at(*b).hex() for b in blocks]")]
    hashes = [key for n in in_file for key in blocks[n]]
    places = process.ask("places()")
    process.ask("on(0), alloc(6 << 20)")
    # More on the first GPU when it was asked than when it is parked.
    told = [[gpu, size + (6 << 20 if n == 0 else 0)] for n, (gpu, size) in enumerate(places)]
    assert process.ask("places()") == told
    process.ask("cu.cuMemFree_v2(ctypes.c_uint64(blocks.pop()[0]))")
    parking = held.parks(_found(blocks[0]), told)
    parking.finish_copy()
    first = places[0][1] // CHUNK
    zeros = [blake3(bytes(CHUNK)).digest()] * 3
    assert parking.hashes == b"".join([*hashes[:first], *zeros, *hashes[first:]])
    held.comes_back()
    assert process.ask("[marks(n) for n in range(0, 12, 3)]") == [[n + 1] * 3 for n in range(0, 12, 3)]


def test_more_on_a_gpu_than_was_said_is_not_parked(start: Start) -> None:
    held = start(gpus=2)
    process = held.process
    process.ask("on(0), alloc(4 << 20), on(1), alloc(4 << 20), mark(0, 5), mark(1, 6)")
    told = process.ask("places()")
    process.ask("on(0), alloc(4 << 20)")
    with pytest.raises(AssertionError):
        held.parks(told=told)
    assert process.ask("marks(0), marks(1)") == [[5] * 3, [6] * 3]


def test_the_file_does_for_two_gpus(start: Start) -> None:
    held = start(gpus=2)
    process = held.process
    process.ask(f"{ON_TWO}, {MARK}")
    parking = held.parks()
    parking.finish_copy()
    parking.do_without_holder()
    held.comes_back()
    assert process.ask("[marks(n) for n in range(150)]") == MARKS


def test_gpus_that_cannot_access_each_other_are_left_to_the_driver(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MADE_UP_APART", "yes")
    process = start(gpus=2).process
    process.ask("alloc(4 << 20), on(1), alloc(4 << 20), create(20 << 20)")
    assert process.ask("ours.gpuckpt_parkable()") == 0


def _host_memory(held: HeldProcess) -> int:
    """Return how many bytes of memory the files of what is parked take."""
    return sum(file.stat().st_blocks * 512 for file in held.memory.iterdir())


@pytest.mark.parametrize("exported", [0, 1], ids=["", "exportable"])
def test_only_what_is_in_use_of_a_large_reservation_takes_memory_and_room(start: Start, exported: int) -> None:
    """As JAX makes one: three quarters of the GPU, of which little is ever touched, and which it could export."""
    held = start(free=1300 * MIB)
    process = held.process
    assert process.ask(f"create(1088 << 20, {exported})") == 0
    assert process.ask(MAPS) == 2, "it leaves the GPU part by part"
    process.ask("mark(0, 7)")
    assert held.shows() == Seen(in_use=3 * CHUNK, new=3 * CHUNK)
    assert _host_memory(held) <= 4 * CHUNK
    parking = held.parks()
    parking.finish_copy()
    assert parking.hashes.count(blake3(bytes(CHUNK)).digest()) == 1088 * MIB // CHUNK - 3
    assert _host_memory(held) <= 4 * CHUNK
    held.comes_back()
    assert process.ask("marks(0)") == [7] * 3
    file = held.memory / parking.parked.file
    assert file.stat().st_size == 1088 * MIB
    assert _host_memory(held) <= 4 * CHUNK


def test_parts_in_which_all_is_zero_leave_the_gpu_when_the_process_is_checkpointed(start: Start) -> None:
    held = start(free=1300 * MIB)
    process = held.process
    assert process.ask("create(1088 << 20, 1), ctypes.memset(blocks[0][0], 7, 16)")[0] == 0
    parking = held.parks()
    run_on(process.run_dir, process.pid)
    before = free_bytes(process)
    parking.give_up_zeros()
    wait_until(lambda: free_bytes(process) >= before + 64 * MIB, what="the second part is still on the GPU")
    held.comes_back()
    assert process.ask("marks(0)") == [7, 0, 0]


@pytest.mark.parametrize("holder", [True, False], ids=["by the holder", "by the process itself"])
def test_a_file_with_holes_brings_back_zeros_where_the_gpus_memory_was_another_s(start: Start, *, holder: bool) -> None:
    held = start()
    process = held.process
    process.ask("create(80 << 20), alloc(40 << 20), mark(1, 5)")
    parking = held.parks()
    run_on(held.folder, process.pid)
    parking.finish_copy()
    parking.rest()
    process.is_used.touch()
    if not holder:
        parking.do_without_holder()
    held.comes_back()
    assert process.ask("marks(0), marks(1)") == [[0] * 3, [5] * 3]
    assert _host_memory(held) <= 4 * CHUNK


@pytest.mark.parametrize(
    ("change", "size"),
    [
        ("cu.cuMemFree_v2(ctypes.c_uint64(blocks.pop(0)[0]))", 30),
        ("[cu.cuMemFree_v2(ctypes.c_uint64(blocks.pop(0)[0])), alloc(20 << 20), mark(2, 9)][0]", 50),
        ("alloc(2 << 20)", None),
    ],
    ids=["freed", "other", "more"],
)
def test_what_changes_after_it_was_shown_is_parked_as_it_is_then(start: Start, change: str, size: int | None) -> None:
    held = start()
    process = held.process
    process.ask("alloc(20 << 20), alloc(18 << 20), alloc(12 << 20), mark(0, 1), mark(1, 2), mark(2, 3)")
    held.shows()
    assert process.ask(change) == 0
    before = _blocks(process)
    if size is None:
        # There is no place for more than was asked for: the driver copies all of it then.
        assert held.parking is not None
        assert held.parking.halt(process.pid)
        assert not held.parking.park(process.pid, lambda parked: None)
        assert held.parking.holder is None, "nobody has it open while the driver makes a checkpoint"
    else:
        held.parks()
        held.comes_back()
    assert _blocks(process) == before
    assert process.ask("[cu.cuMemFree_v2(ctypes.c_uint64(a)) for a, _ in blocks]") == [0] * len(process.ask("blocks"))
    wait_until(lambda: free_bytes(process) == 1 << 40, what="the holder has memory on the GPU")


def test_what_is_given_up_while_it_is_shown_can_be_had_again_at_once(start: Start) -> None:
    """A cell that runs while a save is prepared has the GPU to itself, however full it is."""
    held = start(free=100 * MIB)
    process = held.process
    process.ask("alloc(40 << 20), alloc(40 << 20), mark(0, 1), mark(1, 2)")
    held.shows()
    assert process.ask("cu.cuMemFree_v2(ctypes.c_uint64(blocks.pop(0)[0]))") == 0
    assert process.ask("alloc(60 << 20), mark(1, 3)") == [0, None]
    assert process.ask("[marks(n) for n in range(2)]") == [[2] * 3, [3] * 3]


def test_memory_of_which_more_is_in_use_by_then_is_saved_all_the_same(start: Start) -> None:
    held = start()
    process = held.process
    process.ask("create(256 << 20), mark(0, 1)")
    assert held.shows() == Seen(3 * CHUNK, 3 * CHUNK)
    process.ask("ctypes.memset(blocks[0][0] + (64 << 20), 5, 64 << 20)")
    before = process.ask("ctypes.string_at(blocks[0][0] + (100 << 20), 8).hex()")
    parking = held.parks()
    parking.finish_copy()
    assert _host_memory(held) >= 64 << 20
    held.comes_back()
    assert process.ask("ctypes.string_at(blocks[0][0] + (100 << 20), 8).hex()") == before
    assert process.ask("marks(0)") == [1] * 3


def test_memory_that_there_is_no_room_for_by_then_is_given_back(start: Start) -> None:
    held = start()
    process = held.process
    process.ask("create(256 << 20), mark(0, 1)")
    held.shows()
    assert held.parking is not None
    assert held.parking.holder is not None
    process.ask("ctypes.memset(blocks[0][0] + (64 << 20), 5, 64 << 20)")
    with memory_cgroup(300 << 20) as group:
        group.join(held.parking.holder)
        parking = held.parks()
        with pytest.raises(DriverError, match="host memory"):
            parking.finish_copy()
        held.comes_back()  # the holder ends with it
    assert process.ask("marks(0)") == [1] * 3
    assert process.ask("ctypes.string_at(blocks[0][0] + (100 << 20), 8).hex()") == "05" * 8
