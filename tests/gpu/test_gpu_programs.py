"""Programs as people run them on GPUs: every byte that they had there is back, and they go on as if nothing was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from gpu_memory import GIB, used_by_gpu
from job_programs import Job, program
from notebooks import Notebook, wait_until

from benchmarks.gpu_programs import PROGRAMS, Program

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300)]

TRAINING_JOB = """
import sys, time
for number in range(8):
    print("step", number, step(), flush=True)
    while number == 3 and not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
print("digest", digest(), flush=True)
"""


def small(chosen: Program) -> str:
    """Return the source that sets a program up with 1 GiB on each GPU; skip where it cannot run."""
    if reason := chosen.lacks(len(used_by_gpu())):
        pytest.skip(reason)
    # What takes most of a GPU by default need not do so here, beside its copy.
    limit = "import os; os.environ['XLA_PYTHON_CLIENT_MEM_FRACTION'] = '0.1'\n" if chosen.takes_all else ""
    return limit + chosen.setup(GIB)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_goes_on_after_a_restore_as_it_did_after_the_save(notebook: Notebook, name: str) -> None:
    notebook.run(small(PROGRAMS[name]), timeout=120)
    before = notebook.value("digest()")
    notebook.run("%gpuckpt save here", timeout=120)
    assert notebook.value("digest()") == before, "the save itself changed something"
    straight_on = notebook.value("step(), step()")
    assert notebook.value("digest()") != before, "a step changes nothing that the digest sees"
    for _ in range(2):
        notebook.run("%gpuckpt restore here", timeout=120)
        assert notebook.value("digest()") == before
        assert notebook.value("step(), step()") == straight_on


def told(output: str) -> list[str]:
    """Return what the training job printed itself: libraries may warn beside it."""
    return [line for line in output.splitlines() if line.startswith(("step ", "digest "))]


def test_a_training_run_as_a_job_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    source, gate = program(tmp_path, small(PROGRAMS["training"]) + TRAINING_JOB), tmp_path / "gate"
    gate.touch()
    whole = subprocess.run([sys.executable, source, str(gate)], capture_output=True, text=True, check=True, timeout=300)
    assert len(told(whole.stdout)) == 9
    gate.unlink()
    training = Job("training")
    training.start(sys.executable, source, str(gate))
    wait_until(lambda: len(told(training.output())) == 4, 300)
    training.save("half")
    assert training.told()["gpu_memory"] != 0, "it has nothing on the GPU"
    gate.touch()
    assert training.wait_for_end() == 0
    assert told(training.output()) == told(whole.stdout)
    training.restore("half")
    assert training.wait_for_end() == 0
    assert told(training.output()) == told(whole.stdout)
