"""`jupyter gpuckpt list`, `show` and `rm`, with snapshots of real kernels."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from command_line import Cli
from notebooks import Notebook

pytestmark = pytest.mark.shared_kernel


def _manifest(name: str) -> Path:
    return Path(os.environ["GPUCKPT_STORE"], "snapshots", f"{name}.json")


def test_an_empty_store_is_listed_as_such(cli: Cli) -> None:
    listed = cli("list")
    assert (listed.status, listed.err) == (0, "")
    assert listed.out.startswith("No snapshots yet.")
    assert cli("list", "--json").json == {"snapshots": [], "faults": [], "here": {}}


def test_snapshots_are_listed_shown_and_removed(cli: Cli, notebook: Notebook) -> None:
    notebook.run("%gpuckpt save first -m 'three numbers'")
    notebook.run("%gpuckpt save second")
    lines = cli("list").out.splitlines()
    assert lines[0].split()[:3] == ["name", "saved", "size"]
    assert [line.split()[0] for line in lines[1:]] == ["second", "first"]
    assert "three numbers" in lines[2]
    first = cli("list", "--json").json["snapshots"][1]
    assert (first["name"], first["message"]) == ("first", "three numbers")
    assert first["size"] > 1_000_000

    def named(*words: str) -> list[str]:
        return cli("list", "--format", "{name}", *words).out.split()

    notebook.run("%gpuckpt tag first good best\n%gpuckpt pin second")
    assert named() == ["second", "first"]
    assert (named("--tag", "good", "--tag", "best"), named("--tag", "good", "--pinned")) == (["first"], [])
    assert (named("--pinned"), named("--notebook", "other.ipynb")) == (["second"], [])
    assert (named("--since", "1h"), named("--since", "2999-01-01")) == (["second", "first"], [])
    assert cli("list", "--tag", "none").out == "None of the 2 snapshots matches.\n"
    assert [one["name"] for one in cli("list", "--tag", "best", "--json").json["snapshots"]] == ["first"]
    lines = cli("list", "--format", "json").out.splitlines()
    assert [json.loads(line)["name"] for line in lines] == named()
    refused = cli("list", "--format", "{nothing}")
    assert (refused.status, "can be: name, " in refused.err) == (2, True)
    assert "neither an age" in cli("list", "--since", "soon").err
    in_a_cell = notebook.run("%gpuckpt list --tag good --format '{{name}} {{pinned}} {{tags}}'").text
    assert in_a_cell == "first false best,good"
    notebook.run("%gpuckpt unpin second\n%gpuckpt tag first --remove good --remove best")

    assert "three numbers" in cli("show", "first").out
    shown = cli("show", "first", "--json").json
    assert shown["id"] == first["id"]
    assert shown["kernel"]["kernel_id"] == notebook.manager.provisioner.kernel_id

    removed = cli("rm", "first")
    assert (removed.status, removed.out.split(":")[0]) == (0, "Removed first")
    assert [s["name"] for s in cli("list", "--json").json["snapshots"]] == ["second"]


def test_a_hint_can_be_typed_where_it_is_read(cli: Cli, notebook: Notebook) -> None:
    kernel = notebook.manager.provisioner.kernel_id
    assert "`%gpuckpt save NAME`" in notebook.run("%gpuckpt list").text
    assert "`jupyter gpuckpt save KERNEL NAME`" in cli("list").out
    assert "`%gpuckpt list`" in notebook.fails("%gpuckpt show nothing").text
    assert "`jupyter gpuckpt list`" in cli("show", "nothing").err
    assert "`%gpuckpt save NAME`" in notebook.fails("%gpuckpt restore").text
    assert f"`jupyter gpuckpt save {kernel} NAME`" in cli("restore", kernel, "--json").json["error"]["then"]


def test_the_command_shows_the_same_text_as_the_notebook(cli: Cli, notebook: Notebook) -> None:
    notebook.run("%gpuckpt save same")
    # But for whose it is to be based on one.
    listed = re.sub(r"here: kernel \w+", "here", cli("list").out)
    assert listed.split() == notebook.run("%gpuckpt list").text.split()
    assert cli("show", "same").out.strip() == notebook.run("%gpuckpt show same").text


def test_a_missing_snapshot_does_not_keep_the_others_from_being_removed(cli: Cli, notebook: Notebook) -> None:
    for name in ("one", "two"):
        notebook.run(f"%gpuckpt save {name}")
    removed = cli("rm", "one", "nothing", "two")
    assert removed.status == 3
    assert removed.out.count("Removed") == 2
    assert "There is no snapshot named nothing." in removed.err
    document = cli("rm", "nothing", "--json")
    assert document.status == 3
    assert document.json["removed"] == []
    assert document.json["errors"][0]["kind"] == "NoSuchSnapshot"


def test_a_snapshot_that_is_not_there(cli: Cli) -> None:
    shown = cli("show", "nothing")
    assert (shown.status, shown.out) == (3, "")
    assert [line.split(" ")[0] for line in shown.err.splitlines()] == ["There", "Why:", "Next:"]
    assert cli("show", "nothing", "--json").json["error"]["kind"] == "NoSuchSnapshot"


def test_a_text_that_can_be_no_name(cli: Cli) -> None:
    assert cli("show", "../secret").status == 1
    assert cli("show", "../secret", "--json").json["error"]["kind"] == "BadName"


def test_a_damaged_snapshot_is_told_apart_and_can_be_removed(cli: Cli, notebook: Notebook) -> None:
    notebook.run("%gpuckpt save good")
    notebook.run("%gpuckpt save bad")
    _manifest("bad").write_bytes(_manifest("bad").read_bytes()[:-40])
    listed = cli("list")
    assert listed.status == 0
    assert "good" in listed.out
    assert "bad" in listed.out
    document = cli("list", "--json").json
    assert [s["name"] for s in document["snapshots"]] == ["good"]
    assert [f["kind"] for f in document["faults"]] == ["Damaged"]
    assert cli("show", "bad").status == 1
    assert cli("rm", "bad").status == 0
    assert cli("list", "--json").json["faults"] == []


def test_a_store_that_is_no_folder(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    listed = cli("list", GPUCKPT_STORE=str(tmp_path / "file"))
    assert listed.status == 1
    assert "Next: " in listed.err


def test_a_message_cannot_steer_the_terminal(cli: Cli, notebook: Notebook) -> None:
    notebook.run("get_ipython().run_line_magic('gpuckpt', 'save evil -m \"a\\x1b[2Jb\"')")
    assert "\x1b" not in cli("list").out
    assert cli("list", "--json").json["snapshots"][0]["message"] == "a\x1b[2Jb"
