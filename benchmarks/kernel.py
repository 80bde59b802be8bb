"""Saves and restores beside criu by hand, in one run, alternating: ``python -m benchmarks.kernel [--gpu GIB ...]``.

Three figures: for how long the kernel stands still in a save; how long it takes from asking for a restore until the
next cell is answered; bytes on disk. After every cycle the state is compared with what it was.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import tempfile
from pathlib import Path

from .ours import OurKernel
from .plain import PlainKernel

_CPU_STATE = """
import os, hashlib
state = os.urandom({size}); numbers = list(range(10000))
def digest(): return hashlib.blake2b(state).hexdigest() + str(sum(numbers))
"""
_GPU_STATE = """
import torch
state = torch.randint(0, 2**62, ({size} // 8,), device="cuda")
def digest(): return str([int(part.sum()) for part in state.split(2**24)])
"""


def measure(label: str, state: str, rounds: int) -> str:
    """Run one size and return its row of the table: medians of ours and of the plain way."""
    frozen: dict[str, list[float]] = {"plain": [], "ours": []}
    back: dict[str, list[float]] = {"plain": [], "ours": []}
    durable: list[float] = []
    sizes = {"plain": 0, "ours": 0}
    with tempfile.TemporaryDirectory(prefix="gpuckpt-bench-") as folder:
        os.environ["GPUCKPT_STORE"] = str(Path(folder, "store"))
        os.environ["IPYTHONDIR"] = str(Path(folder, "ipython"))
        plain, ours = PlainKernel(Path(folder)), OurKernel()
        try:
            expected = {}
            for name, kernel in (("plain", plain), ("ours", ours)):
                kernel.run(state)
                expected[name] = kernel.run("print(digest())")
            for _ in range(rounds):
                seconds, sizes["plain"] = plain.save()
                frozen["plain"].append(seconds)
                back["plain"].append(plain.restore())
                stood_still, seconds, sizes["ours"] = ours.save()
                frozen["ours"].append(stood_still)
                durable.append(seconds)
                back["ours"].append(ours.restore())
                for name, kernel in (("plain", plain), ("ours", ours)):
                    assert kernel.run("print(digest())") == expected[name], f"{name}: the state is not what it was"
        finally:
            plain.close()
            ours.close()
    figures = [f"{statistics.median(values[way]):.3f} s" for values in (frozen, back) for way in ("plain", "ours")]
    mb = [f"{sizes[way] / 1e6:,.0f} MB" for way in ("plain", "ours")]
    return f"| {' | '.join([label, *figures[:2], *figures[2:], f'{statistics.median(durable):.3f} s', *mb])} |"


def main() -> None:
    """Measure and print a table for docs/benchmarks.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--gpu", type=float, nargs="*", default=[], metavar="GIB", help="GPU memory to hold, a row each"
    )
    parser.add_argument("--cpu", type=int, nargs="*", default=[0, 60, 1000], metavar="MB", help="memory to hold")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    print(f"{now}, {os.cpu_count()} cores, {platform.system()} {platform.release()}, medians of {args.rounds}")
    head = [
        "state",
        "frozen: plain",
        "ours",
        "first cell: plain",
        "ours",
        "until durable: ours",
        "on disk: plain",
        "ours",
    ]
    print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}")
    for megabytes in args.cpu:
        row = measure(f"{megabytes} MB more", _CPU_STATE.format(size=megabytes * 10**6), args.rounds)
        print(row, flush=True)
    for gib in args.gpu:
        print(measure(f"{gib:g} GiB of VRAM", _GPU_STATE.format(size=int(gib * 2**30)), args.rounds), flush=True)


if __name__ == "__main__":
    main()
