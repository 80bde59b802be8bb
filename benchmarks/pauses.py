"""How long a kernel stands still when it is saved after each cell: ``python -m benchmarks.pauses [NAME ...]``.

The cells do nothing on the GPU; ``host`` needs none. For each automatic save: for how long the kernel was paused, and
for how long it could not use its GPU, as the snapshot says; until when it was on the disk; and what a thread of the
kernel's says that wakes every millisecond: its longest gaps. At the end the last cell is undone, and the memory is
compared.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.snapshots.saved import processes_of
from jupyter_gpuckpt.store import Manifest, Store

from .ours import OurKernel

_STATE = "import torch\ntorch.manual_seed(1)\nblocks = [{blocks}]\n"
_ONE = "torch.randint(0, 2**62, ({size} << 17,), device='cuda') for _ in range({count})"
_TRAINED = """import torch
torch.manual_seed(1)
model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(16)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(64, 4096, device="cuda")).square().mean().backward()
    optimizer.step(), optimizer.zero_grad()
blocks = list(model.parameters())
"""
_ON_ALL = """import torch
torch.manual_seed(1)
gpus = [f"cuda:{n}" for n in range(torch.cuda.device_count())]
blocks = [torch.randint(0, 2**62, (20 << 17,), device=gpu) for gpu in gpus for _ in range(400)]
copies = [blocks[0].to(gpu) for gpu in gpus]
"""
_ON_HOST = """import numpy as np
blocks = [np.random.default_rng(n).integers(0, 2**31, 125_000) for n in range(2000)]
"""
PROGRAMS = {
    "small": _STATE.format(blocks=_ONE.format(size=1, count=8)),
    "one_gib": _STATE.format(blocks=_ONE.format(size=1024, count=1)),
    "training": _TRAINED,
    "blocks": _STATE.format(blocks=_ONE.format(size=20, count=1200)),
    "all_gpus": _ON_ALL,
    "host": _ON_HOST,
}
_CLOCK = """
import threading, time
gaps = []
def clock():
    last = time.monotonic()
    while True:
        time.sleep(0.001)
        now = time.monotonic()
        if now - last > 0.005: gaps.append(now - last)
        last = now
threading.Thread(target=clock, daemon=True).start()
def digest(): return [float((b.detach().double() if hasattr(b, 'detach') else b).sum()) for b in blocks]
seen = digest()
"""


def _saved() -> dict[str, Manifest]:
    return {manifest.id: manifest for manifest in Store(settings.store_dir()).list()}


def measure(name: str, cells: int) -> None:
    """Run one program, and so many cells after it."""
    print(f"{name}:")
    kernel = OurKernel()
    pauses = []
    try:
        kernel.run(PROGRAMS[name])
        kernel.run(_CLOCK)
        kernel.run("%gpuckpt auto on")
        for n in range(cells):
            before = _saved()
            began = time.perf_counter()
            kernel.run(f"gaps.clear(); n = {n}")
            while not (new := _saved().keys() - before.keys()):
                time.sleep(0.02)
            durable = time.perf_counter() - began
            about = processes_of(_saved()[new.pop()])
            # Without a cell of its own, which would be followed by a save, too.
            gaps = kernel.look("sorted((round(1000 * gap) for gap in gaps), reverse=True)[:3]")
            print(
                f"  paused {1000 * about.frozen_seconds:4.0f} ms  off the GPU {about.gpu_seconds or 0:.2f} s  "
                f"durable {durable:5.2f} s  a thread's longest gaps (ms): {gaps}",
                flush=True,
            )
            pauses.append(about.frozen_seconds)
        print(f"  median of all but the first: {1000 * statistics.median(pauses[1:]):.0f} ms")
        kernel.run("%gpuckpt undo")
        kernel.run(f"assert n == {cells - 2} and digest() == seen")
    finally:
        kernel.close()


def main() -> None:
    """Measure, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PROGRAMS)}; all without one")
    parser.add_argument("--cells", type=int, default=6, metavar="N")
    args = parser.parse_args()
    if unknown := set(args.names) - PROGRAMS.keys():
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    for name in args.names or PROGRAMS:
        with tempfile.TemporaryDirectory(prefix="pauses-") as folder:
            os.environ["GPUCKPT_STORE"] = folder
            measure(name, args.cells)


if __name__ == "__main__":
    main()
