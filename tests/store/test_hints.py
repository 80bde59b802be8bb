"""A save looks up only what it needs; hints, that tell where, may be old, damaged or gone at any time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from store_helpers import FILES, litter, packs_of, read_back, save

from jupyter_gpuckpt.store import Store, hints, index, lookup
from jupyter_gpuckpt.store.layout import Layout

BLOCK = 2 * 1024 * 1024
SNAPSHOTS = 12


def files(number: int) -> dict[str, bytes]:
    """Return files of which all snapshots have the first chunk, and each has one of its own."""
    return {"pages": b"same in all".ljust(BLOCK, b".") + f"only in {number}".encode()}


@pytest.fixture
def many(store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store with snapshots that nearly all hints are written down for, in several files."""
    monkeypatch.setattr(hints, "_MANY_PARTS", 2)
    monkeypatch.setattr(hints, "_MOST", 8)
    monkeypatch.setattr(hints, "_BLOCK", 2)
    for number in range(SNAPSHOTS):
        save(store, f"n{number}", files=files(number))
    assert len(written(store)) > 1
    return store


def written(store: Store) -> list[Path]:
    return sorted(Layout(store.root).hinted())


def assert_kept_once(store: Store) -> None:
    """Saving again what is in the store adds nothing to it."""
    for name in [m.name for m in store.list()]:
        assert save(store, f"{name}-again", files=read_back(store, name)).stored == 0


def test_each_byte_is_kept_once_among_many_snapshots(many: Store) -> None:
    assert_kept_once(many)
    assert many.check(read_data=True).faults == []
    assert litter(many) == []


@pytest.mark.parametrize("gone", [range(1, SNAPSHOTS), range(SNAPSHOTS - 1), [0], [SNAPSHOTS - 1]])
def test_it_is_found_by_whichever_snapshots_are_left(many: Store, gone: list[int]) -> None:
    for number in gone:
        many.remove(f"n{number}")
    assert_kept_once(many)


def test_nothing_is_relied_on_that_only_a_removed_snapshot_had(many: Store) -> None:
    with many.writer("reader"):  # at work meanwhile, so that the removed bytes are still in their pack
        many.remove("n3")
        saved = save(many, "n3", files=files(3))
    many.collect()
    assert saved.stored > 0
    assert read_back(many, "n3") == files(3)


def test_a_save_reads_the_index_of_few_snapshots(many: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    save(many, "last", files=files(0))
    read: list[str] = []

    def counted(layout: Layout, part: str) -> index.Part:
        read.append(part)
        return index.open_part(layout, part)

    monkeypatch.setattr(hints, "open_part", counted)
    monkeypatch.setattr(lookup, "open_part", counted)
    monkeypatch.setattr(index, "read_part", counted)
    assert save(many, "next", files=files(5)).stored == 0
    assert 0 < len(read) <= 3  # those without hints yet, and those with the two chunks


def test_hints_do_not_pile_up(many: Store) -> None:
    for number in range(SNAPSHOTS):
        many.remove(f"n{number}")
    for number in range(4):
        save(many, f"later{number}", files=files(number))
    covered = [part for path in written(many) if (found := hints.Hints.open(path)) for part in found.parts]
    assert len(covered) == len(set(covered))
    assert set(covered) <= {m.id for m in many.list()}


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def scramble(path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[:32] + bytes(255 - byte for byte in raw[32:]))


def reverse(path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[:32] + raw[:31:-1])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "gone": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut": cut,
    "scrambled": scramble,
    "reversed": reverse,
    "huge": lambda path: path.write_bytes(path.read_bytes()[:16] + b"\xff" * 16),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_hints_do_no_harm(many: Store, damage: str) -> None:
    for path in written(many):
        DAMAGES[damage](path)
    for number in range(3):
        save(many, f"later{number}", files=files(number))
        assert read_back(many, f"later{number}") == files(number)
    assert many.check(read_data=True).faults == []


def test_they_can_be_deleted_at_any_time_and_nothing_is_stored_twice_for_it(many: Store) -> None:
    shutil.rmtree(many.root / "hints")
    assert_kept_once(many)


def test_a_save_does_without_them_where_they_cannot_be_written(many: Store) -> None:
    shutil.rmtree(many.root / "hints")
    (many.root / "hints").write_bytes(b"")
    assert_kept_once(many)


def test_what_a_repair_found_damaged_is_stored_anew(many: Store) -> None:
    (pack,) = [pack for pack in packs_of(many, "n0") if b"only in 0" in pack.read_bytes()]
    raw = pack.read_bytes()
    pack.write_bytes(raw.replace(b"only in 0", b"only on 0"))
    many.repair()
    assert save(many, "again", files=files(0)).stored > 0
    many.repair()
    assert read_back(many, "n0") == read_back(many, "again") == files(0)


def test_small_stores_have_none(store: Store) -> None:
    for number in range(3):
        save(store, f"n{number}", files=FILES)
    assert written(store) == []
