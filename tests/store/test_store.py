"""Saving, listing, reading and removing snapshots in a store that works."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from store_helpers import ABOUT, FILES, everything, fill, litter, readable_by_others, save

from jupyter_gpuckpt.errors import NameTaken, NoSuchSnapshot, StoreError
from jupyter_gpuckpt.store import Store


def test_a_snapshot_comes_back_byte_for_byte(store: Store) -> None:
    saved = save(store, "it", "two\nlines \N{SNOWMAN} \ud800")
    assert store.get("it") == saved
    assert saved.size == sum(map(len, FILES.values()))
    with store.open("it") as snapshot:
        assert snapshot.manifest == saved
        for path, content in FILES.items():
            assert (snapshot.directory / path).read_bytes() == content


def test_large_and_empty_files_come_back(store: Store) -> None:
    files = {"large": os.urandom(9 * 2**20 + 7), "exact": bytes(8 * 2**20), "empty": b""}
    save(store, "it", files=files)
    with store.open("it") as snapshot:
        for path, content in files.items():
            assert (snapshot.directory / path).read_bytes() == content


def test_what_the_caller_says_is_kept(store: Store) -> None:
    with store.writer("it") as writer:
        manifest = writer.commit(
            message="m",
            parent="0" * 32,
            kernel={"id": "k", "list": [1, 2.5, None, True]},
            machine={"cpu": "x"},
            cuda={"devices": []},
            process={"pid": 3},
        )
    got = store.get("it")
    assert got == manifest
    assert got.kernel == {"id": "k", "list": [1, 2.5, None, True]}
    assert (got.parent, got.machine, got.process) == ("0" * 32, {"cpu": "x"}, {"pid": 3})


def test_a_message_beyond_json_size_is_refused_and_leaves_nothing(store: Store) -> None:
    with store.writer("it") as writer, pytest.raises(StoreError, match="too large"):
        writer.commit(message="x" * 2**24, **ABOUT)
    assert litter(store) == []


def test_nothing_is_visible_before_the_commit(store: Store) -> None:
    with store.writer("it") as writer:
        fill(writer)
        assert store.scan() == ([], [])
        with pytest.raises(NoSuchSnapshot):
            store.open("it")
    assert store.scan() == ([], [])


def test_leaving_without_a_commit_deletes_everything(store: Store) -> None:
    with store.writer("it") as writer:
        fill(writer)
    assert litter(store) == []


def test_a_cancelled_commit_deletes_everything(store: Store) -> None:
    def cancel(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with store.writer("it") as writer:
        fill(writer)
        with pytest.raises(KeyboardInterrupt):
            writer.commit(message="", progress=cancel, **ABOUT)
    assert store.list() == []
    assert litter(store) == []


def test_progress_ends_with_all_bytes(store: Store) -> None:
    seen: list[tuple[str, int, int]] = []
    with store.writer("it") as writer:
        fill(writer)
        size = writer.commit(message="", progress=lambda *a: seen.append(a), **ABOUT).size
    store.open("it", lambda *a: seen.append(a)).close()
    assert ("store", size, size) in seen
    assert seen[-1] == ("verify", size, size)


def test_a_taken_name_is_refused_unless_it_is_to_be_replaced(store: Store) -> None:
    save(store, "it", "old")
    with pytest.raises(NameTaken) as caught:
        store.writer("it")
    assert "--replace" in caught.value.then
    assert store.get("it").message == "old"
    save(store, "it", "new", replace=True)
    assert [m.message for m in store.list()] == ["new"]
    assert litter(store) == []


def test_the_newest_is_listed_first(store: Store) -> None:
    for name in ("b", "c", "a"):
        save(store, name, files={})
    assert [m.name for m in store.list()] == ["a", "c", "b"]


def test_a_missing_name_says_which_are_close(store: Store) -> None:
    with pytest.raises(NoSuchSnapshot):
        store.get("it")
    save(store, "before_finetune", files={})
    with pytest.raises(NoSuchSnapshot, match="Did you mean before_finetune"):
        store.open("before_finetun")


def test_removing_gives_the_bytes_back(store: Store) -> None:
    size = save(store, "it").size
    save(store, "other")
    assert store.remove("it") == size
    assert [m.name for m in store.list()] == ["other"]
    assert litter(store) == []
    with pytest.raises(NoSuchSnapshot):
        store.remove("it")


@pytest.mark.parametrize("replace", [False, True])
def test_files_in_use_outlive_their_name(store: Store, replace: bool) -> None:
    save(store, "it")
    with store.open("it") as snapshot:
        if replace:
            save(store, "it", "new", replace=True)
        else:
            assert store.remove("it") == 0
        assert store.collect() == 0
        for path, content in FILES.items():
            assert (snapshot.directory / path).read_bytes() == content
    assert store.collect() == snapshot.manifest.size
    assert litter(store) == []


def test_everything_is_the_owners_alone(store: Store) -> None:
    save(store, "it")
    assert readable_by_others(store.root) == []
    for path, (mode, _) in everything(store.root).items():
        assert stat.S_IMODE(mode) == (0o700 if stat.S_ISDIR(mode) else 0o600), path


def test_a_strict_umask_takes_nothing_from_the_owner(store: Store) -> None:
    before = os.umask(0o777)
    try:
        with store.writer("it") as writer:
            writer.commit(message="", **ABOUT)
        store.open("it").close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((store.root / "snapshots" / "it.json").stat().st_mode) == 0o600


def test_a_store_that_was_copied_with_loose_modes_is_tightened_by_a_save(store: Store) -> None:
    save(store, "it")
    store.root.chmod(0o755)
    save(store, "other")
    assert stat.S_IMODE(store.root.stat().st_mode) == 0o700


def test_a_store_in_which_others_can_write_is_refused(store: Store) -> None:
    save(store, "it")
    store.root.chmod(0o777)
    for use in (store.writer, store.open, store.remove):
        with pytest.raises(StoreError, match="Others can write"):
            use("it")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to somebody else")
def test_a_store_of_somebody_else_is_refused(store: Store) -> None:
    save(store, "it")
    os.chown(store.root, 65534, 65534)
    with pytest.raises(StoreError, match="belongs to somebody else"):
        store.open("it")


def test_a_folder_with_other_things_does_not_become_a_store(store: Store) -> None:
    store.root.mkdir()
    (store.root / "thesis.tex").write_text("")
    before = everything(store.root)
    with pytest.raises(StoreError, match=r"thesis\.tex"):
        store.writer("it")
    assert everything(store.root) == before


def test_an_empty_folder_becomes_a_store(store: Store) -> None:
    store.root.mkdir(mode=0o777)
    save(store, "it")
    assert readable_by_others(store.root) == []


def test_links_and_pipes_among_the_files_are_refused(store: Store, tmp_path: Path) -> None:
    for make in (
        lambda p: p.symlink_to(tmp_path),
        lambda p: os.mkfifo(p),
        lambda p: (p.parent / "new\nline").touch(),
    ):
        with store.writer("it") as writer:
            make(writer.directory / "odd")
            with pytest.raises(StoreError, match="not a regular file with a plain name"):
                writer.commit(message="", **ABOUT)
    assert litter(store) == []
