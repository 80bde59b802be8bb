"""Processes that have each other's GPU memory open, which the driver could not restore as they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from command_line import COMMAND, run
from job_programs import Job, program
from notebooks import StartKernel, wait_until

from jupyter_gpuckpt.freeze.cuda import CudaWorker

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

_WARM = 200.0
"""For how long two ranks may take to import torch and to find each other, in seconds."""

_RANKS = r'''
"""Two ranks that add up on their GPUs for as long as a file names a group, and stand alone while it is empty."""
import os, subprocess, sys, time

folder = sys.argv[1]
if len(sys.argv) == 2:
    ranks = [subprocess.Popen([sys.executable, __file__, folder, str(rank)]) for rank in range(2)]
    sys.exit(max(rank.wait() for rank in ranks))

import torch, torch.distributed as dist

rank, group, steps = int(sys.argv[2]), "", 0
torch.cuda.set_device(rank)
total = torch.zeros(1 << 20, device="cuda")
while True:
    with open(f"{folder}/group") as file:
        wanted = file.read()
    if group:
        # Both have to leave in the same step.
        leaves = torch.tensor([float(wanted != group)], device="cuda")
        dist.all_reduce(leaves)
        if leaves.item():
            dist.destroy_process_group()
            group = ""
    elif wanted:
        dist.init_process_group("nccl", init_method=f"file://{folder}/{wanted}", rank=rank, world_size=2)
        group = wanted
    total += 1
    steps += 1
    assert total.sum().item() == steps * total.numel()
    with open(f"{folder}/{rank}.new", "w") as file:
        file.write(f"{group or 'alone'} {steps}")
    os.replace(f"{folder}/{rank}.new", f"{folder}/{rank}")
    time.sleep(0.02)
'''


class Ranks:
    """What the two ranks have written, and what they are told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tell("one")

    def tell(self, group: str) -> None:
        """Have them be in this group, or in none."""
        new = self.folder / "new"
        new.write_text(group)
        new.replace(self.folder / "group")

    def go_on(self, group: str) -> None:
        """Wait until both have gone some steps further, in this group."""
        began: list[int] = []

        def further() -> bool:
            try:
                told = [(self.folder / str(rank)).read_text().split() for rank in range(2)]
            except FileNotFoundError:
                return False
            if any(where != group for where, _ in told):
                return False
            steps = [int(count) for _, count in told]
            if not began:
                began.extend(steps)
            return all(now > before + 3 for now, before in zip(steps, began, strict=True))

        wait_until(further, _WARM, f"the ranks do not go on in {group}")


@pytest.fixture
def ranks(tmp_path: Path, worker: CudaWorker, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    if len(worker.gpus()) < 2:
        pytest.skip("needs two GPUs")
    monkeypatch.setenv("GPUCKPT_NCCL", "off")
    folder = tmp_path / "ranks"
    folder.mkdir()
    return Ranks(folder)


def test_a_job_of_two_ranks_is_refused_while_they_are_connected_and_saved_when_they_are_not(
    ranks: Ranks, tmp_path: Path
) -> None:
    job = Job("ranks")
    job.start(sys.executable, program(tmp_path, _RANKS), str(ranks.folder))
    ranks.go_on("one")
    refused = run("save", job.name, "never", "--json").json["error"]
    assert refused["kind"] == "Refused"
    assert "connected by NCCL" in refused["why"]
    assert "destroy_process_group" in refused["then"]
    ranks.go_on("one")
    ranks.tell("")
    ranks.go_on("alone")
    job.save("apart")
    ranks.go_on("alone")
    ranks.tell("two")
    ranks.go_on("two")
    job.kill()
    ranks.tell("")
    # Ports of the job that has just ended may have to be waited for.
    subprocess.run([*COMMAND, "restore", job.name, "apart"], check=True, timeout=_WARM)
    ranks.go_on("alone")
    ranks.tell("three")
    ranks.go_on("three")


def test_a_kernel_whose_children_are_two_ranks_is_refused_and_goes_on(
    ranks: Ranks, tmp_path: Path, start: StartKernel
) -> None:
    notebook = start()
    command = [sys.executable, program(tmp_path, _RANKS), str(ranks.folder)]
    notebook.run(f"import subprocess; x = 1; ranks = subprocess.Popen({command!r})", _WARM)
    ranks.go_on("one")
    answer = notebook.fails("%gpuckpt save never")
    assert "connected by NCCL" in answer.text
    ranks.go_on("one")
    ranks.tell("")
    ranks.go_on("alone")
    notebook.run("%gpuckpt save apart", _WARM)
    ranks.go_on("alone")
    assert notebook.value("x, ranks.poll()") == "1 None"


_SHARED = r'''
"""A process that gives a tensor on its GPU to a child, which adds to it."""
import os, sys, time, torch, torch.multiprocessing as multiprocessing

def add(tensor, end):
    while not os.path.exists(end):
        tensor += 1
        torch.cuda.synchronize()
        time.sleep(0.02)

if __name__ == "__main__":
    tensor = torch.zeros(1 << 20, device="cuda")
    child = multiprocessing.get_context("spawn").Process(target=add, args=(tensor, sys.argv[1]))
    child.start()
    while True:
        print(int(tensor[0].item()), child.is_alive(), flush=True)
        time.sleep(0.05)
'''


def test_a_job_whose_processes_share_gpu_memory_shares_it_after_a_restore(tmp_path: Path) -> None:
    job, end = Job("shared"), tmp_path / "end"

    def goes_on(more_than: int) -> int:
        """Wait until the child has added to its parent's tensor; return what the parent finds there."""
        wait_until(lambda: job.lines() and int(job.lines()[-1].split()[0]) > more_than, _WARM, "the child adds nothing")
        assert job.lines()[-1].endswith("True"), "the child has ended"
        return int(job.lines()[-1].split()[0])

    try:
        job.start(sys.executable, program(tmp_path, _SHARED), str(end))
        at = goes_on(3)
        for name in ("first", "second"):
            job.save(name)
            at = goes_on(at + 3)
        for _ in range(2):
            job.kill()
            job.restore("second")
            written = len(job.lines())
            job.wait_for(written + 1)
            assert int(job.lines()[written].split()[0]) < at, "it does not go on from where it was saved"
            goes_on(at + 3)
    finally:
        job.kill()


def test_a_job_whose_processes_share_gpu_memory_by_the_driver_is_refused_until_one_is_left(tmp_path: Path) -> None:
    job, end = Job("shared"), tmp_path / "end"
    job.start(sys.executable, program(tmp_path, _SHARED), str(end), GPUCKPT_PARKING="off")
    wait_until(lambda: job.lines() and int(job.lines()[-1].split()[0]) > 3, _WARM, "the child adds nothing")
    refused = run("save", job.name, "never", "--json").json["error"]
    assert refused["kind"] == "Refused"
    assert "share GPU memory (CUDA IPC" in refused["why"]
    before = int(job.lines()[-1].split()[0])
    wait_until(lambda: int(job.lines()[-1].split()[0]) > before, what="the child does not go on")
    end.touch()
    wait_until(lambda: job.lines()[-1].endswith("False"), what="the child does not end")
    job.save("alone")
    written = len(job.lines())
    job.wait_for(written + 3)
