"""What a store does for machines that share it, as far as one machine can show that; see tests/shared_store."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from store_helpers import FILES, litter, read_back, save

from jupyter_gpuckpt.errors import Busy, NameTaken, StoreError
from jupyter_gpuckpt.store import Store, committing
from jupyter_gpuckpt.store.sessions import Lock, Session, held, holder

_AS_A_SERVER_OF_NFS = """
import fcntl, sys
file = open(sys.argv[1], "r+b")
fcntl.lockf(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_lock_that_a_file_server_holds_for_a_client_is_seen_on_its_disk(store: Store) -> None:
    """It holds it as one of fcntl(2), which `flock` does not see."""
    save(store, "it")
    path = store.root / "locks" / ("0" * 32)
    path.touch()
    words = [sys.executable, "-c", _AS_A_SERVER_OF_NFS, str(path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "locked\n"
        fd = os.open(path, os.O_RDWR)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(fd)
        assert Lock.take(path) is None
        assert held(store.root / "locks") == {"0" * 32}
        store.collect()
        assert path.exists()
        server.communicate()
    store.collect()
    assert litter(store) == []


def test_a_save_whose_lock_was_taken_away_when_it_was_named_is_taken_back(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, "first")
    name_new = committing.name_new

    def name_and_lose(draft: Path, path: Path) -> None:
        name_new(draft, path)
        for lock in (store.root / "locks").iterdir():
            lock.unlink()

    monkeypatch.setattr(committing, "name_new", name_and_lose)
    with pytest.raises(StoreError, match="was not stored"):
        save(store, "it", files={"a": os.urandom(9999)})
    assert [m.name for m in store.list()] == ["first"]
    monkeypatch.undo()
    store.collect()
    assert litter(store) == []
    assert read_back(store, "first") == FILES


def test_a_link_that_was_made_although_the_server_says_that_the_name_is_taken_counts(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def answer_lost(source: Any, target: Any) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", answer_lost)
    save(store, "it")
    assert read_back(store, "it") == FILES
    with pytest.raises(NameTaken):
        save(store, "it")


def test_what_a_holder_says_of_itself_replaces_what_one_before_it_has_said(tmp_path: Path) -> None:
    path = tmp_path / ("0" * 32)
    path.write_text(json.dumps({"work": "kernel", "by": "x" * 300}))
    session = Session(tmp_path, "kernel", of="0" * 32, by="train.ipynb")
    found = holder(tmp_path, "0" * 32)
    assert found is not None
    assert (found.by, found.is_of_this_machine) == ("train.ipynb", True)
    session.close()


def test_where_locks_do_not_reach_a_session_of_another_machine_counts_until_its_file_is_gone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, "it")
    save(store, "gone", files={"a": os.urandom(9999)})
    elsewhere = store.root / "locks" / ("0" * 32)
    about = {"work": "save", "pid": 1, "since": "2031-01-01", "host": "other", "machine": "m", "boot": "b"}
    elsewhere.write_text(json.dumps(about))
    lease = store.root / "leases" / store.get("it").id
    lease.parent.mkdir(mode=0o700)
    lease.write_text(json.dumps({**about, "work": "kernel", "by": "train.ipynb"}))
    monkeypatch.setattr("jupyter_gpuckpt.store.sessions.locks_reach", lambda _: False)
    monkeypatch.setattr("jupyter_gpuckpt.store.lease.locks_reach", lambda _: False)
    store.remove("gone")
    assert store.collect().waiting > 9999
    with pytest.raises(Busy) as refused:
        store.lease(store.get("it").id, "x")
    assert f"rm {lease}" in refused.value.then
    lease.unlink()
    store.lease(store.get("it").id, "x").close()
    elsewhere.unlink()
    assert store.collect().freed > 9999
    assert litter(store) == ["leases"]
