"""The server stays quick: its event loop is never held for long."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from jupyter_servers import Server, running

_HELD = 0.05  # for how long the loop may be held, in seconds
_ROUNDS = 12  # at most
_WATCH = """
import asyncio, time
from pathlib import Path

_log = Path("LOG").open("a", buffering=1)
_run = asyncio.events.Handle._run

def _waited():
    "For how long this thread was ready and had no processor: what else the machine does holds it up, not we."
    try:
        with open("/proc/thread-self/schedstat") as told:
            return int(told.read().split()[1]) / 1e9
    except OSError:
        return 0.0

def _timed(handle):
    began, waited = time.perf_counter(), _waited()
    _run(handle)
    print(time.perf_counter() - began - (_waited() - waited), file=_log)

asyncio.events.Handle._run = _timed
"""


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Server]:
    """A server that writes down for how long each step of its loop took."""
    with running(tmp_path, _WATCH.replace("LOG", str(tmp_path / "steps"))) as started:
        yield started


@pytest.mark.criu
def test_the_loop_is_not_held_during_a_save_and_a_download(watched: Server) -> None:
    steps = watched.folder / "steps"
    worst = []
    with watched.notebook() as (kernel_id, notebook):
        notebook.run("x = bytearray(50_000_000)")
        for number in range(_ROUNDS):
            seen = steps.stat().st_size
            watched.save(kernel_id, f"round-{number}")
            watched.ask("GET", "snapshots")
            watched.ask("GET", "kernels")
            assert watched.request("GET", f"api/gpuckpt/snapshots/round-{number}/export").ok
            with steps.open() as log:
                log.seek(seen)
                worst.append(max(map(float, log)))
            # What else the machine does can hold up any one of them, but not all.
            if worst[-1] < _HELD:
                break
    assert min(worst) < _HELD, worst
