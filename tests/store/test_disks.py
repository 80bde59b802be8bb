"""Disks that are full or read-only, by real mounts (faults 3, 15)."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from store_helpers import ABOUT, FILES, abandon, everything, fill, litter, read_back, save

from jupyter_gpuckpt.errors import StoreError
from jupyter_gpuckpt.store import Store, pack

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")

MB = 2**20


@contextmanager
def mounted(point: Path, *commands: list[str]) -> Iterator[None]:
    point.mkdir()
    subprocess.run(commands[0], check=True)
    try:
        for command in commands[1:]:
            subprocess.run(command, check=True)
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(point)], check=True)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Store]:
    """A store on a file system of 8 MiB of its own."""
    point = tmp_path / "small"
    with mounted(point, ["mount", "-t", "tmpfs", "-o", "size=8m,nr_inodes=100", "small", str(point)]):
        yield Store(point / "store")


def use_up(point: Path) -> None:
    with (point / "ballast").open("wb", buffering=0) as f:
        for size in (MB, 4096, 1):
            try:
                while f.write(bytes(size)) == size:
                    pass
            except OSError:
                continue


@pytest.mark.parametrize("replace", [False, True])
def test_a_full_disk_fails_the_save_and_says_what_to_do(small: Store, replace: bool) -> None:
    saved = save(small, "old", files={"a": os.urandom(3 * MB)})
    with small.writer("old" if replace else "new", replace=replace) as writer:
        fill(writer, {"a": os.urandom(MB)})
        use_up(small.root.parent)
        with pytest.raises(StoreError) as caught:
            writer.commit(message="", **ABOUT)
    assert caught.value.data["errno"] == "ENOSPC"
    assert caught.value.data["free"] < 64 * 1024
    assert "MB are free" in caught.value.why
    assert "rm" in caught.value.then
    assert "GPUCKPT_STORE" in caught.value.then
    assert small.list() == [saved]
    assert litter(small) == []
    read_back(small, "old")


def test_a_save_that_found_no_room_takes_none(tmp_path: Path) -> None:
    # A little less than a pack: the chunk that finds no room is the one that makes the pack full.
    point = tmp_path / "a pack"
    with mounted(point, ["mount", "-t", "tmpfs", "-o", f"size={pack.PACK}", "small", str(point)]):
        store = Store(point / "store")
        free = shutil.disk_usage(point).free
        with store.writer("new") as writer:
            writer.add(Path("/dev/urandom"), "a", 2 * pack.PACK)
            with pytest.raises(StoreError, match="No space left"):
                writer.commit(message="", **ABOUT)
        # Not even by a file that has no name any more, for as long as this process lives.
        assert litter(store) == []
        assert free - shutil.disk_usage(point).free < MB


def test_a_disk_that_is_full_of_files_fails_the_beginning_of_a_save(small: Store) -> None:
    save(small, "old")
    for number in range(100):
        try:
            (small.root.parent / str(number)).touch()
        except OSError:
            break
    with pytest.raises(StoreError) as caught:
        small.writer("new")
    assert caught.value.data["errno"] == "ENOSPC"
    assert litter(small) == []
    assert small.remove("old") > 0


def test_files_that_do_not_fit_leave_nothing(small: Store) -> None:
    with small.writer("it") as writer, pytest.raises(OSError, match="No space left"):
        (writer.directory / "pages-1.img").write_bytes(bytes(9 * MB))
    assert litter(small) == []


def test_on_a_full_disk_rm_and_collect_make_room_for_a_save(small: Store) -> None:
    size = 3 * MB
    save(small, "old", files={"a": os.urandom(size)})
    writer = small.writer("never")
    (writer.directory / "b").write_bytes(bytes(size))
    abandon(writer)
    use_up(small.root.parent)
    assert small.collect().freed == size
    use_up(small.root.parent)
    assert small.remove("old") >= size
    save(small, "new", files={"a": os.urandom(MB)})
    read_back(small, "new")


def test_a_snapshot_that_finds_no_room_to_be_put_in_says_where(store: Store, tmp_path: Path) -> None:
    save(store, "it", files={"a": os.urandom(2 * MB)})
    point = tmp_path / "small"
    with mounted(point, ["mount", "-t", "tmpfs", "-o", "size=1m", "small", str(point)]):
        with pytest.raises(StoreError, match="No space left on device") as caught:
            store.open("it", point / "files")
        assert str(point) in caught.value.why
        assert list(point.iterdir()) == []


def test_a_store_that_cannot_be_written_is_read_and_left_untouched(store: Store, tmp_path: Path) -> None:
    save(store, "it")
    save(store, "other")
    writer = store.writer("never")
    fill(writer)
    abandon(writer)
    point = tmp_path / "view"
    bind = ["mount", "--bind", str(store.root), str(point)]
    with mounted(point, bind, ["mount", "-o", "remount,ro,bind", str(point)]):
        view = Store(point)
        before = everything(point)
        assert [m.name for m in view.list()] == ["other", "it"]
        assert read_back(view, "it") == FILES
        for write in (
            lambda: view.writer("new"),
            lambda: view.writer("it", replace=True),
            lambda: view.remove("it"),
            lambda: view.note("it", "another"),
            lambda: view.tag("it", ["best"]),
            lambda: view.collect(),
        ):
            with pytest.raises(StoreError) as caught:
                write()
            assert caught.value.data["errno"] == "EROFS"
            assert "GPUCKPT_STORE" in caught.value.then
        assert everything(point) == before


def test_a_new_store_on_a_read_only_disk_is_refused(tmp_path: Path) -> None:
    point = tmp_path / "view"
    with mounted(point, ["mount", "-t", "tmpfs", "-o", "ro", "view", str(point)]):
        store = Store(point / "a" / "store")
        assert store.list() == []
        with pytest.raises(StoreError) as caught:
            store.writer("it")
        assert caught.value.data["errno"] == "EROFS"
