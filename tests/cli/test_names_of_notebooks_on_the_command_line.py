"""Snapshots by their names and notebooks on the command line: the one that is meant, or a question which it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from command_line import Cli
from notebooks import StartKernel

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.store import Store


def _saved(name: str, notebook: str, key: str = "") -> None:
    """Have a snapshot of a notebook in the store."""
    with Store(settings.store_dir()).writer(key or name) as writer:
        (writer.directory / "pages").write_bytes(notebook.encode())
        kernel = {"notebook": notebook, "kernel_id": notebook, "execution_count": 1}
        process = {"processes": [], "frozen_seconds": 0.1}
        writer.commit(message="", parent=None, kernel=kernel, machine={"criu": "4"}, cuda={}, process=process)


@pytest.mark.criu
def test_another_notebooks_snapshot_is_restored_only_where_that_is_said(cli: Cli, start: StartKernel) -> None:
    def open_(path: str) -> str:
        notebook = start(env={**os.environ, "JPY_SESSION_NAME": path})
        notebook.run(f"x = {path!r}")
        kernel_id: str = notebook.manager.provisioner.kernel_id
        return kernel_id

    open_("/home/me/a.ipynb"), open_("/home/me/my b.ipynb")
    assert cli("save", "a.ipynb", "base").status == 0
    for words in (["base"], []):
        refused = cli("restore", "my b.ipynb", *words)
        assert refused.status != 0
        assert "`jupyter gpuckpt restore 'my b.ipynb' --from a.ipynb:base`" in refused.err
    assert cli("restore", "my b.ipynb", "base", "--json").json["error"]["data"]["from"] == "a.ipynb:base"
    assert cli("restore", "my b.ipynb", "base", "--from", "a.ipynb:base").status == 2
    assert cli("restore", "my b.ipynb", "--from", "a.ipynb:base").status == 0
    # It can have that name itself.
    assert cli("save", "my b.ipynb", "base", "-m", "mine").out.startswith("Saved base: ")
    assert {s["label"] for s in cli("list", "--json").json["snapshots"]} == {"a.ipynb:base", "my b.ipynb:base"}
    assert cli("restore", "my b.ipynb", "base", "--json").json["message"] == "mine"
    assert cli("restore", "a.ipynb", "base", "--json").json["message"] == ""


def test_damaged_snapshots_and_two_of_one_notebook_are_told_apart_and_removed(cli: Cli) -> None:
    # Two of one notebook, as a fetch can bring about: each is what the list calls it.
    _saved("base", "/home/me/a.ipynb")
    _saved("base", "/home/me/a.ipynb", "base~00000001")
    assert sorted(s["label"] for s in cli("list", "--json").json["snapshots"]) == ["base", "base~00000001"]
    assert cli("show", "base", "--json").json["name"] == cli("show", "a.ipynb:base", "--json").json["name"] == "base"
    assert cli("show", "base~00000001", "--json").json["name"] == "base~00000001"
    for path in Path(settings.store_dir(), "snapshots").iterdir():
        path.write_bytes(path.read_bytes()[:-9])
    for key in ("base", "base~00000001"):
        assert cli("show", key, "--json").json["error"]["kind"] == "Damaged"
        assert cli("rm", key).status == 0
    assert cli("show", "base").status == 3


def test_a_name_that_several_notebooks_have_is_asked_back(cli: Cli, tmp_path: Path) -> None:
    _saved("base", "/home/me/one/train.ipynb")
    _saved("base", "/home/me/two/train.ipynb", "base~00000001")
    _saved("alone", "/home/me/two/train.ipynb")
    shown = [line.split()[0] for line in cli("list").out.splitlines()[1:]]
    assert sorted(shown) == ["alone", "one/train.ipynb:base", "two/train.ipynb:base"]
    for words in (["show", "base"], ["rm", "base"], ["mv", "base", "new"], ["pin", "base"], ["tag", "base", "t"]):
        refused = cli(*words)
        assert refused.status == 1, words
        assert "one/train.ipynb:base" in refused.err
        assert "two/train.ipynb:base" in refused.err
    # As much of the path as tells them apart is enough, and all of it is right, too.
    for said in ("two/train.ipynb:base", "/home/me/two/train.ipynb:base"):
        assert cli("show", said, "--json").json.get("notebook") == "/home/me/two/train.ipynb"
    assert cli("show", "train.ipynb:base").status == 1
    told = cli("keep", "--last", "1", "--dry-run").out
    assert "Would remove one/train.ipynb:base." in told
    assert "Would remove two/train.ipynb:base." in told
    missing = cli("show", "three.ipynb:base")
    assert missing.status == 3
    assert "one/train.ipynb:base" in missing.err
    # A remote has both, and each is fetched by what the list there calls it.
    for name in ("one/train.ipynb:base", "two/train.ipynb:base"):
        assert cli("push", name, str(tmp_path / "remote")).status == 0
    assert "two/train.ipynb:base" in cli("remote", str(tmp_path / "remote")).out
    assert cli("rm", "two/train.ipynb:base").out.startswith("Removed two/train.ipynb:base")
    assert [s["label"] for s in cli("list", "--json").json["snapshots"]] == ["alone", "base"]
    assert cli("pull", str(tmp_path / "remote"), "two/train.ipynb:base").status == 0
    # A name that is given must be free in its own notebook only.
    assert cli("mv", "two/train.ipynb:base", "alone").status == 1
    assert cli("mv", "alone", "other").status == 0
    assert cli("mv", "one/train.ipynb:base", "other").status == 0
    shown = [line.split()[1] for line in cli("log").out.splitlines() if line.startswith("* ")]
    assert sorted(shown) == ["base", "one/train.ipynb:other", "two/train.ipynb:other"]
