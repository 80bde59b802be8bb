"""Files of a snapshot that are read later than the others: nothing of them is lost meanwhile, nor used unverified."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from store_helpers import packs_of, save

from jupyter_gpuckpt.errors import Damaged, NoSuchSnapshot, Untrusted
from jupyter_gpuckpt.store import Store

GPU = os.urandom(9 << 20) + bytes(4 << 20) + os.urandom(12345)
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
