"""One snapshot in one file: what comes back is what went in, and nothing hostile comes in at all (faults 25, 26)."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import stat
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from store_helpers import FILES, everything, litter, read_back, save
from transfer_helpers import LARGE, person, secrets_of

from jupyter_gpuckpt.errors import Damaged, GpuckptError, Incompatible, NameTaken, StoreError, UnknownKey, Unsigned
from jupyter_gpuckpt.store import Manifest, Store
from jupyter_gpuckpt.store.contents import MAGIC as CONTENTS
from jupyter_gpuckpt.store.index import MAGIC as INDEX
from jupyter_gpuckpt.store.index import part_from_bytes
from jupyter_gpuckpt.store.pack import plausible
from jupyter_gpuckpt.store.signatures import split
from jupyter_gpuckpt.store.transfer.container import export_snapshot, import_snapshot, write_file
from jupyter_gpuckpt.store.trust import Trust

HEAD = b'gpuckpt export 2\n{"features":[],"format":2}\n'


def exported(store: Store, name: str = "it") -> bytes:
    out = io.BytesIO()
    export_snapshot(store, name, out, secrets_of(store))
    return out.getvalue()


def bring(store: Store, content: bytes, **how: bool) -> Manifest:
    return import_snapshot(store, io.BytesIO(content), "it.export", secrets_of(store), **how)


def record(kind: bytes, content: bytes, length: int | None = None) -> bytes:
    return struct.pack("<4sQ", kind, len(content) if length is None else length) + content


def records(content: bytes) -> list[tuple[bytes, bytes]]:
    """Take an export apart."""
    found, at = [], len(HEAD)
    while at < len(content):
        kind, length = struct.unpack_from("<4sQ", content, at)
        found.append((kind, content[at + 12 : at + 12 + length]))
        at += 12 + length
    return found


def together(parts: list[tuple[bytes, bytes]]) -> bytes:
    return HEAD + b"".join(record(kind, content) for kind, content in parts)


@pytest.fixture
def ann(tmp_path: Path) -> Store:
    ann = person(tmp_path, "ann")
    save(ann, "it", files=LARGE)
    return ann


@pytest.fixture
def bob(tmp_path: Path, ann: Store) -> Store:
    """Somebody who trusts Ann, and has a snapshot already."""
    bob = person(tmp_path, "bob")
    bob.trust.add(ann.trust.own())
    save(bob, "own", files=FILES)
    bob.collect()
    return bob


def refused(bob: Store, content: bytes, *kinds: type[GpuckptError]) -> GpuckptError:
    """Check that an import is refused with one of these errors, and leaves the store as it was."""
    before = everything(bob.root)
    with pytest.raises(kinds) as caught:
        bring(bob, content)
    assert everything(bob.root) == before
    assert caught.value.why
    assert caught.value.then
    return caught.value


def test_a_snapshot_comes_back_from_a_file(ann: Store, bob: Store, tmp_path: Path) -> None:
    target = tmp_path / "it.export"
    how = secrets_of(ann)
    write_file(target, lambda out: export_snapshot(ann, "it", out, how), replace=False)
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert bring(bob, target.read_bytes()) == ann.get("it")
    assert read_back(bob, "it") == LARGE
    assert litter(bob) == []
    assert bring(bob, target.read_bytes()).name == "it", "once more is harmless"
    with pytest.raises(NameTaken):
        write_file(target, lambda out: export_snapshot(ann, "it", out, how), replace=False)
    with pytest.raises(StoreError):
        write_file(tmp_path / "no" / "folder", lambda out: export_snapshot(ann, "it", out, how), replace=False)
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".tmp")] == []


def test_a_file_of_a_stranger_is_refused(ann: Store, bob: Store, tmp_path: Path) -> None:
    (_, manifest), *rest = records(exported(ann))
    sealed = split(manifest)[0]
    refused(bob, together([(b"MNFT", sealed), *rest]), Unsigned)
    refused(bob, together([(b"MNFT", Trust(tmp_path / "x").sign(sealed)), *rest]), UnknownKey)


def test_what_stands_where_it_should_not_is_refused(ann: Store, bob: Store) -> None:
    good = records(exported(ann))
    manifest, contents, first, second, *_ = good
    odd: list[bytes] = [
        b"",
        b"PK\x03\x04",
        b"gpuckpt export 3\n",
        HEAD,
        HEAD[:30],
        together(good)[:-1],
        together(good) + b"x",
        together([contents, manifest, *good[2:]]),
        together([manifest, manifest, *good[1:]]),
        together([manifest, contents, first, first, *good[2:]]),
        together([manifest, contents, *good[3:]]),
        together([manifest, contents, *good[3:-1], (b"CHNK", first[1][:40] + second[1][40:]), good[-1]]),
        together([manifest, (b"CONT", contents[1] + bytes(40)), *good[2:]]),
        together([*good[:-1], (b"DONE", b"x")]),
        together([*good[:-1], (b"LINK", b"../../etc"), good[-1]]),
        HEAD + record(*manifest) + record(b"CONT", b"", 2**40),
        HEAD + record(b"MNFT", b"", 2**62),
        HEAD.replace(b'"format":2', b'"format":2,"features":["age"]') + together(good)[len(HEAD) :],
        b"gpuckpt export 2\n" + b"[" * 60_000 + b"\n",
        b"gpuckpt export 2\n" + b"x" * 70_000,
    ]
    for content in odd:
        refused(bob, content, Damaged, GpuckptError)
    refused(bob, HEAD.replace(b"2}", b"3}") + together(good)[len(HEAD) :], Incompatible)
    bring(bob, together(good))


def signed_by(
    store: Store, name: str, contents: bytes, size: int, manifest: Callable[[dict[str, Any]], None] = lambda _: None
) -> bytes:
    """Return a manifest that somebody who is trusted signed, with whatever in it."""
    members = {**dataclasses.asdict(store.get("it")), "name": name}
    members |= {"contents": blake3(contents).hexdigest(), "size": size, "id": "a" * 32}
    manifest(members)
    body = json.dumps(members, sort_keys=True, separators=(",", ":")).encode()[:-1]
    return store.trust.sign(body + b',"blake3":"' + blake3(body).hexdigest().encode() + b'"}\n')


def contents_of(files: list[list[Any]], *chunks: bytes) -> bytes:
    body = b"".join(blake3(chunk).digest() + struct.pack("<Q", len(chunk)) for chunk in chunks)
    return CONTENTS + json.dumps({"files": files}).encode() + b"\n" + body


def chunk(content: bytes, stored: bytes | None = None, codec: int = 0, size: int | None = None) -> tuple[bytes, bytes]:
    head = struct.pack("<B3xI32s", codec, len(content) if size is None else size, blake3(content).digest())
    return b"CHNK", head + (content if stored is None else stored)


DONE = (b"DONE", b"")


@pytest.mark.parametrize(
    "paths",
    [
        ["../../evil"],
        ["/etc/evil"],
        ["a/../../evil"],
        ["a//b"],
        ["./a"],
        [""],
        ["a\0b"],
        ["a\nb"],
        ["a\\..\\b"],
        ["a", "a"],
        ["a", "a/b"],
        ["x" * 300],
        ["/".join("x" * 3000)],
        [7],
    ],
)
def test_a_path_that_leaves_its_folder_or_is_no_plain_one_is_refused_even_of_somebody_who_is_trusted(
    ann: Store, bob: Store, tmp_path: Path, paths: list[Any]
) -> None:
    contents = contents_of([[path, 4, 1] for path in paths], *[b"evil"] * len(paths))
    manifest = signed_by(ann, "evil", contents, 4 * len(paths))
    before = everything(tmp_path)
    refused(bob, together([(b"MNFT", manifest), (b"CONT", contents), chunk(b"evil"), DONE]), Damaged)
    assert everything(tmp_path) == before


def test_names_ids_and_members_that_lead_elsewhere_are_refused(ann: Store, bob: Store) -> None:
    contents = contents_of([["a", 4, 1]], b"evil")
    parts = [(b"CONT", contents), chunk(b"evil"), DONE]
    changes: list[dict[str, Any]] = [
        {"name": "../evil"},
        {"name": "a/b"},
        {"name": 7},
        {"id": "../../evil"},
        {"id": "A" * 32},
        {"mounts": ["/:/"]},
        {"hooks": ["rm -rf /"]},
        {"criu": ["--action-script=x"]},
        {"features": ["mount"]},
        {"size": 2**70},
        {"size": 5},
        {"kernel": []},
        {"process": {"x": "[" * 10}, "cuda": None},
    ]
    for change in changes:
        manifest = signed_by(ann, "evil", contents, 4, lambda members, change=change: members.update(change))  # type: ignore[misc]
        refused(bob, together([(b"MNFT", manifest), *parts]), Damaged, Incompatible)
    deep = b'{"a":' * 100_000
    refused(bob, together([(b"MNFT", ann.trust.sign(deep + b"\n")), *parts]), Damaged)
    bring(bob, together([(b"MNFT", signed_by(ann, "evil", contents, 4)), *parts]))
    assert read_back(bob, "evil") == {"a": b"evil"}


def test_a_snapshot_with_the_id_of_another_does_not_touch_that(ann: Store, bob: Store) -> None:
    contents = contents_of([["a", 4, 1]], b"evil")
    manifest = signed_by(ann, "evil", contents, 4, lambda members: members.update(id=bob.get("own").id))
    refused(bob, together([(b"MNFT", manifest), (b"CONT", contents), chunk(b"evil"), DONE]), NameTaken)
    assert read_back(bob, "own") == FILES


def test_chunks_that_are_not_what_they_say_are_refused(ann: Store, bob: Store) -> None:
    content = b"A" * 100_000
    contents = contents_of([["a", len(content), 1]], content)
    start = [(b"MNFT", signed_by(ann, "evil", contents, len(content))), (b"CONT", contents)]
    pack = zstandard.ZstdCompressor().compress
    bomb = pack(bytes(2**31))
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(content)
    odd = [
        chunk(content, b"B" * 100_000),
        chunk(content, bomb, 1),
        chunk(content, bomb, 1, 2**31),
        chunk(content, unsized, 1),
        chunk(content, pack(content)[:-3], 1),
        chunk(content, content, 1),
        chunk(content, pack(content), 2),
        chunk(content, b"", 0, 0),
        (b"CHNK", b"x" * 10),
        (b"CHNK", b"x" * (3 * 2**20)),
        chunk(b"another"),
    ]
    for one in odd:
        refused(bob, together([*start, one, DONE]), Damaged)
    bring(bob, together([*start, chunk(content, pack(content), 1), DONE]))


BOMBS = """
import io, resource, sys
sys.path[:0] = sys.argv[1].split(":")
from pathlib import Path
from jupyter_gpuckpt.errors import GpuckptError
from jupyter_gpuckpt.store import Store
from jupyter_gpuckpt.store.transfer.container import import_snapshot
from jupyter_gpuckpt.store.transfer.sealing import Secrets
from jupyter_gpuckpt.store.trust import Trust
folder = Path(sys.argv[2])
store = Store(folder / "store", Trust(folder / "keys"))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sorted(Path(sys.argv[3]).iterdir()):
    try:
        with path.open("rb") as f:
            import_snapshot(store, f, path.name, Secrets(folder / "keys"))
    except GpuckptError:
        continue
    sys.exit(f"{path.name} was taken")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_memory_stays_flat_whatever_a_file_claims(ann: Store, bob: Store, tmp_path: Path) -> None:
    folder = tmp_path / "bombs"
    folder.mkdir()
    good = records(exported(ann))
    (folder / "claims").write_bytes(HEAD + record(b"MNFT", b"", 2**50))
    with (folder / "long").open("wb") as f:  # sparse
        f.write(HEAD + struct.pack("<4sQ", b"MNFT", 2**35))
        f.truncate(2**35)
    with (folder / "contents").open("wb") as f:
        f.write(HEAD + record(*good[0]) + struct.pack("<4sQ", b"CONT", 2**34))
        f.truncate(2**34)
    # 16 MiB of JSON of which each byte is an object: it is not taken apart before it is known who wrote it.
    (folder / "objects").write_bytes(HEAD + record(b"MNFT", b"[" + b"{}," * (5 * 2**20) + b"{}]\n"))
    (folder / "line").write_bytes(b"gpuckpt export 2\n" + b"x" * 2**26)
    path = ":".join(p for p in sys.path if p)
    said = subprocess.run(
        [sys.executable, "-c", BOMBS, path, bob.root.parent, folder], capture_output=True, text=True, timeout=60
    )
    assert said.returncode == 0, said.stderr
    assert int(said.stdout) < 150 * 2**20


# -- whatever else there may be


@st.composite
def _changed(draw: st.DrawFn, good: bytes) -> bytes:
    """Change a few things in a file that was whole: bytes, cuts, repeats, and numbers."""
    content = good
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["byte", "cut", "drop", "repeat", "number", "records"]))
        at = draw(st.integers(0, max(0, len(content) - 1)))
        length = draw(st.integers(1, 64))
        if kind == "byte":
            content = content[:at] + bytes([draw(st.integers(0, 255))]) + content[at + 1 :]
        elif kind == "cut":
            content = content[:at]
        elif kind == "drop":
            content = content[:at] + content[at + length :]
        elif kind == "repeat":
            content = content[: at + length] + content[at:]
        elif kind == "number":
            value = draw(st.sampled_from([0, 1, 2**31 - 1, 2**32 - 1, 2**63, 2**64 - 1]))
            content = content[:at] + struct.pack("<Q", value) + content[at + 8 :]
        elif content == good:
            content = together(draw(st.permutations(records(good))))
    return content


def test_no_change_of_a_file_does_more_than_raise_a_named_error(tmp_path: Path) -> None:
    ann, bob = person(tmp_path, "ann"), person(tmp_path, "bob")
    files = {"pages-1.img": b"pages" * 500, "core-1.img": os.urandom(300), "vram/0": bytes(9000)}
    save(ann, "it", files=files)
    save(bob, "own", files=FILES)
    bob.collect()
    bob.trust.add(ann.trust.own())
    good = exported(ann)
    before = everything(bob.root)

    @given(_changed(good))
    @settings(max_examples=400)
    def check(content: bytes) -> None:
        try:
            bring(bob, content)
        except GpuckptError:
            assert everything(bob.root) == before
            return
        assert read_back(bob, "it") == files
        bob.remove("it")
        assert everything(bob.root) == before

    check()


@given(st.binary(max_size=300))
def test_no_bytes_make_an_index_or_a_signature_do_more_than_raise_an_error(raw: bytes) -> None:
    for sealed in (raw, INDEX + raw + blake3(INDEX + raw).digest()):
        with contextlib.suppress(ValueError):
            assert all(plausible(at.codec, at.stored, at.size) for at in part_from_bytes(sealed).values())
    for line in (raw, b"{}\n" + raw, b"{}\ned25519 " + raw):
        with contextlib.suppress(ValueError):
            split(line)


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(["../x", "/etc/passwd", "a" * 32]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


def test_no_manifest_of_somebody_who_is_trusted_does_more_than_raise_a_named_error(tmp_path: Path) -> None:
    ann, bob = person(tmp_path, "ann"), person(tmp_path, "bob")
    save(ann, "it", files=FILES)
    save(bob, "own", files=FILES)
    bob.collect()
    bob.trust.add(ann.trust.own())
    rest = records(exported(ann))[1:]
    contents = rest[0][1]
    size = ann.get("it").size
    before = everything(bob.root)
    members = st.sampled_from(list(Manifest.__dataclass_fields__)) | st.text(max_size=9)

    @given(st.dictionaries(members, _values, min_size=1, max_size=3))
    @settings(max_examples=200)
    def check(change: dict[str, Any]) -> None:
        manifest = signed_by(ann, "it", contents, size, lambda members: members.update(change))
        try:
            name = bring(bob, together([(b"MNFT", manifest), *rest])).name
        except GpuckptError:
            assert everything(bob.root) == before
            return
        assert read_back(bob, name) == FILES
        bob.remove(name)
        (bob.trust.folder / "newest.json").unlink()
        assert everything(bob.root) == before

    check()
