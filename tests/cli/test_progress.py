"""How far something is, how long it will still take, and what is said of that: without a kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jupyter_gpuckpt.kernel.show import progress_text, remaining
from jupyter_gpuckpt.operations.pace import Pace
from jupyter_gpuckpt.operations.results import Progress


def test_what_is_left_follows_the_pace_of_late() -> None:
    pace = Pace()
    assert pace.take(0.0, "writing", 0, 1000) == Progress(stage="writing", total=1000), "nothing is known at first"
    assert pace.take(2.0, "writing", 100, 1000) == Progress(stage="writing", done=100, total=1000, rate=50, left=18)
    assert pace.take(10.0, "writing", 200, 1000).rate == 20
    assert pace.take(15.0, "writing", 700, 1000).left == pytest.approx(3), "the slow beginning is forgotten"
    assert pace.take(40.0, "writing", 700, 1000).left is None, "where nothing moves nothing is promised"
    assert pace.take(41.0, "writing", 0, 500).left is None, "of what has another total nothing is known yet"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.2, "a moment"),
        (7.4, "about 7 s"),
        (47, "about 45 s"),
        (88, "about 1 min"),
        (89 * 60, "about 89 min"),
        (6.8 * 3600, "about 7 h"),
    ],
)
def test_what_is_left_is_said_roughly(seconds: float, said: str) -> None:
    assert remaining(seconds) == f"{said} left"


def test_a_line_says_the_stage_and_how_much_and_how_long() -> None:
    stage = Progress(stage="writing", seconds=4.0)
    much = replace(stage, done=48 * 10**7, total=10**9)
    fast = replace(much, rate=12.5e6, left=41.6)
    assert progress_text("Saving x", stage) == "Saving x: writing (4.0 s)"
    assert progress_text("Saving x", much) == "Saving x: writing 48 % of 1.0 GB (4.0 s)"
    assert progress_text("Saving x", fast) == "Saving x: writing 48 % of 1.0 GB, 12.5 MB/s, about 40 s left"
    assert (
        progress_text("Sending x", replace(fast, stage="")) == "Sending x: 48 % of 1.0 GB, 12.5 MB/s, about 40 s left"
    )
    assert progress_text("Saving x", replace(fast, cancelling=True)) == "Saving x: cancelling…"
