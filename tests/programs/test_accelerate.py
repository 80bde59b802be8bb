"""Two ranks by gloo that Hugging Face's accelerate starts, as a job and from a cell, in the middle of a training."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from command_line import run
from job_programs import Job, program
from notebooks import StartKernel, wait_until

TRAINS = """
import os, time
import torch

def train(gate, told):
    from accelerate import Accelerator
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(7)
    model = torch.nn.Linear(32, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    rows = torch.randn(1280, 32)
    model, optimizer, batches = accelerator.prepare(
        model, optimizer, torch.utils.data.DataLoader(rows, batch_size=16, shuffle=True)
    )
    for step, x in enumerate(batches):
        loss = (model(x) - x[:, :8]).square().mean()
        optimizer.zero_grad(); accelerator.backward(loss); optimizer.step()
        whole = accelerator.gather(loss.detach()).mean()
        if accelerator.is_main_process:
            with open(told, "a") as f: print(step, whole.item().hex(), file=f)
            while step == 19 and not os.path.exists(gate):
                time.sleep(0.01)
"""
STEPS = 40


def steps(told: Path) -> list[str]:
    return told.read_text().splitlines() if told.exists() else []


def test_a_job_that_accelerate_launches_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    gate, told = tmp_path / "open", tmp_path / "told"
    source = f"{TRAINS}\ntrain({str(gate)!r}, {str(told)!r})\nos._exit(0)"
    # As on GPUs: the program itself asks for the CPU.
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    job = Job("train")
    job.start(*launch, program(tmp_path, source), OMP_NUM_THREADS="1")
    wait_until(lambda: len(steps(told)) == 20, what="the ranks do not train")
    job.save("here")
    gate.touch()
    assert job.wait_for_end() == 0, job.output()
    losses = steps(told)
    assert len(losses) == STEPS
    for times in (1, 2):
        job.restore("here")
        assert job.wait_for_end() == 0, job.output()
        assert steps(told) == losses + losses[-20:] * times


def test_ranks_that_a_cell_launches_come_back_with_it(start: StartKernel, tmp_path: Path) -> None:
    """By `debug_launcher`: `notebook_launcher` starts several ranks in the same way, and on GPUs alone."""
    gate, told = tmp_path / "open", tmp_path / "told"
    notebook = start()
    notebook.run(textwrap.dedent(TRAINS) + "\nfrom accelerate import debug_launcher")
    cell = notebook.client.execute(f"debug_launcher(train, ({str(gate)!r}, {str(told)!r}), 2); done = 1")
    assert cell
    wait_until(lambda: len(steps(told)) == 20, what="the ranks do not train")
    saved = run("save", notebook.folder.name, "here")
    assert saved.status == 0, saved
    gate.touch()
    wait_until(lambda: len(steps(told)) == STEPS, what="the ranks do not go on")
    assert notebook.value("done") == "1"
    losses = steps(told)
    notebook.run("%gpuckpt restore here", timeout=120)
    assert steps(told) == losses + losses[-20:]
    assert notebook.value("done") == "1"
