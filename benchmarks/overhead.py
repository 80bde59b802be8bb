"""What a kernel that can be saved costs while nothing is saved, beside a plain one: ``python -m benchmarks.overhead``.

Two training loops' time a step: one whose kernels are small, so that launching them is what counts, and one that keeps
the GPU at work. Several kernels of each kind take turns in short rounds; each has a median, and by how much those of
one kind differ says what a difference of the kinds is worth. The GPU memory that a kernel with such a loop takes by
NVML's account (nothing else may use the GPUs meanwhile), and the time from starting a kernel until it has answered its
first cell.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence

from jupyter_client import BlockingKernelClient, KernelManager

from .cells import run
from .gpu_memory import free_bytes
from .start import NAMES, first_cell

_TRAINING = """
import torch, time
def loop(width, batch):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(16)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    def steps(count):
        for _ in range(count):
            x = torch.randn(batch, width, device="cuda")
            loss = ((model(x) - x) ** 2).mean()
            optimizer.zero_grad(); loss.backward(); optimizer.step()
        torch.cuda.synchronize()
    return steps
loops = {"small": (loop(1024, 256), 60), "large": (loop(4096, 2048), 5)}
for steps, count in loops.values(): steps(count)
def seconds(which):
    steps, count = loops[which]
    began = time.perf_counter(); steps(count); return (time.perf_counter() - began) / count
"""
_LOOPS = ("small", "large")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="how often the kernels take turns")
    parser.add_argument("--kernels", type=int, default=3, help="how many there are of each kind")
    args = parser.parse_args()
    starts: dict[str, list[float]] = {name: [] for name in NAMES}
    for _ in range(args.kernels):
        for name in NAMES:
            starts[name].append(first_cell(name))
    kernels = []
    memory: dict[str, list[int]] = {name: [] for name in NAMES}
    kinds = NAMES * args.kernels
    try:
        for name in kinds:
            manager = KernelManager(kernel_name=name)
            manager.start_kernel()
            client = manager.client()
            kernels.append((manager, client))
            client.start_channels()
            client.wait_for_ready(60)
            free = free_bytes()
            run(client, _TRAINING)
            memory[name].append(free - free_bytes())
        for which in _LOOPS:
            _compare(which, kinds, [client for _, client in kernels], args.rounds)
    finally:
        for manager, client in kernels:
            client.stop_channels()
            manager.shutdown_kernel(now=True)
    for name in NAMES:
        taken = ", ".join(f"{size / 2**20:.0f}" for size in memory[name])
        print(f"{name}: start to first cell {statistics.median(starts[name]):.3f} s; {taken} MiB of GPU memory")


def _compare(which: str, kinds: tuple[str, ...], clients: Sequence[BlockingKernelClient], rounds: int) -> None:
    times: list[list[float]] = [[] for _ in clients]
    for _ in range(rounds):
        for client, own in zip(clients, times, strict=True):
            own.append(json.loads(run(client, f"print(seconds({which!r}))")) * 1e3)
    medians = {
        name: [statistics.median(own) for kind, own in zip(kinds, times, strict=True) if kind == name] for name in NAMES
    }
    plain, ours = (statistics.mean(medians[name]) for name in NAMES)
    # The standard error of the difference of the two means (Welch).
    error = math.sqrt(sum(statistics.variance(each) / len(each) for each in medians.values()))
    for name, each in medians.items():
        print(f"{name}: a step of the {which} loop takes {', '.join(f'{one:.3f}' for one in each)} ms")
    percent = 100 / plain
    print(f"{which} loop: ours {(ours - plain) * percent:+.2f} %, give or take {error * percent:.2f} %", flush=True)


if __name__ == "__main__":
    main()
