"""`jupyter gpuckpt hibernate`: a kernel goes to the disk, or all do before a deadline."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from command_line import Cli, Orphan
from keeper_faults import keeper_pid
from notebooks import Notebook, StartKernel

pytestmark = pytest.mark.criu


def test_a_kernel_goes_to_the_disk_and_comes_back(cli: Cli, notebook: Notebook) -> None:
    notebook.run("x = 41")
    kernel_id = notebook.manager.provisioner.kernel_id
    done = cli("hibernate", kernel_id)
    assert (done.status, done.err) == (0, "")
    assert "Hibernated in" in done.out
    (kernel,) = cli("kernels", "--json").json["kernels"]
    assert kernel["state"] == "hibernated"
    row = cli("kernels").out.splitlines()[1]
    assert "hibernated" in row
    assert "on disk" in row
    assert "hibernated" in cli("save", kernel_id, "x").err
    assert "already" in cli("hibernate", kernel_id).out
    assert cli("wake", kernel_id).out.startswith("Woke in")
    assert notebook.value("x + 1") == "42"


@pytest.mark.parametrize("words", [[], ["x", "--all"], ["x", "--deadline", "3"], ["--all", "--deadline", "soon"]])
def test_what_is_no_command(cli: Cli, words: list[str]) -> None:
    assert cli("hibernate", *words).status == 2


def test_all_before_a_deadline_the_most_valuable_first(cli: Cli, start: StartKernel, tmp_path: Path) -> None:
    idle, worked, silent = start(), start(), start()
    worked.run("import time; x = 41\nbegan = time.process_time()\nwhile time.process_time() < began + 1: pass")
    idle.run("import jupyter_gpuckpt, time; y = 1; jupyter_gpuckpt.before_save(lambda: time.sleep(600))")
    os.kill(keeper_pid(silent), signal.SIGSTOP)
    try:
        for deadline in ("4", "16", "64"):  # more where the machine is so slow that not even one gets ready
            done = cli("hibernate", "--all", "--deadline", deadline, "--json")
            assert (done.status, done.err) == (1, ""), "what is in the report is said once"
            first, second, last = done.json["kernels"]
            if first["saved"]:
                break
    finally:
        os.kill(keeper_pid(silent), signal.SIGCONT)
    assert (first["kernel_id"], first["saved"]) == (worked.manager.provisioner.kernel_id, True)
    assert (second["kernel_id"], second["saved"]) == (idle.manager.provisioner.kernel_id, False)
    # On a slow machine the first one may have had all of the time.
    assert second["why"] in ("The deadline passed before it was saved.", "The deadline had passed.")
    report = Path(done.json["report"])
    assert report.parent == tmp_path / "logs"
    assert json.loads(report.read_text())["kernels"] == [first, second, last]
    # One that cannot be asked is told of as well.
    assert (last["kernel_id"], last["saved"]) == (silent.manager.provisioner.kernel_id, False)
    assert "does not answer" in last["why"]
    assert silent.value("1") == "1"
    assert worked.value("x + 1") == "42"
    assert idle.value("y") == "1"


def test_one_that_nobody_holds_ends(cli: Cli, orphan: Orphan) -> None:
    done = cli("hibernate", "--all")
    assert done.status == 0
    assert "hibernated-train-" in done.out
    assert cli("kernels", "--json").json["kernels"] == []
    (snapshot,) = cli("list", "--json").json["snapshots"]
    assert (snapshot["pinned"], snapshot["tags"]) == (True, ["hibernated"])
