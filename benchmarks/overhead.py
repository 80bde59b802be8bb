"""What a kernel that can be saved costs while nothing is saved, beside a plain one: ``python -m benchmarks.overhead``.

A training loop's time a step (medians of many short rounds, taking turns; a second plain kernel shows by how much two
of a kind differ), the GPU memory that a kernel with it takes by NVML's account (nothing else may use the GPUs
meanwhile), and the time from starting the kernel until it has answered its first cell.
"""

from __future__ import annotations

import argparse
import json
import statistics

from jupyter_client import KernelManager

from .cells import run
from .gpu_memory import free_bytes
from .start import NAMES, first_cell

_TRAINING = """
import torch, time
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(16)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
def steps(count):
    for _ in range(count):
        x = torch.randn(256, 1024, device="cuda")
        loss = ((model(x) - x) ** 2).mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    torch.cuda.synchronize()
steps(100)
def seconds():
    began = time.perf_counter(); steps(60); return (time.perf_counter() - began) / 60
"""
_TURNS = 6
"""How often the kernels take turns in a round of steps."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    starts: dict[str, list[float]] = {name: [] for name in NAMES}
    for _ in range(rounds):
        for name in NAMES:
            starts[name].append(first_cell(name))
    kernels = []
    memory: list[int] = []
    trained = (*NAMES, "python3")
    try:
        for name in trained:
            manager = KernelManager(kernel_name=name)
            manager.start_kernel()
            client = manager.client()
            kernels.append((manager, client))
            client.start_channels()
            client.wait_for_ready(60)
            free = free_bytes()
            run(client, _TRAINING)
            memory.append(free - free_bytes())
        step: list[list[float]] = [[] for _ in trained]
        for _ in range(rounds * _TURNS):
            for (_, client), times in zip(kernels, step, strict=True):
                times.append(json.loads(run(client, "print(seconds())")) * 1e3)
    finally:
        for manager, client in kernels:
            client.stop_channels()
            manager.shutdown_kernel(now=True)
    for name in NAMES:
        print(f"{name}: start to first cell {statistics.median(starts[name]):.3f} s")
    for name, times, taken in zip(trained, step, memory, strict=True):
        first, median, third = statistics.quantiles(times, n=4)
        quarters = f"{median:.3f} ms (half of them {first:.3f} to {third:.3f})"
        print(f"{name}: a step {quarters}, {taken / 2**20:.0f} MiB of GPU memory")


if __name__ == "__main__":
    main()
