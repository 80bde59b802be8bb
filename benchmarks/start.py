"""How much later a kernel that can be saved starts than a plain one: ``python -m benchmarks.start``.

The time from starting the kernel until it has answered its first cell, the two taking turns in one run, and the same
for the first start in a program, in programs of their own.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

from jupyter_client import KernelManager

from .cells import run

NAMES = ("python3", "python3-gpuckpt")


def first_cell(name: str) -> float:
    """Start a kernel of this kernelspec and end it; return after how many seconds it had answered its first cell."""
    began = time.perf_counter()
    manager = KernelManager(kernel_name=name)
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(60)
    run(client, "pass")
    seconds = time.perf_counter() - began
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    return seconds


def _first_cell_elsewhere(name: str) -> float:
    program = [sys.executable, "-m", "benchmarks.start", "--one", name]
    return float(subprocess.run(program, capture_output=True, check=True, text=True).stdout)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--one", choices=NAMES, help="start only this one, once")
    args = parser.parse_args()
    if args.one:
        print(first_cell(args.one))
        return
    for measure, what in ((first_cell, "any start"), (_first_cell_elsewhere, "the first start in a program")):
        seconds: dict[str, list[float]] = {name: [] for name in NAMES}
        if measure is first_cell:
            for name in NAMES:
                first_cell(name)  # what this program imports for it counts below
        for _ in range(args.rounds):
            for name in NAMES:
                seconds[name].append(measure(name))
        plain, ours = (statistics.median(seconds[name]) for name in NAMES)
        print(f"{what}: plain {plain:.3f} s, ours {ours:.3f} s, {1e3 * (ours - plain):.0f} ms later")


if __name__ == "__main__":
    main()
