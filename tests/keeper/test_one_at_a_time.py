"""One operation at a time, and a wake beside a save that is being written."""

from __future__ import annotations

import asyncio

import pytest

from jupyter_gpuckpt.client.record import Operation
from jupyter_gpuckpt.errors import Busy, Cancelled
from jupyter_gpuckpt.keeper.one_at_a_time import OneAtATime
from jupyter_gpuckpt.keeper.operations.progress import to_nobody


async def _may_begin(operations: OneAtATime, kind: str) -> bool:
    """Tell whether an operation of this kind begins without having to wait."""

    async def begin() -> None:
        operation = Operation(kind, "it")
        await operations.wait_for_others(operation, to_nobody, patient=True, for_all=kind == "wake")
        with operations.begin(operation):
            pass

    try:
        await asyncio.wait_for(begin(), 0.05)
    except (TimeoutError, asyncio.TimeoutError, Busy):
        return False
    return True


def test_only_a_wake_goes_on_beside_a_save_that_is_being_written() -> None:
    async def check() -> None:
        operations = OneAtATime()
        with operations.begin(Operation("save", "x")) as save:
            assert operations.holds_kernel
            assert not await _may_begin(operations, "wake")
            save.let_kernel_go()
            assert operations.writes == "x"
            assert await _may_begin(operations, "wake")
            assert not any([await _may_begin(operations, kind) for kind in ("save", "sleep", "restore", "hibernate")])
            with operations.begin(Operation("wake", "y")) as wake:
                assert (operations.current, operations.writes) == (wake, "x")
                assert not await _may_begin(operations, "wake")
                operations.break_off()
                assert (wake.cancelling.is_set(), save.cancelling.is_set()) == (True, False)
            assert operations.current is save
            assert not operations.idle.is_set()
        assert operations.idle.is_set()
        assert await _may_begin(operations, "save")

    asyncio.run(check())


@pytest.mark.parametrize("first", ["save", "wake"])
def test_whichever_of_the_two_ends_first(first: str) -> None:
    async def check() -> None:
        operations = OneAtATime()
        both = {kind: operations.begin(Operation(kind, kind)) for kind in ("save", "wake")}
        both["save"].__enter__().let_kernel_go()
        both["wake"].__enter__()
        both.pop(first).__exit__(None, None, None)
        ((kind, other),) = both.items()
        assert operations.current is not None
        assert operations.current.kind == kind
        assert not operations.idle.is_set()
        other.__exit__(None, None, None)
        assert operations.current is None
        assert operations.idle.is_set()

    asyncio.run(check())


def test_one_that_waits_for_another_is_listed_and_can_be_cancelled() -> None:
    async def check() -> None:
        operations = OneAtATime()
        with operations.begin(Operation("restore", "x", "one")) as restore:
            wake = Operation("wake", "it", "other")
            waiting = asyncio.create_task(operations.wait_for_others(wake, to_nobody, patient=True, for_all=True))
            await asyncio.sleep(0)
            assert operations.queued == ["wake"]
            assert operations.cancel("other")
            with pytest.raises(Cancelled):
                await waiting
            assert operations.queued == []
            assert not restore.cancelling.is_set()

    asyncio.run(check())


def test_only_who_asked_for_it_cancels_an_operation() -> None:
    async def check() -> None:
        operations = OneAtATime()
        save = Operation("save", "it", "other")
        with operations.begin(Operation("wake", "", "one")) as wake:
            waiting = asyncio.create_task(operations.wait_for_others(save, to_nobody, patient=True))
            await asyncio.sleep(0)
            wake.cancellable = False
            assert not operations.cancel("one"), "it is at a stage that cannot be left"
            assert not operations.cancel("nobody's", "save")
            assert not operations.cancel("", "save"), "who is of a version without ids has not asked for this one"
        await waiting
        assert not save.cancelling.is_set()

    asyncio.run(check())
