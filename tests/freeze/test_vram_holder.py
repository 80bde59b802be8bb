"""The lines by which the program that holds GPU memory is told what to do; what it does is true on a GPU alone."""

from __future__ import annotations

import pytest

vram_holder = pytest.importorskip("jupyter_gpuckpt.freeze.vram_holder")


class Told:
    """Stands where a holder does, and keeps what it was told."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def __getattr__(self, name: str) -> object:
        return lambda *arguments: self.done.append(f"{name}{arguments}")


@pytest.mark.parametrize(
    ("line", "done"),
    [
        ("see 5 7\n", "see(5, 7)"),
        ("stage\n", "stage()"),
        ("take 5 7\n", "take(5, 7)"),
        ("copied\n", "copied()"),
        ("load\n", "load()"),
        ("bring 0 4096 8192\n", "bring(0, 4096, 8192)"),
        ("fill 5 7\n", "fill(5, 7)"),
        ("rest\n", "rest()"),
        ("rise\n", "rise()"),
    ],
)
def test_each_line_is_done(line: str, done: str) -> None:
    told = Told()
    assert vram_holder._answer(told, line) is None
    assert told.done == [done]


@pytest.mark.parametrize("line", ["\n", "give 5\n", "take 5\n", "take 5 -7\n", "take five 7\n", "rest 1\n", "close\n"])
def test_what_is_not_known_is_answered_and_ends_nothing(line: str) -> None:
    assert vram_holder._answer(Told(), line) == "unknown"
