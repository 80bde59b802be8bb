"""A node that is drained, its kernels all saved by a deadline: ``python -m benchmarks.drain``.

Real kernels, each with a large array and a thread that counts. They are hibernated as for a machine that goes down;
then each is woken and asked what it has.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .ours import OurKernel

_STATE = """
import hashlib, os, threading, time
import numpy as np
data = np.frombuffer(os.urandom({size}), dtype=np.uint8).copy()
digest = hashlib.blake2b(data).hexdigest()
steps, lost = [0], threading.Event()
def count():
    while not lost.wait(0.05):
        steps.append(steps[-1] + 1)
thread = threading.Thread(target=count, daemon=True)
thread.start()
"""
_ASK = """
lost.set(); thread.join()
print(hashlib.blake2b(data).hexdigest() == digest and steps == list(range(len(steps))), len(steps))
"""


def main() -> None:
    """Print one line for the table, and fail if a kernel was not saved, or has lost anything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", type=int, default=20)
    parser.add_argument("--size", type=int, default=200, metavar="MB", help="each kernel's array")
    parser.add_argument("--deadline", type=int, default=60, metavar="SECONDS")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpuckpt-bench-") as name:
        for variable in ("JUPYTER_RUNTIME_DIR", "GPUCKPT_STORE", "GPUCKPT_KEYS", "GPUCKPT_LOGS", "IPYTHONDIR"):
            os.environ[variable] = str(Path(name, variable.lower()))
        Path(os.environ["JUPYTER_RUNTIME_DIR"]).mkdir()
        with contextlib.ExitStack() as stack:
            kernels = []
            for _ in range(args.kernels):
                kernels.append(OurKernel())
                stack.callback(kernels[-1].close)
                kernels[-1].run(_STATE.format(size=args.size * 1_000_000))
            load = os.getloadavg()[0]
            command = [sys.executable, "-c", "import sys; from jupyter_gpuckpt.cli import main; sys.exit(main())"]
            began = time.perf_counter()
            done = subprocess.run(
                [*command, "hibernate", "--all", "--json", "--deadline", str(args.deadline)],
                stdout=subprocess.PIPE,
                check=False,
            )
            took = time.perf_counter() - began
            outcomes = json.loads(done.stdout)["kernels"]
            saved = [outcome["name"] for outcome in outcomes if outcome["saved"]]
            listed = json.loads(subprocess.run([*command, "list", "--json"], stdout=subprocess.PIPE, check=True).stdout)
            sources = [one["kernel_id"] for one in listed["snapshots"]]
            assert len(sources) == len({*sources}) == len(saved), "a kernel was saved twice"
            whole = [kernel.run(_ASK).split()[0] == "True" for kernel in kernels]
            print(
                f"{platform.platform()}, {os.cpu_count()} processors, load {load:.1f}: {len(saved)} of {args.kernels} "
                f"kernels of {args.size} MB saved in {took:.1f} s; {sum(whole)} came back with every step once"
            )
            for outcome in outcomes:
                if not outcome["saved"]:
                    print(outcome["why"])
            assert len(saved) == sum(whole) == args.kernels


if __name__ == "__main__":
    main()
