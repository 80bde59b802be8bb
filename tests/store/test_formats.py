"""Stores that earlier versions wrote: each format that a release had is read for good.

`format-N.tar.gz` is a store that a version with format N wrote, with one snapshot in it. Newer formats are refused:
`test_damage.py`.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from store_helpers import read_back, save

from jupyter_gpuckpt.store import Store
from jupyter_gpuckpt.store.manifest import FORMAT

HERE = Path(__file__).parent
MAKER = "5ce93ed8af0ea107fa0611bddcf8eb09731fc906766b96031a476469ca992e68"
FILES = {"criu/pages-1.img": bytes(range(256)) * 40, "kernel.log": b"hello\n", "vram/0": b"\0" * 9000}


@pytest.mark.parametrize("archive", sorted(HERE.glob("format-*.tar.gz")), ids=lambda path: path.name)
def test_a_store_of_an_earlier_version_is_read_and_written_on(archive: Path, tmp_path: Path) -> None:
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data") if hasattr(tarfile, "data_filter") else packed.extractall(tmp_path)
    for path in [tmp_path / "store", *(tmp_path / "store").rglob("*")]:
        path.chmod(0o700 if path.is_dir() else 0o600)
    store = Store(tmp_path / "store")
    store.trust.add(MAKER)
    (old,) = store.list()
    assert (old.name, old.message, store.labels(old).tags) == ("old", "of an earlier version", ("kept",))
    assert read_back(store, "old") == FILES
    new = save(store, "new", files=FILES)
    assert new.stored == 0  # all of it is there already
    assert store.check(read_data=True).faults == []
    store.remove("old")
    assert read_back(store, "new") == FILES


def test_the_format_that_this_version_writes_is_among_them() -> None:
    assert (HERE / f"format-{FORMAT}.tar.gz").exists()
