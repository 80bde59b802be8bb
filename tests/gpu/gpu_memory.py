"""What kernels hold on a GPU in these tests, and how much of the GPU is in use."""

from __future__ import annotations

import contextlib
import select
import subprocess
import sys
from collections.abc import Iterator

GIB = 1 << 30
_FILLED = 90.0  # for how long a program may import torch and take the GPU's memory, in seconds

DIGEST = """
import hashlib

def digest(*tensors):
    h = hashlib.blake2b(digest_size=16)
    for t in tensors:
        h.update(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()
"""

TRAINING = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

def train(steps):
    for _ in range(steps):
        x = torch.randn(64, 512, device="cuda")
        loss = ((model(x) - x) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()

def everything():
    moments = [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
    return digest(*model.parameters(), *moments, torch.cuda.get_rng_state(), torch.get_rng_state())

train(20)
"""

STATE = """
import torch
x = torch.randint(0, 2**62, (2**26 + 12345,), device='cuda')
y = [torch.randn(5_000_000 + i, device='cuda') for i in range(20)]
for i in range(0, 20, 3): y[i] = None  # holes
y = [t for t in y if t is not None]
a, b = torch.ones(1 << 23, device='cuda'), torch.zeros(1 << 23, device='cuda')
graph = torch.cuda.CUDAGraph(); torch.cuda.synchronize()
with torch.cuda.graph(graph): b.add_(a)
graph.replay(); d = digest(x, *y, a, b)
"""
SAME = "digest(x, *y, a, b) == d"

BIG = """
import torch
x = torch.randint(0, 2**62, ({size} >> 3,), device='cuda')
def check():
    total = 0
    for n, c in enumerate(x.split(1 << 24)):
        total ^= int(((c ^ (c >> 7)) * torch.arange(1, len(c) + 1, device='cuda')).sum()) + n
    return total
c = check()
torch.cuda.synchronize(); torch.cuda.empty_cache()
"""


def used_by_gpu() -> list[int]:
    """Return how much memory is in use on each GPU."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout.split()
    return [int(line) << 20 for line in lines]


@contextlib.contextmanager
def leaving_free(size: int) -> Iterator[None]:
    """Have another program take all GPU memory but so many bytes."""
    program = (
        "import torch; torch.cuda.init(); free, _ = torch.cuda.mem_get_info()\n"
        f"x = torch.empty(free - {size}, dtype=torch.uint8, device='cuda'); print('full', flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as filler:
        try:
            assert filler.stdout is not None
            heard, _, _ = select.select([filler.stdout], [], [], _FILLED)
            assert heard, f"the program that takes the rest of the GPU's memory had not done so after {_FILLED:.0f} s"
            assert filler.stdout.readline() == b"full\n"
            yield
        finally:
            filler.kill()
