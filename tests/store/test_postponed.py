"""Files of a snapshot that are read later than the others: nothing of them is lost meanwhile, nor used unverified."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from notebooks import PATIENCE
from store_helpers import packs_of, read_back, save

from jupyter_gpuckpt.errors import Damaged, NoSuchSnapshot, Untrusted
from jupyter_gpuckpt.keeper.gpu.bring_back import GpuReturn
from jupyter_gpuckpt.store import Store

GPU = os.urandom(9 << 20) + bytes(4 << 20) + os.urandom(12345)
FIRST = 3 << 20
FILES = {"criu/pages-1.img": os.urandom(5000), "vram/7-parked": GPU, "vram/7-0": b"small", "vram": b"no folder"}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    place = tmp_path / "place"
    place.mkdir()
    return place


def test_they_are_made_at_once_and_have_their_bytes_when_they_are_read(store: Store, place: Path) -> None:
    del (files := dict(FILES))["vram"]
    save(store, "it", files=files)
    said = []
    later = store.postpone("it", store.get("it").id, {"vram": place})
    assert {path.name: path.stat().st_size for path in place.iterdir()} == {"7-parked": len(GPU), "7-0": 5}
    assert not any((place / "7-parked").read_bytes())
    later.read(lambda stage, done, total: said.append((stage, done, total)))
    assert (place / "7-parked").read_bytes() == GPU
    assert (place / "7-0").read_bytes() == b"small"
    assert said[-1] == ("verify", len(GPU) + 5, len(GPU) + 5)
    later.close()
    later.close()


def test_a_file_of_the_folders_name_is_none_of_them(store: Store, place: Path) -> None:
    save(store, "it", files={"vram": b"no folder", "other": b"x"})
    before = set(store.root.iterdir())
    later = store.postpone("it", store.get("it").id, {"vram": place})
    later.read()
    later.close()
    assert list(place.iterdir()) == []
    assert set(store.root.iterdir()) == before


def test_they_can_be_read_after_the_snapshot_was_removed_and_are_collected_after_that(
    store: Store, place: Path
) -> None:
    save(store, "it", files={"vram/7-parked": GPU})
    packs = packs_of(store, "it")
    later = store.postpone("it", store.get("it").id, {"vram": place})
    store.remove("it")
    store.collect()
    later.read()
    assert (place / "7-parked").read_bytes() == GPU
    later.close()
    store.collect()
    assert not any(pack.exists() for pack in packs)


def test_what_is_missing_is_told_beforehand_and_what_is_damaged_when_it_is_read(store: Store, place: Path) -> None:
    save(store, "it", files={"vram/7-parked": GPU})
    (pack,) = packs_of(store, "it")
    good = pack.read_bytes()
    pack.write_bytes(good[:-100])
    with pytest.raises(Damaged, match="missing from the packs"):
        store.postpone("it", store.get("it").id, {"vram": place})
    pack.write_bytes(good[:-100] + bytes(100))
    later = store.postpone("it", store.get("it").id, {"vram": place})
    with pytest.raises(Damaged) as caught:
        later.read()
    assert caught.value.data == {"name": "it", "file": "vram/7-parked"}
    # Mended, it can be read by the same reader.
    pack.write_bytes(good)
    later.read()
    assert (place / "7-parked").read_bytes() == GPU
    later.close()


def test_nothing_is_postponed_of_what_would_not_be_opened(store: Store, place: Path, tmp_path: Path) -> None:
    with pytest.raises(NoSuchSnapshot):
        store.postpone("it", "an id", {"vram": place})
    save(store, "it", files={"vram/7-parked": b"x"})
    with pytest.raises(NoSuchSnapshot):
        store.postpone("it", "of the one before it", {"vram": place})
    manifest = store.root / "snapshots" / "it.json"
    manifest.write_bytes(manifest.read_bytes().splitlines()[0] + b"\n")
    with pytest.raises(Untrusted):
        store.postpone("it", store.get("it").id, {"vram": place})
    assert list(place.iterdir()) == []


def test_what_the_progress_raises_ends_it(store: Store, place: Path) -> None:
    save(store, "it", files={"vram/7-parked": GPU})
    later = store.postpone("it", store.get("it").id, {"vram": place})

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        later.read(stop)
    later.close()


class Room:
    """Takes bytes, and has them."""

    most = 8 << 20
    verifies = False

    def __init__(self, size: int) -> None:
        self.bytes = bytearray(size)

    def wants(self, offset: int, size: int) -> bool:
        return True

    @contextlib.contextmanager
    def room(self, offset: int, size: int) -> Iterator[memoryview]:
        with memoryview(self.bytes) as whole, whole[offset : offset + size] as room:
            yield room


class Behind:
    """A restore that reads a snapshot's GPU memory behind the rest."""

    def __init__(self, store: Store, place: Path) -> None:
        there, snapshot = {"vram": place}, store.get("it").id
        self.room, self.files_are_there = Room(len(GPU)), threading.Event()
        files = store.postpone("it", snapshot, there, "vram/7-0".__eq__)
        taken = store.postpone("it", snapshot, there, "vram/7-parked".__eq__, {"vram/7-parked": self.room})
        self.gpu = GpuReturn(None, None, [], None, None)  # type: ignore[arg-type] - nothing is parked: nobody is asked
        self.gpu.read_behind(files, taken, self._hear)

    def _hear(self, _: str, done: int, total: int) -> None:
        if done == total == FIRST:
            self.files_are_there.set()


def test_what_goes_to_the_gpu_is_read_when_the_files_are_and_nothing_else_is_to_be_done(
    store: Store, place: Path
) -> None:
    files = {"vram/7-0": os.urandom(FIRST), "vram/7-parked": GPU}
    save(store, "it", files=files)

    async def read() -> None:
        behind = Behind(store, place)
        assert await asyncio.to_thread(behind.files_are_there.wait, PATIENCE)
        assert (place / "7-0").read_bytes() == files["vram/7-0"]
        assert not any(behind.room.bytes)
        await behind.gpu.have_read()
        assert behind.room.bytes == GPU
        await behind.gpu.close()

    asyncio.run(read())


@pytest.mark.parametrize("damaged", ["vram/7-0", "vram/7-parked"])
def test_damage_in_either_of_them_is_told_and_the_store_may_delete_both(
    store: Store, place: Path, damaged: str
) -> None:
    save(store, "it", files={"vram/7-0": os.urandom(FIRST)})
    (first,) = packs_of(store, "it")
    save(store, "it", files={**read_back(store, "it"), "vram/7-parked": GPU}, replace=True)
    (second,) = set(packs_of(store, "it")) - {first}
    pack = first if damaged == "vram/7-0" else second
    pack.write_bytes(pack.read_bytes()[:-100] + bytes(100))

    async def read() -> None:
        behind = Behind(store, place)
        with pytest.raises(Damaged) as caught:
            await behind.gpu.have_read()
        assert caught.value.data["file"] == damaged
        await behind.gpu.close()

    asyncio.run(read())
    store.remove("it")
    assert not first.exists()
    assert not second.exists()
