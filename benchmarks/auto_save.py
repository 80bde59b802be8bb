"""What ``auto on`` costs a notebook: ``python -m benchmarks.auto_save [--cells N] [--pause SECONDS ...] [--rounds N]``.

The same cells are executed by a kernel that is saved after each of them and by one that is not, in one run,
alternating. What is compared is the time that the cells take, from asking for each until it is answered; the pauses
between them, in which somebody reads and types, are not counted. Without a pause the next cell is there when one
ends, as with *Run All*.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.store import Store

from .ours import OurKernel

_BEGIN = """
import hashlib, numpy as np
random = np.random.default_rng(0)
data = random.random(6_000_000)
notes = {}
"""
_SHORT = "notes[{n}] = 'seen'; part = data[{n}::200].copy()"
_MEDIUM = "data[:1_000_000] = random.random(1_000_000); order = np.argsort(data[:1_000_000])"
_LONG = "for _ in range(4): found = np.sort(data)[::7].cumsum()"
_LONG_CELL = 1.0
"""From how many seconds on a cell counts as long."""


def _cell(n: int) -> str:
    """Return cell `n`: of twenty, fifteen are short, four take a tenth of a second, and one more than a second."""
    return _LONG if n % 20 == 19 else _MEDIUM if n % 5 == 4 else _SHORT.format(n=n)


def _times(cells: int, pause: float, *, saved: bool) -> list[float]:
    """Return how long each cell took, in seconds."""
    kernel = OurKernel()
    try:
        kernel.run(_BEGIN)
        kernel.run(f"%gpuckpt auto {'on' if saved else 'off'}")
        times = []
        for n in range(cells):
            time.sleep(pause)
            began = time.perf_counter()
            kernel.run(_cell(n))
            times.append(time.perf_counter() - began)
        return times
    finally:
        kernel.close()


def _compare(cells: int, pause: float, rounds: int) -> None:
    runs: dict[bool, list[list[float]]] = {False: [], True: []}
    for _ in range(rounds):
        for saved in (False, True):
            with tempfile.TemporaryDirectory(prefix="auto-save-") as folder:
                os.environ["GPUCKPT_STORE"] = folder
                runs[saved].append(_times(cells, pause, saved=saved))
                if saved:
                    _tell_of_store(Path(folder))
    print(f"{cells} cells, {pause:g} s between them, {rounds} rounds:")
    for what, fewest in (("all cells", 0.0), ("long cells", _LONG_CELL)):
        which = [n for n, took in enumerate(runs[False][0]) if took >= fewest]
        off, on = (_median_of_sums(runs[saved], which) for saved in (False, True))
        print(f"  {what} ({len(which)}): off {off:.2f} s, on {on:.2f} s: {100 * (on / off - 1):+.1f} %", flush=True)


def _median_of_sums(runs: Sequence[Sequence[float]], which: Sequence[int]) -> float:
    return statistics.median(sum(times[n] for n in which) for times in runs)


def _tell_of_store(folder: Path) -> None:
    saved = Store(settings.store_dir()).list()
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"  {len(saved)} snapshots are left, and take {size / 1e6:.0f} MB")


def main() -> None:
    """Measure, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=200, metavar="N")
    parser.add_argument("--pause", type=float, nargs="+", default=[0.0, 1.0], metavar="SECONDS")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    args = parser.parse_args()
    for pause in args.pause:
        _compare(args.cells, pause, args.rounds)


if __name__ == "__main__":
    main()
