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
from store_helpers import FILES, everything, fill, litter, save

from jupyter_gpuckpt.errors import Damaged, GpuckptError, Incompatible, StoreError
from jupyter_gpuckpt.store import Manifest, Store


def sealed(members: dict[str, Any]) -> bytes:
    body = json.dumps(members, sort_keys=True, separators=(",", ":")).encode()[:-1]
    return body + b',"blake3":"' + blake3(body).hexdigest().encode() + b'"}\n'


def members_of(store: Store) -> dict[str, Any]:
    members: dict[str, Any] = json.loads((store.root / "snapshots" / "it.json").read_bytes())
    del members["blake3"]
    return members


def rewrite(store: Store, changes: dict[str, Any]) -> None:
    path = store.root / "snapshots" / "it.json"
    path.write_bytes(sealed({**members_of(store), **changes}))


def flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "flipped": flip,
    "cut": lambda c: c[:-1],
    "longer": lambda c: c + b"\0",
    "emptied": lambda _: b"",
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("path", FILES)
def test_a_changed_byte_in_a_file_is_named(store: Store, path: str, change: str) -> None:
    manifest = save(store, "it")
    target = store.root / "data" / manifest.id / path
    target.write_bytes(CHANGES[change](target.read_bytes()))
    with pytest.raises(Damaged) as caught:
        store.open("it")
    assert caught.value.data == {"name": "it", "file": path}
    target.write_bytes(FILES[path])
    store.open("it").close()


def test_one_bit_late_in_a_large_file_is_named(store: Store) -> None:
    manifest = save(store, "it", files={"small": b"x", "large": bytes(17 * 2**20)})
    with (store.root / "data" / manifest.id / "large").open("r+b") as f:
        f.seek(-2, os.SEEK_END)
        f.write(b"\x80")
    with pytest.raises(Damaged, match="large: its bytes"):
        store.open("it")


def test_a_missing_file_names_the_snapshot_and_the_file(store: Store) -> None:
    manifest = save(store, "it")
    (store.root / "data" / manifest.id / "core-1.img").unlink()
    with pytest.raises(Damaged, match=r"(?s)it is damaged.*core-1\.img: the file is missing"):
        store.open("it")


@pytest.mark.parametrize("kind", ["file", "link", "link to a folder"])
def test_a_file_too_many_is_damage(store: Store, tmp_path: Path, kind: str) -> None:
    manifest = save(store, "it")
    extra = store.root / "data" / manifest.id / "extra.img"
    if kind == "file":
        extra.write_bytes(b"")
    else:
        extra.symlink_to(tmp_path if kind == "link to a folder" else "core-1.img")
    with pytest.raises(Damaged, match=r"extra\.img"):
        store.open("it")


def test_a_file_that_became_a_link_or_a_pipe_is_damage(store: Store, tmp_path: Path) -> None:
    manifest = save(store, "it")
    target = store.root / "data" / manifest.id / "core-1.img"
    outside = tmp_path / "same"
    target.rename(outside)
    target.symlink_to(outside)
    with pytest.raises(Damaged, match=r"core-1\.img"):
        store.open("it")
    target.unlink()
    os.mkfifo(target)
    with pytest.raises(Damaged, match=r"core-1\.img"):
        store.open("it")


def test_missing_data_is_damage_and_can_be_removed(store: Store) -> None:
    manifest = save(store, "it")
    (store.root / "data" / manifest.id).rename(store.root / "elsewhere")
    with pytest.raises(Damaged, match="folder cannot be read"):
        store.open("it")
    store.remove("it")
    assert store.list() == []


def test_every_changed_or_missing_byte_of_a_manifest_is_noticed(store: Store) -> None:
    save(store, "it")
    path = store.root / "snapshots" / "it.json"
    good = path.read_bytes()
    for i in range(len(good)):
        for changed in (good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :], good[:i]):
            with pytest.raises((Damaged, Incompatible)):
                Manifest.from_json(changed, "it")
    path.write_bytes(flip(good))
    with pytest.raises(Damaged):
        store.open("it")


def test_every_changed_or_missing_byte_of_the_format_file_is_noticed(store: Store) -> None:
    save(store, "it")
    path = store.root / "format.json"
    good = path.read_bytes()
    for i in range(len(good)):
        for changed in (good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :], good[:i]):
            path.write_bytes(changed)
            for use in (store.get, store.open, store.writer, store.remove):
                with pytest.raises((Damaged, Incompatible)):
                    use("it")
    path.unlink()
    with pytest.raises(StoreError, match="not a store"):
        store.get("it")


def test_a_damaged_manifest_hides_no_other_and_can_be_removed(store: Store) -> None:
    size = save(store, "bad").size
    save(store, "good")
    path = store.root / "snapshots" / "bad.json"
    path.write_bytes(flip(path.read_bytes()))
    manifests, broken = store.scan()
    assert [m.name for m in manifests] == ["good"]
    assert [(type(e), e.data["name"]) for e in broken] == [(Damaged, "bad")]
    assert store.collect() == 0, "its data may be what a repair needs"
    assert store.remove("bad") == size
    assert store.scan()[1] == []
    assert litter(store) == []


def test_a_manifest_under_another_name_is_damage(store: Store) -> None:
    save(store, "it")
    snapshots = store.root / "snapshots"
    (snapshots / "that.json").write_bytes((snapshots / "it.json").read_bytes())
    with pytest.raises(Damaged, match="that of the snapshot it"):
        store.open("that")


HASH = "0" * 64
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
    ("size", 1),
    ("size", -1),
    ("size", None),
    ("files", []),
    *(
        ("files", {path: {"size": 0, "blake3": HASH}})
        for path in ("/etc/passwd", "../x", "a/../../x", "", ".", "a//b", "a\0b", "x" * 300)
    ),
    ("files", {"a": None}),
    ("files", {"a": {"size": 0}}),
    ("files", {"a": {"size": 0, "blake3": HASH, "mode": 0o4755}}),
    ("files", {"a": {"size": "0", "blake3": HASH}}),
    ("files", {"a": {"size": False, "blake3": HASH}}),
    ("files", {"a": {"size": 0, "blake3": "x"}}),
    ("files", {"a": {"size": 0, "blake3": "G" * 64}}),
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


@pytest.mark.parametrize("mark", [{"format": 2}, {"format": 1, "features": ["chunks"]}])
def test_a_newer_store_is_refused_and_left_untouched(store: Store, mark: dict[str, Any]) -> None:
    save(store, "it")
    (store.root / "format.json").write_text(json.dumps(mark))
    store.root.chmod(0o755)
    before = everything(store.root)
    uses: list[Callable[[], object]] = [
        store.list,
        store.collect,
        lambda: store.get("it"),
        lambda: store.open("it"),
        lambda: store.remove("it"),
        lambda: store.writer("new"),
        lambda: store.writer("it", replace=True),
    ]
    for use in uses:
        with pytest.raises(Incompatible, match="Update jupyter_gpuckpt"):
            use()
    assert everything(store.root) == before


@pytest.mark.parametrize("change", [{"format": 2, "new": 1}, {"features": ["chunks"]}])
def test_a_newer_snapshot_is_refused_and_left_untouched(store: Store, change: dict[str, Any]) -> None:
    save(store, "it")
    save(store, "good")
    rewrite(store, change)
    before = everything(store.root)
    uses: list[Callable[[str], object]] = [store.get, store.open, store.remove]
    for use in uses:
        with pytest.raises(Incompatible):
            use("it")
    assert store.collect() == 0
    manifests, broken = store.scan()
    assert ([m.name for m in manifests], [type(e) for e in broken]) == (["good"], [Incompatible])
    assert everything(store.root) == before


def test_data_that_no_manifest_names_is_reclaimed(store: Store) -> None:
    save(store, "it")
    writer = store.writer("never")
    fill(writer)
    writer._lock.release()  # as the end of its process would
    (store.root / "snapshots" / f"{writer.id}.tmp").write_bytes(b"half a manifest")
    orphan = store.root / "data" / ("f" * 32)
    orphan.mkdir()
    (orphan / "x").write_bytes(b"12345")
    assert store.collect() == sum(map(len, FILES.values())) + 5
    assert litter(store) == []
    store.open("it").close()


def test_errors_keep_their_data_across_processes(store: Store) -> None:
    manifest = save(store, "it")
    (store.root / "data" / manifest.id / "core-1.img").unlink()
    with pytest.raises(Damaged) as caught:
        store.open("it")
    again = GpuckptError.from_dict(json.loads(json.dumps(caught.value.as_dict())))
    assert (type(again), str(again), again.data) == (Damaged, str(caught.value), caught.value.data)
