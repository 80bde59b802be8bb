"""Bytes that somebody takes straight out of the packs: together with what is written they are the file, verified."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from store_helpers import packs_of, save

from jupyter_gpuckpt.errors import Damaged
from jupyter_gpuckpt.store import Store
from jupyter_gpuckpt.store.codec import RAW
from jupyter_gpuckpt.store.index import read_part
from jupyter_gpuckpt.store.pack import PackReader

MIB = 1 << 20
PLAIN = os.urandom(9 * MIB + 12345)
ZEROS = bytes(6 * MIB)
TEXT = b"compressible" * 200_000
PARKED = PLAIN + bytes(-len(PLAIN) % (2 * MIB)) + ZEROS + TEXT
FILES = {"criu/pages-1.img": os.urandom(5000), "vram/7-parked": PARKED, "vram/7-0": b"small"}


class Pages:
    """Takes bytes as pages of memory, as a GPU's driver does: it keeps them mapped, and copies them afterwards."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.taken: list[tuple[mmap.mmap, int, int, int]] = []
        self.written: list[tuple[int, int]] = []
        self._refuses = refuses

    def take(self, pack: int, pieces: Sequence[tuple[int, int, int]]) -> bool:
        if not self._refuses:
            mapped = mmap.mmap(pack, 0, mmap.MAP_SHARED, mmap.PROT_READ)
            self.taken += [(mapped, *piece) for piece in pieces]
        return not self._refuses

    def wrote(self, offset: int, size: int) -> None:
        self.written.append((offset, size))

    def whole(self, file: Path) -> bytes:
        """Return the bytes that the file would have, had all of it been written."""
        found = bytearray(file.stat().st_size)
        for mapped, offset, size, to in self.taken:
            found[to : to + size] = mapped[offset : offset + size]
        content = file.read_bytes()
        for offset, size in self.written:
            found[offset : offset + size] = content[offset : offset + size]
        return bytes(found)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    place = tmp_path / "place"
    place.mkdir()
    return place


def restore(store: Store, tmp_path: Path, place: Path, taker: Pages) -> int:
    """Open a snapshot with that taker; return how many bytes were told to be done."""
    told = []
    into = tmp_path / "files"
    taking = {"vram/7-parked": taker}
    progress = lambda _, done, __: told.append(done)  # noqa: E731
    store.open("it", into, progress, {"vram": place}, takers=taking).close()
    return told[-1]


def test_what_is_stored_as_it_is_and_in_memory_is_taken_and_the_rest_is_written(
    store: Store, tmp_path: Path, place: Path
) -> None:
    save(store, "it", files=FILES)
    for pack in packs_of(store, "it"):
        pack.read_bytes()
    taker = Pages()
    assert restore(store, tmp_path, place, taker) == sum(map(len, FILES.values()))
    assert taker.whole(place / "7-parked") == PARKED
    assert sum(size for _, _, size, _ in taker.taken) >= len(PLAIN) - 2 * MIB
    assert (place / "7-0").read_bytes() == b"small"
    # What was taken takes no memory a second time, nor do zeros.
    assert 0 < sum(size for _, size in taker.written) < len(TEXT) + 4 * MIB
    assert (place / "7-parked").stat().st_blocks * 512 < len(TEXT) + 5 * MIB


def test_where_nothing_is_taken_all_is_written(store: Store, tmp_path: Path, place: Path) -> None:
    save(store, "it", files=FILES)
    taker = Pages(refuses=True)
    restore(store, tmp_path, place, taker)
    assert (place / "7-parked").read_bytes() == PARKED
    assert taker.whole(place / "7-parked") == PARKED


def is_forgotten(pack: Path) -> bool:
    """Take a pack out of memory; tell whether all of it is."""
    with pack.open("rb") as file:
        fd = file.fileno()
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        for offset in range(0, pack.stat().st_size, 4096):
            with contextlib.suppress(OSError):
                os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT)
                return False
    return True


def test_what_the_disk_would_have_to_be_waited_for_is_told_from_what_is_in_memory(
    store: Store, tmp_path: Path, place: Path
) -> None:
    save(store, "it", files=FILES)
    packs = packs_of(store, "it")
    if not all(any(is_forgotten(pack) for _ in range(50)) for pack in packs):
        pytest.skip("this file system forgets nothing")
    reader = PackReader(store.root / "packs")
    plain = [at for at in read_part(store._layout, store.get("it").id).values() if at.codec == RAW]
    with reader.opened() as opened:
        assert not any(reader.is_at_hand(at, opened) for at in plain)
        for pack in packs:
            pack.read_bytes()
        assert all(reader.is_at_hand(at, opened) for at in plain)
    for pack in packs:
        is_forgotten(pack)
    taker = Pages()
    restore(store, tmp_path, place, taker)
    assert taker.whole(place / "7-parked") == PARKED


def test_what_was_taken_of_a_damaged_pack_is_never_used(store: Store, tmp_path: Path, place: Path) -> None:
    save(store, "it", files=FILES)
    pack = max(packs_of(store, "it"), key=lambda pack: pack.stat().st_size)
    with pack.open("r+b") as file:
        file.seek(3 * MIB)
        file.write(b"\xff\x00" * 50)
    taker = Pages()
    with pytest.raises(Damaged) as caught:
        restore(store, tmp_path, place, taker)
    assert caught.value.data["file"] == "vram/7-parked"
    assert not (tmp_path / "files").exists()
