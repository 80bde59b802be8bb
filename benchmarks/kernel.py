"""Saves and restores beside criu by hand, in one run, alternating: ``python -m benchmarks.kernel [--gpu GIB ...]``.

For how long a save pauses the kernel; how long it takes from asking for a restore until the next cell is
answered, with the snapshot in the page cache and not; how long until a save is on the disk, of bytes that the store has
and has not; bytes on disk; memory of the machine. Beside them, what the disk takes for as many bytes. After every
cycle the state is compared with what it was.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from . import disk
from .gpu_memory import free_bytes
from .ours import OurKernel
from .plain import PlainKernel

_CPU_STATE = """
import os, hashlib
state = os.urandom({size}); numbers = list(range(10000))
def digest(): return hashlib.blake2b(state).hexdigest() + str(sum(numbers))
def touch(): return state[0]
"""
_GPU_STATE = """
import torch
state = torch.randint(0, 2**62, ({size} // 8 + 1,), device="cuda")
def digest(): return str([int(part.sum()) for part in state.split(2**24)])
def touch(): return state[:1].item()
"""


@dataclass
class Row:
    """One size's figures: medians, in seconds; sizes in bytes."""

    label: str
    size: int
    frozen: dict[str, float]
    """For how long the kernel was paused in a save, by the way: ``plain``, ``ours``."""
    first_cell: dict[str, float]
    """From asking for a restore until the cell after it is answered."""
    lazy: dict[str, float]
    """The same of our ``restore --lazy``: the first ``cell``, and the first one that needs the ``gpu``."""
    durable: float
    """From asking for one of our saves until all of it is synced."""
    durable_known: float
    """The same where the store has these bytes already, in another snapshot."""
    written: float
    """What the disk takes to write and sync as many bytes as the first of our saves stores."""
    cold: float
    """The first cell after one of our restores, with nothing of the store in the page cache."""
    read: float
    """What the disk takes to read all of the store's files."""
    on_disk: dict[str, int]
    on_gpu: int
    """What our kernel has on the GPU, its context included."""
    host_memory: int
    """How much less memory the machine had for others at the worst moment of one of our saves."""

    def __str__(self) -> str:
        figures = [f"{each[way]:.3f} s" for each in (self.frozen, self.first_cell) for way in ("plain", "ours")]
        megabytes = [f"{self.on_disk[way] / 1e6:,.0f} MB" for way in ("plain", "ours")]
        memory = [f"{each / 1e6:,.0f} MB" for each in (self.on_gpu, self.host_memory)]
        figures += [f"{self.lazy[which]:.3f} s" for which in ("cell", "gpu")]
        disk = [f"{each:.3f} s" for each in (self.durable, self.durable_known, self.written, self.cold, self.read)]
        return f"| {' | '.join([self.label, *figures, *disk, *megabytes, *memory])} |"


HEAD = (
    "state",
    "frozen: plain",
    "ours",
    "first cell: plain",
    "ours",
    "lazy: first cell",
    "first that needs the GPU",
    "until durable: ours",
    "of known bytes",
    "writing them",
    "first cell, cold: ours",
    "reading them",
    "on disk: plain",
    "ours",
    "on the GPU: ours",
    "host memory: ours",
)


def measure(label: str, size: int, state: str, rounds: int) -> Row:
    """Run one size, of so many bytes of state."""
    frozen: dict[str, list[float]] = {"plain": [], "ours": []}
    back: dict[str, list[float]] = {"plain": [], "ours": []}
    lazy: dict[str, list[float]] = {"cell": [], "gpu": []}
    durable, host_memory = [], []
    sizes = {"plain": 0, "ours": 0}
    with tempfile.TemporaryDirectory(prefix="gpuckpt-bench-") as folder:
        store = Path(folder, "store")
        os.environ["GPUCKPT_STORE"] = str(store)
        os.environ["IPYTHONDIR"] = str(Path(folder, "ipython"))
        plain, ours = PlainKernel(Path(folder)), OurKernel()
        try:
            expected = {}
            for name, kernel in (("plain", plain), ("ours", ours)):
                free = free_bytes()
                kernel.run(state)
                on_gpu = free - free_bytes()  # the last one's, which is ours
                expected[name] = kernel.run("print(digest())")
            for _ in range(rounds):
                seconds, sizes["plain"] = plain.save()
                frozen["plain"].append(seconds)
                back["plain"].append(plain.restore())
                _tell(label, frozen=frozen["plain"], first_cell=back["plain"])
                plain.forget()
                with LowestMemory() as memory:
                    stood_still, seconds, sizes["ours"] = ours.save()
                host_memory.append(memory.taken)
                frozen["ours"].append(stood_still)
                durable.append(seconds)
                back["ours"].append(ours.restore())
                _compare("ours", ours, expected["ours"])
                for which, seconds in zip(lazy, ours.restore_lazily("touch()"), strict=True):
                    lazy[which].append(seconds)
                _tell(label, frozen=frozen["ours"], first_cell=back["ours"], durable=durable, **lazy)
                for name, kernel in (("plain", plain), ("ours", ours)):
                    _compare(name, kernel, expected[name])
            _, known, _ = ours.save("known")
            ours.remove("known")
            written, read = disk.write_seconds(Path(folder), sizes["ours"]), disk.read_seconds(store)
            disk.forget(store)
            cold = ours.restore()
            _tell(label, known=[known], written=[written], read=[read], cold=[cold])
            _compare("ours", ours, expected["ours"])
        finally:
            plain.close()
            ours.close()
    medians = [{way: statistics.median(values) for way, values in each.items()} for each in (frozen, back, lazy)]
    on_disk = (statistics.median(durable), known, written, cold, read)
    return Row(label, size, *medians, *on_disk, sizes, on_gpu, max(host_memory))


def _tell(label: str, **figures: list[float]) -> None:
    """Tell on standard error what was measured last: a run of many minutes may be cut off."""
    last = ", ".join(f"{name} {each[-1]:.3f} s" for name, each in figures.items())
    print(f"  {label}: {last}", file=sys.stderr, flush=True)


def _compare(name: str, kernel: PlainKernel | OurKernel, expected: str) -> None:
    # What the plain way's kernel prints can be lost: its client's second socket may not be back when the first one is.
    found = kernel.run("print(digest())") or kernel.run("print(digest())")
    if found != expected:
        raise SystemExit(f"{name}: the state is not what it was: {found!r} instead of {expected!r}")


class LowestMemory:
    """How much memory of the machine was taken, at most, within a block (MemAvailable: caches do not count)."""

    def __enter__(self) -> LowestMemory:
        self._before = self._lowest = psutil.virtual_memory().available
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    @property
    def taken(self) -> int:
        """The bytes."""
        return self._before - self._lowest

    def _watch(self) -> None:
        while not self._end.wait(0.02):
            self._lowest = min(self._lowest, psutil.virtual_memory().available)


def main() -> None:
    """Measure and print a table for docs/benchmarks.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--gpu", type=float, nargs="*", default=[], metavar="GIB", help="GPU memory to hold, a row each"
    )
    parser.add_argument("--cpu", type=int, nargs="*", default=[0, 60, 1000], metavar="MB", help="memory to hold")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the rows to this file, as lines of JSON")
    args = parser.parse_args()
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    print(f"{now}, {os.cpu_count()} cores, {platform.system()} {platform.release()}, medians of {args.rounds}")
    print(f"| {' | '.join(HEAD)} |\n|{' --- |' * len(HEAD)}")
    sizes = [(f"{megabytes} MB more", megabytes * 10**6, _CPU_STATE) for megabytes in args.cpu]
    sizes += [(f"{gib:g} GiB of VRAM" if gib else "a bare context", int(gib * 2**30), _GPU_STATE) for gib in args.gpu]
    for label, size, state in sizes:
        row = measure(label, size, state.format(size=size), args.rounds)
        print(row, flush=True)
        if args.json:
            with args.json.open("a") as rows:
                rows.write(json.dumps(asdict(row)) + "\n")


if __name__ == "__main__":
    main()
