"""GPU programs saved and restored, the plain way and ours in one run, taking turns: ``python -m benchmarks.programs``.

For each of `benchmarks.gpu_programs`: for how long a save pauses it, how long it takes from asking for a restore until
the next cell is answered, what NVML says that it has on the GPUs, and the bytes on disk. Every byte of its state is
compared after every save and every restore, and what the next two steps return after a restore with what they returned
after the save. Where a GPU has no room for both kernels and a restore, only one is alive at a time, and starts anew for
each round.

With ``--steps``: how long a step takes in a kernel of ours as it is, and with GPUCKPT_PARKING=off.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import math
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from jupyter_gpuckpt.freeze.cuda_messages import Gpu
from jupyter_gpuckpt.freeze.nvml import Nvml

from .gpu_programs import PROGRAMS, Program
from .ours import OurKernel
from .plain import PlainKernel

_WAYS = ("plain", "ours")
_STEPPED = ("training", "jax", "cupy")
HEAD = ("program", *(f"{what}: {way}" for what in ("frozen", "first cell", "on the GPU", "on disk") for way in _WAYS))
_TIMED = """
import time
def step_seconds(count):
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return seconds
"""


@dataclass
class Row:
    """One program's figures by the way, of those that succeeded: medians, in seconds; sizes in bytes."""

    program: str
    size: int
    """What it was told to hold on each GPU."""
    frozen: dict[str, float] = field(default_factory=dict)
    first_cell: dict[str, float] = field(default_factory=dict)
    on_gpu: dict[str, int] = field(default_factory=dict)
    on_disk: dict[str, int] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        times, sizes = (self.frozen, self.first_cell), (self.on_gpu, self.on_disk)
        cells = [self.program]
        cells += [self._cell(each, way, lambda value: f"{value:.3f} s") for each in times for way in _WAYS]
        cells += [self._cell(each, way, lambda value: f"{value / 1e6:,.0f} MB") for each in sizes for way in _WAYS]
        return f"| {' | '.join(cells)} |"

    def _cell(self, figures: Mapping[str, float], way: str, text: Callable[[float], str]) -> str:
        return text(figures[way]) if way in figures else "failed" if way in self.errors else "-"


class Changed(Exception):
    """A program's state is not what it was, or its next steps return something else."""


class _Side:
    """One way of one program: its kernel, while it has one, and what was measured."""

    def __init__(self, way: str, setup: str, start: Callable[[], PlainKernel | OurKernel]) -> None:
        self.way, self._setup, self._start = way, setup, start
        self._kernel: PlainKernel | OurKernel | None = None
        self.frozen: list[float] = []
        self.paused = 0.0
        self.first_cell: list[float] = []
        self.on_gpu = self.on_disk = 0

    def cycle(self) -> None:
        """Save and restore once, and compare.

        Raises
        ------
        Changed : what came back is not what was there.
        """
        if self._kernel is None:
            self._kernel = self._start()
            self._kernel.run(self._setup)
            self._value("digest()")  # the memory that this takes counts for both
            self.on_gpu = _held_by(self._kernel.pid())
        kernel, before = self._kernel, self._value("digest()")
        saved = kernel.save()
        self.frozen.append(saved[0])
        self.paused = kernel.paused if isinstance(kernel, OurKernel) else saved[0]
        self.on_disk = int(saved[-1])
        self._same("digest()", before, "after a save")
        steps = self._next_steps()
        self.first_cell.append(kernel.restore())
        self._same("digest()", before, "after a restore")
        if (found := self._next_steps()) != steps:
            raise Changed(f"after a restore, the next steps return {found} instead of {steps}")
        if isinstance(kernel, PlainKernel):
            kernel.forget()

    def _next_steps(self) -> str:
        assert self._kernel is not None
        self._kernel.run("steps = [step(), step()]")
        return self._value("steps")

    def _same(self, expression: str, expected: str, when: str) -> None:
        if (found := self._value(expression)) != expected:
            raise Changed(f"{when}, {expression} is {found} instead of {expected}")

    def _value(self, expression: str) -> str:
        assert self._kernel is not None
        # What the plain way's kernel prints can be lost: its client's second socket may come back later than the first.
        return self._kernel.run(f"print({expression})") or self._kernel.run(f"print({expression})")

    def close(self, timings: bool = False) -> None:
        """End the kernel, if there is one."""
        kernel, self._kernel = self._kernel, None
        if isinstance(kernel, OurKernel) and timings:
            print(*kernel.timings(), sep="\n", file=sys.stderr, flush=True)
        if kernel is not None:
            kernel.close()


def _held_by(pid: int) -> int:
    """Return how many bytes a process has on all GPUs, as NVML says."""
    return sum(usage.bytes or 0 for usage in Nvml().usage() if usage.pid == pid)


def measure(program: Program, size: int, rounds: int, ways: Sequence[str], alone: bool, timings: bool = False) -> Row:
    """Run one program with so many bytes on each GPU; a way that fails is left out from then on, and the row says so.

    Where it runs `alone`, a kernel ends before another starts. With `timings`, what the steps of our restores took is
    printed when the kernel ends.
    """
    row = Row(program.name, size)
    with tempfile.TemporaryDirectory(prefix="gpuckpt-bench-") as folder:
        os.environ["GPUCKPT_STORE"] = str(Path(folder, "store"))
        os.environ["IPYTHONDIR"] = str(Path(folder, "ipython"))
        starts: dict[str, Callable[[], PlainKernel | OurKernel]]
        starts = {"plain": lambda: PlainKernel(Path(folder)), "ours": OurKernel}
        sides = [_Side(way, program.setup(size), starts[way]) for way in ways]
        try:
            for _ in range(rounds):
                for side in sides:
                    if side.way not in row.errors:
                        _try(side, row, alone, timings)
        finally:
            for side in sides:
                side.close(timings)
    for side in sides:
        if side.way not in row.errors:
            row.frozen[side.way] = statistics.median(side.frozen)
            row.first_cell[side.way] = statistics.median(side.first_cell)
            row.on_gpu[side.way], row.on_disk[side.way] = side.on_gpu, side.on_disk
    return row


def _try(side: _Side, row: Row, alone: bool, timings: bool) -> None:
    try:
        side.cycle()
    except Exception as e:  # noqa: BLE001 - the other way and the other programs are measured all the same
        row.errors[side.way] = _one_line(e)
        with contextlib.suppress(Exception):  # it may have lost its kernel
            side.close()
        return
    if alone:
        side.close(timings)
    figures = (
        f"frozen {side.frozen[-1]:.3f} s (its threads {side.paused:.3f} s), first cell {side.first_cell[-1]:.3f} s"
    )
    print(f"  {row.program}, {side.way}: {figures}, all is the same", file=sys.stderr, flush=True)


@dataclass
class Steps:
    """How long a program's step takes in a kernel of ours, in milliseconds: medians."""

    program: str
    size: int
    with_library: float
    without: float
    percent: float
    """By how much it is longer with the library: the mean of the turns' differences."""
    give_or_take: float
    """The standard error of that."""

    def __str__(self) -> str:
        times = f"{self.with_library:.3f} ms with the library, {self.without:.3f} ms without"
        return f"{self.program}: a step takes {times}: {self.percent:+.2f} %, give or take {self.give_or_take:.2f} %"


def measure_steps(program: Program, size: int, turns: int, count: int) -> Steps:
    """Have two kernels of a program, with the library and without it, take turns of so many steps."""
    seconds: tuple[list[list[float]], list[list[float]]] = ([], [])
    with contextlib.ExitStack() as held:
        kernels = []
        for environment in ({}, {"GPUCKPT_PARKING": "off"}):
            kernel = OurKernel(environment)
            held.callback(kernel.close)
            kernel.run(program.setup(size) + _TIMED + f"step_seconds({count})")
            kernels.append(kernel)
        for _ in range(turns):
            for kernel, own in zip(kernels, seconds, strict=True):
                own.append(json.loads(kernel.run(f"print(step_seconds({count}))")))
    with_library, without = ([statistics.median(turn) for turn in each] for each in seconds)
    percents = [100 * (a / b - 1) for a, b in zip(with_library, without, strict=True)]
    return Steps(
        program.name,
        size,
        1e3 * statistics.median(itertools.chain(*seconds[0])),
        1e3 * statistics.median(itertools.chain(*seconds[1])),
        statistics.mean(percents),
        statistics.stdev(percents) / math.sqrt(turns),
    )


def _fits(gpus: Sequence[Gpu], program: Program, size: int) -> bool:
    """Tell whether both kernels, and what is restored beside one of them, have room at once."""
    kernel = int(1.5 * size) + (1 << 30)  # frameworks take more than what a program keeps
    return not program.takes_all and all(2 * kernel + size < gpu.free for gpu in gpus[: program.gpus])


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _measured(program: Program, size: int, gpus: Sequence[Gpu], args: argparse.Namespace) -> Row | Steps:
    if args.steps:
        return measure_steps(program, size, args.turns, args.count)
    ways = _WAYS[1:] if args.ours else _WAYS
    alone = not _fits(gpus, program, size)
    return measure(program, size, args.rounds, ways, alone=alone, timings=args.timings)


def main() -> int:
    """Measure and print a table for docs/benchmarks.md; return 1 where something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PROGRAMS)}; all without one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ours", action="store_true", help="leave the plain way out")
    parser.add_argument("--timings", action="store_true", help="tell what each step of our restores took")
    parser.add_argument("--steps", action="store_true", help=f"measure steps, of {', '.join(_STEPPED)} without a NAME")
    parser.add_argument("--turns", type=int, default=20, help="with --steps: how often the kernels take turns")
    parser.add_argument("--count", type=int, default=10, help="with --steps: how many steps a turn has")
    parser.add_argument("--size", type=float, metavar="GIB", help="what to hold on each GPU, for a try")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the rows to this file, as lines of JSON")
    args = parser.parse_args()
    if args.rounds < 1 or args.turns < 2:
        parser.error("at least 1 round and 2 turns are needed")
    if unknown := set(args.names) - set(PROGRAMS):
        parser.error(f"there is no {', '.join(sorted(unknown))}: there are {', '.join(PROGRAMS)}")
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    gpus = Nvml().gpus()
    on = ", ".join(gpu.name for gpu in gpus) or "no GPU"
    medians = f"{args.turns} turns" if args.steps else f"medians of {args.rounds}"
    print(f"{now}, {os.cpu_count()} cores, {on}, {platform.system()} {platform.release()}, {medians}")
    if not args.steps:
        print(f"| {' | '.join(HEAD)} |\n|{' --- |' * len(HEAD)}", flush=True)
    failed = False
    for name in args.names or (_STEPPED if args.steps else PROGRAMS):
        program = PROGRAMS[name]
        # Without a GPU, a size is for a try on the CPU.
        if reason := program.lacks(len(gpus) if gpus or args.size is None else program.gpus):
            print(f"{name}: left out: {reason}", file=sys.stderr, flush=True)
            continue
        size = program.size if args.size is None else int(args.size * 2**30)
        size = min([size, *(int(0.4 * gpu.total) for gpu in gpus)])
        try:
            measured = _measured(program, size, gpus, args)
        except Exception as e:  # noqa: BLE001 - the other programs are measured all the same
            print(f"{name}: {_one_line(e)}", file=sys.stderr, flush=True)
            failed = True
            continue
        if isinstance(measured, Row):
            for way, error in measured.errors.items():
                print(f"{name}, {way}: {error}", file=sys.stderr, flush=True)
                failed = True
        print(measured, flush=True)
        if args.json:
            with args.json.open("a") as rows:
                rows.write(json.dumps(asdict(measured)) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
