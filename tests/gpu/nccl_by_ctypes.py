"""Sums over two GPUs by NCCL alone, opened as vLLM's PyNccl opens it: `nccl_by_ctypes.py FOLDER [RANK]`.

Without RANK it starts both ranks. One opens NCCL by its name and the other one by its path; torch is linked with the
same one, and nothing of torch.distributed is used. The communicator's id goes through a file. Each rank writes a line
for each step: its number, and what has been added up so far, to the bit.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

_RANKS, _SUMS_A_STEP, _NUMBERS = 2, 50, 1 << 20
_FLOAT, _SUM = 7, 0  # nccl.h


class _Id(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


_SIGNATURES = {
    "ncclGetUniqueId": (ctypes.POINTER(_Id),),
    "ncclCommInitRank": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, _Id, ctypes.c_int),
    "ncclAllReduce": (
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int),
        *(ctypes.c_void_p, ctypes.c_void_p),
    ),
}


class _Nccl:
    def __init__(self, library: str) -> None:
        self.functions = ctypes.CDLL(library)
        for name, types in _SIGNATURES.items():
            getattr(self.functions, name).argtypes = types

    def do(self, name: str, *arguments: object) -> None:
        if result := getattr(self.functions, name)(*arguments):
            sys.exit(f"{name} gave {result}")


def _path_of_torch_s_nccl() -> str:
    found = re.search(r"\S+/libnccl\.so\S*", Path("/proc/self/maps").read_text())
    if found is None:
        sys.exit("torch has loaded no NCCL")
    return found[0]


def _unique_id(nccl: _Nccl, rank: int, folder: Path) -> _Id:
    path = folder / "id"
    if rank == 0:
        own, new = _Id(), folder / "new"
        nccl.do("ncclGetUniqueId", ctypes.byref(own))
        new.write_bytes(bytes(own))
        new.rename(path)
    while not path.exists():
        time.sleep(0.01)
    return _Id.from_buffer_copy(path.read_bytes())


def add_up(folder: Path, rank: int) -> None:
    """Be one of the ranks; `rank` is the number of its GPU, too."""
    torch.cuda.set_device(rank)
    nccl, comm = _Nccl("libnccl.so.2" if rank == 0 else _path_of_torch_s_nccl()), ctypes.c_void_p()
    nccl.do("ncclCommInitRank", ctypes.byref(comm), _RANKS, _unique_id(nccl, rank, folder), rank)
    numbers = torch.Generator(device="cuda")
    numbers.manual_seed(rank)
    total = torch.zeros(_NUMBERS, device="cuda")
    with Path(folder, f"losses-{rank}").open("a", buffering=1) as sums:
        for step in range(1_000_000):
            for _ in range(_SUMS_A_STEP):
                own = torch.randn(_NUMBERS, device="cuda", generator=numbers)
                both = torch.empty_like(own)
                words = own.data_ptr(), both.data_ptr(), _NUMBERS, _FLOAT, _SUM, comm
                nccl.do("ncclAllReduce", *words, torch.cuda.current_stream().cuda_stream)
                total.mul_(0.9).add_(both)
            sums.write(f"{step} {total.double().sum().item().hex()}\n")


if __name__ == "__main__":
    folder = sys.argv[1]
    if len(sys.argv) > 2:
        add_up(Path(folder), int(sys.argv[2]))
        sys.exit()
    ranks = [subprocess.Popen([sys.executable, __file__, folder, str(rank)]) for rank in range(_RANKS)]
    sys.exit(max(rank.wait() for rank in ranks))
