"""`jupyter gpuckpt log`, `diff`, `mv`, `note`, `pin`, `tag`, `keep`, `gc`, `check` and `repair`, on a store."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from command_line import COMMAND, Cli

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.errors import Refused
from jupyter_gpuckpt.setting import parse_size
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
    save(store, "stranger", "f" * 32)
    first = save(store, "first")
    second = save(store, "second", first.id)
    third = save(store, "third", second.id)
    save(store, "branch", first.id)
    save(store, "of-third", third.id)
    save(store, "other-branch", first.id)
    # The newest first; a line is that of its newest; what is unrelated stands apart.
    drawn = [line.split("  ")[0] for line in cli("log").out.splitlines()]
    assert drawn == [
        "* other-branch",
        "| * of-third",
        "| * third",
        "| * second",
        "|/",
        "| * branch",
        "|/",
        "* first",
        "",
        "* stranger",
    ]
    document = cli("log", "--json").json
    assert {s["name"]: s["parent"] for s in document["snapshots"]}["third"] == second.id


def test_the_log_of_one_notebook(cli: Cli, store: Store) -> None:
    save(store, "base", notebook="work/train.ipynb")
    save(store, "branch", notebook="work/my other.ipynb")
    # Whose each history is, is said where there are several.
    drawn = [line.split("  ")[0] for line in cli("log").out.splitlines()]
    assert drawn == ["work/my other.ipynb:", "* branch", "", "work/train.ipynb:", "* base"]
    assert [s["name"] for s in cli("log", "--notebook", "my other", "--json").json["snapshots"]] == ["branch"]
    # One that is not there is an error, which says those that are: nothing is to be removed by a wrong name either.
    for words in (["log"], ["keep", "--last", "1"]):
        unknown = cli(*words, "--notebook", "trian")
        assert (unknown.status, unknown.out) == (3, "")
        assert "There are snapshots of: 'my other.ipynb', train.ipynb." in unknown.err
        assert "`jupyter gpuckpt list` shows all" in unknown.err


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
    said = cli("diff", "a", "b").out.splitlines()
    assert said[:2] == [
        "Nothing is known of variables: one of the two is not of a Python kernel with our agent.",
        "b differs from a by 3.0 kB.",
    ]
    assert ["fresh", "new", "0", "B", "3.0", "kB"] in [line.split() for line in said]
    assert "a and a hold the same." in cli("diff", "a", "a").out
    assert cli("diff", "a", "nothing").status == 3


def test_a_snapshot_gets_another_name(cli: Cli, store: Store) -> None:
    save(store, "old")
    save(store, "other")
    assert cli("mv", "old", "new").out == "old is now new.\n"
    assert cli("mv", "old", "newer").status == 3
    assert cli("mv", "new", "other", "--json").json["error"]["kind"] == "NameTaken"
    save(store, "auto-3")
    assert cli("keep", "auto/3", "as", "before_merge").out == "auto/3 is now before_merge.\n"
    for wrong in (
        ["new"],
        ["new", "as"],
        ["new", "to", "newer"],
        ["new", "as", "auto-1"],
        ["--last", "1", "a", "as", "b"],
    ):
        assert cli("keep", *wrong).status == 2
    assert sorted(m.name for m in store.list()) == ["before_merge", "new", "other"]


def test_a_note_is_changed_in_words_and_by_several(cli: Cli, store: Store) -> None:
    save(store, "it")
    assert cli("note", "it", "the", "best so far").out == "it: the best so far\n"
    assert cli("list", "--json").json["snapshots"][0]["message"] == "the best so far"
    assert cli("note", "it", "", "--json").json["message"] == ""
    assert cli("note", "nothing", "x").status == 3
    assert cli("note", "it").status == 2


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


def at_a_terminal(answer: str, *words: str) -> tuple[int, str]:
    """Run `jupyter gpuckpt` at a terminal, and give this answer; return the exit status and what it printed."""
    here, there = os.openpty()
    try:
        os.write(here, f"{answer}\n".encode())
        done = subprocess.run([*COMMAND, *words], stdin=there, stderr=there, stdout=subprocess.PIPE, timeout=60)
        asked = os.read(here, 1 << 16).decode()
    finally:
        os.close(here)
        os.close(there)
    return done.returncode, asked + done.stdout.decode()


def test_what_would_be_removed_is_told_and_asked_for_at_a_terminal(cli: Cli, store: Store) -> None:
    for number in range(4):
        save(store, f"s{number}", data=os.urandom(50_000))
    would = cli("keep", "--last", "2", "--dry-run", "--json").json
    assert (would["would_remove"], would["freed"] > 100_000) == (["s1", "s0"], True)
    assert "2 snapshots would be removed, 10" in cli("rm", "s0", "s1", "--dry-run").out
    assert cli("rm", "s0", "s1", "nothing", "--dry-run").status == 3
    for words in (["keep", "--last", "2"], ["rm", "s0", "s1"]):
        status, shown = at_a_terminal("", *words)
        assert status == 1
        assert "Remove 2 snapshots (10" in shown
        assert "Nothing was removed." in shown
    assert len(store.list()) == 4
    status, shown = at_a_terminal("y", "keep", "--last", "2")
    assert (status, "2 snapshots removed, 10" in shown) == (0, True)
    assert at_a_terminal("", "rm", "s2")[0] == 0, "one is removed without a question"
    save(store, "s4")
    assert at_a_terminal("", "rm", "s3", "s4", "--yes")[0] == 0
    assert store.list() == []


def test_what_would_be_freed_is_what_a_removal_and_a_collection_free(cli: Cli, store: Store) -> None:
    shared = os.urandom(50_000)
    for name in ("one", "other"):
        save(store, name, shared=shared, own=os.urandom(9_000_000))
    would = cli("rm", "one", "--dry-run", "--json").json["freed"]
    assert cli("rm", "one", "--json").json["freed"] == would
    would = cli("gc", "--dry-run", "--json").json["freed"]
    assert would > 8_000_000
    assert cli("gc", "--json").json["freed"] == would


def test_a_damaged_store_is_no_reason_to_remove_all_but_the_newest(cli: Cli, store: Store) -> None:
    saved = [save(store, f"s{number}", data=os.urandom(50_000)) for number in range(4)]
    (store.root / "index" / saved[0].id).unlink()
    refused = cli("keep", "--under", "120k")
    assert (refused.status, "No old snapshots were removed." in refused.err) == (1, True)
    assert len(store.list()) == 4


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
    assert cli("repair").out == "The index of other was rebuilt.\n"
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
    assert parse_size(text) == size
