"""Programs that are started before it is known what for: who needs one gets one, and none is left."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest
from notebooks import wait_until

from jupyter_gpuckpt.freeze.holder_programs import HolderPrograms
from jupyter_gpuckpt.freeze.line_program import LineProgram

HOLDER = "jupyter_gpuckpt.freeze.vram_holder"


def gpus_of(program: LineProgram) -> list[str]:
    """Return the GPUs that a program was started for."""
    started = psutil.Process(program.pid)
    # For a moment Linux has given it its memory, and not yet its words.
    wait_until(lambda: HOLDER in started.cmdline(), what="it has not become that program")
    return started.cmdline()[started.cmdline().index(HOLDER) + 1 :]


def below() -> set[int]:
    return {one.pid for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE}


@pytest.fixture
def holders() -> Iterator[HolderPrograms]:
    holders = HolderPrograms()
    yield holders
    holders.close()


def test_who_asks_gets_one_for_these_gpus_if_there_is_one_and_the_others_are_ended(holders: HolderPrograms) -> None:
    before = below()
    holders.start([["one"], ["other", "one"], ["third"]])
    taken = [holders.take(["one", "other"]), holders.take(["fourth"])]
    try:
        assert [set(gpus_of(one)) for one in taken] == [{"one", "other"}, {"one"}]
        assert len(below() - before) == 3
        holders.close()
        assert below() - before == {one.pid for one in taken}
    finally:
        for one in taken:
            one.kill()
            one.close()
    assert below() == before


def test_where_there_is_none_one_is_started(holders: HolderPrograms) -> None:
    program = holders.take(["one"])
    try:
        assert gpus_of(program) == ["one"]
    finally:
        program.kill()
        program.close()


def test_when_it_is_over_none_is_started_any_more(holders: HolderPrograms) -> None:
    before = below()
    holders.close()
    holders.start([["one"]])
    assert below() == before


def test_one_that_is_told_nothing_ends_by_itself(holders: HolderPrograms) -> None:
    """As when its keeper is killed."""
    program = holders.take()
    program.close()
    program.wait(30)
    assert program.pid is None
