"""Whoever keeps the folder that is a remote cannot lead what is done there into folders of its users."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from store_helpers import everything, save
from transfer_helpers import LARGE, at, person

from jupyter_gpuckpt.errors import NoSuchSnapshot, RemoteError
from jupyter_gpuckpt.store import Store
from jupyter_gpuckpt.store.transfer.pull import pull
from jupyter_gpuckpt.store.transfer.push import push
from jupyter_gpuckpt.store.transfer.remote_collect import collect_remote
from jupyter_gpuckpt.store.transfer.remote_listing import listed
from jupyter_gpuckpt.store.transfer.remote_store import RemoteStore

USES: dict[str, Callable[[Store, RemoteStore], object]] = {
    "push": lambda store, there: push(store, "it", there, replace=True),
    "pull": lambda store, there: pull(store, there, "that", replace=True),
    "remote": lambda store, there: listed(there, store.trust),
    "remove": lambda store, there: there.remove_manifest("it"),
    "gc": lambda _, there: collect_remote(there),
}


@pytest.fixture
def ann(tmp_path: Path) -> Store:
    ann = person(tmp_path, "ann")
    save(ann, "it", files=LARGE)
    return ann


@pytest.fixture
def remote(ann: Store, tmp_path: Path) -> Path:
    push(ann, "it", at(tmp_path / "remote", ann))
    return tmp_path / "remote"


def condemn(remote: Path, store: Store) -> None:
    """Say that all files of a store have been needless for long."""
    paths = {
        f"{folder}/{path.name}": 0
        for folder in ("packs", "contents", "index")
        for path in (store.root / folder).iterdir()
    }
    (remote / "condemned.json").write_text(json.dumps(paths))


@pytest.mark.parametrize("folder", ["snapshots", "packs", "index", "contents"])
def test_a_link_in_place_of_a_folder_is_not_followed(ann: Store, remote: Path, folder: str) -> None:
    shutil.rmtree(remote / folder)
    (remote / folder).symlink_to(ann.root / folder)
    if folder != "snapshots":
        shutil.rmtree(remote / "snapshots")
    condemn(remote, ann)
    there, before = at(remote, ann), everything(ann.root)
    refused = []
    for name, use in USES.items():
        try:
            use(ann, there)
        except RemoteError as e:
            refused.append(e.why)
        except NoSuchSnapshot:
            assert name == "pull"
    assert any(str(remote / folder) in why for why in refused)
    assert everything(ann.root) == before


def test_a_store_is_no_remote_also_where_a_link_leads_to_one(ann: Store, remote: Path) -> None:
    shutil.rmtree(remote)
    remote.symlink_to(ann.root)
    before = everything(ann.root)
    with pytest.raises(RemoteError, match="is a store of snapshots"):
        at(remote, ann)
    assert everything(ann.root) == before
