"""`jupyter gpuckpt log`, `diff`, `mv`, `pin`, `tag`, `keep`, `gc`, `check` and `repair`, on a store of files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.errors import Refused
from jupyter_gpuckpt.store import Manifest, Store

ABOUT: dict[str, Any] = {"machine": {"criu": "4.2"}, "cuda": {}, "process": {"processes": [1], "frozen_seconds": 0.1}}


@pytest.fixture
def store(folders: None) -> Store:
    return Store(settings.store_dir())


def save(store: Store, name: str, parent: str | None = None, notebook: str = "", **files: bytes) -> Manifest:
    with store.writer(name) as writer:
        for path, content in files.items():
            (writer.directory / path).write_bytes(content)
        kernel = {"notebook": notebook, "kernel_id": "k"}
        return writer.commit(message=f"about {name}", parent=parent, kernel=kernel, **ABOUT)


def test_the_log_draws_which_snapshot_came_from_which(cli: Cli, store: Store) -> None:
    assert cli("log").out == "No snapshots yet.\n"
    first = save(store, "first")
    second = save(store, "second", first.id)
    save(store, "branch", first.id, notebook="work/other.ipynb")
    save(store, "third", second.id)
    save(store, "stranger", "f" * 32)
    drawn = [line.split("  ")[0] for line in cli("log").out.splitlines()]
    assert drawn == ["* first", "|\\ * second", "| * third", "* branch", "* stranger"]
    document = cli("log", "--json").json
    assert {s["name"]: s["parent"] for s in document["snapshots"]}["third"] == second.id
    assert [s["name"] for s in cli("log", "--notebook", "other", "--json").json["snapshots"]] == ["branch"]


def test_what_differs_is_said_by_file(cli: Cli, store: Store) -> None:
    same = os.urandom(5000)
    save(store, "a", pages=same, gone=b"gone", moved=b"x" * 999)
    save(store, "b", pages=same, fresh=os.urandom(3000), renamed=b"x" * 999)
    document = cli("diff", "a", "b", "--json").json
    changes = {c["path"]: (c["old"], c["new"], c["changed"]) for c in document["files"]}
    assert changes == {
        "pages": (5000, 5000, 0),
        "gone": (4, None, 0),
        "fresh": (None, 3000, 3000),
        "moved": (999, None, 0),
        "renamed": (None, 999, 0),
    }
    assert "3.0 kB of b are not in a." in cli("diff", "a", "b").out
    assert "hold the same" in cli("diff", "a", "a").out
    assert cli("diff", "a", "nothing").status == 3


def test_a_snapshot_gets_another_name(cli: Cli, store: Store) -> None:
    save(store, "old")
    save(store, "other")
    assert cli("mv", "old", "new").out == "old is now new.\n"
    assert cli("mv", "old", "newer").status == 3
    assert cli("mv", "new", "other", "--json").json["error"]["kind"] == "NameTaken"
    assert sorted(m.name for m in store.list()) == ["new", "other"]


def test_pins_and_tags_are_kept_and_listed(cli: Cli, store: Store) -> None:
    save(store, "it")
    assert cli("pin", "it").status == 0
    assert cli("tag", "it", "best", "v1", "--json").json == {"name": "it", "tags": ["best", "v1"], "pinned": True}
    assert cli("tag", "it", "--remove", "v1").out == "it: best\n"
    assert "pinned best" in cli("list").out
    listed = cli("list", "--json").json["snapshots"][0]
    assert (listed["pinned"], listed["tags"]) == (True, ["best"])
    refused = cli("rm", "it", "--json")
    assert refused.status == 1
    assert refused.json["errors"][0]["kind"] == "Pinned"
    assert cli("unpin", "nothing", "it").status == 3
    assert cli("rm", "it").status == 0


def test_old_snapshots_are_removed_by_a_rule(cli: Cli, store: Store) -> None:
    for number in range(4):
        save(store, f"s{number}", notebook="a.ipynb" if number % 2 else "b.ipynb", data=os.urandom(50_000))
    assert cli("keep", "--last", "1", "--notebook", "a", "--json").json["removed"] == ["s1"]
    done = cli("keep", "--under", "120k", "--json").json
    assert done["removed"] == ["s0"]
    assert done["used"] < 120_000
    assert "Nothing had to be removed." in cli("keep", "--last", "9").out
    for wrong in (
        ["keep"],
        ["keep", "--last", "0"],
        ["keep", "--under", "much"],
        ["keep", "--last", "1", "--under", "1"],
    ):
        assert cli(*wrong).status == 2


def test_what_no_snapshot_needs_is_freed(cli: Cli, store: Store) -> None:
    save(store, "it", data=os.urandom(50_000))
    (store.root / "snapshots" / "it.json").unlink()
    would = cli("gc", "--dry-run", "--json").json
    assert would["freed"] > 50_000
    assert store.used() > 50_000
    waiting = cli("gc", "--grace", "600", "--json").json
    assert (waiting["freed"] < 50_000, waiting["waiting"] > 50_000) == (True, True)
    assert cli("gc").out == "50.1 kB freed.\n"
    assert store.used() == 0


def test_damage_is_named_and_mended_where_it_can_be(cli: Cli, store: Store) -> None:
    saved = save(store, "it", data=os.urandom(50_000))
    other = save(store, "other", data=os.urandom(50_000))
    assert cli("check", "--read-data").out == "No damage found: 2 snapshots, 2 chunks, 100 kB read.\n"
    (store.root / "index" / other.id).unlink()
    found = cli("check")
    assert found.status == 1
    assert "needed by other" in found.out
    blocked = cli("gc")
    assert (blocked.status, blocked.out.split(".")[0]) == (1, "0 B freed")
    assert cli("repair").out == "The index of other was made again.\n"
    assert cli("check").status == 0
    pack = next(Path(store.root, "packs").glob(f"{saved.id}-*"))
    raw = bytearray(pack.read_bytes())
    raw[30_000] ^= 1
    pack.write_bytes(raw)
    assert cli("check").status == 0
    document = cli("check", "--read-data", "--json")
    assert document.status == 1
    assert document.json["touched"] == ["it"]
    mended = cli("repair", "--json")
    assert (mended.status, list(mended.json["lost"])) == (1, ["it"])
    assert cli("rm", "it").status == 0
    assert cli("check", "--read-data").status == 0


@pytest.mark.parametrize("variable", ["GPUCKPT_STORE_QUOTA", "GPUCKPT_KEEP_UNDER", "GPUCKPT_KEEP_LAST"])
def test_a_setting_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    read = {
        "GPUCKPT_STORE_QUOTA": settings.store_quota,
        "GPUCKPT_KEEP_UNDER": settings.keep_under,
        "GPUCKPT_KEEP_LAST": settings.keep_last,
    }[variable]
    assert read() is None
    monkeypatch.setenv(variable, "5")
    assert read() == 5
    monkeypatch.setenv(variable, "lots")
    with pytest.raises(Refused, match=variable):
        read()


@pytest.mark.parametrize(("text", "size"), [("0", 0), ("500M", 5 * 10**8), ("1.5t", 15 * 10**11), ("20GB", 2 * 10**10)])
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert settings.parse_size(text) == size
