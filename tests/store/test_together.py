"""Several processes at one store (faults 8, 9, 11)."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import subprocess
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path

import pytest
from store_helpers import ABOUT, FILES, fill, litter, read_back, save

from jupyter_gpuckpt.errors import NameTaken
from jupyter_gpuckpt.store import Store, Writer
from jupyter_gpuckpt.store.chunks import digest
from jupyter_gpuckpt.store.codec import RAW
from jupyter_gpuckpt.store.sessions import settle

SPAWN = mp.get_context("spawn")
ROUNDS = 60


def compete(root: Path, me: str, start: Barrier, replace: bool, results: Queue[str]) -> None:
    store = Store(root)
    for number in range(ROUNDS):
        start.wait(60)
        name = "shared" if replace else f"round-{number}"
        try:
            save(store, name, me, {**FILES, "me": me.encode() * 9999, "own": os.urandom(9999)}, replace=replace)
        except NameTaken:
            results.put("lost")
        else:
            results.put("won")


def collect_until(root: Path, done: Event) -> None:
    while not done.is_set():
        Store(root).collect()


def save_and_remove_until(root: Path, done: Event) -> None:
    store, number = Store(root), 0
    while not done.is_set():
        for name in ("one", "other"):
            save(store, name, files={**FILES, "shared": b"shared" * 9999, f"own-{number}": os.urandom(9999)})
            number += 1
        for name in ("one", "other"):
            store.remove(name)


def hold(root: Path, ready: Event) -> None:
    """Write, and never end."""
    with Store(root).writer("never") as writer:
        fill(writer)
        ready.set()
        signal.pause()


@pytest.mark.parametrize("replace", [False, True])
def test_of_two_writers_of_a_name_one_wins_and_collect_beside_them_harms_nothing(tmp_path: Path, replace: bool) -> None:
    root = tmp_path / "store"
    start, done, results = SPAWN.Barrier(2), SPAWN.Event(), SPAWN.Queue()
    writers = [SPAWN.Process(target=compete, args=(root, me, start, replace, results)) for me in "ab"]
    collector = SPAWN.Process(target=collect_until, args=(root, done))
    for process in (*writers, collector):
        process.start()
    try:
        outcomes = [results.get(timeout=60) for _ in range(2 * ROUNDS)]
        for process in writers:
            process.join(60)
    finally:
        done.set()
        for process in writers:
            process.kill()
            process.join()
        collector.join(60)
    assert collector.exitcode == 0
    assert outcomes.count("won") == (2 * ROUNDS if replace else ROUNDS)
    store = Store(root)
    manifests, broken = store.scan()
    assert broken == []
    assert len(manifests) == (1 if replace else ROUNDS)
    for manifest in manifests:
        assert read_back(store, manifest.name)["me"] == manifest.message.encode() * 9999
    store.collect()
    assert litter(store) == []


def test_who_looks_beside_removals_is_told_how_much_there_is_and_how_much_would_go(tmp_path: Path) -> None:
    store, done = Store(tmp_path / "store"), SPAWN.Event()
    save(store, "stays")
    remover = SPAWN.Process(target=save_and_remove_until, args=(store.root, done))
    remover.start()
    try:
        for _ in range(300):
            assert [store.would_collect().obstacle, store.would_compact().obstacle] == ["", ""]
            assert store.used() > 0
    finally:
        done.set()
        remover.join(60)
    assert remover.exitcode == 0


def test_what_a_suspended_process_uses_stays_until_it_is_dead(store: Store) -> None:
    save(store, "it", files={"a": os.urandom(99_999)})
    ready = SPAWN.Event()
    holder = SPAWN.Process(target=hold, args=(store.root, ready))
    holder.start()
    try:
        assert ready.wait(60)
        os.kill(holder.pid or 0, signal.SIGSTOP)
        assert store.remove("it") < 99_999
        assert store.collect().waiting > 99_999
        assert [path for path in litter(store) if path.startswith("saving/")]
    finally:
        holder.kill()
        holder.join()
    assert store.collect().freed > 99_999
    assert litter(store) == []


def test_a_child_that_inherited_a_lock_does_not_hold_it(store: Store) -> None:
    save(store, "it", files={"a": os.urandom(99_999)})
    with store.writer("new") as writer:
        child = subprocess.Popen(["sleep", "60"], pass_fds=[writer._session._lock._fd])
    try:
        assert store.remove("it") > 99_999
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("look", [1, 2])
@pytest.mark.parametrize("so_far", ["a pack", "a part of the index"])
def test_who_begins_while_a_collection_looks_around_loses_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch, look: int, so_far: str
) -> None:
    save(store, "it")
    data = os.urandom(9999)
    looks = 0
    late: list[Writer] = []

    def settled_and_then_somebody_begins(locks: Path) -> set[str]:
        nonlocal looks
        looks += 1
        found = settle(locks)
        if looks == look:
            writer = store.writer("late")
            fill(writer, {"a": data})
            if so_far == "a pack":
                writer._packs.put(digest(data), len(data), RAW, data)
            else:
                writer._store_files(lambda _: None, None)
            late.append(writer)
        return found

    monkeypatch.setattr("jupyter_gpuckpt.store.upkeep.collect.settle", settled_and_then_somebody_begins)
    store.collect()
    (writer,) = late
    with writer:
        writer.commit(message="", **ABOUT)
    assert read_back(store, "late") == {"a": data}
    assert read_back(store, "it") == FILES
