"""Distributed trainings, as they are: saved while they run, and the same to the bit when they come back."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest
from job_programs import Job, free_port
from notebooks import StartKernel, wait_until

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.freeze.cuda import CudaWorker
from jupyter_gpuckpt.installed import NCCL_LIBRARY
from jupyter_gpuckpt.snapshots.saved import processes_of
from jupyter_gpuckpt.store import Store

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

_PROGRAM, _BY_CTYPES = (Path(__file__).with_name(name) for name in ("nccl_training.py", "nccl_by_ctypes.py"))
_WARM = 90.0
"""For how long two ranks may take to import torch and to find each other, in seconds."""
_AFTER = 200
"""Steps that are computed twice, and compared."""


class Training:
    """What the ranks of a training have written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ranks = 2

    def losses(self, rank: int) -> list[tuple[int, str]]:
        path = self.folder / f"losses-{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(step), loss) for step, loss in (line.split() for line in lines if len(line.split()) == 2)]

    def steps(self) -> int:
        """Return how many steps all have computed, those that were computed twice included."""
        return min(len(self.losses(rank)) for rank in range(self.ranks))

    def goes_on(self, steps: int = 20) -> None:
        wanted = self.steps() + steps
        wait_until(lambda: self.steps() >= wanted, _WARM, "the training does not go on")

    def computed_twice(self) -> int:
        """Return how many steps were computed more than once, all with the same losses to the bit."""
        found: dict[int, set[str]] = defaultdict(set)
        times: dict[int, int] = defaultdict(int)
        for rank in range(self.ranks):
            for step, loss in self.losses(rank):
                found[step].add(loss)
                times[step] += 1
        assert [step for step, losses in found.items() if len(losses) > 1] == []
        return sum(count > self.ranks for count in times.values())


@pytest.fixture
def training(tmp_path: Path, worker: CudaWorker, monkeypatch: pytest.MonkeyPatch) -> Training:
    if len(worker.gpus()) < 2:
        pytest.skip("needs two GPUs")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    return Training(tmp_path)


def _torchrun(kind: str, training: Training, *layers: str) -> list[str]:
    how_many, port = f"--nproc-per-node={training.ranks}", f"--master-port={free_port('tcp')}"
    command = [sys.executable, "-m", "torch.distributed.run", how_many, port]
    return [*command, str(_PROGRAM), kind, str(training.folder), *layers]


def test_ranks_of_8_gib_are_parked_and_paused_for_two_and_a_half_seconds(training: Training) -> None:
    job = Job("ddp")
    job.start(*_torchrun("ddp", training, "100"))  # 17 MB each, five times
    training.goes_on()
    job.save("here")
    manifest = Store(settings.store_dir()).get("here")
    parked = manifest.cuda.get("parked") or []
    assert len(parked) == 2, "a rank was not parked"
    assert min(sum(size for _, size in one["places"]) for one in parked) > 7 << 30
    training.goes_on()
    job.kill()
    began, steps = time.monotonic(), training.steps()
    job.restore("here")
    wait_until(lambda: training.steps() > steps, _WARM, "the training does not go on")
    print(f"the next step had ended {time.monotonic() - began:.2f} s after asking for the restore")
    training.goes_on(60)
    assert training.computed_twice() >= 20
    paused = processes_of(manifest).frozen_seconds
    print(f"paused for {paused:.2f} s")
    assert paused <= 2.5


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_training_by_torchrun_goes_on_to_the_bit(
    training: Training, worker: CudaWorker, kind: str, ranks: int
) -> None:
    if len(worker.gpus()) < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    training.ranks = ranks
    job = Job(kind)
    job.start(*_torchrun(kind, training))
    training.goes_on()
    job.save("first")
    training.goes_on(_AFTER)
    job.save("second")
    training.goes_on()
    job.kill()
    job.restore("first")
    training.goes_on(_AFTER)
    assert training.computed_twice() >= _AFTER - 20
    job.restore("second")  # over the running one
    training.goes_on()
    assert job.told()["state"] == "running"


def test_ranks_that_open_nccl_themselves_go_on_to_the_bit(training: Training) -> None:
    job = Job("sums")
    job.start(sys.executable, str(_BY_CTYPES), str(training.folder))
    training.goes_on()
    job.save("here")
    training.goes_on(_AFTER)
    job.kill()
    job.restore("here")
    training.goes_on(_AFTER)
    assert training.computed_twice() >= _AFTER - 20
    job.save("again")
    training.goes_on()
    assert job.told()["state"] == "running"


def test_one_is_saved_twenty_times_in_a_row(training: Training) -> None:
    job = Job("ddp")
    job.start(*_torchrun("ddp", training))
    training.goes_on()
    for _ in range(20):
        job.save("again", "--replace")
        training.goes_on(5)
    assert job.told()["state"] == "running"


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_ranks_that_a_cell_started_come_back_with_their_kernel(
    training: Training, start: StartKernel, start_method: str
) -> None:
    notebook = start()
    lines = [
        f"import sys; sys.path.insert(0, {str(_PROGRAM.parent)!r})",
        "import os; os.environ['CUBLAS_WORKSPACE_CONFIG'] = ':4096:8'",
        "import torch.multiprocessing as mp, nccl_training",
        f"ranks = mp.start_processes(nccl_training.train, ('ddp', {str(training.folder)!r}), 2, join=False, "
        f"start_method={start_method!r})",
    ]
    notebook.run("\n".join(lines), _WARM)
    training.goes_on()
    notebook.run("%gpuckpt save between", _WARM)
    training.goes_on(60)
    notebook.run("%gpuckpt restore between", _WARM)
    training.goes_on(60)
    assert training.computed_twice() >= 30
    assert notebook.value("[one.is_alive() for one in ranks.processes]") == "[True, True]"
    notebook.run("[one.kill() for one in ranks.processes]")


def test_the_library_has_all_of_nccl_s_functions_that_take_a_communicator() -> None:
    """One that passes by would be given a handle that is not NCCL's."""
    nvidia = pytest.importorskip("nvidia.nccl")
    (folder,) = nvidia.__path__
    headers = [path.read_text(errors="replace") for path in Path(folder, "include").rglob("*.h")]
    taking = {
        name for text in headers for name in re.findall(r"\b(nccl\w+)\s*\([^;{}()]*\bncclComm_t\b[^;{}()]*\)\s*;", text)
    }
    assert {"ncclAllReduce", "ncclCommSplit"} <= taking
    taking |= {f"p{name}" for name in taking}
    real = _exported(next(Path(folder, "lib").glob("libnccl.so.*")))
    assert sorted((taking & real) - _exported(NCCL_LIBRARY)) == []


def _exported(library: Path) -> set[str]:
    listed = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1].partition("@")[0] for line in listed.splitlines()}
