"""Open MPI: two ranks on one machine, as a job."""

from __future__ import annotations

import sys
from pathlib import Path

from job_programs import Job, program

SUMS = """
import os, sys, time
from mpi4py import MPI
import numpy
world = MPI.COMM_WORLD
total = numpy.zeros(100_000)
for step in range(100):
    part = numpy.full(100_000, float(world.rank + step))
    world.Allreduce(part, total)
    (said,) = world.allgather(world.sendrecv(step * world.rank, 1 - world.rank))[:1]
    if world.rank == 0:
        print(step, total[0], said, flush=True)
        while step == 49 and not os.path.exists(sys.argv[1]):
            time.sleep(0.01)
"""


def test_two_ranks_go_on_where_they_were(tmp_path: Path) -> None:
    gate = tmp_path / "open"
    job = Job("mpi")
    source = program(tmp_path, SUMS)
    job.start("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, source, str(gate))
    job.wait_for(50)
    job.save("here")
    gate.touch()
    assert job.wait_for_end() == 0, job.output()
    expected = [f"{step} {2.0 * step + 1} {step}" for step in range(100)]
    assert job.lines() == expected
    for _ in range(2):
        job.restore("here")
        assert job.wait_for_end() == 0, job.output()
        assert job.lines() == expected
