"""Kernels that are no ipykernel of the server's own Python: they have no agent, and are saved from outside."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from command_line import Cli
from notebooks import Notebook, StartKernel

_KERNEL = """
from ipykernel.kernelapp import IPKernelApp
from ipykernel.kernelbase import Kernel

class Tally(Kernel):
    implementation = banner = "tally"
    implementation_version = "1"
    language_info = {"name": "tally", "mimetype": "text/plain", "file_extension": ".txt"}
    total = 0

    def do_execute(self, code, silent, *args, **kwargs):
        self.total += int(code)
        return {"status": "ok", "execution_count": self.execution_count, "payload": [],
                "user_expressions": {"total": self.total}}

IPKernelApp.launch_instance(kernel_class=Tally)
"""


@pytest.fixture
def tally(start: StartKernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Notebook:
    """A kernel of another language, which adds up numbers."""
    program = tmp_path / "tally.py"
    program.write_text(_KERNEL)
    spec = tmp_path / "data" / "kernels" / "tally"
    spec.mkdir(parents=True)
    about = {
        "argv": [sys.executable, str(program), "-f", "{connection_file}"],
        "display_name": "Tally",
        "language": "tally",
        "metadata": {"kernel_provisioner": {"provisioner_name": "gpuckpt-provisioner"}},
    }
    (spec / "kernel.json").write_text(json.dumps(about))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "data"))
    return start("tally")


def _add(notebook: Notebook, number: int) -> int:
    """Return the total after adding a number."""
    reply = notebook.client.execute(str(number), reply=True, timeout=60)
    return int(reply["content"]["user_expressions"]["total"])


def test_it_is_saved_and_restored_from_outside(cli: Cli, tally: Notebook) -> None:
    kernel_id = tally.manager.provisioner.kernel_id
    assert [_add(tally, 1), _add(tally, 2)] == [1, 3]
    assert cli("save", kernel_id, "three").status == 0
    assert _add(tally, 100) == 103
    restored = cli("restore", kernel_id, "three")
    assert (restored.status, restored.err) == (0, "")
    assert _add(tally, 4) == 7
    tally.manager.interrupt_kernel()
    assert _add(tally, 1) == 8


def test_its_snapshot_is_refused_in_another_kernel_which_runs_on(cli: Cli, tally: Notebook, start: StartKernel) -> None:
    assert cli("save", tally.manager.provisioner.kernel_id, "zero").status == 0
    other = start("tally")
    assert _add(other, 5) == 5
    refused = cli("restore", other.manager.provisioner.kernel_id, "zero", "--json")
    assert refused.json["error"]["kind"] == "Refused"
    assert "snapshot of its own" in refused.json["error"]["then"]
    assert _add(other, 1) == 6


def test_it_is_saved_every_so_often_but_not_after_cells(cli: Cli, tally: Notebook) -> None:
    kernel_id = tally.manager.provisioner.kernel_id
    refused = cli("auto", kernel_id, "on", "--json")
    assert (refused.status, refused.json["error"]["kind"]) == (1, "Refused")
    assert f"auto {kernel_id[:8]} on --every 10m" in refused.json["error"]["then"]
    assert "not saved by itself" in cli("auto", kernel_id).out
    assert "every 1 h in which it does something;" in cli("auto", kernel_id, "on", "--every", "1h").out


def test_it_is_not_put_to_sleep_since_no_cell_could_wake_it(cli: Cli, tally: Notebook) -> None:
    refused = cli("sleep", tally.manager.provisioner.kernel_id, "--json")
    assert (refused.status, refused.json["error"]["kind"]) == (1, "Refused")
    assert "It has no agent" in refused.json["error"]["why"]
    assert _add(tally, 5) == 5
