"""Bytes of a file that somebody takes in its place: every one of them, verified, and never a wrong one."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_helpers import packs_of, save

from jupyter_gpuckpt.errors import Cancelled, Damaged
from jupyter_gpuckpt.store import Store

MIB = 1 << 20
PLAIN = os.urandom(9 * MIB + 12345)
ZEROS = bytes(30 * MIB)
TEXT = b"compressible" * 200_000
PARKED = PLAIN + bytes(-len(PLAIN) % (2 * MIB)) + ZEROS + TEXT
FILES = {"criu/pages-1.img": os.urandom(5000), "vram/7-parked": PARKED, "vram/7-0": b"small"}


class Rooms:
    """Takes bytes through rooms that hold something else before."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.taken: dict[int, bytes] = {}
        self.unused: list[int] = []
        self.verifies = False
        self._lock = threading.Lock()

    def wants(self, offset: int, size: int) -> bool:
        return True

    @contextlib.contextmanager
    def room(self, offset: int, size: int) -> Iterator[memoryview]:
        assert size <= self.most
        room = bytearray(b"\xab" * size)
        try:
            yield memoryview(room)
        except BaseException:
            with self._lock:
                self.unused.append(offset)
            raise
        with self._lock:
            assert offset not in self.taken
            self.taken[offset] = bytes(room)

    def whole(self) -> bytes:
        """Return the file, zeros where nothing was taken."""
        found = bytearray(len(PARKED))
        for offset, content in self.taken.items():
            found[offset : offset + len(content)] = content
        return bytes(found)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    place = tmp_path / "place"
    place.mkdir()
    return place


def restore(store: Store, tmp_path: Path, place: Path, taker: Rooms) -> int:
    """Open a snapshot with that taker; return how many bytes were told to be done."""
    told = []
    progress = lambda _, done, __: told.append(done)  # noqa: E731
    store.open("it", tmp_path / "files", progress, {"vram": place}, takers={"vram/7-parked": taker}).close()
    return told[-1]


@pytest.mark.parametrize("most", [2 * MIB, 5 * MIB, 64 * MIB])
def test_they_are_the_file_which_takes_no_memory_then(store: Store, tmp_path: Path, place: Path, most: int) -> None:
    save(store, "it", files=FILES)
    taker = Rooms(most)
    assert restore(store, tmp_path, place, taker) == sum(map(len, FILES.values()))
    assert taker.whole() == PARKED
    assert (place / "7-parked").stat().st_blocks == 0
    assert (place / "7-0").read_bytes() == b"small"
    if most < len(ZEROS):  # zeros alone are not brought
        assert sum(map(len, taker.taken.values())) < len(PARKED) - len(ZEROS) + 4 * MIB


def test_what_is_not_wanted_is_not_read(store: Store, tmp_path: Path, place: Path) -> None:
    save(store, "it", files=FILES)
    begin, end = len(PLAIN) - 3 * MIB, len(PARKED)

    class Some(Rooms):
        def wants(self, offset: int, size: int) -> bool:
            return offset < end and begin < offset + size

    # The beginning, which nobody wants. Which pack has it, and where, is up to the threads that wrote it.
    at = {pack: pack.read_bytes().find(PLAIN[:100]) for pack in packs_of(store, "it")}
    ((pack, where),) = ((pack, where) for pack, where in at.items() if where >= 0)
    with pack.open("r+b") as file:
        file.seek(where)
        file.write(b"\xff\x00" * 50)
    taker = Some(5 * MIB)
    assert restore(store, tmp_path, place, taker) == sum(map(len, FILES.values()))
    assert taker.whole()[begin:] == PARKED[begin:]
    assert min(taker.taken) >= begin - 2 * MIB


def test_what_is_damaged_is_never_taken(store: Store, tmp_path: Path, place: Path) -> None:
    save(store, "it", files=FILES)
    pack = max(packs_of(store, "it"), key=lambda pack: pack.stat().st_size)
    with pack.open("r+b") as file:
        file.seek(3 * MIB)
        file.write(b"\xff\x00" * 50)
    taker = Rooms(2 * MIB)
    with pytest.raises(Damaged) as caught:
        restore(store, tmp_path, place, taker)
    assert caught.value.data["file"] == "vram/7-parked"
    assert len(taker.unused) == 1
    assert all(PARKED[offset : offset + len(content)] == content for offset, content in taker.taken.items())
    assert not (tmp_path / "files").exists()


def test_a_taker_that_verifies_has_what_there_is(store: Store, tmp_path: Path, place: Path) -> None:
    save(store, "it", files=FILES)
    taker = Rooms(2 * MIB)
    taker.verifies = True
    restore(store, tmp_path, place, taker)
    assert taker.whole() == PARKED
    pack = max(packs_of(store, "it"), key=lambda pack: pack.stat().st_size)
    with pack.open("r+b") as file:
        file.seek(3 * MIB)
        file.write(b"\xff\x00" * 50)
    taken = Rooms(2 * MIB)
    taken.verifies = True
    restore(store, tmp_path, place, taken)
    wrong = [at for at in range(0, len(PARKED), MIB) if taken.whole()[at : at + MIB] != PARKED[at : at + MIB]]
    assert len(wrong) == 1


def test_a_taker_that_fails_ends_it(store: Store, tmp_path: Path, place: Path) -> None:
    save(store, "it", files=FILES)

    class Failing(Rooms):
        @contextlib.contextmanager
        def room(self, offset: int, size: int) -> Iterator[memoryview]:
            raise Cancelled("It was cancelled.", "", "")
            yield

    with pytest.raises(Cancelled):
        restore(store, tmp_path, place, Failing(2 * MIB))
    assert not (tmp_path / "files").exists()
