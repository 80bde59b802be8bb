"""torchrun: two ranks of DDP by gloo on the CPU, as a job, in the middle of their training."""

from __future__ import annotations

import sys
from pathlib import Path

from job_programs import Job, program

TRAINS = """
import os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
model = DistributedDataParallel(torch.nn.Linear(32, 8))
optimizer = torch.optim.AdamW(model.parameters())
torch.manual_seed(rank)
for step in range(40):
    x = torch.randn(64, 32)
    loss = (model(x) - x[:, :8]).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    whole = loss.detach().clone()
    dist.all_reduce(whole)
    if rank == 0:
        print(step, whole.item().hex(), flush=True)
        while step == 19 and not os.path.exists(sys.argv[1]):
            time.sleep(0.01)
dist.destroy_process_group()
os._exit(0)  # one of ten ranks aborts while Python ends ("terminate called"), also where nothing was saved
"""


def test_the_losses_are_those_of_the_uninterrupted_run(tmp_path: Path) -> None:
    gate = tmp_path / "open"
    job = Job("train")
    job.start(
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        program(tmp_path, TRAINS),
        str(gate),
        OMP_NUM_THREADS="1",
    )
    job.wait_for(20)
    job.save("here")
    gate.touch()
    assert job.wait_for_end() == 0, job.output()
    losses = [line for line in job.lines() if line[0].isdigit()]
    assert len(losses) == 40
    for _ in range(2):
        job.restore("here")
        assert job.wait_for_end() == 0, job.output()
        assert [line for line in job.lines() if line[0].isdigit()] == losses
