"""Ranges of bytes, held against sets of single bytes."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from jupyter_gpuckpt.freeze.ranges import Range, data_of, joined, size_of, within, without

PAGE = 4096


def _ranges(steps: list[tuple[int, int]]) -> list[Range]:
    """Return ranges that are apart, of gaps and lengths."""
    found, at = [], 0
    for gap, length in steps:
        found.append((at + gap, at + gap + length))
        at += gap + length
    return found


RANGES = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), max_size=8).map(_ranges)


def _bytes(ranges: list[Range]) -> set[int]:
    return {at for begin, end in ranges for at in range(begin, end)}


@given(RANGES, RANGES)
def test_they_are_cut_at_others(ranges: list[Range], others: list[Range]) -> None:
    inside, outside = list(within(ranges, others)), list(without(ranges, others))
    assert _bytes(inside) == _bytes(ranges) & _bytes(others)
    assert _bytes(outside) == _bytes(ranges) - _bytes(others)
    assert size_of(inside) + size_of(outside) == size_of(ranges)
    assert sorted(inside) == inside
    assert all(begin < end for begin, end in inside + outside)


@given(st.lists(st.integers(0, 20), unique=True).map(sorted))
def test_those_that_touch_are_one(single: list[int]) -> None:
    ranges = joined((at, at + 1) for at in single)
    assert _bytes(ranges) == set(single)
    assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(ranges))


def test_the_holes_of_a_file_are_left_out(tmp_path: Path) -> None:
    file = Path("/dev/shm", f"gpuckpt-test-{os.getpid()}") if Path("/dev/shm").is_dir() else tmp_path / "file"
    with file.open("w+b") as f:
        file.unlink()
        f.truncate(64 * PAGE)
        assert data_of(f.fileno()) == []
        for page in (0, 1, 7, 63):
            os.pwrite(f.fileno(), b"x", page * PAGE)
        assert data_of(f.fileno()) == [(0, 2 * PAGE), (7 * PAGE, 8 * PAGE), (63 * PAGE, 64 * PAGE)]
