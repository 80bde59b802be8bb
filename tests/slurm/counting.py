"""A program that counts its steps in the home that hosts share, as a job of Slurm, and what is checked of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import NamedTuple

from notebooks import wait_until
from slurm_cluster import Cluster, Job

__all__ = ["PROGRAM", "Counting", "Step", "batch_script"]

PROGRAM = """
import os, socket, sys, time
name = sys.argv[1] if len(sys.argv) > 1 else "train"
steps, n, secret = open(f"steps-{name}", "a"), 0, os.urandom(4).hex()
while not os.path.exists(f"gate-{name}"):
    n += 1
    print(n, flush=True)
    print(n, secret, socket.gethostname(), time.time(), file=steps, flush=True)
    time.sleep(0.02)
sys.exit(int(open(f"gate-{name}").read()))
"""


class Step(NamedTuple):
    """A step that was taken: its number, what the process remembers from its beginning, where it was, and when."""

    number: int
    secret: str
    host: str
    at: float


def batch_script() -> str:
    """Return the batch script that users are shown."""
    return resources.files("jupyter_gpuckpt").joinpath("recipes", "slurm-job.sh").read_text()


class Counting:
    """The program in alice's home, by the name of its job of `run`."""

    def __init__(self, cluster: Cluster, name: str = "train") -> None:
        self._cluster, self.name = cluster, name
        self.home = cluster.hosts.homes / "alice"
        self._steps, self._gate = self.home / f"steps-{name}", self.home / f"gate-{name}"
        (self.home / "train.py").write_text(PROGRAM)

    def submitted(self, *options: str, script: str = "") -> Job:
        """Submit it, by the batch script that users are shown or by another; wait until it takes steps."""
        job = self._cluster.submits(script or batch_script(), *options)
        self.counts(job)
        return job

    def steps(self) -> list[Step]:
        """Return the steps that were taken."""
        lines = self._steps.read_text().splitlines() if self._steps.exists() else []
        return [Step(int(n), secret, host, float(at)) for n, secret, host, at in (line.split() for line in lines)]

    def counts(self, job: Job, on: str = "") -> None:
        """Wait until it takes steps, on this host."""
        before = len(self.steps())
        try:
            wait_until(lambda: len([s for s in self.steps()[before:] if on in ("", s.host)]) > 5)
        except AssertionError as e:
            raise AssertionError(f"no steps are taken: {job}") from e

    def let_end(self, status: int = 0) -> None:
        """Have the program end with this status."""
        half = self.home / "half"
        half.write_text(str(status))
        half.replace(self._gate)

    def assert_none_lost_or_twice(self, *hosts: str, deaths: Sequence[int] = ()) -> None:
        """Check that one program has taken all steps, each of them once, on these hosts one after the other.

        `deaths` are how many steps had been taken each time that a node died: the next may repeat an earlier one.
        """
        steps = self.steps()
        assert len({step.secret for step in steps}) == 1
        assert steps[0].number == 1
        for n in range(1, len(steps)):
            before, step = steps[n - 1].number, steps[n].number
            assert step == before + 1 or (n in deaths and 1 < step <= before), f"{before}, then {step}"
        seen = [step.host for n, step in enumerate(steps) if n == 0 or steps[n - 1].host != step.host]
        assert not hosts or seen == list(hosts)

    def assert_written_once(self, job: Job) -> None:
        """Check that the output of a job has each step once, in order."""
        numbers = [int(line) for line in job.output().splitlines() if line.isdecimal()]
        assert numbers == [step.number for step in self.steps()]
