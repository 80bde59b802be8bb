"""The server stays quick: its event loop is never held for long, and a thousand snapshots are listed at once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jupyter_servers import Server, running
from many_snapshots import store_of

from jupyter_gpuckpt.server.library import Library

_HELD = 0.05  # for how long the loop may be held, in seconds
_ROUNDS = 5
_WATCH = """
import asyncio, time
from pathlib import Path

_log = Path("LOG").open("a", buffering=1)
_run = asyncio.events.Handle._run

def _timed(handle):
    began = time.perf_counter()
    _run(handle)
    print(time.perf_counter() - began, file=_log)

asyncio.events.Handle._run = _timed
"""


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Server]:
    """A server that writes down for how long each step of its loop took."""
    with running(tmp_path, _WATCH.replace("LOG", str(tmp_path / "steps"))) as started:
        yield started


@pytest.mark.criu
def test_the_loop_is_not_held_during_a_save(watched: Server) -> None:
    steps = watched.folder / "steps"
    worst = []
    with watched.notebook() as (kernel_id, notebook):
        notebook.run("x = bytearray(50_000_000)")
        for number in range(_ROUNDS):
            seen = steps.stat().st_size
            watched.save(kernel_id, f"round-{number}")
            watched.ask("GET", "snapshots")
            watched.ask("GET", "kernels")
            with steps.open() as log:
                log.seek(seen)
                worst.append(max(map(float, log)))
    # What else the machine does can hold up any one of them, but not all.
    assert min(worst) < _HELD, worst


def test_a_thousand_snapshots_are_listed_again_in_a_moment(tmp_path: Path) -> None:
    store_of(tmp_path / "store", 1000)
    library = Library(tmp_path / "store")
    assert len(library.listing()["snapshots"]) == 1000
    took = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        listed = library.listing()
        took.append(time.perf_counter() - began)
    assert [listed["snapshots"][i]["name"] for i in (0, -1)] == ["many-0999", "many-0000"]
    assert min(took) < _HELD, took


def test_a_listing_sees_what_came_went_and_was_replaced(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store_of(store, 3)
    library = Library(store)
    library.listing()
    (store / "snapshots" / "many-0000.json").unlink()
    (store / "snapshots" / "many-0001.json").write_bytes(b"{}")
    listed = library.listing()
    assert [s["name"] for s in listed["snapshots"]] == ["many-0002"]
    assert [fault["kind"] for fault in listed["faults"]] == ["Damaged"]
