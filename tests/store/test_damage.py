"""Bytes that are not the ones that were saved, and formats of other versions (faults 5, 7, 13)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from store_helpers import FILES, abandon, everything, fill, litter, packs_of, read_back, save

from jupyter_gpuckpt.errors import Damaged, GpuckptError, Incompatible, StoreError, Unsigned
from jupyter_gpuckpt.store import Manifest, Store
from jupyter_gpuckpt.store.contents import Contents


def sealed(members: dict[str, Any]) -> bytes:
    body = json.dumps(members, sort_keys=True, separators=(",", ":")).encode()[:-1]
    return body + b',"blake3":"' + blake3(body).hexdigest().encode() + b'"}\n'


def members_of(store: Store) -> dict[str, Any]:
    members: dict[str, Any] = json.loads((store.root / "snapshots" / "it.json").read_bytes().splitlines()[0])
    del members["blake3"]
    return members


def rewrite(store: Store, changes: dict[str, Any]) -> None:
    path = store.root / "snapshots" / "it.json"
    path.write_bytes(store.trust.sign(sealed({**members_of(store), **changes})))


def flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "flipped": flip,
    "cut": lambda c: c[:-1],
    "emptied": lambda _: b"",
}


def damaged_file(store: Store, kind: str) -> Path:
    if kind == "pack":
        (pack,) = packs_of(store, "it")
        return pack
    return store.root / kind / store.get("it").id


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_byte_in_a_pack_names_the_file_of_the_snapshot(store: Store, change: str) -> None:
    save(store, "it", files={"pages-1.img": os.urandom(9999)})
    (pack,) = packs_of(store, "it")
    good = pack.read_bytes()
    pack.write_bytes(CHANGES[change](good))
    with pytest.raises(Damaged) as caught:
        read_back(store, "it")
    assert caught.value.data == {"name": "it", "file": "pages-1.img"}
    assert "repair" in caught.value.then
    pack.write_bytes(good)
    assert len(read_back(store, "it")["pages-1.img"]) == 9999


def test_every_bit_of_a_pack_counts(store: Store) -> None:
    content = {"a": b"abcdefgh", "b": b"a line of text\n" * 8}
    save(store, "it", files=content)
    (pack,) = packs_of(store, "it")
    good = pack.read_bytes()
    # What stands before the chunks' bytes is for repairs only: the index has it as well.
    for i in range(len(good)):
        pack.write_bytes(good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :])
        try:
            assert read_back(store, "it") == content
        except Damaged:
            continue


def test_one_bit_late_in_a_large_file_is_named(store: Store, tmp_path: Path) -> None:
    save(store, "it", files={"small": b"x", "large": os.urandom(17 * 2**20)})
    (pack,) = packs_of(store, "it")
    with pack.open("r+b") as f:
        f.seek(16 * 2**20)
        byte = f.read(1)
        f.seek(16 * 2**20)
        f.write(bytes([byte[0] ^ 128]))
    with pytest.raises(Damaged, match="large: chunk"):
        store.open("it", tmp_path / "files")
    assert not (tmp_path / "files").exists()


def test_a_missing_pack_names_the_snapshots_that_need_it_and_no_other(store: Store) -> None:
    save(store, "it", files={"a": os.urandom(9999)})
    save(store, "other", files={"a": os.urandom(9999)})
    (pack,) = packs_of(store, "it")
    pack.unlink()
    with pytest.raises(Damaged, match=r"(?s)it is damaged.*a: its chunk [0-9a-f]{16} is missing"):
        read_back(store, "it")
    read_back(store, "other")


@pytest.mark.parametrize("change", [*CHANGES, "gone"])
def test_a_damaged_index_is_made_up_for_by_the_packs(store: Store, change: str) -> None:
    save(store, "it")
    part = damaged_file(store, "index")
    if change == "gone":
        part.unlink()
    else:
        part.write_bytes(CHANGES[change](part.read_bytes()))
    assert read_back(store, "it") == FILES
    # Nothing is stored in reliance on it, or deleted.
    assert store.collect().obstacle
    assert store.would_collect().obstacle
    save(store, "again")
    assert read_back(store, "again") == read_back(store, "it") == FILES


@pytest.mark.parametrize("change", [*CHANGES, "gone"])
def test_a_damaged_list_of_contents_is_damage(store: Store, change: str) -> None:
    save(store, "it")
    path = damaged_file(store, "contents")
    if change == "gone":
        path.unlink()
    else:
        path.write_bytes(CHANGES[change](path.read_bytes()))
    with pytest.raises(Damaged, match="the list of its files"):
        read_back(store, "it")
    store.remove("it")
    assert store.list() == []
    assert litter(store) == []


def test_a_pack_that_became_a_link_or_a_pipe_is_damage(store: Store, tmp_path: Path) -> None:
    save(store, "it")
    (pack,) = packs_of(store, "it")
    outside = tmp_path / "same"
    pack.rename(outside)
    pack.symlink_to(outside)
    with pytest.raises(Damaged):
        read_back(store, "it")
    pack.unlink()
    os.mkfifo(pack)
    with pytest.raises(Damaged):
        read_back(store, "it")


def contents(files: object, *records: tuple[bytes, int]) -> bytes:
    packed = b"".join(key + size.to_bytes(8, "little") for key, size in records)
    return b"gpuckpt contents 2\n" + json.dumps({"files": files}).encode() + b"\n" + packed


KEY = b"k" * 32


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"gpuckpt contents 2\n",
        b"gpuckpt contents 2\n[]\n",
        contents(None),
        contents([["a", 1, 1]]),
        contents([["a", 2, 1]], (KEY, 1)),
        contents([["a", 1, 1]], (KEY, 1), (KEY, 1)),
        contents([["a", 1, 1], ["a", 1, 1]], (KEY, 1), (KEY, 1)),
        contents([["a", 1, 1], ["a/b", 1, 1]], (KEY, 1), (KEY, 1)),
        contents([["a", 2**40, 1]], (KEY, 2**40)),
        contents([["a", 0, 1]], (KEY, 0)),
        contents([["a", True, 1]], (KEY, 1)),
        contents([["a", 1, 1]], (KEY, 1)) + b"x",
        *(
            contents([[path, 1, 1]], (KEY, 1))
            for path in ("/etc/passwd", "../x", "a/../../x", "", ".", "a//b", "a\0b", "x" * 300)
        ),
    ],
)
def test_contents_that_lie_are_refused(raw: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whichever is found first
        Contents.from_bytes(raw)


def test_every_changed_or_missing_byte_of_a_manifest_is_noticed(store: Store) -> None:
    save(store, "it")
    path = store.root / "snapshots" / "it.json"
    good = path.read_bytes()
    for i in range(len(good)):
        for changed in (good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :], good[:i]):
            with pytest.raises((Damaged, Incompatible, Unsigned)):
                store.trust.check(changed, Manifest.from_json(changed, "it").name)
    path.write_bytes(flip(good))
    with pytest.raises(Damaged):
        read_back(store, "it")


def test_every_changed_or_missing_byte_of_the_format_file_is_noticed(store: Store) -> None:
    save(store, "it")
    path = store.root / "format.json"
    good = path.read_bytes()
    for i in range(len(good)):
        for changed in (good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :], good[:i]):
            path.write_bytes(changed)
            for use in (store.get, store.writer, store.remove):
                with pytest.raises((Damaged, Incompatible)):
                    use("it")
    path.unlink()
    with pytest.raises(StoreError, match="not a store"):
        store.get("it")


def test_a_damaged_manifest_hides_no_other_and_can_be_removed(store: Store) -> None:
    save(store, "bad", files={"a": os.urandom(9999)})
    save(store, "good")
    path = store.root / "snapshots" / "bad.json"
    path.write_bytes(flip(path.read_bytes()))
    manifests, broken = store.scan()
    assert [m.name for m in manifests] == ["good"]
    assert [(type(e), e.data["name"]) for e in broken] == [(Damaged, "bad")]
    assert store.collect().freed == 0, "its data may be what a repair needs"
    assert store.remove("bad") > 9999
    assert store.scan()[1] == []
    assert litter(store) == []


def test_a_manifest_under_another_name_is_damage(store: Store) -> None:
    save(store, "it")
    snapshots = store.root / "snapshots"
    (snapshots / "that.json").write_bytes((snapshots / "it.json").read_bytes())
    with pytest.raises(Damaged, match="that of the snapshot it"):
        read_back(store, "that")


ODD: list[tuple[str, Any]] = [
    ("format", 0),
    ("format", "1"),
    ("format", True),
    ("format", None),
    ("features", None),
    ("features", {}),
    ("features", [1]),
    ("name", 1),
    ("name", "../x"),
    ("id", "../../x"),
    ("id", "A" * 32),
    ("id", None),
    ("message", None),
    ("created", "2025-01-01"),
    ("created", "2025-01-01T00:00:00.000000+01:00"),
    ("created", 1),
    ("parent", "x"),
    ("parent", 0),
    ("kernel", []),
    ("machine", None),
    ("cuda", "x"),
    ("process", 1),
    ("size", -1),
    ("size", None),
    ("size", True),
    ("stored", "1"),
    ("contents", None),
    ("contents", "x"),
    ("contents", "G" * 64),
    ("hooks", ["rm -rf /"]),
]


@pytest.mark.parametrize(("member", "value"), ODD)
def test_a_manifest_with_an_odd_member_is_refused_though_its_hash_is_right(
    store: Store, member: str, value: Any
) -> None:
    save(store, "it", files={})
    rewrite(store, {member: value})
    with pytest.raises(Damaged):
        store.get("it")


def test_a_manifest_without_a_member_is_refused(store: Store) -> None:
    save(store, "it")
    members = members_of(store)
    for member in members:
        raw = sealed({k: v for k, v in members.items() if k != member})
        with pytest.raises(Damaged, match=member):
            Manifest.from_json(raw, "it")


@pytest.mark.parametrize(
    "raw",
    [b"", b"null", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"a":NaN}', b'{"a":1,"a":1}', b"9" * 9999],
)  # fmt: skip
def test_what_is_no_manifest_is_damage(raw: bytes) -> None:
    with pytest.raises(Damaged):
        Manifest.from_json(raw, "it")


def test_a_manifest_that_is_too_long_is_not_even_read(store: Store) -> None:
    save(store, "it")
    os.truncate(store.root / "snapshots" / "it.json", 2**40)
    with pytest.raises(Damaged, match="longer than"):
        store.get("it")


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
_members = st.sampled_from(list(Manifest.__dataclass_fields__))


@given(st.binary(max_size=200) | st.dictionaries(_members | st.text(), _json).map(sealed))
def test_no_bytes_do_more_than_raise_a_named_error(raw: bytes) -> None:
    with pytest.raises((Damaged, Incompatible)):
        Manifest.from_json(raw, "it")


@pytest.mark.parametrize("mark", [{"format": 3}, {"format": 2, "features": ["chunks"]}, {"format": 1, "features": []}])
def test_a_newer_store_is_refused_and_left_untouched(store: Store, mark: dict[str, Any]) -> None:
    save(store, "it")
    (store.root / "format.json").write_text(json.dumps(mark))
    store.root.chmod(0o755)
    before = everything(store.root)
    uses: list[Callable[[], object]] = [
        store.list,
        store.collect,
        lambda: store.get("it"),
        lambda: read_back(store, "it"),
        lambda: store.remove("it"),
        lambda: store.writer("new"),
        lambda: store.writer("it", replace=True),
    ]
    for use in uses:
        with pytest.raises(Incompatible, match="Nothing was changed"):
            use()
    assert everything(store.root) == before


@pytest.mark.parametrize("change", [{"format": 3, "new": 1}, {"features": ["chunks"]}, {"format": 1}])
def test_a_newer_snapshot_is_refused_and_left_untouched(store: Store, change: dict[str, Any]) -> None:
    save(store, "it")
    save(store, "good")
    store.collect()
    rewrite(store, change)
    before = everything(store.root)
    uses: list[Callable[[str], object]] = [store.get, lambda name: read_back(store, name), store.remove]
    for use in uses:
        with pytest.raises(Incompatible):
            use("it")
    assert store.collect().obstacle
    manifests, broken = store.scan()
    assert ([m.name for m in manifests], [type(e) for e in broken]) == (["good"], [Incompatible])
    assert everything(store.root) == before


def test_data_that_no_manifest_names_is_reclaimed(store: Store) -> None:
    save(store, "it")
    writer = store.writer("never")
    fill(writer)
    abandon(writer)
    (store.root / "snapshots" / f"{writer.id}.tmp").write_bytes(b"half a manifest")
    for folder in ("contents", "index"):
        (store.root / folder / ("f" * 32)).write_bytes(b"")
    (store.root / "packs" / ("f" * 32 + "-000001")).write_bytes(b"12345")
    assert store.collect().obstacle, "an index that cannot be read may name anything"
    (store.root / "index" / ("f" * 32)).unlink()
    assert store.collect().freed >= 5
    assert litter(store) == []
    assert read_back(store, "it") == FILES


def test_errors_keep_their_data_across_processes(store: Store) -> None:
    save(store, "it")
    damaged_file(store, "contents").unlink()
    with pytest.raises(Damaged) as caught:
        read_back(store, "it")
    again = GpuckptError.from_dict(json.loads(json.dumps(caught.value.as_dict())))
    assert (type(again), str(again), again.data) == (Damaged, str(caught.value), caught.value.data)
