"""A plain distributed training by torchrun or from a notebook: `nccl_training.py KIND FOLDER [LAYERS]`.

KIND is `ddp` or `fsdp`. Each rank writes a line for each step: its number and the loss, to the bit.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist

_WIDTH = 2048


def _model(kind: str, rank: int, layers: int) -> torch.nn.Module:
    blocks = [block for _ in range(layers) for block in (torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.GELU())]
    model = torch.nn.Sequential(*blocks, torch.nn.Linear(_WIDTH, 1)).cuda()
    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    from torch.distributed.fsdp import fully_shard

    for block in model:
        if isinstance(block, torch.nn.Linear):
            fully_shard(block)
    return fully_shard(model)


def train(rank: int, kind: str, folder: str, layers: int = 8) -> None:
    """Be one of two ranks; `rank` is the number of its GPU, too."""
    torch.cuda.set_device(rank)
    if "RANK" in os.environ:
        dist.init_process_group("nccl")
    else:
        dist.init_process_group("nccl", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    model = _model(kind, rank, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = torch.Generator(device="cuda")
    data.manual_seed(rank)
    with Path(folder, f"losses-{rank}").open("a", buffering=1) as losses:
        for step in range(1_000_000):
            loss = model(torch.randn(32, _WIDTH, device="cuda", generator=data)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.write(f"{step} {total.item().hex()}\n")


if __name__ == "__main__":
    train(int(os.environ["LOCAL_RANK"]), *sys.argv[1:3], *map(int, sys.argv[3:]))
