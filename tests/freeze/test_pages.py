"""Where the images of memory are cut (CRIU's ``pages-N.img`` by its ``pagemap-M.img``)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from jupyter_gpuckpt.freeze.pages import LONG, PAGE, SMALLEST_WINDOW, apart, joined, pieces, windows

PRESENT, LAZY, PARENT = 4, 2, 1
W = SMALLEST_WINDOW // PAGE
"""Pages of one window of a small image."""
L = LONG // PAGE


def varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def message(*fields: tuple[int, int]) -> bytes:
    body = b"".join(varint(number << 3) + varint(value) for number, value in fields)
    return struct.pack("<I", len(body)) + body


def write(folder: Path, runs: Sequence[tuple[int, int, int]], number: int = 1, field: int = 5) -> Path:
    """Write the pagemap of runs (first page, pages, flags), and return the path of the image."""
    raw = struct.pack("<II", 0x54564319, 0x56084025) + message((1, number))
    for first, count, flags in runs:
        raw += message((1, first * PAGE), *([(2, 0)] if field == 5 else []), (4, flags), (field, count))
    (folder / f"pagemap-1000{number}.img").write_bytes(raw)
    return folder / f"pages-{number}.img"


@pytest.mark.parametrize("field", [2, 5])
def test_pages_of_one_window_are_one_piece(tmp_path: Path, field: int) -> None:
    runs = [(0, 1, PRESENT), (2, 2, PRESENT | LAZY), (W + 1, 1, PRESENT), (5 * W - 1, 2, PRESENT)]
    image = write(tmp_path, runs, field=field)
    assert windows(image) == [3 * PAGE, PAGE, PAGE, PAGE]


def test_pages_that_are_not_in_the_image_count_for_nothing(tmp_path: Path) -> None:
    image = write(tmp_path, [(3, 5, PARENT), (8, 2, PRESENT), (20, 9, 0)])
    assert windows(image) == [2 * PAGE]


def test_a_long_run_is_one_piece_whatever_its_parts(tmp_path: Path) -> None:
    image = write(tmp_path, [(1, 1, PRESENT), (L + 5, 5, PRESENT), (L + 10, L, PRESENT | LAZY), (9 * L, 1, PRESENT)])
    assert windows(image) == [PAGE, LONG + 5 * PAGE, PAGE]


def test_a_heap_is_cut_into_windows_however_long_it_is(tmp_path: Path) -> None:
    begin, heap = 5 * PAGE, (7 * PAGE, 7 * PAGE + 3 * LONG)
    array = (heap[1] + PAGE, heap[1] + PAGE + LONG)
    runs = [(begin, heap[1]), array]  # what is before the heap has no gap to it
    assert pieces(apart(runs, [])) == [(run,) for run in runs]
    cut = pieces(apart(runs, [heap]))
    assert cut[-1] == (array,)
    assert all(piece[-1][1] - piece[0][0] <= SMALLEST_WINDOW for piece in cut[:-1])
    assert joined(area for piece in cut for area in piece) == runs
    # It may grow: what was cut stays so.
    longer = pieces(apart([(begin, heap[1] + LONG)], [(heap[0], heap[1] + LONG)]))
    assert longer[: len(cut) - 2] == cut[:-2]
    # One that is large would make the windows of all memory large.
    large = (heap[0], heap[0] + 65 * 2**20)
    assert pieces(apart([large], [large])) == [(large,)]


def test_the_windows_of_a_large_image_are_larger_and_not_many_more(tmp_path: Path) -> None:
    count = {}
    for number, megabytes in enumerate((8, 64, 1024, 8192), 1):
        runs = [(n * 512, 256, PRESENT) for n in range(megabytes)]
        count[megabytes] = len(windows(write(tmp_path, runs, number)) or ())
    assert count == {8: 512, 64: 2048, 1024: 2048, 8192: 8192}


def test_every_image_has_its_own_pagemap(tmp_path: Path) -> None:
    first = write(tmp_path, [(1, 1, PRESENT)], 1)
    second = write(tmp_path, [(1, 2, PRESENT)], 2)
    assert (windows(first), windows(second)) == ([PAGE], [2 * PAGE])


def test_what_is_not_explained_is_left_to_the_store(tmp_path: Path) -> None:
    image = write(tmp_path, [(1, 1, PRESENT)])
    assert windows(tmp_path / "files.img") is None
    assert windows(tmp_path / "pages-9.img") is None
    pagemap = tmp_path / "pagemap-10001.img"
    good = pagemap.read_bytes()
    pagemap.write_bytes(good[:8] + message((1, 1)) + struct.pack("<I", 4) + b"\x0a\x02hi")
    assert windows(image) is None
    for cut in range(8, len(good)):
        pagemap.write_bytes(good[:cut])
        windows(image)  # whatever it says, nothing is raised
