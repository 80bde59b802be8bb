"""Saving, listing, reading and removing snapshots in a store that works."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from store_helpers import (
    ABOUT,
    FILES,
    abandon,
    everything,
    fill,
    litter,
    packs_of,
    read_back,
    readable_by_others,
    save,
)

from jupyter_gpuckpt.errors import NameTaken, NoSuchSnapshot, StoreError
from jupyter_gpuckpt.store import Store
from jupyter_gpuckpt.store.chunks import CHUNK, digest


def test_a_snapshot_comes_back_byte_for_byte(store: Store) -> None:
    saved = save(store, "it", "two\nlines \N{SNOWMAN} \ud800")
    assert store.get("it") == saved
    assert saved.size == sum(map(len, FILES.values()))
    assert read_back(store, "it") == FILES


def test_large_and_empty_files_come_back(store: Store) -> None:
    files = {"large": os.urandom(9 * 2**20 + 7), "exact": bytes(8 * 2**20), "empty": b""}
    save(store, "it", files=files)
    assert read_back(store, "it") == files


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
            read_back(store, "it")
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


def test_a_commit_that_is_given_up_meanwhile_ends_before_anything_is_deleted(store: Store) -> None:
    closing: list[threading.Thread] = []

    def give_up(stage: str, done: int, total: int) -> None:
        closing.append(threading.Thread(target=writer.close))
        closing[-1].start()
        closing[-1].join(0.2)
        assert closing[-1].is_alive(), "it deletes what is being written"

    writer = store.writer("it")
    fill(writer)
    with pytest.raises(StoreError, match="not stored"):
        writer.commit(message="", progress=give_up, **ABOUT)
    for thread in closing:
        thread.join()
    assert store.list() == []
    assert litter(store) == []


def test_a_snapshot_that_is_given_up_too_late_is_whole(store: Store) -> None:
    is_named, goes_on = threading.Event(), threading.Event()

    def choose() -> tuple[str, bool]:
        is_named.set()
        assert goes_on.wait(60)
        return "it", False

    writer = store.writer("it", choose=choose)
    fill(writer)
    committing = threading.Thread(target=writer.commit, kwargs={"message": "", **ABOUT})
    committing.start()
    assert is_named.wait(60)
    closing = threading.Thread(target=writer.close)
    closing.start()
    closing.join(0.5)
    assert closing.is_alive(), "it deletes what is being committed"
    goes_on.set()
    for thread in (committing, closing):
        thread.join()
    assert read_back(store, "it") == FILES
    assert litter(store) == []


def test_progress_ends_with_all_bytes(store: Store, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    with store.writer("it") as writer:
        fill(writer)
        size = writer.commit(message="", progress=lambda *a: seen.append(a), **ABOUT).size
    store.open("it", tmp_path / "files", lambda *a: seen.append(a)).close()
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
        read_back(store, "before_finetun")


def test_each_distinct_byte_is_kept_once_and_zeros_not_at_all(store: Store) -> None:
    weights = os.urandom(5 * CHUNK)
    first = save(store, "first", files={"pages-1.img": weights, "vram/0": bytes(50 * CHUNK)})
    assert first.size == 55 * CHUNK
    assert len(weights) < first.stored < len(weights) + 10_000
    changed = weights[:CHUNK] + os.urandom(CHUNK) + weights[2 * CHUNK :]
    second = save(store, "second", files={"pages-1.img": changed, "copy": weights})
    assert CHUNK < second.stored < CHUNK + 10_000
    assert read_back(store, "second") == {"pages-1.img": changed, "copy": weights}


def test_what_compresses_is_compressed_and_what_does_not_is_stored_as_it_is(store: Store) -> None:
    text = b"".join(b"line %d of a log\n" % i for i in range(200_000))
    assert save(store, "text", files={"a": text}).stored < len(text) / 3
    noise = os.urandom(CHUNK)
    save(store, "noise", files={"a": noise})
    (pack,) = packs_of(store, "noise")
    assert noise in pack.read_bytes()


def test_pieces_are_cut_where_the_caller_says(store: Store) -> None:
    pages = os.urandom(3 * CHUNK)
    moved = os.urandom(4096) + pages
    save(store, "first", files={"pages": pages})
    with store.writer("second") as writer:
        fill(writer, {"pages": moved})
        cut = [4096, CHUNK, CHUNK, CHUNK]
        second = writer.commit(message="", cut=lambda file: cut if file.name == "pages" else None, **ABOUT)
    assert second.stored < 8192
    assert read_back(store, "second") == {"pages": moved}


def test_memory_that_moved_by_pages_and_changed_in_part_is_found_again(store: Store) -> None:
    memory = os.urandom(40 * CHUNK)
    moved = os.urandom(5 * 4096) + memory[: 20 * CHUNK] + os.urandom(4096) + memory[20 * CHUNK + 4096 :] + bytes(CHUNK)
    stored = []
    for name, content in (("first", memory), ("second", moved)):
        with store.writer(name) as writer:
            fill(writer, {"pages": content, "rest": b"x"})
            stored.append(writer.commit(message="", cut=lambda f: [f.stat().st_size], **ABOUT).stored)
        assert read_back(store, name) == {"pages": content, "rest": b"x"}
    assert stored[1] < 6 * CHUNK


def test_folders_that_lie_elsewhere_can_be_part_of_a_snapshot(store: Store, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "deep").mkdir(parents=True)
    (elsewhere / "deep" / "pages").write_bytes(b"from memory")
    with store.writer("it") as writer:
        fill(writer, {"log": b"a"})
        writer.include(elsewhere, "criu")
        writer.commit(message="", **ABOUT)
    assert read_back(store, "it") == {"log": b"a", "criu/deep/pages": b"from memory"}


def test_removing_gives_back_what_no_other_snapshot_needs(store: Store) -> None:
    shared, own = os.urandom(3 * CHUNK), os.urandom(2 * CHUNK)
    save(store, "it", files={"shared": shared})
    save(store, "other", files={"shared": shared, "own": own})
    assert 0 < store.remove("it") < CHUNK
    assert read_back(store, "other") == {"shared": shared, "own": own}
    save(store, "it", files={"shared": shared})
    assert len(own) <= store.remove("other") < len(own) + 10_000
    assert litter(store) == []
    with pytest.raises(NoSuchSnapshot):
        store.remove("other")


def test_a_copy_that_was_taken_out_outlives_its_snapshot(store: Store, tmp_path: Path) -> None:
    save(store, "it")
    with store.open("it", tmp_path / "files") as snapshot:
        store.remove("it")
        assert litter(store) == []
        for path, content in FILES.items():
            assert (snapshot.directory / path).read_bytes() == content
    assert not (tmp_path / "files").exists()


def test_what_somebody_at_work_may_rely_on_waits_for_their_end(store: Store) -> None:
    data = os.urandom(2 * CHUNK)
    save(store, "old", files={"a": data})
    with store.writer("new") as writer:
        assert store.remove("old") < CHUNK
        assert store.collect().waiting > len(data)
        fill(writer, {"a": data})
        writer.commit(message="", **ABOUT)
    assert store.collect().waiting == 0
    assert read_back(store, "new") == {"a": data}
    # Whoever begins after the removal does not delay it.
    with store.writer("late"):
        pass
    assert store.remove("new") > len(data)
    assert litter(store) == []


def test_a_condemned_pack_that_came_into_use_again_and_out_of_it_waits_anew(store: Store) -> None:
    data = os.urandom(CHUNK)
    save(store, "old", files={"a": data})
    first = store.writer("first")
    store.remove("old")
    fill(first, {"a": data})
    with pytest.raises(StoreError, match="too large"):  # after its part of the index is in place
        first.commit(message="x" * 2**24, **ABOUT)
    with store.writer("second") as second:
        first.close()
        assert store.collect().waiting > len(data)
        fill(second, {"a": data})
        second.commit(message="", **ABOUT)
    store.collect()
    assert read_back(store, "second") == {"a": data}
    assert litter(store) == []


def test_the_time_of_grace_is_kept(store: Store) -> None:
    save(store, "it", files={"a": os.urandom(CHUNK)})
    (store.root / "snapshots" / "it.json").unlink()
    assert store.collect(grace=3600).waiting > CHUNK
    assert store.would_collect().freed > CHUNK
    assert store.collect(grace=3600).waiting > CHUNK
    assert store.collect().freed > CHUNK
    assert litter(store) == []


def test_saying_what_a_collection_would_free_changes_nothing(store: Store) -> None:
    save(store, "it", files={"a": os.urandom(CHUNK)})
    writer = store.writer("never")
    fill(writer)
    abandon(writer)
    (store.root / "snapshots" / "it.json").unlink()
    before = everything(store.root)
    would = store.would_collect()
    assert everything(store.root) == before
    assert store.collect() == would


def test_who_is_at_work_is_written_down(store: Store) -> None:
    save(store, "it")
    with store.writer("new") as writer:
        (lock,) = [path for path in (store.root / "locks").iterdir() if path.name == writer.id]
        said = json.loads(lock.read_text())
    assert (said["work"], said["pid"], said["host"]) == ("save", os.getpid(), socket.gethostname())
    assert not lock.exists()


def test_a_writer_whose_lock_was_deleted_gives_up(store: Store) -> None:
    with store.writer("it") as writer:
        fill(writer)
        (store.root / "locks" / writer.id).unlink()
        with pytest.raises(StoreError, match="its lock file"):
            writer.commit(message="", **ABOUT)
    assert store.list() == []
    store.collect()
    assert litter(store) == []


def test_memory_stays_flat_however_large_a_snapshot_is(store: Store, tmp_path: Path) -> None:
    """Half of 1 GiB that is all different is as good as more: what grows with it would show."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with (elsewhere / "vram").open("wb") as f:
        for _ in range(16):
            f.write(os.urandom(2**24))
    code = (
        "import sys; from pathlib import Path; from jupyter_gpuckpt.store import Store\n"
        "store = Store(Path(sys.argv[1]))\n"
        "with store.writer('it') as writer:\n"
        "    writer.include(Path(sys.argv[2]), '.')\n"
        "    writer.commit(message='', parent=None, kernel={}, machine={}, cuda={}, process={})\n"
        "store.open('it', Path(sys.argv[1]).parent / 'out').close()\n"
        "print(Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(store.root), str(elsewhere)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 128 * 1024


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
        read_back(store, "it")
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
    for use in (store.writer, store.get, store.remove):
        with pytest.raises(StoreError, match="Other users can write"):
            use("it")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to somebody else")
def test_a_store_of_somebody_else_is_refused(store: Store) -> None:
    save(store, "it")
    os.chown(store.root, 65534, 65534)
    with pytest.raises(StoreError, match="belongs to another user"):
        store.get("it")


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


def test_what_was_hashed_elsewhere_is_not_read_where_the_store_has_it(store: Store, tmp_path: Path) -> None:
    old, new, zeros = os.urandom(3 * CHUNK), os.urandom(CHUNK), bytes(CHUNK)
    saved = save(store, "before", files={"vram/0": old, "other": new})
    bare = tmp_path / "bare"
    with store.writer("it") as writer:
        known = writer.held_of(saved, lambda path: path.startswith("vram/"))
        assert set(known) == {digest(zeros), *(digest(old[at : at + CHUNK]) for at in range(0, len(old), CHUNK))}
        store.remove("before")  # meanwhile: what was promised stays
        with bare.open("wb") as f:
            os.pwrite(f.fileno(), new, 2 * CHUNK)
            f.truncate(5 * CHUNK)
        wanted = old[: 2 * CHUNK] + new + zeros + old[2 * CHUNK :]
        writer.add(bare, "vram/0", len(wanted))
        keys = [digest(wanted[at : at + CHUNK]) for at in range(0, len(wanted), CHUNK)]
        writer.hashed("vram/0", keys)
        assert writer.commit(message="", **ABOUT).stored < 2 * CHUNK
    store.collect()
    assert read_back(store, "it") == {"vram/0": wanted}
    with store.writer("again") as writer:
        writer.held_of(store.get("it"), lambda path: True)
        writer.put_back(bare, keys)
    assert bare.read_bytes() == wanted


def test_a_hash_that_is_not_that_of_the_bytes_is_an_error_and_nothing_is_saved(store: Store, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(CHUNK))
    with store.writer("it") as writer:
        writer.add(file, "vram/0", CHUNK)
        writer.hashed("vram/0", [digest(b"others")])
        with pytest.raises(StoreError, match="computed of it before"):
            writer.commit(message="", **ABOUT)
    with store.writer("it") as writer:
        writer.add(file, "vram/0", CHUNK)
        writer.hashed("vram/1", [digest(b"others")])  # whose holes would be saved as they are
        with pytest.raises(ValueError, match="vram/1"):
            writer.commit(message="", **ABOUT)
    assert store.list() == []
    assert litter(store) == []
