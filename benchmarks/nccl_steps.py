"""What the library in front of NCCL costs a training's steps: ``python -m benchmarks.nccl_steps`` (two GPUs).

A DDP training of two ranks by torchrun, with the library and without, taking turns; nothing is saved meanwhile.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from jupyter_gpuckpt.installed import NCCL_LIBRARY

_TRAINING = Path(__file__).parents[1] / "tests/gpu/nccl_training.py"
_LAYERS = "24"
_WARM, _WARM_LIMIT = 100, 120.0
"""Steps that are not counted, and for how long they may take, in seconds."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="how often the two take turns")
    parser.add_argument("--seconds", type=float, default=8.0, help="for how long steps are counted each time")
    args = parser.parse_args()
    with_it: list[float] = []
    without: list[float] = []
    for turn in range(args.rounds):
        for rates in (with_it, without) if turn % 2 else (without, with_it):
            rates.append(_steps_a_second(args.seconds, has_library=rates is with_it))
            print("with   " if rates is with_it else "without", f"{rates[-1]:.2f} steps a second", flush=True)
    ratio = statistics.median(with_it) / statistics.median(without)
    print(f"medians {statistics.median(with_it):.2f} and {statistics.median(without):.2f}: {100 * (ratio - 1):+.2f} %")


def _steps_a_second(seconds: float, *, has_library: bool) -> float:
    with tempfile.TemporaryDirectory() as folder:
        losses = Path(folder, "losses-0")
        environment = {**os.environ, "NCCL_NVLS_ENABLE": "0"}
        if has_library:
            environment |= {"LD_PRELOAD": str(NCCL_LIBRARY), "GPUCKPT_RUN_DIR": folder}
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        training = subprocess.Popen(
            [sys.executable, *launcher, str(_TRAINING), "ddp", folder, _LAYERS],
            env=environment,
            stderr=subprocess.DEVNULL,
        )
        try:
            deadline = time.monotonic() + _WARM_LIMIT
            while _lines(losses) < _WARM:
                if training.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("the training does not run")
                time.sleep(0.01)
            before, began = _lines(losses), time.monotonic()
            time.sleep(seconds)
            return (_lines(losses) - before) / (time.monotonic() - began)
        finally:
            # torchrun's workers have sessions of their own: left alone, they would slow down the next turn.
            ranks = psutil.Process(training.pid).children(recursive=True)
            training.kill()
            training.wait()
            for rank in ranks:
                rank.kill()
            psutil.wait_procs(ranks)


def _lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


if __name__ == "__main__":
    main()
