"""Chunks that are stored as deltas of others: every snapshot has its bytes, and its bases, whatever is done."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quick_passphrase import passphrases_are_quick
from store_helpers import ABOUT, fill, litter, packs_of, read_back, save
from transfer_helpers import at, person, secrets_of

import jupyter_gpuckpt
from jupyter_gpuckpt.errors import Damaged, Incompatible, RemoteError
from jupyter_gpuckpt.store import Bases, Changed, Manifest, Piece, Store, blocks, chunking, delta, digest
from jupyter_gpuckpt.store.codec import DELTA, DELTAS, OLD_DELTA
from jupyter_gpuckpt.store.index import MAGIC, MAGIC_WITH_DELTAS, DamagedPart, Index, read_part, write_part
from jupyter_gpuckpt.store.names import pack_name
from jupyter_gpuckpt.store.pack import HEADER, Location, OpenPacks
from jupyter_gpuckpt.store.pack import MAGIC as PACK_MAGIC
from jupyter_gpuckpt.store.transfer.container import export_snapshot, import_snapshot
from jupyter_gpuckpt.store.transfer.pull import pull
from jupyter_gpuckpt.store.transfer.push import push

PAGE = 4096
SIZE = 64 * PAGE
_ENCRYPTED: dict[str, object] = {"passphrase": lambda: "open sesame", "with_passphrase": True}
PAGES = "criu/pages-1.img"
Files = dict[str, bytes]


def save_over(store: Store, name: str, files: Mapping[str, bytes], before: str) -> Manifest:
    """Save, and tell the store of each chunk what another snapshot has at its place."""
    were = store.contents(store.get(before)).files
    with store.writer(name) as writer:
        fill(writer, dict(files))
        for path, content in files.items():
            if sum(chunk.size for chunk in were.get(path, ())) == len(content):
                writer.tell(path, [c.size if c.hash == bytes(32) else Changed(c.size, c.hash) for c in were[path]])
        return writer.commit(message="", **ABOUT)


def changed(content: bytes, page: int, seed: int) -> bytes:
    """Return bytes of which some in one page are others."""
    at, some = page * PAGE + 100, random.Random(seed).randbytes(50)
    return content[:at] + some + content[at + 50 :]


def part(store: Store, name: str) -> Index:
    return read_part(store._layout, store.get(name).id)


def deltas(store: Store, name: str) -> Index:
    return {key: at for key, at in part(store, name).items() if at.base}


def damage(store: Store, key: bytes, name: str) -> None:
    """Change a byte of a chunk that a snapshot needs."""
    where = part(store, name)[key]
    pack = store.root / "packs" / where.pack
    raw = bytearray(pack.read_bytes())
    raw[where.offset + where.stored // 2] ^= 1
    pack.write_bytes(raw)


@pytest.fixture
def saved() -> Files:
    return {PAGES: os.urandom(SIZE), "log": b"a log"}


@pytest.fixture
def three(store: Store, saved: Files) -> dict[str, Files]:
    """Snapshots of which each was told what the one before has: `two` and `three` are deltas of `one`."""
    states = {"one": saved}
    save(store, "one", files=saved)
    for name, before, page in (("two", "one", 3), ("three", "two", 9)):
        states[name] = {**states[before], PAGES: changed(states[before][PAGES], page, page)}
        save_over(store, name, states[name], before)
        assert len(deltas(store, name)) == 1
    return states


def assert_all_there(store: Store, states: Mapping[str, Files]) -> None:
    assert {name: read_back(store, name) for name in states} == states
    assert store.check(read_data=True).faults == []
    assert litter(store) == []


def test_what_changed_alone_is_stored_and_a_delta_is_never_a_base(store: Store, three: dict[str, Files]) -> None:
    assert all(store.get(name).stored < 1000 for name in ("two", "three"))
    (first,), (second,) = deltas(store, "two").values(), deltas(store, "three").values()
    assert first.base == second.base
    assert not part(store, "three")[second.base].base
    assert_all_there(store, three)


def test_a_chunk_that_changed_much_is_stored_by_itself(store: Store, saved: Files) -> None:
    save(store, "one", files=saved)
    other = {**saved, PAGES: saved[PAGES][: SIZE // 8] + os.urandom(SIZE - SIZE // 8)}
    save_over(store, "two", other, "one")
    assert deltas(store, "two") == {}
    assert_all_there(store, {"one": saved, "two": other})


def test_the_store_is_marked_before_a_delta_is_in_it_and_not_without_one(store: Store, saved: Files) -> None:
    mark = store.root / "format.json"
    save(store, "one", files=saved)
    assert json.loads(mark.read_bytes()) == {"features": [], "format": 2}
    save_over(store, "two", {**saved, PAGES: changed(saved[PAGES], 1, 1)}, "one")
    # Versions that know no such feature refuse the store: `test_damage.py`.
    assert json.loads(mark.read_bytes()) == {"features": ["combined deltas", "deltas"], "format": 2}
    mark.write_text('{"features":["deltas","of a newer version"],"format":2}')
    with pytest.raises(Incompatible, match="it needs 'of a newer version'"):
        store.list()
    assert "newer" in mark.read_text()


def test_a_base_stays_for_as_long_as_a_delta_needs_it(store: Store, three: dict[str, Files]) -> None:
    for gone in ("one", "two"):
        store.remove(gone)
        store.collect()
        store.compact()
        del three[gone]
        assert_all_there(store, three)
    (only,) = deltas(store, "three").values()
    assert only.base in part(store, "three")
    store.remove("three")
    store.collect()
    assert list((store.root / "packs").iterdir()) == []


def test_bases_and_deltas_are_copied_out_of_sparse_packs(store: Store, saved: Files) -> None:
    more = {str(n): os.urandom(SIZE) for n in range(12)}
    save(store, "one", files={**saved, **more})
    two = {**saved, PAGES: changed(saved[PAGES], 5, 5)}
    with store.writer("two") as writer:
        fill(writer, {**two, **{f"{n}-of-two": os.urandom(SIZE) for n in range(3)}})
        (chunk,) = store.contents(store.get("one")).files[PAGES]
        writer.tell(PAGES, [Changed(chunk.size, chunk.hash)])
        writer.commit(message="", **ABOUT)
    save_over(store, "three", two, "two")
    before = deltas(store, "three")
    store.remove("one")
    store.remove("two")
    assert store.compact().freed > 10 * SIZE
    after = deltas(store, "three")
    assert [at.pack for at in before.values()] != [at.pack for at in after.values()]
    assert store.used() < 2 * SIZE
    assert_all_there(store, {"three": two})


def test_a_damaged_base_is_told_of_every_snapshot_that_needs_it(store: Store, three: dict[str, Files]) -> None:
    (at,) = deltas(store, "three").values()
    store.remove("one")
    damage(store, at.base, "three")
    found = store.check(read_data=True).faults
    assert ("chunk", ("three", "two")) in [(fault.what, fault.snapshots) for fault in found]
    assert {name for fault in found for name in fault.snapshots} == {"two", "three"}
    with pytest.raises(Damaged, match=f"the chunk {at.base.hex()[:16]} that it is a delta of") as caught:
        read_back(store, "three")
    assert caught.value.data == {"name": "three", "file": PAGES}
    # Nothing new relies on it.
    new = {PAGES: changed(three["three"][PAGES], 1, 1)}
    save_over(store, "new", new, "three")
    assert deltas(store, "new") == {}
    assert read_back(store, "new") == new
    assert set(store.repair().lost) == {"two", "three"}
    # Its bytes are saved once more, and the others have theirs again.
    save(store, "again", files=three["one"])
    assert store.repair().lost == {}
    store.collect()
    assert_all_there(store, {"new": new, "again": three["one"], "two": three["two"], "three": three["three"]})


def test_a_missing_base_is_told_without_reading_the_data(store: Store, three: dict[str, Files]) -> None:
    store.remove("one")
    (at,) = deltas(store, "two").values()
    (store.root / "packs" / part(store, "two")[at.base].pack).unlink()
    assert {name for fault in store.check().faults for name in fault.snapshots} == {"two", "three"}


def test_the_index_can_be_made_again_from_the_packs(store: Store, three: dict[str, Files]) -> None:
    store.remove("one")
    before = {name: part(store, name) for name in ("two", "three")}
    del three["one"]
    for path in (store.root / "index").iterdir():
        path.unlink()
    assert {name: read_back(store, name) for name in three} == three
    assert sorted(store.repair().mended) == ["three", "two"]
    assert {name: part(store, name) for name in three} == before
    assert_all_there(store, three)


def test_parts_of_files_and_files_read_later_have_their_bytes(
    store: Store, three: dict[str, Files], tmp_path: Path
) -> None:
    content = three["three"][PAGES]
    with store.parts(store.get("three"), [PAGES]) as parts:
        for offset in (0, 3 * PAGE + 99, 9 * PAGE + 110, SIZE - 10):
            assert parts.read(PAGES, offset, 77) == content[offset : offset + 77]
    assert store.read_files("three", [PAGES])[2] == {PAGES: content}
    later = store.postpone("three", store.get("three").id, {"criu": tmp_path})
    for name in ("one", "two", "three"):
        store.remove(name)
    later.read()
    assert (tmp_path / "pages-1.img").read_bytes() == content
    later.close()


@pytest.mark.parametrize("how", [{}, _ENCRYPTED], ids=["plain", "encrypted"])
def test_no_delta_leaves_the_store(
    store: Store, three: dict[str, Files], tmp_path: Path, how: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    passphrases_are_quick(monkeypatch)
    remote = tmp_path / "remote"
    for name in ("three", "two"):
        push(store, name, at(remote, store, **how))
    other = person(tmp_path, "other")
    other.trust.add(store.trust.own())
    for name in ("two", "three"):
        pull(other, at(remote, other, create=False, **how), name)
        assert deltas(other, name) == {}
    assert_all_there(other, {name: three[name] for name in ("two", "three")})
    assert json.loads((other.root / "format.json").read_bytes())["features"] == []
    # Back to where all of it is there as deltas.
    save(store, "same", files=three["two"])
    store.remove("two")
    assert pull(store, at(remote, store, create=False, **how), "two").fetched == 0
    for name in ("one", "three", "same"):
        store.remove(name)
    assert len(deltas(store, "two")) == 1
    assert_all_there(store, {"two": three["two"]})
    said: list[int] = []
    file = io.BytesIO()
    export_snapshot(store, "two", file, secrets_of(store, **how), announce=said.append)
    assert said == ([] if how else [len(file.getvalue())])
    third = person(tmp_path, "third")
    third.trust.add(store.trust.own())
    file.seek(0)
    import_snapshot(third, file, "a file", secrets_of(third, **how))
    assert deltas(third, "two") == {}
    assert_all_there(third, {"two": three["two"]})


def test_a_delta_from_elsewhere_is_refused(store: Store, three: dict[str, Files], tmp_path: Path) -> None:
    remote, other = tmp_path / "remote", person(tmp_path, "other")
    other.trust.add(store.trust.own())
    push(store, "two", at(remote, store))
    mine = store.root / "index" / store.get("two").id
    there = remote / "index" / mine.name
    for pack in packs_of(store, "two"):
        (remote / "packs" / pack.name).write_bytes(pack.read_bytes())
    records = mine.read_bytes()[len(MAGIC) + 8 :][: len(part(store, "two")) * 72]
    as_of_old = MAGIC + records
    for raw in (mine.read_bytes(), as_of_old + digest(as_of_old)):
        there.write_bytes(raw)
        with pytest.raises((Damaged, RemoteError)):
            pull(other, at(remote, other, create=False), "two")
        assert other.list() == []
        # Nor does anybody who sends something there rely on it.
        assert push(store, "two", at(remote, store)).sent >= SIZE
        assert pull(other, at(remote, other, create=False), "two").fetched >= SIZE
        other.remove("two")
    ((key, where),) = deltas(store, "two").items()
    file = io.BytesIO()
    export_snapshot(store, "two", file, secrets_of(store))
    raw = file.getvalue()
    begin = raw.rindex(key) - 8
    with OpenPacks(store.root / "packs") as packs:
        made = os.pread(packs.open(where.pack), where.stored, where.offset)
    record = struct.pack("<4sQB3xI32s", b"CHNK", 40 + len(made), 2, where.size, key) + made
    forged = raw[: begin - 12] + record + raw[begin + 40 + SIZE :]
    with pytest.raises(Damaged, match="codec 2 is not known"):
        import_snapshot(other, io.BytesIO(forged), "a file", secrets_of(other))


def test_a_delta_that_names_another_base_than_the_index_is_not_used(store: Store, three: dict[str, Files]) -> None:
    ((key, where),) = deltas(store, "two").items()
    pack = store.root / "packs" / where.pack
    raw = bytearray(pack.read_bytes())
    assert raw[where.offset - HEADER :][:4] == b"CHNK"
    raw[where.offset : where.offset + 32] = bytes(32)
    pack.write_bytes(raw)
    with pytest.raises(Damaged, match=key.hex()[:16]):
        read_back(store, "two")
    assert read_back(store, "three") == three["three"]


def forge(store: Store, name: str, made: bytes, codec: int) -> None:
    """Let a snapshot's only delta be stored as these bytes, and all that is written about it say so."""
    index = part(store, name)
    ((key, at),) = deltas(store, name).items()
    where = pack_name(store.get(name).id, 99)
    entry = struct.pack("<4sB3xII32s", b"CHNK", codec, len(made), at.size, key)
    (store.root / "packs" / where).write_bytes(PACK_MAGIC + entry + made)
    (store.root / "packs" / at.pack).unlink()
    index[key] = at._replace(pack=where, offset=len(PACK_MAGIC) + len(entry), stored=len(made), codec=codec)
    write_part(store._layout, store.get(name).id, index, store.get(name).id)


def _one_block(frame: bytes) -> bytes:
    return bytes([1]) + bytes(SIZE // 4096 - 1) + frame


def _all_blocks(frame: bytes) -> bytes:
    return b"\xff" * (SIZE // 4096) + frame


def _claiming(size: int, content: bytes) -> bytes:
    """Return a frame that claims to have another size than it has, both of 256 bytes and more, below 64 KiB."""
    frame = bytearray(zstandard.compress(content))
    assert frame[4] >> 6 == 1  # two bytes say the size
    frame[5:7] = (size - 256).to_bytes(2, "little")
    return bytes(frame)


_HOSTILE = {
    "expands to 256 MiB": _one_block(zstandard.compress(bytes(1 << 28))),
    "expands to 256 MiB, all blocks": _all_blocks(zstandard.compress(bytes(1 << 28))),
    "claims no size": _one_block(zstandard.ZstdCompressor(write_content_size=False).compress(bytes(512))),
    "is longer than it says": _one_block(_claiming(512, bytes(60_000))),
    "is shorter than it says": _one_block(_claiming(512, bytes(300))),
    "has blocks of another number": _all_blocks(zstandard.compress(bytes(512))),
    "is of nothing": _one_block(b"\x50\x2a\x4d\x18" + (512).to_bytes(4, "little") + bytes(512)),
    "ends within its bits": b"\x01" * 5,
    "has no frame": _one_block(b"?"),
    "is of other bytes": _one_block(zstandard.compress(bytes(511) + b"x")),
}


@pytest.mark.parametrize("codec", DELTAS)
@pytest.mark.parametrize("made", _HOSTILE.values(), ids=[*_HOSTILE])
def test_a_hostile_delta_is_damage_and_takes_no_memory(
    store: Store, three: dict[str, Files], made: bytes, codec: int
) -> None:
    (at,) = deltas(store, "two").values()
    forge(store, "two", at.base + made, codec)
    tracemalloc.start()
    try:
        with pytest.raises(Damaged):
            read_back(store, "two")
        assert ("chunk", ("two",)) in [(f.what, f.snapshots) for f in store.check(read_data=True).faults]
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert [*store.repair().lost] == ["two"]
    assert read_back(store, "three") == three["three"]


def _sealed(keys: Sequence[bytes], at: Location, pairs: Sequence[tuple[int, int]], count: int) -> bytes:
    """Return a part of the index in which these chunks are deltas of each other as the pairs say."""
    places = [struct.pack("<32s16sIQIIB3x", key, bytes.fromhex(at.pack[:32]), 1, 16, 99, SIZE, 2) for key in keys]
    raw = (
        MAGIC_WITH_DELTAS
        + struct.pack("<Q", count)
        + b"".join(places)
        + b"".join(struct.pack("<II", *p) for p in pairs)
    )
    return raw + digest(raw)


@pytest.mark.parametrize(
    ("pairs", "count"),
    [([(0, 1), (1, 0)], 2), ([(0, 0), (1, 1)], 2), ([(0, 1)], 2), ([(0, 7)], 2), ([(0, 1)], 2**60), ([], 2)],
    ids=["in a circle", "of itself", "of a delta without base", "of nothing", "more than there are", "of none"],
)
def test_an_index_of_deltas_that_have_no_whole_base_is_damage(
    store: Store, three: dict[str, Files], pairs: list[tuple[int, int]], count: int
) -> None:
    ((key, at),) = deltas(store, "two").items()
    mine = store.root / "index" / store.get("two").id
    was = mine.read_bytes()
    mine.write_bytes(_sealed(sorted([key, at.base]), at, pairs, count))
    with pytest.raises(DamagedPart):
        part(store, "two")
    assert "index" in {fault.what for fault in store.check().faults}
    assert read_back(store, "two") == three["two"]  # the packs say where its chunks are
    assert store.repair().mended == ["two"]
    assert mine.read_bytes() == was
    assert_all_there(store, three)


def test_packs_of_deltas_of_each_other_are_damage(store: Store, three: dict[str, Files]) -> None:
    ((key, at),) = deltas(store, "two").items()
    session = store.get("two").id
    for path in [*(store.root / "index").iterdir(), *(store.root / "packs").iterdir()]:
        path.unlink()
    entries = b""
    for chunk, base in ((key, at.base), (at.base, key)):
        made = base + _one_block(zstandard.compress(bytes(512)))
        entries += struct.pack("<4sB3xII32s", b"CHNK", 2, len(made), SIZE, chunk) + made
    (store.root / "packs" / pack_name(session, 1)).write_bytes(PACK_MAGIC + entries)
    for name in three:
        with pytest.raises(Damaged):
            read_back(store, name)
    assert store.check().faults
    assert sorted(store.repair().lost) == sorted(three)


def test_bases_stay_in_memory_from_one_save_to_the_next(store: Store, three: dict[str, Files]) -> None:
    """Small ones: what is read of a store is read once."""
    small = {PAGES: os.urandom(8 * PAGE)}
    save(store, "small", files=small)
    bases = Bases()
    for number in range(3):
        small = {PAGES: changed(small[PAGES], number, number)}
        with store.writer(f"small-{number}") as writer:
            writer.bases = bases
            fill(writer, small)
            before = "small" if not number else f"small-{number - 1}"
            (chunk,) = store.contents(store.get(before)).files[PAGES]
            writer.tell(PAGES, [Changed(chunk.size, chunk.hash)])
            writer.commit(message="", **ABOUT)
        bases.saved()
        assert len(deltas(store, f"small-{number}")) == 1
        assert read_back(store, f"small-{number}") == small

    def unread() -> bytes:
        raise AssertionError("it is read again")

    (at,) = deltas(store, "small-2").values()
    assert digest(bases.get(at.base, unread)) == at.base
    bases.saved()
    bases.saved()  # a save that did not need it
    with pytest.raises(AssertionError, match="read again"):
        bases.get(at.base, unread)


@pytest.mark.parametrize("much", [1, 40 * 1024, 70 * 1024, SIZE - PAGE])
@pytest.mark.parametrize(("size", "of_base"), [(SIZE, SIZE), (SIZE - 300, SIZE), (SIZE, SIZE - 300), (700, 5)])
def test_a_delta_makes_its_chunk_whatever_it_differs_in(much: int, size: int, of_base: int) -> None:
    some = random.Random(much)
    base = some.randbytes(of_base)
    chunk = bytearray((base + some.randbytes(SIZE))[:size])
    begin = max(size - much, 0)
    chunk[begin:] = some.randbytes(size - begin)
    made = delta.make(chunk, digest(base), base)
    assert delta.base_of(made) == digest(base)
    assert delta.apply(DELTA, made, base, memoryview(bytearray(some.randbytes(size)))) == chunk


@pytest.fixture
def without_library(tmp_path: Path) -> Any:
    """What makes deltas, installed where there was no C compiler."""
    alone = tmp_path / "no-library"
    alone.mkdir()
    spec = spec_from_file_location("blocks_without_library", shutil.copy(str(blocks.__file__), alone))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module._built is None
    assert blocks._built is not None  # `make setup` needs a C compiler
    return module


@pytest.mark.parametrize("much", [0, 1, 512, 40 * 1024, SIZE])
@pytest.mark.parametrize("size", [1, 511, 512, 513, PAGE, SIZE, SIZE - 300])
def test_python_makes_and_applies_what_the_library_does(without_library: Any, much: int, size: int) -> None:
    some = random.Random(much)
    other = some.randbytes(size)
    chunk = other[: max(size - much, 0)] + some.randbytes(min(much, size))
    bits, difference = blocks.made(chunk, other)
    assert without_library.made(chunk, other) == (bits, difference)
    for applied in (blocks.apply, without_library.apply):
        room = memoryview(bytearray(other))
        applied(bits, bytes(difference), room)
        assert room == chunk


@pytest.fixture
def elsewhere(tmp_path: Path) -> Callable[[str], None]:
    """Run code that knows this module as `t`, by an installation where there was no C compiler."""
    installed, package = tmp_path / "installed", Path(jupyter_gpuckpt.__file__).parent
    for folder in (package, package / "store"):
        to = installed / folder.relative_to(package.parent)
        to.mkdir(parents=True)
        for path in folder.iterdir():
            if path.name not in ("store", "__pycache__", "libgpuckpt-blocks.so"):
                (to / path.name).symlink_to(path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(installed), *filter(None, sys.path)])}

    def run(code: str) -> None:
        begin = "import test_deltas as t\nassert t.blocks._built is None\n"
        words = [sys.executable, "-c", begin + code]  # Python looks for packages where it is started, too
        done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    return run


def test_a_store_is_written_and_read_with_and_without_the_library(
    store: Store, saved: Files, tmp_path: Path, elsewhere: Callable[[str], None]
) -> None:
    two = {**saved, PAGES: changed(saved[PAGES], 5, 2)}
    states = {"one": saved, "two": two, "three": {**two, PAGES: changed(two[PAGES], 9, 3)}}
    given = tmp_path / "states"
    given.write_bytes(pickle.dumps(states))
    there = (
        f"import pickle\nstore = t.Store(t.Path({str(store.root)!r}))\n"
        f"states = pickle.loads(t.Path({str(given)!r}).read_bytes())\n"
    )
    save(store, "one", files=saved)
    elsewhere(there + "t.save_over(store, 'two', states['two'], 'one')")
    save_over(store, "three", states["three"], "two")
    assert [len(deltas(store, name)) for name in states] == [0, 1, 1]
    assert_all_there(store, states)
    elsewhere(there + "t.assert_all_there(store, states)")


def old_delta(data: bytes, key: bytes, base: bytes) -> bytes:
    """Return a delta as the version made it that knew no others."""
    places = [place for place in range(0, len(data), 512) if data[place : place + 512] != base[place : place + 512]]
    bits = bytearray(-(-len(data) // 4096))
    for place in places:
        bits[place // 4096] |= 1 << place // 512 % 8
    new, old = (b"".join(one[place : place + 512] for place in places) for one in (data, base[: len(data)]))
    if len(new) <= 64 * 1024:
        combined = int.from_bytes(new, "little") ^ int.from_bytes(old, "little")
        return key + bits + zstandard.compress(combined.to_bytes(len(new), "little"))
    dictionary = zstandard.ZstdCompressionDict(old, zstandard.DICT_TYPE_RAWCONTENT)
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=19)
    return key + bits + zstandard.ZstdCompressor(dict_data=dictionary, compression_params=parameters).compress(new)


@pytest.mark.parametrize("much", [1000, 160 * 1024])
def test_deltas_of_an_earlier_version_are_read(
    store: Store, saved: Files, monkeypatch: pytest.MonkeyPatch, much: int
) -> None:
    mark = store.root / "format.json"
    save(store, "one", files=saved)
    newer = bytes(byte ^ 1 for byte in saved[PAGES][:much]) + saved[PAGES][much:]
    states = {"one": saved, "two": {**saved, PAGES: newer}}
    with monkeypatch.context() as patched:
        patched.setattr(chunking, "DELTA", OLD_DELTA)
        patched.setattr(delta, "make", lambda data, key, base: old_delta(bytes(data), key, bytes(base)))
        save_over(store, "two", states["two"], "one")
        mark.write_text('{"features":["deltas"],"format":2}\n')
    assert [at.codec for at in deltas(store, "two").values()] == [OLD_DELTA]
    assert_all_there(store, states)
    states["three"] = {**saved, PAGES: changed(newer, 40, 3)}
    save_over(store, "three", states["three"], "two")
    assert json.loads(mark.read_bytes())["features"] == ["combined deltas", "deltas"]
    assert_all_there(store, states)
    for path in (store.root / "index").iterdir():
        path.unlink()
    assert len(store.repair().mended) == 3  # the packs tell the codecs, too
    assert_all_there(store, states)


def test_a_save_that_is_given_up_leaves_the_others(store: Store, three: dict[str, Files]) -> None:
    with store.writer("given-up") as writer:
        fill(writer, {PAGES: changed(three["three"][PAGES], 2, 2)})
        writer.tell(
            PAGES, [Changed(chunk.size, chunk.hash) for chunk in store.contents(store.get("three")).files[PAGES]]
        )
    store.collect()
    assert_all_there(store, three)


_SAME = random.Random(1).randbytes(15 * PAGE)
_BLOCKS = [bytes(16 * PAGE), *(_SAME + random.Random(n).randbytes(PAGE) for n in range(9))]
_BLOCKS += [random.Random(n).randbytes(PAGE) + _SAME for n in range(9)]
_STEPS = st.one_of(
    st.tuples(st.just("save"), st.lists(st.integers(0, len(_BLOCKS) - 1), min_size=1, max_size=6), st.integers(0, 9)),
    st.tuples(st.just("remove"), st.integers(0, 9)),
    st.sampled_from([("collect",), ("compact",), ("repair",), ("index",)]),
)


@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(_STEPS, min_size=8, max_size=30))
def test_every_snapshot_has_its_bytes_after_any_order_of_work(steps: list[tuple[Any, ...]]) -> None:
    """`index` deletes the index, so that it has to be made again; `test_model.py` kills such work at any moment."""
    with tempfile.TemporaryDirectory() as folder:
        store = person(Path(folder), "somebody")
        states: dict[str, Files] = {}
        for number, (what, *how) in enumerate(steps):
            if what == "save":
                files = {PAGES: b"".join(_BLOCKS[n] for n in how[0])}
                with store.writer(f"s{number}") as writer:
                    fill(writer, files)
                    before = [c for n in sorted(states)[how[1] :] for c in store.contents(store.get(n)).chunks()]
                    pieces: list[Piece] = [16 * PAGE for _ in how[0]]
                    for n, chunk in enumerate(before[: len(pieces)]):
                        pieces[n] = Changed(16 * PAGE, chunk.hash)
                    writer.tell(PAGES, pieces)
                    writer.commit(message="", **ABOUT)
                states[f"s{number}"] = files
            elif what == "remove" and how[0] < len(states):
                name = sorted(states)[how[0]]
                del states[name]
                store.remove(name)
            elif what == "index" and states:
                for path in (store.root / "index").iterdir():
                    path.unlink()
                assert store.repair().lost == {}
            elif what in ("collect", "compact", "repair"):
                getattr(store, what)()
        assert {name: read_back(store, name) for name in states} == states
        if states:
            assert store.check(read_data=True).faults == []
            store.collect()
            assert litter(store) == []
