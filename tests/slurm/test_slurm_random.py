"""A job of a real Slurm that is stopped in all ways, one after the other, and loses no step and does none twice.

`GPUCKPT_TEST_SLURM_STOPS` says how often; `-s` shows how long each took.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable

import pytest
from counting import Counting, batch_script
from notebooks import wait_until
from slurm_cluster import Cluster, Job

_STOPS = int(os.environ.get("GPUCKPT_TEST_SLURM_STOPS", "5"))
_SHARES = {"requeued": 20, "preempted": 15, "at its limit": 5, "node died": 10}
_SLURM_WAITS = 300.0  # seconds: for a node that does not answer, and between two looks at time limits


class _Stopping:
    """The ways to stop a job; each returns when Slurm has it queued again."""

    def __init__(self, cluster: Cluster, counting: Counting, job: Job) -> None:
        self._cluster, self._counting, self._job = cluster, counting, job
        self.ways: dict[str, Callable[[str], None]] = {
            "requeued": self._requeue,
            "preempted": self._preempt,
            "at its limit": self._limit,
            "node died": self._kill_node,
        }
        self.deaths: list[int] = []

    def stop(self, way: str) -> None:
        restarts = int(self._job.shown()["Restarts"])
        self.ways[way](self._job.node)
        wait_until(lambda: int(self._job.shown()["Restarts"]) > restarts, timeout=_SLURM_WAITS)
        self._job.wait_for("PENDING")

    def _requeue(self, node: str) -> None:
        self._cluster.drained(node)
        self._job.requeued()

    def _preempt(self, node: str) -> None:
        urgent = ("-p", "urgent", "-c2", "-w", node)
        self._cluster.submits("#!/bin/sh\nexec sleep 1000", *urgent, user="bob")

    def _limit(self, node: str) -> None:
        self._cluster.drained(node)
        self._cluster.asks("scontrol", "update", f"JobId={self._job.id}", "TimeLimit=1", user="alice")

    def _kill_node(self, node: str) -> None:
        self._cluster.hosts[node].kill()
        self.deaths.append(len(self._counting.steps()))

    def tidy(self, way: str, node: str) -> None:
        """Have the node take jobs again; check that nothing was left on it."""
        if way == "node died":
            self._cluster.boot(self._cluster.hosts[node])
        host = self._cluster.hosts[node]
        wait_until(lambda: not host.processes("alice"), what="processes are left")
        if way == "preempted":
            self._cluster.asks("scancel", "--user=bob")
        elif way == "at its limit":
            self._cluster.asks("scontrol", "update", f"JobId={self._job.id}", "TimeLimit=UNLIMITED")
        if way in ("requeued", "at its limit"):
            self._cluster.drained(node, resume=True)
        wait_until(lambda: self._cluster.asks("sinfo", "-hNo", "%T", "-n", node).split()[0] == "idle", timeout=120)


@pytest.mark.slow
@pytest.mark.timeout(300 + 180 * _STOPS)
def test_stopped_in_all_ways_it_loses_no_step_and_does_none_twice(cluster: Cluster, counting: Counting) -> None:
    seed = random.randrange(1 << 30)
    chosen = random.Random(seed)
    print(f"\nseed {seed}")
    script = batch_script().replace("run train", "run train --every 2").replace("exec ", "date +%s.%N >> starts\nexec ")
    job = counting.submitted("--cpus-per-task=2", script=script)
    wait_until(cluster.snapshots, what="it is not saved")  # a node that died before would have it begin afresh
    stopping = _Stopping(cluster, counting, job)
    begun = list(_SHARES)[:_STOPS]
    ways = begun + chosen.choices(list(_SHARES), list(_SHARES.values()), k=_STOPS - len(begun))
    chosen.shuffle(ways)
    own: dict[str, list[float]] = {way: [] for way in _SHARES}
    for number, way in enumerate(ways, 1):
        time.sleep(chosen.uniform(0, 3))
        node, taken = job.node, len(counting.steps())
        began = time.time()
        stopping.stop(way)
        queued = time.time()
        job.starts_again()
        counting.counts(job, on=cluster.other(node))
        first = next(step for step in counting.steps()[taken:] if step.host != node)
        started = float((counting.home / "starts").read_text().split()[-1])
        own[way].append((queued - began) + (first.at - started))
        print(
            f"{number}. {way} on {node} at step {counting.steps()[taken - 1].number}: queued again after "
            f"{queued - began:.1f} s; on {first.host} from its start to its next step, {first.number}: "
            f"{first.at - started:.1f} s"
        )
        stopping.tidy(way, node)
    counting.let_end()
    job.wait_for("COMPLETED")
    counting.assert_none_lost_or_twice(deaths=stopping.deaths)
    print(f"{len(counting.steps())} steps, {len(ways)} stops, {len(stopping.deaths)} of them deaths of nodes")
    for way in ("requeued", "preempted"):
        if own[way]:
            print(
                f"{way}: {statistics.median(own[way]):.1f} s (median of {len(own[way])}), at most {max(own[way]):.1f} s"
            )
