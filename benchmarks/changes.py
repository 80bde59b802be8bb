"""Saves of a kernel of which little changes: ``python -m benchmarks.changes [--cpu MB] [--gpu BLOCKS] [--rounds N]``.

The memory is random: of `--cpu`, in arrays of 1 MB on the host; of `--gpu`, in blocks of 20 MiB. Between two saves one
in a hundred of them changes. For each save: for how long the kernel was paused, until when all was on the disk, and
what was stored; then what a restore takes until the next cell is answered. After every restore all of it is compared.

On the host, kernels take turns whose saves copy all memory (``GPUCKPT_UNCHANGED=copy``), or that which has changed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence

from jupyter_gpuckpt import settings

from .ours import OurKernel

_CPU = """
import hashlib, numpy as np
blocks = [np.random.default_rng(n).integers(0, 2**62, 125_000) for n in range({count})]
def digest(): return hashlib.blake2b(b"".join(hashlib.blake2b(b).digest() for b in blocks)).hexdigest()
"""
_GPU = """
import torch
torch.manual_seed(1)
blocks = [torch.randint(0, 2**62, (20 << 17,), device="cuda") for _ in range({count})]
weights = torch.randint(0, 2**62, (20 << 17,), device="cuda")
def digest(): return [int((b * weights).sum()) for b in blocks]
"""
_ALL, _HUNDREDTH = "for b in blocks: b += 1", "for b in blocks[{n}::100]: b += 1"
_CHANGES = [("first", ""), *[("1 % changed", _HUNDREDTH.format(n=n)) for n in range(5)], ("nothing changed", "")]
_CHANGES += [("all changed", _ALL), ("1 % changed after that", _HUNDREDTH.format(n=7))]

_FOLLOWED = slice(3, 6)
"""The saves with 1 % changed that follow others such, so that what is known of those before can be of use."""


def _measure(begin: str) -> list[tuple[float, float, float]]:
    """Return of each save for how long it paused the kernel, until when it was on the disk (s), and the MB stored."""
    kernel = OurKernel()
    try:
        kernel.run(f"{begin}\nseen = []")
        saves = []
        for n, (what, cell) in enumerate(_CHANGES):
            kernel.run(f"{cell}\nseen.append(digest())")
            frozen, durable, stored = kernel.save(f"s{n}")
            saves.append((frozen, durable, stored / 1e6))
            print(f"  {what:24} {_shown(saves[-1])}  threads paused {kernel.paused:5.3f} s", flush=True)
        for n in (len(_CHANGES) - 1, 3, 5, 0):
            began = time.perf_counter()
            kernel.run(f"%gpuckpt restore s{n} --discard")
            kernel.run("pass")
            took = time.perf_counter() - began
            kernel.run(f"assert len(seen) == {n + 1} and digest() == seen[-1]")
            print(f"  restored to {_CHANGES[n][0]!r}: {took:.2f} s until the next cell", flush=True)
        return saves
    finally:
        kernel.close()


def _shown(save: Sequence[float]) -> str:
    frozen, durable, stored = save
    return f"frozen {frozen:5.3f} s  durable {durable:6.2f} s  stored {stored:8.1f} MB"


def _compare(begin: str, rounds: int) -> None:
    runs: dict[str, list[list[tuple[float, float, float]]]] = {settings.COPY: [], settings.SKIP: []}
    for _ in range(rounds):
        for how, measured in runs.items():
            os.environ[settings.unchanged.variable] = how
            print(f" {how}:")
            with tempfile.TemporaryDirectory(prefix="changes-") as folder:
                os.environ["GPUCKPT_STORE"] = folder
                measured.append(_measure(begin))
    for how, measured in runs.items():
        little = [save for saves in measured for save in saves[_FOLLOWED]]
        median = [statistics.median(values) for values in zip(*little, strict=True)]
        print(f" median of {len(little)} saves with 1 % changed, {how}: {_shown(median)}", flush=True)


def main() -> None:
    """Measure, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", type=int, nargs="*", default=[], metavar="MB")
    parser.add_argument("--gpu", type=int, nargs="*", default=[], metavar="BLOCKS")
    parser.add_argument("--rounds", type=int, default=1, metavar="N")
    args = parser.parse_args()
    for count in args.cpu:
        print(f"{count} MB on the host:")
        _compare(_CPU.format(count=count), args.rounds)
    for count in args.gpu:
        print(f"{count} blocks of 20 MiB on the GPU:")
        with tempfile.TemporaryDirectory(prefix="changes-") as folder:
            os.environ["GPUCKPT_STORE"] = folder
            _measure(_GPU.format(count=count))


if __name__ == "__main__":
    main()
