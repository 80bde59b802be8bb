"""Save and restore a kernel and a job for long, and see that nothing grows: ``make soak``; in the tests a short form.

After every round of cycles all is counted. What is counted (processes, descriptors, threads, ports, mounts, files) may
not become more; of sizes (memory, the store, logs) the slope over all rounds but the first ones is held against a
limit. The slope is the median of those between all pairs of rounds (Theil and Sen), which a few odd ones do not move.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from command_line import run
from job_programs import TRAIN, Job, program
from jupyter_client import KernelManager
from keeper_faults import keeper_pid
from leaks import clients_of, is_more, look, memory
from notebooks import SPEC, Notebook, open_channels, wait_for_ready

from jupyter_gpuckpt.client.jobs import folder_of
from jupyter_gpuckpt.linux.processes import resident_bytes
from jupyter_gpuckpt.store import Store

_REST = 20.0  # seconds
_FIRST = 0.25
"""Such a part of the rounds is not looked at: what is set up once is set up in them."""

LIMITS = {"keeper": 4000, "sleeper": 1000, "kernel": 60_000, "job": 1000, "keeper of the job": 4000, "store": 8000}
"""By how many bytes a cycle each may grow: 4 kB are 4 MB in a thousand cycles.

A kernel grows by itself: by 4 kB with each cell, and by 36 kB whenever its clients connect again, as they do after a
restore; both were measured in a kernel that was never saved.
"""


@dataclass
class Soak:
    """What was found: one row a round."""

    per_round: int
    counts: list[dict[str, Any]] = field(default_factory=list)
    sizes: list[dict[str, int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def faults(self) -> list[str]:
        """Return what has grown, in words."""
        first = int(len(self.counts) * _FIRST)
        wanted = self.counts[first]
        found = [
            f"{name}: {wanted[name]} in round {first}, {count[name]} in round {number}"
            for number, count in enumerate(self.counts[first:], first)
            for name in wanted
            if is_more(count[name], wanted[name])
        ]
        for name, slope in self.slopes().items():
            if slope > LIMITS[name]:
                found.append(f"{name} grows by {slope:,.0f} bytes a cycle, {LIMITS[name]:,.0f} are allowed")
        return found

    def slopes(self) -> dict[str, float]:
        """Return by how many bytes a cycle each size grows."""
        rest = self.sizes[int(len(self.sizes) * _FIRST) :]
        return {name: slope_of([float(size[name]) for size in rest]) / self.per_round for name in self.sizes[0]}


def slope_of(values: list[float]) -> float:
    """Return the median of the slopes between all pairs of values that stand one apart each."""
    apart = len(values) // 200 + 1  # not every value is looked at: the pairs are the square of that
    pairs = itertools.combinations(enumerate(values[::apart]), 2)
    return statistics.median((b - a) / (j - i) / apart for (i, a), (j, b) in pairs) if len(values) > 1 else 0.0


@contextlib.contextmanager
def _kernel() -> Iterator[Notebook]:
    manager = KernelManager(kernel_name=SPEC)
    manager.start_kernel()
    client = manager.client()
    open_channels(client)
    notebook = Notebook(manager, client)
    try:
        wait_for_ready(client)
        yield notebook
    finally:
        notebook.close()


def soak(folder: Path, rounds: int, per_round: int, note: Callable[[str], None], seconds: float = 0) -> Soak:
    """Do so many rounds, and for at least so many seconds; all that is made lies in `folder`."""
    found = Soak(per_round)
    job = Job("soaked")
    job.start(sys.executable, program(folder, TRAIN), str(folder / "never"))
    job.wait_for(30)
    try:
        with _kernel() as notebook:
            notebook.run("n = 0; held = list(range(100_000))")
            clients = clients_of(notebook)
            began = time.monotonic()
            while len(found.counts) < rounds or time.monotonic() - began < seconds:
                _round(notebook, job, per_round)
                _look(found, notebook, job, folder, clients)
                found.seconds.append((time.monotonic() - began) / (len(found.counts) * per_round))
                note(f"{len(found.counts) * per_round} cycles, {time.monotonic() - began:,.0f} s: {found.sizes[-1]}")
            assert notebook.value("n") == str(len(found.counts) * per_round)
    finally:
        job.kill()
    return found


def _round(notebook: Notebook, job: Job, cycles: int) -> None:
    for _ in range(cycles):
        notebook.run("n += 1")
        notebook.run("%gpuckpt save kernel --replace")
        notebook.run("%gpuckpt restore kernel")
    job.save("job", "--replace")
    job.restore("job")
    assert len(job.lines()) == 30


def _look(found: Soak, notebook: Notebook, job: Job, folder: Path, clients: int) -> None:
    with notebook.keeper as keeper:
        keeper.request("rm", {"name": "job"})  # the store has the kernel's alone then
    Store(Path(os.environ["GPUCKPT_STORE"])).compact()
    told = job.told()
    found.counts.append({**_at_rest(found, notebook, folder, clients), "of the job": len(told["pids"])})
    found.sizes.append(
        {
            **memory(notebook),
            "job": int(told["memory"]),
            "keeper of the job": resident_bytes([int(told["keeper_pid"])]),
            "store": Store(Path(os.environ["GPUCKPT_STORE"])).used(),
        }
    )
    for log in (notebook.folder / "keeper.log", folder_of("soaked").path / "keeper.log"):
        assert log.stat().st_size <= 2 << 20
    assert keeper_pid(notebook)


def _at_rest(found: Soak, notebook: Notebook, folder: Path, clients: int) -> dict[str, Any]:
    """Count, once that is as it was before, or after a while of waiting for it: threads and connections come and go."""
    # The first time, not all is set up yet.
    before = found.counts[-1] if len(found.counts) > 1 else None
    deadline = time.monotonic() + _REST
    while True:
        counted = look(notebook, folder, clients)
        grown = before is not None and any(is_more(value, before[name]) for name, value in counted.items())
        if not grown or time.monotonic() > deadline:
            return counted
        time.sleep(0.1)


def main() -> int:
    """Soak as the command line says, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=1000, help="saves and restores of the kernel")
    parser.add_argument("--minutes", type=float, default=120, help="how long at least")
    parser.add_argument("--round", type=int, default=10, help="how many cycles between two looks")
    parser.add_argument("--json", type=Path, help="where to write what was found")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpuckpt-soak-") as name:
        folder = Path(name)
        for variable, part in (
            ("JUPYTER_RUNTIME_DIR", "runtime"),
            ("GPUCKPT_STORE", "store"),
            ("GPUCKPT_KEYS", "keys"),
            ("GPUCKPT_LOGS", "logs"),
            ("IPYTHONDIR", "ipython"),
        ):
            os.environ[variable] = str(folder / part)
        rounds = -(-args.cycles // args.round)
        began = time.monotonic()
        found = soak(folder, rounds, args.round, lambda text: print(text, flush=True), args.minutes * 60)
        minutes = (time.monotonic() - began) / 60
    faults = found.faults()
    cycles = len(found.counts) * args.round
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    print(f"\n{now}, {os.cpu_count()} cores, {platform.system()} {platform.release()}")
    print(f"{cycles:,} cycles in {minutes:,.0f} minutes, {found.seconds[-1]:.2f} s each\n")
    print(
        "| | after the first quarter | at the end | slope, bytes a cycle | allowed |\n| --- | --- | --- | --- | --- |"
    )
    first = found.sizes[int(len(found.sizes) * _FIRST)]
    for size, slope in found.slopes().items():
        last = found.sizes[-1][size]
        print(f"| {size} | {first[size] / 1e6:,.1f} MB | {last / 1e6:,.1f} MB | {slope:,.0f} | {LIMITS[size]:,} |")
    print(f"\nCounted each time: {found.counts[-1]}")
    if args.json:
        args.json.write_text(json.dumps({"sizes": found.sizes, "counts": found.counts, "faults": faults}, indent=1))
    print("\n" + ("\n".join(faults) if faults else "Nothing grows."))
    return 1 if faults else 0


if __name__ == "__main__":
    assert run("--version").status == 0
    sys.exit(main())
