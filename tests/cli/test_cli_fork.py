"""`jupyter gpuckpt fork` and `move`: real kernels, forked from outside."""

from __future__ import annotations

import re
from pathlib import Path

from command_line import Cli
from copies import Copy
from notebooks import Notebook


def _id(notebook: Notebook) -> str:
    kernel_id: str = notebook.manager.provisioner.kernel_id
    return kernel_id


def test_a_kernel_is_forked_from_outside_and_says_how_to_open_the_copy(cli: Cli, notebook: Notebook) -> None:
    notebook.run("import socket; s = socket.create_server(('127.0.0.1', 0)); x = 1")
    port = notebook.value("s.getsockname()[1]")
    ran = cli("fork", _id(notebook))
    assert (ran.status, ran.err) == (0, "")
    found = re.search(r"Copy 0 is kernel (\S+)\. In a terminal: jupyter console --existing (\S+)", ran.out)
    assert found, ran.out
    assert re.search(rf"Port {port} is port \d+ there\.", ran.out)
    folder = Path(notebook.folder).parent.parent
    copy = Copy({"id": found[1], "connection_file": str(folder / found[2])})
    try:
        assert copy.value("x") == "1"
        listed = {kernel["kernel_id"]: kernel for kernel in cli("kernels", "--json").json["kernels"]}
        assert listed[found[1]]["copy_of"] == _id(notebook)
        assert f"fork of {_id(notebook)[:8]}" in cli("kernels").out
        assert cli("stop", found[1]).status == 0
        assert not (folder / found[2]).exists()
    finally:
        copy.close()


def test_a_fork_from_a_snapshot_as_json(cli: Cli, notebook: Notebook) -> None:
    notebook.run("x = 'saved'")
    cli("save", _id(notebook), "here")
    notebook.run("x = 'later'")
    made = cli("fork", _id(notebook), "--snapshot", "here", "-n", "2", "--reseed", "--json").json
    copies = [Copy(kernel) for kernel in made["kernels"]]
    try:
        assert [copy.value("x") for copy in copies] == ["saved", "saved"]
    finally:
        for copy in copies:
            copy.close()


def test_what_cannot_be(cli: Cli, notebook: Notebook) -> None:
    for words, status, says in (
        (("fork", "ID", "-n", "0.5"), 2, "is not a number of at least 1"),
        (("fork", "ID", "-n", "65"), 1, "Ask for 1 to 64 at once."),
        (("fork", "ID", "--snapshot", "nothing"), 3, "nothing"),
        (("fork", "nobody"), 3, "No kernel matches"),
        (("move", "ID"), 2, "--gpu"),
        (("move", "ID", "--gpu", "x"), 2, "not a GPU number"),
        (("move", "ID", "--gpu", "0"), 1, "It has nothing on a GPU."),
        (("fork", "ID", "--gpu", "0"), 1, "It has nothing on a GPU."),
    ):
        ran = cli(*(_id(notebook) if word == "ID" else word for word in words))
        assert ran.status == status, words
        assert says.lower() in ran.err.lower(), words
    assert notebook.value("1") == "1"
