"""What a restored job finds of the environment that it would be started with now: GPUs, batch job, host."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from command_line import run
from job_programs import Job, folder_of, program

pytestmark = pytest.mark.criu

_ASKS = """
import logging, multiprocessing, os, sys, time
import jupyter_gpuckpt

logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="log: %(message)s")
os.environ["SLURM_CPUS_PER_TASK"] = "set by the program"

def tell(*words):  # in one piece: both processes write to the same file
    sys.stdout.write(" ".join(map(str, words)) + "\\n")
    sys.stdout.flush()

def say(who):
    tell(who, *(os.environ.get(name) for name in sys.argv[1].split(",")))

def ask(who):
    @jupyter_gpuckpt.after_restore
    def _(resumed):
        say(f"{who} restored={resumed.restored} sees {resumed.environment['OTHER']}")
        tell(sorted(resumed.changed), "secret" in repr(resumed))
    say(who)

def of_child():
    ask("child")
    time.sleep(1000)

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=of_child)
    child.start()
    ask("parent")
    while True:
        time.sleep(0.01)
"""
_ASKED_FOR = "SLURM_JOB_ID,CUDA_VISIBLE_DEVICES,SLURM_ARRAY_TASK_ID,SLURMD_NODENAME,SLURM_CPUS_PER_TASK,OTHER"
_BEFORE = {
    "SLURM_JOB_ID": "1",
    "CUDA_VISIBLE_DEVICES": "3",
    "SLURM_ARRAY_TASK_ID": "7",
    "SLURM_CPUS_PER_TASK": "2",
    "OTHER": "old",
    "JUPYTERHUB_API_TOKEN": "secret-1",
}
_AFTER = {
    "SLURM_JOB_ID": "2",
    "CUDA_VISIBLE_DEVICES": "0",
    "SLURMD_NODENAME": "hostb",
    "SLURM_CPUS_PER_TASK": "4",
    "OTHER": "new",
    "JUPYTERHUB_API_TOKEN": "secret-2",
}
_CHANGED = ["CUDA_VISIBLE_DEVICES", "JUPYTERHUB_API_TOKEN", "SLURMD_NODENAME", "SLURM_ARRAY_TASK_ID", "SLURM_JOB_ID"]


@pytest.mark.parametrize("way", ["in its place", "as another"])
def test_python_that_asks_has_its_variables_brought_up_to_date(tmp_path: Path, way: str) -> None:
    job = Job("asks")
    job.start(sys.executable, program(tmp_path, _ASKS), _ASKED_FOR, **_BEFORE)
    old = "1 3 7 None set by the program old"
    job.wait_for(2)
    assert sorted(job.lines()) == [f"child {old}", f"parent {old}"]
    job.save("once")
    job.kill()
    assert len(job.lines()) == 2  # a save alone is no restore
    if way == "as another":
        assert run("restore", "asks", "once", "--as", "other", **_AFTER).status == 0
        job = Job("other")
    else:
        assert run("restore", "asks", "once", **_AFTER).status == 0
    # What is not about the place (OTHER), and what the program has set itself, stays.
    new = "2 0 None hostb set by the program old"
    expected = [f"{who} restored=True sees new {new}" for who in ("child", "parent")]
    job.wait_for(8)
    told = sorted(job.lines())
    assert [line for line in told if "restored" in line] == expected
    assert told.count(f"{_CHANGED} False") == 2
    assert told.count(f"log: brought up to date in os.environ: {', '.join(_CHANGED)}") == 2
    assert "secret" not in job.output()
    # And again, from a snapshot of the restored one.
    job.save("third")
    job.restore("third")
    job.wait_for(12)
    job.kill()


def test_any_program_finds_the_file_with_the_new_environment(tmp_path: Path) -> None:
    script = (
        'echo ready; while [ ! -e "$1" ]; do sleep 0.05; done; '
        'tr "\\0" "\\n" < "$GPUCKPT_ENVIRONMENT" | grep -E "^(SLURM_JOB_ID|OTHER)=" | sort'
    )
    gate = tmp_path / "gate"
    job = Job("shell")
    job.start("sh", "-c", script, "sh", str(gate), **_BEFORE)
    job.wait_for(1)
    job.save("s")
    file = next(folder_of("shell").glob("run-*/environment"))
    assert file.stat().st_mode & 0o777 == 0o600
    job.kill()
    assert list(folder_of("shell").glob("run-*")) == []
    assert run("restore", "shell", "s", **_AFTER).status == 0
    gate.touch()
    assert job.wait_for_end() == 0
    assert job.lines() == ["ready", "OTHER=new", "SLURM_JOB_ID=2"]
