"""A made-up training of several processes, which call NCCL as programs do: `ranks.py LIBNCCL SIZE FOLDER [WAY]`.

Each step is an all-reduce over all, one over a half that was split off, one with a factor, and values that are passed
around in a group. It writes a line for each step; where a result is wrong or an error is given, it ends, and says why.

`WAY` is `ways` for ranks each of which finds NCCL's functions in another way, `register` for memory that is
registered, `capture` for a step in a graph, `gpu` for ranks with 260 MiB on a GPU, which are looked at in each step.
While FOLDER has a file `hold`, rank 1 waits in the middle of a step, as for its data.
"""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path

CAPTURING = 7
"""The stream that the made-up driver says to be captured."""


class Id(ctypes.Structure):
    """A communicator's id."""

    _fields_ = (("bytes", ctypes.c_ubyte * 128),)


class OnGpu:
    """Memory on a GPU, in which one number is counted up at both ends."""

    def __init__(self) -> None:
        self.cuda, self.number, self.word = ctypes.CDLL("libcuda.so.1"), 0, ctypes.c_uint64()
        context, address, size = ctypes.c_void_p(), ctypes.c_uint64(), 260 << 20
        self.do("cuInit", 0)
        self.do("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.do("cuCtxSetCurrent", context)
        self.do("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        self.ends = [ctypes.c_uint64(address.value + at) for at in (0, size - 8)]

    def do(self, name: str, *arguments: object) -> None:
        """Call a function of the driver's."""
        if result := getattr(self.cuda, name)(*arguments):
            sys.exit(f"{name} gave {result}")

    def step(self) -> None:
        """See that the number is there, and count it up; end where it is not."""
        for end in self.ends:
            self.do("cuMemcpyDtoH_v2", ctypes.byref(self.word), end, ctypes.c_size_t(8))
            if self.word.value != self.number:
                sys.exit(f"on the GPU is {self.word.value}, not {self.number}")
            self.word.value += 1
            self.do("cuMemcpyHtoD_v2", end, ctypes.byref(self.word), ctypes.c_size_t(8))
        self.number += 1


def linked(library: str) -> ctypes.CDLL:
    """Return where a program finds NCCL's functions that is linked with it."""
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(None)


def found_by(rank: int, library: str) -> list[ctypes.CDLL]:
    """Return where a rank looks for NCCL's functions: in NCCL itself, by path or by name, as if linked, or in turns."""
    match rank:
        case 0:
            return [ctypes.CDLL(library)]
        case 1:
            return [ctypes.CDLL(Path(library).name)]
        case 2:
            return [linked(library), ctypes.CDLL(library)]
    return [linked(library)]


class Rank:
    """One of the processes."""

    def __init__(self, library: str, rank: int, size: int, folder: Path, way: str) -> None:
        self.nccls = itertools.cycle(found_by(rank, library) if way == "ways" else [linked(library)])
        self.rank, self.size, self.folder = rank, size, folder
        self.world, self.half, self.factor = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
        self.do("ncclCommInitRank", ctypes.byref(self.world), size, self.unique_id(), rank)
        self.do("ncclCommSplit", self.world, rank % 2, rank, ctypes.byref(self.half), None)
        three = ctypes.c_int64(3)
        self.do("ncclRedOpCreatePreMulSum", ctypes.byref(self.factor), ctypes.byref(three), 4, 1, self.world)

    def unique_id(self) -> Id:
        """Return the id that the first rank has made, and left in the folder."""
        path = self.folder / "id"
        if self.rank == 0:
            own, new = Id(), self.folder / "new"
            self.do("ncclGetUniqueId", ctypes.byref(own))
            new.write_bytes(bytes(own))
            new.rename(path)
        while not path.exists():
            time.sleep(0.01)
        return Id.from_buffer_copy(path.read_bytes())

    def do(self, name: str, *arguments: object) -> None:
        """Call a function of NCCL's."""
        if result := getattr(next(self.nccls), name)(*arguments):
            sys.exit(f"rank {self.rank}: {name} gave {result}")

    def expect(self, found: int, wanted: int, what: str) -> None:
        """End where a result is wrong."""
        if found != wanted:
            sys.exit(f"rank {self.rank}: {what} is {found}, not {wanted}")

    def sum(self, value: int, comm: ctypes.c_void_p, op: int = 0, stream: int = 0) -> int:
        """Return the sum of all ranks' values."""
        given, into = ctypes.c_int64(value), ctypes.c_int64()
        words = (ctypes.byref(given), ctypes.byref(into), ctypes.c_size_t(1), 4, op, comm, ctypes.c_void_p(stream))
        self.do("ncclAllReduce", *words)
        return into.value

    def pass_on(self, value: int) -> int:
        """Send a value to the next rank, and return what the one before it has sent."""
        sent, got, one = ctypes.c_int64(value), ctypes.c_int64(), ctypes.c_size_t(1)
        self.do("ncclGroupStart")
        self.do("ncclSend", ctypes.byref(sent), one, 4, (self.rank + 1) % self.size, self.world, None)
        self.do("ncclRecv", ctypes.byref(got), one, 4, (self.rank - 1) % self.size, self.world, None)
        self.do("ncclGroupEnd")
        return got.value

    def step(self, step: int) -> None:
        """Compute a step."""
        rank, size = self.rank, self.size
        self.expect(self.sum(rank + step, self.world), sum(range(size)) + size * step, "the sum over all")
        while rank == 1 and (self.folder / "hold").exists():
            (self.folder / "holds").touch()
            time.sleep(0.01)
        mine = sum(other for other in range(size) if other % 2 == rank % 2)
        self.expect(self.sum(rank * step, self.half), step * mine, "the sum over a half")
        self.expect(self.sum(1, self.world, self.factor.value), 3 * size, "the sum with a factor")
        self.expect(self.pass_on(step * 100 + rank), step * 100 + (rank - 1) % size, "what was passed on")

    def watch(self) -> None:
        """Ask all the time whether there is an error, as torch's watchdog does; end where there is."""
        error, nccl = ctypes.c_int(), next(self.nccls)
        while True:
            result = nccl.ncclCommGetAsyncError(self.world, ctypes.byref(error))
            if result or error.value:
                print(f"rank {self.rank}: the watchdog is told {result} {error.value}", file=sys.stderr, flush=True)
                os._exit(1)
            time.sleep(0.002)


def train(library: str, rank: int, size: int, folder: Path, way: str) -> None:
    """Be one of the ranks."""
    memory = OnGpu() if way == "gpu" else None
    one = Rank(library, rank, size, folder, way)
    if way == "register":
        one.do("ncclCommRegister", one.world, None, ctypes.c_size_t(1), ctypes.byref(ctypes.c_void_p()))
    if way == "capture":
        one.sum(1, one.world, stream=CAPTURING)
    threading.Thread(target=one.watch, daemon=True).start()
    with (folder / f"steps-{rank}").open("a", buffering=1) as steps:
        for step in range(1_000_000):
            one.step(step)
            if memory is not None:
                memory.step()
            steps.write(f"{step}\n")
            time.sleep(0.002 * (rank + 1))


if __name__ == "__main__":
    library, size, folder, way = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), (*sys.argv[4:], "")[0]
    if way == "capture":
        ctypes.CDLL(os.environ["MADE_UP_DRIVER"], mode=ctypes.RTLD_GLOBAL)
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=train, args=(library, n, size, folder, way)) for n in range(size)]
    for process in ranks:
        process.start()
    (folder / "pids").write_text(" ".join(str(process.pid) for process in ranks))
    for process in ranks:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in ranks))
