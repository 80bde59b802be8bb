"""The package is upgraded or downgraded while kernels live: they are understood, or told apart, and never ended."""

from __future__ import annotations

import json
from typing import Any

from command_line import run
from keeper_faults import keeper_pid, kill_keeper
from notebooks import Notebook, wait_until

from jupyter_gpuckpt.linux.processes import start_time


def _rewrite(notebook: Notebook, file: str, **members: Any) -> None:
    path = notebook.folder / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **members}))


def _kernel_id(notebook: Notebook) -> str:
    return str(notebook.manager.provisioner.kernel_id)


def test_a_keeper_tells_its_version_and_records_of_newer_ones_are_read(notebook: Notebook) -> None:
    notebook.run("x = 1")
    (told,) = run("kernels", "--json").json["kernels"]
    assert told["version"] == run("--version").out.split()[1]
    # A newer keeper wrote what this version does not know, and speaks as this one does.
    _rewrite(notebook, "state.json", invented="later", version="9.9")
    _rewrite(notebook, "launch.json", invented=["later"])
    kill_keeper(notebook)
    assert notebook.manager.is_alive()
    notebook.run("%gpuckpt save here")
    notebook.run("x = 2")
    notebook.run("%gpuckpt restore here")
    assert notebook.value("x") == "1"
    # An older one died in the middle of a move, which it had written down as a save.
    _rewrite(notebook, "state.json", format=1, operation={"kind": "save", "name": "", "cuda": [], "held": []})
    kill_keeper(notebook)
    assert notebook.manager.is_alive()
    assert notebook.value("x") == "1"
    wait_until(lambda: "operation" not in json.loads((notebook.folder / "state.json").read_text()))


def test_a_keeper_that_would_misunderstand_is_named_with_both_versions_and_the_kernel_runs_on(
    notebook: Notebook,
) -> None:
    notebook.run("x = 1")
    keeper = keeper_pid(notebook)
    for protocol, version, word in ((0, "", "older"), (99, "9.9", "newer")):
        _rewrite(notebook, "state.json", protocol=protocol, version=version)
        (fault,) = run("kernels", "--json").json["faults"]
        assert fault["kind"] == "OtherVersion"
        assert f"protocol {protocol}), which is {word} than this" in fault["why"]
        assert (version or f"kill -9 {keeper}") in fault["then"]
        assert run("save", _kernel_id(notebook), "x", "--json").json["error"]["kind"] == "OtherVersion"
        assert notebook.manager.is_alive()
        assert notebook.value("x") == "1"


def test_a_kernel_of_a_dead_keeper_of_a_newer_version_is_not_taken_over_and_not_ended(notebook: Notebook) -> None:
    notebook.run("x = 1")
    (kernel,) = run("kernels", "--json").json["kernels"]
    _rewrite(notebook, "state.json", protocol=99, version="9.9")
    kill_keeper(notebook)
    assert notebook.manager.is_alive()  # as far as the server knows
    (fault,) = run("kernels", "--json").json["faults"]
    assert "9.9" in fault["why"]
    assert notebook.value("x") == "1"
    # As with what it has begun, in words that are not known here, or known but odd.
    unknown: tuple[tuple[int, dict[str, Any], str], ...] = (
        (99, {"kind": "merge"}, "it has format 99, and this version knows format"),
        (2, {"kind": "merge"}, "operation is {'kind': 'merge'}, and none of: SaveInProgress"),
        (2, {"kind": "save", "criu": "1234"}, "operation.criu is '1234', and not int"),
    )
    for number, operation, why in unknown:
        _rewrite(notebook, "state.json", protocol=2, format=number, operation=operation)
        (fault,) = run("kernels", "--json").json["faults"]
        assert (fault["kind"], why in fault["why"], "Use jupyter_gpuckpt 9.9" in fault["then"]) == (
            "OtherVersion",
            True,
            True,
        ), fault
        assert notebook.value("x") == "1"
    _rewrite(notebook, "state.json", protocol=1, format=1, operation=None)  # the newer version is back
    assert notebook.manager.is_alive()
    notebook.run("%gpuckpt save here")
    assert run("kernels", "--json").json["kernels"][0]["pid"] == kernel["pid"]
    assert run("stop", _kernel_id(notebook), "--force").status == 0
    assert start_time(kernel["pid"]) is None


def test_one_of_an_older_version_gets_a_new_keeper_when_its_own_is_ended(notebook: Notebook) -> None:
    notebook.run("x = 1")
    _rewrite(notebook, "state.json", protocol=0, version="")
    kill_keeper(notebook)  # as the error says
    assert notebook.manager.is_alive()
    notebook.run("%gpuckpt save here")
    assert run("kernels", "--json").json["faults"] == []


def test_a_snapshot_whose_agent_speaks_another_protocol_is_refused_with_both(notebook: Notebook) -> None:
    notebook.run("x = 1")
    notebook.run("from jupyter_gpuckpt import settings; settings.AGENT_PROTOCOL = 99")
    notebook.run("%gpuckpt save later")
    notebook.run("x = 2")
    refused = notebook.fails("%gpuckpt restore later")
    assert "agent protocol 99" in refused.text
    assert "agent protocol 1 to 1" in refused.text
    assert notebook.value("x") == "2"
