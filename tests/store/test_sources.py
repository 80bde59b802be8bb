"""How the files of a snapshot are read and cut: each byte once, and what moved is found again."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from store_helpers import ABOUT, read_back

from jupyter_gpuckpt.store import Manifest, Store, chunking, sources
from jupyter_gpuckpt.store.sources import Reader, Source

MIB = 1024 * 1024


def save_folder(store: Store, name: str, folder: Path, pieces: list[int] | None = None) -> Manifest:
    """Save a folder as criu's images are saved: from where they lie."""
    with store.writer(name) as writer:
        writer.include(folder, "criu")
        return writer.commit(message="", **ABOUT, cut=lambda _: pieces)


@pytest.mark.parametrize("advice", [sources._POPULATE_READ, 9999], ids=["in place", "read"])
@pytest.mark.parametrize("memory", [True, False], ids=["memory", "disk"])
def test_what_is_seen_in_place_and_what_is_read_are_the_same(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, advice: int, memory: bool
) -> None:
    monkeypatch.setattr(sources, "_POPULATE_READ", advice)
    folder = Path("/dev/shm", f"gpuckpt-test-{os.getpid()}") if memory else tmp_path / "images"
    folder.mkdir()
    try:
        files = {
            "pages": random.Random(0).randbytes(9 * MIB + 5000),
            "small": b"small",
            "zeros": bytes(3 * MIB),
            "empty": b"",
        }
        for name, content in files.items():
            folder.joinpath(name).write_bytes(content)
        with folder.joinpath("holes").open("wb") as holes:
            holes.truncate(5 * MIB)
            holes.seek(3 * MIB)
            holes.write(b"x")
        files["holes"] = folder.joinpath("holes").read_bytes()
        save_folder(store, "it", folder)
        assert read_back(store, "it") == {f"criu/{name}": content for name, content in files.items()}
        assert (folder / "holes").stat().st_blocks * 512 < 3 * MIB  # looking at a hole took no memory
    finally:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def test_parts_of_a_file_are_seen_in_any_order(tmp_path: Path) -> None:
    content = random.Random(1).randbytes(10 * MIB + 17)
    file = tmp_path / "file"
    file.write_bytes(content)
    places = [(0, 100), (50, 2 * MIB), (3 * MIB, 2 * MIB), (2 * MIB + 5, 4096), (10 * MIB, 17), (5 * MIB, 2 * MIB)]
    for own in (True, False):
        with Reader(Source(file, len(content), "file", own=own)) as reader:
            for offset, size in places:
                assert reader.view(offset, size, len(content)) == content[offset : offset + size]


@pytest.mark.parametrize("own", [True, False])
def test_a_file_that_becomes_shorter_is_an_error_and_no_crash(tmp_path: Path, own: bool) -> None:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(8 * MIB))
    with Reader(Source(file, 8 * MIB, "file", own=own)) as reader:
        assert len(reader.view(0, 2 * MIB, 2 * MIB)) == 2 * MIB
        os.truncate(file, 5 * MIB)
        with pytest.raises(OSError, match="shorter"):
            reader.view(4 * MIB, 2 * MIB, 8 * MIB)


def test_an_array_that_moved_is_found_again_across_the_ends_of_stretches(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunking, "_STRETCH", 8 * MIB)
    array = random.Random(2).randbytes(40 * MIB)
    folder = tmp_path / "images"
    folder.mkdir()
    for name, before in (("first", b""), ("second", random.Random(3).randbytes(3 * MIB + 4096))):
        (folder / "pages").write_bytes(before + array)
        saved = save_folder(store, name, folder, [len(before + array)])
    assert saved.stored < 3 * MIB + 2 * 2 * MIB  # what is new, and a chunk or two until the cuts are the same again
    assert read_back(store, "second")["criu/pages"] == before + array
