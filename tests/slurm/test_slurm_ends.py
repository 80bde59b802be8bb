"""What is left when a job ends of which Slurm does not find all processes, and of one without enough time."""

from __future__ import annotations

import os
import signal

import pytest
from counting import PROGRAM, Counting
from notebooks import wait_until
from slurm_cluster import Cluster

SLURM_CONF = {"ProctrackType": "proctrack/linuxproc", "TaskPlugin": "task/none", "KillWait": "5"}

_EXEC = """#!/bin/bash
jupyter gpuckpt exec train -- python -u train.py
sleep 1000
"""
_KERNEL = """#!/bin/bash
exec python - <<'END'
import pathlib, time
from jupyter_client import KernelManager
manager = KernelManager(kernel_name="python3-gpuckpt", connection_file=str(pathlib.Path("connection.json").absolute()))
manager.start_kernel(independent=True)
client = manager.client()
client.start_channels()
client.wait_for_ready(timeout=60)
pathlib.Path("started").touch()
time.sleep(1000)
END
"""
_GROWING = """
import os, threading, time
kept = []
def grow():
    while not os.path.exists("grow"): time.sleep(0.1)
    kept.extend(os.urandom(1 << 20) for _ in range(2500))
    open("grown", "w").close()
threading.Thread(target=grow, daemon=True).start()
exec(open("count.py").read())
"""


def test_jobs_end_with_their_slurm_job_and_are_saved(cluster: Cluster, counting: Counting) -> None:
    job = counting.submitted(script=_EXEC)
    wait_until(lambda: "Started job train" in job.output())
    node = cluster.hosts[job.node]
    cluster.asks("scancel", job.id, user="alice")
    wait_until(lambda: not node.processes("alice"), what="processes are left")
    assert cluster.snapshots() == ["hibernated-train"]


def test_kernels_end_with_their_slurm_job_and_are_saved(cluster: Cluster) -> None:
    job = cluster.submits(_KERNEL)
    wait_until(lambda: (cluster.hosts.homes / "alice" / "started").exists())
    node = cluster.hosts[job.node]
    cluster.asks("scancel", job.id, user="alice")
    wait_until(lambda: not node.processes("alice"), what="processes are left")
    (snapshot,) = cluster.snapshots()
    assert "hibernated-" in snapshot


@pytest.mark.parametrize("how", ["asked", "killed"])
def test_run_ends_with_its_slurm_job_and_is_saved(cluster: Cluster, counting: Counting, how: str) -> None:
    job = counting.submitted()
    node = cluster.hosts[job.node]
    if how == "killed":
        for pid in node.pids("jupyter-gpuckpt run train"):
            os.kill(pid, signal.SIGKILL)
    cluster.asks("scancel", job.id, user="alice")
    wait_until(lambda: not node.processes("alice"), what="processes are left")
    assert cluster.snapshots() == ["hibernated-train"]
    again = counting.submitted()
    counting.let_end()
    again.wait_for("COMPLETED")
    counting.assert_none_lost_or_twice()


def test_what_cannot_be_saved_before_slurm_kills_it_is_told_to_end_and_goes_on_with_the_last_save(
    cluster: Cluster, counting: Counting
) -> None:
    (counting.home / "count.py").write_text(PROGRAM)
    (counting.home / "train.py").write_text(_GROWING)
    job = counting.submitted("--mem=3900")
    node = cluster.hosts[job.node]
    node.does("jupyter", "gpuckpt", "save", "train", "running-train", user="alice")
    (counting.home / "grow").touch()
    wait_until(lambda: (counting.home / "grown").exists())
    (counting.home / "grow").unlink()
    cluster.drained(node.name)
    job.requeued()
    job.starts_again()
    taken = len(counting.steps())
    assert "could not be saved in time" in job.output()
    assert "KillWait is 5 s" in job.output()
    counting.counts(job, on=cluster.other(node.name))
    counting.let_end()
    job.wait_for("COMPLETED")
    counting.assert_none_lost_or_twice(deaths=[taken])
