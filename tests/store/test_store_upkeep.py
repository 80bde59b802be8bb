"""Keeping a store in order: check, repair, compaction, names, labels, retention, quota."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

import pytest
from store_helpers import everything, fill, litter, packs_of, read_back, save

from jupyter_gpuckpt.errors import Damaged, NameTaken, NoSuchSnapshot, Pinned, StoreError
from jupyter_gpuckpt.store import Manifest, Store
from jupyter_gpuckpt.store.chunks import CHUNK
from jupyter_gpuckpt.store.upkeep.retention import keep_last, keep_under


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


@pytest.fixture
def three(store: Store) -> Store:
    """A store in which `one` and `two` share a chunk, and `three` has its own."""
    shared = os.urandom(CHUNK)
    save(store, "one", files={"pages": shared})
    save(store, "two", files={"pages": shared, "more": os.urandom(9999)})
    save(store, "three", files={"pages": os.urandom(9999)})
    return store


def faults(store: Store, read_data: bool = True) -> list[tuple[str, tuple[str, ...]]]:
    return [(fault.what, fault.snapshots) for fault in store.check(read_data).faults]


def test_a_whole_store_has_no_faults_and_checking_changes_nothing(three: Store) -> None:
    before = everything(three.root)
    found = three.check(read_data=True)
    assert (found.snapshots, found.chunks, found.faults) == (3, 3, [])
    assert found.read == CHUNK + 2 * 9999
    assert three.check().read == 0
    assert everything(three.root) == before
    assert Store(three.root / "nothing").check().snapshots == 0


def test_a_damaged_chunk_names_the_snapshots_that_need_it(three: Store) -> None:
    (pack,) = packs_of(three, "one")
    flip(pack, CHUNK // 2)
    assert faults(three, read_data=False) == []
    assert faults(three) == [("chunk", ("one", "two"))]


def test_a_missing_pack_a_damaged_manifest_and_lost_contents_are_named(three: Store) -> None:
    (pack,) = packs_of(three, "three")
    pack.unlink()
    flip(three.root / "snapshots" / "one.json", 9)
    (three.root / "contents" / three.get("two").id).unlink()
    assert sorted(faults(three)) == [("contents", ("two",)), ("manifest", ("one",)), ("pack", ("three",))]


def test_a_damaged_index_is_made_again(three: Store) -> None:
    part = three.root / "index" / three.get("two").id
    good = part.read_bytes()
    flip(part, 50)
    (three.root / "index" / ("f" * 32)).write_bytes(b"of nobody")
    assert sorted(faults(three)) == [("index", ()), ("index", ("two",))]
    done = three.repair()
    assert (done.mended, done.lost) == (["two"], {})
    assert part.read_bytes() == good
    assert faults(three) == []
    assert litter(three) == []


def test_all_of_the_index_can_be_made_again_from_the_packs(three: Store) -> None:
    for part in (three.root / "index").iterdir():
        part.unlink()
    assert sorted(three.repair().mended) == ["one", "three", "two"]
    assert faults(three) == []
    assert three.collect().freed == 0


def test_a_lost_chunk_is_told_and_found_again_when_it_is_saved_anew(store: Store) -> None:
    pages = os.urandom(CHUNK)
    save(store, "old", files={"pages": pages, "other": b"whole"})
    pack = packs_of(store, "old")[0]
    flip(pack, CHUNK // 2)
    lost = store.repair().lost
    assert lost == {"old": "1 chunks of pages are lost"}
    with pytest.raises(Damaged):
        read_back(store, "old")
    save(store, "new", files={"pages": pages})
    assert read_back(store, "new") == {"pages": pages}
    assert store.repair().lost == {}
    assert read_back(store, "old") == {"pages": pages, "other": b"whole"}


def test_chunks_of_a_pack_whose_own_list_is_damaged_are_copied(three: Store) -> None:
    (pack,) = packs_of(three, "three")
    flip(pack, 17)
    assert faults(three) == [("pack", ())]
    three.repair()
    assert faults(three) == []
    assert packs_of(three, "three") != [pack]
    three.collect()
    assert litter(three) == []


def test_a_sparse_pack_is_written_anew_and_its_rest_freed(store: Store) -> None:
    files = {str(n): os.urandom(CHUNK) for n in range(5)}
    save(store, "all", files=files)
    save(store, "one", files={"0": files["0"]})
    assert store.remove("all") < CHUNK
    assert store.compact().freed > 4 * CHUNK
    assert store.used() < CHUNK + 10_000
    assert read_back(store, "one") == {"0": files["0"]}
    assert litter(store) == []
    assert faults(store) == []
    assert store.compact().freed == 0


def test_a_pack_is_not_compacted_under_somebody_who_relies_on_it(store: Store) -> None:
    files = {str(n): os.urandom(CHUNK) for n in range(5)}
    save(store, "all", files=files)
    save(store, "one", files={"0": files["0"]})
    with store.writer("late") as writer:
        fill(writer, {"4": files["4"]})
        store.remove("all")
        assert store.compact().waiting > 4 * CHUNK
        writer.commit(message="", parent=None, kernel={}, machine={}, cuda={}, process={})
    store.compact()
    assert read_back(store, "late") == {"4": files["4"]}
    assert read_back(store, "one") == {"0": files["0"]}
    assert store.used() < 3 * CHUNK
    assert litter(store) == []


def test_a_renamed_snapshot_is_the_same_under_another_name(three: Store) -> None:
    before = read_back(three, "one")
    saved = three.get("one")
    three.pin("one", True)
    renamed = three.rename("one", "uno")
    assert (renamed.name, renamed.id, renamed.created) == ("uno", saved.id, saved.created)
    assert three.labels(three.get("uno")).pinned
    assert read_back(three, "uno") == before
    with pytest.raises(NoSuchSnapshot):
        three.get("one")
    with pytest.raises(NameTaken) as caught:
        three.rename("uno", "two")
    assert "--replace" not in caught.value.then  # `mv` has none
    assert three.get("uno") == renamed
    assert litter(three) == []


def test_pinned_snapshots_are_neither_removed_nor_replaced(three: Store) -> None:
    three.pin("one", True)
    with pytest.raises(Pinned, match="unpin one"):
        three.remove("one")
    with pytest.raises(Pinned):
        three.writer("one", replace=True)
    assert keep_last(three, 1) == ["two"]
    assert [m.name for m in three.list()] == ["three", "one"]
    three.pin("one", False)
    three.remove("one")
    assert litter(three) == []


def test_tags_are_added_and_taken_away(three: Store) -> None:
    assert three.tag("one", ["good", "best"]).tags == ("best", "good")
    assert three.tag("one", ["new"], ["good"]).tags == ("best", "new")
    assert three.labels(three.get("one")).tags == ("best", "new")
    with pytest.raises(StoreError, match="cannot be a tag"):
        three.tag("one", ["two words"])


def test_damaged_labels_count_as_a_pin(three: Store) -> None:
    three.tag("one", ["good"])
    (three.root / "labels" / f"{three.get('one').id}.json").write_bytes(b"{")
    with pytest.raises(Pinned):
        three.remove("one")


def test_the_newest_are_kept(store: Store) -> None:
    for number in range(5):
        save(store, f"s{number}", message="mine" if number % 2 else "", files={"a": os.urandom(999)})
    assert sorted(keep_last(store, 1, lambda m: m.message == "mine")) == ["s1"]
    assert sorted(keep_last(store, 2)) == ["s0", "s2"]
    assert [m.name for m in store.list()] == ["s4", "s3"]


def test_the_oldest_are_removed_until_the_store_is_small_enough(store: Store) -> None:
    for number in range(4):
        save(store, f"s{number}", files={"a": os.urandom(100_000)})
    assert keep_under(store, 250_000) == ["s0", "s1"]
    assert store.used() < 250_000
    assert keep_under(store, 0) == ["s2"]


def test_a_save_beyond_the_quota_is_refused_and_leaves_nothing(store: Store) -> None:
    save(store, "old", files={"a": os.urandom(100_000)})
    used = store.used()
    with store.writer("new", quota=used + 50_000) as writer:
        fill(writer, {"a": os.urandom(100_000)})
        with pytest.raises(StoreError) as caught:
            writer.commit(message="", parent=None, kernel={}, machine={}, cuda={}, process={})
    assert caught.value.data["errno"] == "EDQUOT"
    assert store.used() == used
    assert litter(store) == []
    # What is known already takes no room.
    with store.writer("new", quota=used) as writer:
        fill(writer, read_back(store, "old"))
        writer.commit(message="", parent=None, kernel={}, machine={}, cuda={}, process={})


@dataclass(frozen=True)
class Said:
    """What is listed of a snapshot."""

    name: str
    message: str


def describe(manifest: Manifest) -> Said:
    return Said(manifest.name, manifest.message)


def test_a_list_of_many_snapshots_is_kept_and_always_right(store: Store) -> None:
    for number in range(120):
        save(store, f"s{number}", "old", files={})
    asked = []

    def say(manifest: Manifest) -> Said:
        asked.append(manifest.name)
        return describe(manifest)

    def listed(version: str = "1") -> list[tuple[str, str]]:
        asked.clear()
        found, broken = store.listed(Said, say, version)
        assert broken == []
        return sorted((one.name, one.message) for one in found)

    expected = sorted((m.name, m.message) for m in store.list())
    assert (listed(), len(asked)) == (expected, 120)
    assert (listed(), len(asked)) == (expected, 0)
    save(store, "s7", "new", files={}, replace=True)
    store.remove("s8")
    store.rename("s9", "nine")
    expected = sorted((m.name, m.message) for m in store.list())
    assert ("s7", "new") in expected
    assert (listed(), sorted(asked)) == (expected, ["nine", "s7"])
    assert (listed("2"), len(asked)) == (expected, 119)
    kept = store.root / "listing.json"
    for spoil in (lambda: flip(kept, 100), lambda: kept.write_bytes(b""), kept.unlink):
        spoil()
        assert (listed("2"), len(asked)) == (expected, 119)
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


def test_a_damaged_manifest_is_told_in_a_list_that_was_kept(store: Store) -> None:
    for number in range(101):
        save(store, f"s{number}", files={})
    store.listed(Said, describe, "1")
    flip(store.root / "snapshots" / "s5.json", 9)
    found, broken = store.listed(Said, describe, "1")
    assert len(found) == 100
    assert [e.data["name"] for e in broken] == ["s5"]


def test_some_files_of_a_snapshot_are_read_without_the_others(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    with store.writer("a") as writer:
        (writer.directory / "small").write_bytes(b"s" * 5000)
        (writer.directory / "other").write_bytes(os.urandom(5000))
        with (writer.directory / "huge").open("wb") as f:
            f.truncate(2**28 + 1)  # zeros take nothing
        written = writer.commit(message="", parent=None, kernel={}, machine={}, cuda={}, process={})
    manifest, contents, read = store.read_files("a", ["small", "missing"])
    assert manifest.id == written.id
    assert read == {"small": b"s" * 5000}
    assert contents.files.keys() == {"small", "other", "huge"}
    with pytest.raises(Damaged, match="damaged"):
        store.read_files("a", ["huge"])
    huge = 2**28 + 1
    with store.parts(manifest, ["small", "huge"]) as parts:
        assert parts.read("small", 4990, 100) == b"s" * 10
        assert parts.read("huge", huge - 3, 3) == bytes(3)
    with store.writer("b") as writer:
        (writer.directory / "long").write_bytes(long := os.urandom(5_000_000))
        written = writer.commit(message="", parent=None, kernel={}, machine={}, cuda={}, process={})
    with store.parts(written, ["long"]) as parts:
        assert parts.read("long", 2_000_000, 2_500_000) == long[2_000_000:4_500_000]
    store.remove("b")
    with pytest.raises(NoSuchSnapshot), store.parts(written, ["long"]):
        pass


def test_what_would_be_freed_is_what_is_freed(store: Store) -> None:
    files = {str(n): os.urandom(CHUNK) for n in range(6)}
    save(store, "all", files=files)
    save(store, "one", files={"0": files["0"]})
    save(store, "own", files={"own": os.urandom(CHUNK)})
    would = store.would_collect(["all", "own"]).freed
    assert would == store.remove("all") + store.remove("own") > CHUNK
    would = store.would_compact().freed
    assert would > 4 * CHUNK
    before = store.used()
    assert store.compact().freed == would
    assert abs(before - store.used() - would) < 1000, "but for what the index takes"
    assert store.would_compact().freed == store.compact().freed == 0
