"""What a save could be at best: how fast pinned memory is copied: ``python -m benchmarks.gpu_limits``."""

from __future__ import annotations

import statistics
import time

import torch

_SIZE = 4 << 30


def main() -> None:
    """Print both rates, medians of 5, in GiB/s."""
    here = torch.empty(_SIZE, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_SIZE, dtype=torch.uint8, device="cuda")
    for name, to, source in (("out", here, there), ("back", there, here)):
        times = []
        for _ in range(6):
            torch.cuda.synchronize()
            began = time.perf_counter()
            to.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        print(f"{name}: {_SIZE / 2**30 / statistics.median(times[1:]):.1f} GiB/s")


if __name__ == "__main__":
    main()
