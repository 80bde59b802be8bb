"""Stream-ordered memory: blocks come from memory that can be parked, and nobody gets what may still be in use.

The driver is made up: work in its streams is done when the test says so. `tests/gpu` sees that the real one agrees.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_up import Process
from test_parked_memory import HeldProcess

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="written for x86-64"),
    pytest.mark.timeout(300),
]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SLOT = 32 * MIB

PROGRAM = """
u64, size_t = ctypes.c_uint64, ctypes.c_size_t
def streams(count):
    made = [ctypes.c_void_p() for _ in range(count)]
    for s in made: cu.cuStreamCreate(ctypes.byref(s), 1)
    return made
def take(size, s=None, pool=None):
    at = u64()
    if pool is None: result = cu.cuMemAllocAsync(ctypes.byref(at), size_t(size), s)
    else: result = cu.cuMemAllocFromPoolAsync(ctypes.byref(at), size_t(size), pool, s)
    return at.value if result == 0 else -result
def give(at, s=None): return cu.cuMemFreeAsync(u64(at), s)
def work(s): return cu.cuMemsetD8Async(u64(0), 0, size_t(1), s)
def progress(s):
    both = (u64 * 2)()
    cu.cuStreamGetPriority(s, both)
    return list(both)
def waited(s):
    all = (u64 * 64)()
    cu.cuStreamGetFlags(s, all)
    return list(all)
def stream_id(s):
    at = u64()
    cu.cuStreamGetId(s, ctypes.byref(at))
    return at.value - 1
def done(s, upto): return cu.cuStreamGetAttribute(s, upto, None)
def default_pool():
    pool = ctypes.c_void_p()
    cu.cuDeviceGetDefaultMemPool(ctypes.byref(pool), 0)
    return pool
def pool_of(most=0, handle_types=0):
    pool, props = ctypes.c_void_p(), (u64 * 16)()
    ctypes.cast(props, ctypes.POINTER(ctypes.c_int))[0] = 1
    ctypes.cast(props, ctypes.POINTER(ctypes.c_int))[1] = handle_types
    ctypes.cast(props, ctypes.POINTER(ctypes.c_int))[2] = 1
    props[3] = most
    cu.cuMemPoolCreate(ctypes.byref(pool), props)
    return pool
def told(pool, attribute):
    value = u64()
    cu.cuMemPoolGetAttribute(pool, attribute, ctypes.byref(value))
    return value.value
def tell(pool, attribute, value): return cu.cuMemPoolSetAttribute(pool, attribute, ctypes.byref(u64(value)))
"""
KEEP = 2**64 - 1
RESERVED, RESERVED_HIGH, USED, USED_HIGH = 5, 6, 7, 8


class Pools:
    """A process that allocates in streams `s[0]` to `s[3]`, and keeps the default pool's memory."""

    def __init__(self, process: Process) -> None:
        self.process = process
        process.ask(f"exec({PROGRAM!r}, globals())")
        process.ask("[globals().update(s=streams(4), p=default_pool()), tell(p, 4, 2**64 - 1)][1]")

    def ask(self, source: str) -> object:
        return self.process.ask(source)

    def number(self, source: str) -> int:
        value = self.process.ask(source)
        assert isinstance(value, int), value
        return value


@pytest.fixture
def pools(tmp_path: Path, made_up_driver: Path) -> Iterator[Pools]:
    process = Process(tmp_path, made_up_driver, 1 * GIB)
    yield Pools(process)
    process.close()


def test_what_is_freed_in_a_stream_is_there_for_it_at_once(pools: Pools) -> None:
    first = pools.number("take(4 << 20, s[0])")
    assert first > 0
    assert pools.ask(f"work(s[0]), give({first}, s[0]), take(4 << 20, s[0])") == [0, 0, first]
    assert pools.ask("told(p, 5), told(p, 7), ours.gpuckpt_parkable()") == [SLOT, 4 * MIB, SLOT]


def test_another_stream_gets_it_when_the_work_before_is_done(pools: Pools) -> None:
    first = pools.number("take(30 << 20, s[0])")
    pools.ask(f"take(1 << 20, s[1]), work(s[0]), give({first}, s[0])")
    second = pools.number("take(30 << 20, s[1])")
    assert second > 0
    assert abs(second - first) >= 30 * MIB
    pools.ask("done(s[0], 1)")
    assert pools.ask("take(30 << 20, s[2])") == first


def test_a_stream_that_is_idle_is_not_waited_for(pools: Pools) -> None:
    first = pools.number("take(30 << 20, s[0])")
    assert pools.ask(f"give({first}, s[0]), take(30 << 20, s[1])") == [0, first]


def test_what_is_put_together_with_idle_memory_is_still_waited_for(pools: Pools) -> None:
    first, second = pools.number("take(10 << 20, s[0])"), pools.number("take(10 << 20, s[0])")
    assert pools.ask(f"cu.cuMemFree_v2(u64({first})), work(s[0]), give({second}, s[0])") == [0, 0, 0]
    assert pools.number("take(20 << 20, s[1])") >= second + 10 * MIB
    assert pools.ask("take(20 << 20, s[0])") == first


def test_rather_than_fail_one_stream_waits_for_another(pools: Pools) -> None:
    first = pools.number("take(900 << 20, s[0])")
    pools.ask(f"take(1 << 20, s[1]), work(s[0]), give({first}, s[0])")
    assert pools.ask("take(900 << 20, s[1])") == first
    assert pools.ask("waited(s[1])[stream_id(s[0])], progress(s[0])") == [1, [1, 0]], "the processor waited"


def test_free_memory_in_pieces_is_put_together_elsewhere(pools: Pools) -> None:
    pools.ask("globals().update(a=[take(32 << 20, s[0]) for _ in range(30)])")
    pools.ask("[work(s[0])] + [give(x, s[0]) for x in a[::2]]")
    assert pools.number("take(400 << 20, s[0])") > 0
    assert pools.ask("told(p, 5)") <= GIB  # type: ignore[operator]


def test_a_stream_that_is_destroyed_is_still_waited_for(pools: Pools) -> None:
    first = pools.number("take(30 << 20, s[0])")
    pools.ask(f"take(1 << 20, s[1]), work(s[0]), give({first}, s[0]), cu.cuStreamDestroy_v2(s[0])")
    assert abs(pools.number("take(30 << 20, s[1])") - first) >= 30 * MIB
    pools.ask("cu.cuCtxSynchronize()")
    assert pools.ask("take(30 << 20, s[1])") == first


def test_a_context_is_waited_for_when_it_ends_and_not_when_one_of_those_who_have_it_gives_it_up(pools: Pools) -> None:
    pools.ask("[cu.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0) for _ in range(2)]")
    pools.ask("work(s[0]), give(take(30 << 20, s[0]), s[0])")
    release = "cu.cuDevicePrimaryCtxRelease_v2(0), progress(s[0])"
    assert pools.ask(release) == [0, [1, 0]]
    assert pools.ask(release) == [0, [1, 1]]


def test_a_thread_s_own_stream_is_waited_for_by_others(pools: Pools) -> None:
    pools.ask("globals().update(own=ctypes.c_void_p(2))")
    first = pools.number("take(30 << 20, own)")
    pools.ask(f"take(1 << 20, s[1]), work(own), give({first}, own)")
    assert abs(pools.number("take(30 << 20, s[1])") - first) >= 30 * MIB
    pools.ask("cu.cuCtxSynchronize()")
    assert pools.ask("take(30 << 20, s[2])") == first
    before = pools.number("told(p, 5)")
    assert pools.ask("take(10 << 20, own) > 0, take(20 << 20, s[3]) > 0, told(p, 5)") == [True, True, before + SLOT]
    at = (
        "(lambda at: [cu.cuMemAllocAsync_ptsz(ctypes.byref(at), size_t(1000), None), cu.cuMemFreeAsync_ptsz(at, None)])"
    )
    assert pools.ask(f"{at}(u64())") == [0, 0]


def test_more_than_a_pool_is_to_keep_is_given_back_when_the_gpu_is_waited_for(pools: Pools) -> None:
    pools.ask("tell(p, 4, 64 << 20), globals().update(a=[take(32 << 20, s[0]) for _ in range(8)])")
    pools.ask("work(s[0]), [give(x, s[0]) for x in a]")
    assert pools.ask("told(p, 5), cu.cuStreamSynchronize(s[1]), told(p, 5)") == [256 * MIB, 0, 256 * MIB]
    assert pools.ask("cu.cuStreamSynchronize(s[0]), told(p, 5), told(p, 6)") == [0, 64 * MIB, 256 * MIB]
    assert pools.ask("cu.cuMemPoolTrimTo(p, size_t(0)), told(p, 5), ours.gpuckpt_parkable()") == [0, 0, 0]


def test_what_is_used_and_reserved_is_told(pools: Pools) -> None:
    a, b = pools.number("take(1000, s[0])"), pools.number("take(40 << 20, s[0])")
    assert pools.ask("[told(p, n) for n in (5, 6, 7, 8)]") == [64 * MIB, 64 * MIB, 40 * MIB + 1000, 40 * MIB + 1000]
    assert pools.ask(f"give({b}, s[0]), told(p, 7), told(p, 8), tell(p, 8, 0), told(p, 8)") == [
        *(0, 1000, 40 * MIB + 1000),
        *(0, 1000),
    ]
    assert pools.ask(f"give({a}, s[0]), give({a}, s[0]), give({a} + 512, s[0])") == [0, 13, 13], "the driver's error"


def test_a_pool_of_a_program_has_its_limit_and_ends_when_nothing_uses_it(pools: Pools) -> None:
    pools.ask("globals().update(q=pool_of(64 << 20))")
    first = pools.number("take(40 << 20, s[0], q)")
    assert first > 0
    assert pools.ask("take(40 << 20, s[0], q), told(q, 5), told(p, 5)") == [-2, 64 * MIB, 0]
    assert pools.ask("cu.cuMemPoolDestroy(q), ours.gpuckpt_parkable()") == [0, 64 * MIB]
    assert pools.ask(f"give({first}, s[0]), cu.cuStreamSynchronize(s[0]), ours.gpuckpt_parkable()") == [0, 0, 0]


def test_pools_that_are_shared_and_captured_streams_are_the_drivers(pools: Pools) -> None:
    assert pools.ask("take(1 << 20, s[0], pool_of(handle_types=1))") == -12
    first = pools.number("take(1 << 20, s[0])")
    pools.ask("cu.cuStreamBeginCapture_v2(s[0], 0)")
    assert pools.ask(f"take(1 << 20, s[0]), give({first}, s[0])") == [-11, 13]
    assert pools.number("take(1 << 20, s[1])") > 0
    pools.ask("cu.cuStreamEndCapture(s[0], None)")
    assert pools.ask(f"give({first}, s[0]), take(1 << 20, s[0])") == [0, first]


def test_the_device_has_the_pool_that_a_program_chose(pools: Pools) -> None:
    pools.ask("globals().update(q=pool_of()), cu.cuDeviceSetMemPool(0, q), take(1 << 20, s[0])")
    assert pools.ask("told(q, 7), told(p, 7)") == [MIB, 0]


def test_pointers_are_said_to_be_in_their_blocks(pools: Pools) -> None:
    pools.ask("take(1000, s[0])")
    at = pools.number("take(5000, s[0])")
    asked = (
        "[(lambda v: [cu.cuPointerGetAttribute(ctypes.byref(v), n, u64(at + 4000)), v.value][1])(u64())"
        f" for at in [{at}] for n in (11, 12, 9)]"
    )
    assert pools.ask(asked) == [at, 5000, 14]
    range_of = (
        "(lambda base, size: [cu.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), "
        f"u64({at} + 4999)), base.value, size.value])(u64(), u64())"
    )
    assert pools.ask(range_of) == [0, at, 5000]
    assert pools.ask(f"cu.cuMemFree_v2(u64({at}))") == 0
    assert pools.ask(range_of) == [8, 0, 0], "the driver's answer"
    assert pools.ask("take(5000, s[1])") == at


def test_memory_of_one_kind_may_be_freed_as_the_other(pools: Pools) -> None:
    pools.ask("alloc(4 << 20)")
    assert pools.ask("give(blocks[0][0], s[0]), ours.gpuckpt_parkable()") == [0, 0]


def test_what_pools_keep_is_given_back_for_other_memory(pools: Pools) -> None:
    pools.ask("[give(x, s[0]) for x in [take(300 << 20, s[0]) for _ in range(3)]]")
    assert pools.ask("told(p, 5) > 900 << 20, alloc(800 << 20), told(p, 5)") == [True, 0, 0]
    assert pools.ask("take(800 << 20, s[0])") == -2, "the driver's own error"
    assert pools.ask("told(p, 5), take(2 << 40, s[0]), told(p, 5)") == [0, -2, 0], "nothing is left of it"


def test_it_is_parked_and_comes_back_to_each_gpu(
    tmp_path: Path, made_up_driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process(tmp_path, made_up_driver, gpus=2)
    for name, value in process.environment.items():
        monkeypatch.setenv(name, value)
    held = HeldProcess(process, tmp_path)
    try:
        pools = Pools(process)
        pools.ask("blocks.append((take(80 << 20, s[0]), 80 << 20)), on(1), globals().update(t=streams(1))")
        pools.ask(
            "[blocks.append((take(300 << 20, t[0]), 300 << 20)) for _ in range(2)], [mark(n, n + 1) for n in range(3)]"
        )
        assert pools.ask("[size for _, size in places()]") == [96 * MIB, 608 * MIB]
        assert pools.ask("[access(n) for n in range(3)]") == [[0b11] * 2] * 3, "each may be copied to the other"
        for _ in range(2):
            held.parks()
            held.comes_back()
            assert pools.ask("[marks(n) for n in range(3)]") == [[n + 1] * 3 for n in range(3)]
        assert pools.ask("[give(at, t[0]) for at, _ in blocks], [size for _, size in places()]") == [
            [0, 0, 0],
            [96 * MIB, 608 * MIB],
        ]
        assert (
            pools.ask("sorted(take(300 << 20, t[0]) for _ in range(2)) == sorted(at for at, _ in blocks[1:])") is True
        )
    finally:
        held.close()


ORACLE = '''
import random
def outside(a, n, f, when, at, size):
    if a < min(at, a + n): yield a, min(at, a + n) - a, f, when
    if at + size < a + n: yield max(a, at + size), a + n - max(a, at + size), f, when
def walk(seed, steps):
    """Allocate and free at random; return what was given out while it may have been in use."""
    rng, held, freed, wrong = random.Random(seed), [], [], []
    for step in range(steps):
        t = rng.randrange(len(s))
        for _ in range(rng.randrange(3)): work(s[t])
        if rng.random() < 0.2:
            other = rng.randrange(len(s))
            begun, has = progress(s[other])
            done(s[other], rng.randint(has, begun))
        if held and rng.random() < 0.5:
            at, size = held.pop(rng.randrange(len(held)))
            if give(at, s[t]) != 0: wrong.append((step, "not known", hex(at)))
            freed.append((at, size, t, progress(s[t])[0]))
            continue
        size = rng.choice([100, 5000, 1 << 20, 3 << 20, 30 << 20, 100 << 20, 333 << 20])
        at = take(size, s[t])
        if at < 0: continue
        for a, n, by in [(a, n, "held") for a, n in held]:
            if at < a + n and a < at + size: wrong.append((step, "given twice"))
        for a, n, f, when in freed:
            if not (at < a + n and a < at + size) or f == t: continue
            if progress(s[f])[1] < when and waited(s[t])[stream_id(s[f])] < when: wrong.append((step, "in use"))
        mark_at(at, size)
        held.append((at, size))
        # From here on it is the affair of who has it.
        freed = [part for a, n, f, when in freed for part in outside(a, n, f, when, at, size)]
    used = sum(n for _, n in held)
    if used != told(p, 7): wrong.append(("used", used, told(p, 7)))
    for at, _ in held: give(at, s[0])
    cu.cuCtxSynchronize()
    cu.cuMemPoolTrimTo(p, size_t(0))
    if told(p, 5) or told(p, 7): wrong.append(("left", told(p, 5), told(p, 7)))
    return wrong
def mark_at(at, size):
    for x in (at, at + size - 1): ctypes.memset(x, 7, 1)
'''


@pytest.mark.parametrize("seed", range(4))
def test_nobody_gets_what_may_still_be_in_use(pools: Pools, seed: int) -> None:
    pools.ask(f"exec({ORACLE!r}, globals())")
    assert pools.ask(f"walk({seed}, 1500)") == []
