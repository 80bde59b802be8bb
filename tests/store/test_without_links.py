"""File systems without hard links: FAT and exFAT, as sticks and cameras have them, and some of networks."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from store_helpers import FILES, litter, read_back, save
from transfer_helpers import person, secrets_of

from jupyter_gpuckpt.errors import NameTaken, StoreError
from jupyter_gpuckpt.store import Store, durable
from jupyter_gpuckpt.store.transfer.container import export_snapshot, import_snapshot, write_file
from jupyter_gpuckpt.store.transfer.remotes.folder import FolderRemote


@pytest.fixture(autouse=True)
def without_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """What link(2) says there; the rename that takes its place is this system's own."""

    def link(source: Any, target: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), source, None, target)

    monkeypatch.setattr(os, "link", link)


def test_a_store_keeps_its_promises(tmp_path: Path) -> None:
    store = person(tmp_path, "anna")  # its key is made there, too
    save(store, "it")
    assert read_back(store, "it") == FILES
    with pytest.raises(NameTaken):
        save(store, "it", files={"a": b"other"})
    assert read_back(store, "it") == FILES
    save(store, "second")
    with pytest.raises(NameTaken):
        store.rename("second", "it")
    store.rename("second", "third")
    assert sorted(one.name for one in store.list()) == ["it", "third"]
    assert litter(store) == []


def test_a_snapshot_is_exported_to_a_stick_and_imported_from_it(tmp_path: Path) -> None:
    store, file = person(tmp_path, "anna"), tmp_path / "it.gpuckpt"
    save(store, "it")

    def export(replace: bool = False) -> None:
        write_file(file, lambda out: export_snapshot(store, "it", out, secrets_of(store)), replace=replace)

    export()
    before = file.read_bytes()
    with pytest.raises(NameTaken):
        export()
    assert file.read_bytes() == before
    export(replace=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["anna", "it.gpuckpt"]
    store.remove("it")
    with file.open("rb") as source:
        import_snapshot(store, source, "it.gpuckpt", secrets_of(store))
    assert read_back(store, "it") == FILES


def test_of_two_who_send_one_name_to_a_folder_the_second_is_told(tmp_path: Path) -> None:
    remote = FolderRemote(tmp_path / "remote")
    assert remote.create("snapshots/it.json", b"first")
    assert not remote.create("snapshots/it.json", b"second")
    assert [path.read_bytes() for path in (tmp_path / "remote").rglob("*") if path.is_file()] == [b"first"]


def test_where_neither_can_be_done_it_is_an_error_with_the_cause(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "_RENAME_NOREPLACE", 1 << 30)  # a flag that no file system knows
    with pytest.raises(StoreError) as caught:
        save(store, "it")
    assert "Operation not permitted" in caught.value.why
    assert store.list() == []
