"""Zeros are told from all else, wherever the only other byte is: a chunk of zeros is kept as nothing."""

from __future__ import annotations

import pytest

from jupyter_gpuckpt.store.chunks import CHUNK, is_zero


@pytest.mark.parametrize("size", [0, 1, 4096, CHUNK - 1, CHUNK])
def test_what_is_all_zeros_is(size: int) -> None:
    assert is_zero(memoryview(bytes(size)))


@pytest.mark.parametrize("size", [1, 4096, CHUNK - 1, CHUNK])
def test_one_other_byte_is_seen_wherever_it_is(size: int) -> None:
    data = bytearray(size)
    for at in {0, 1, size // 2, 3 * size // 4 + 1, size - 1} & set(range(size)):
        data[at] = 1
        assert not is_zero(memoryview(data))
        data[at] = 0
