"""Saves of a kernel of which little changes: ``python -m benchmarks.changes [--cpu MB] [--gpu BLOCKS]``.

The memory is random: of `--cpu`, in arrays of 1 MB on the host; of `--gpu`, in blocks of 20 MiB. Between two saves one
in a hundred of them changes. For each save: for how long the kernel was paused, until when all was on the disk, and
what was stored; then what a restore takes until the next cell is answered. After every restore all of it is compared.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time

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


def _measure(begin: str) -> None:
    kernel = OurKernel()
    try:
        kernel.run(f"{begin}\nseen = []")
        for n, (what, cell) in enumerate(_CHANGES):
            kernel.run(f"{cell}\nseen.append(digest())")
            frozen, durable, stored = kernel.save(f"s{n}")
            durations = f"frozen {frozen:5.3f} s  durable {durable:6.2f} s"
            print(f"  {what:24} {durations}  stored {stored / 1e6:8.1f} MB", flush=True)
        for n in (len(_CHANGES) - 1, 3, 5, 0):
            began = time.perf_counter()
            kernel.run(f"%gpuckpt restore s{n} --discard")
            kernel.run("pass")
            took = time.perf_counter() - began
            kernel.run(f"assert len(seen) == {n + 1} and digest() == seen[-1]")
            print(f"  restored to {_CHANGES[n][0]!r}: {took:.2f} s until the next cell", flush=True)
    finally:
        kernel.close()


def main() -> None:
    """Measure, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", type=int, nargs="*", default=[], metavar="MB")
    parser.add_argument("--gpu", type=int, nargs="*", default=[], metavar="BLOCKS")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="changes-") as folder:
        os.environ["GPUCKPT_STORE"] = folder
        for count in args.cpu:
            print(f"{count} MB on the host:")
            _measure(_CPU.format(count=count))
        for count in args.gpu:
            print(f"{count} blocks of 20 MiB on the GPU:")
            _measure(_GPU.format(count=count))


if __name__ == "__main__":
    main()
