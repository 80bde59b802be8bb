"""What a restored kernel finds of the environment that it would be started with now: GPUs, batch job, hub."""

from __future__ import annotations

import os

import pytest
from notebooks import StartKernel

pytestmark = pytest.mark.criu

_SAYS = """
import jupyter_gpuckpt, os
os.environ["SLURM_CPUS_PER_TASK"] = "3"
told = []
@jupyter_gpuckpt.after_restore
def _(resumed):
    told.append((resumed.restored, sorted(resumed.changed), resumed.environment.get("OTHER"), repr(resumed)))
"""
_NAMES = ["SLURM_JOB_ID", "CUDA_VISIBLE_DEVICES", "SLURM_ARRAY_TASK_ID", "SLURM_CPUS_PER_TASK", "OTHER"]
_FIRST = {
    "SLURM_JOB_ID": "1",
    "CUDA_VISIBLE_DEVICES": "3",
    "SLURM_ARRAY_TASK_ID": "7",
    "SLURM_CPUS_PER_TASK": "1",
    "OTHER": "old",
    "JUPYTERHUB_API_TOKEN": "secret-1",
}
_SECOND = {
    "SLURM_JOB_ID": "2",
    "CUDA_VISIBLE_DEVICES": "0",
    "SLURM_CPUS_PER_TASK": "8",
    "OTHER": "new",
    "JUPYTERHUB_API_TOKEN": "secret-2",
}


def test_a_kernel_restored_by_another_server_has_its_variables(start: StartKernel) -> None:
    first = start(env={**os.environ, **_FIRST})
    first.run(_SAYS)
    first.run("%gpuckpt save here")
    assert first.value("told[-1][:3]") == "(False, [], None)"
    second = start(env={**os.environ, **_SECOND})
    answer = second.run("%gpuckpt restore here")
    changed = ["CUDA_VISIBLE_DEVICES", "JUPYTERHUB_API_TOKEN", "SLURM_ARRAY_TASK_ID", "SLURM_JOB_ID"]
    assert f"Environment variables were brought up to date: {', '.join(changed)}." in answer.text
    assert second.value(f"[os.environ.get(name) for name in {_NAMES}]") == "['2', '0', None, '3', 'old']"
    assert second.value("os.environ['JUPYTERHUB_API_TOKEN']") == "secret-2"
    assert second.value("told[-1][:3]") == f"(True, {changed}, 'new')"
    # No value of them lies in a log or an answer.
    assert "secret" not in second.value("told[-1][3]")
    assert "secret" not in answer.text
    logs = [path.read_text(errors="replace") for path in second.folder.rglob("*.log")]
    assert logs
    assert all("secret" not in log for log in logs)
    # Nothing to say where nothing has changed.
    second.run("%gpuckpt save there")
    assert "brought up to date" not in second.run("%gpuckpt restore there").text
    assert second.value("told[-1][:2]") == "(True, [])"
