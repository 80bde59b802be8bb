"""`run` in jobs of a real Slurm: whatever stops a job, it goes on, and no step is lost or done twice."""

from __future__ import annotations

import os
import signal

import pytest
from counting import PROGRAM, Counting, batch_script
from notebooks import wait_until
from slurm_cluster import NODES, Cluster, Job


def test_requeued_it_goes_on_on_the_other_node(cluster: Cluster, counting: Counting) -> None:
    job = counting.submitted()
    first = job.node
    cluster.drained(first)
    job.requeued()
    job.starts_again()
    counting.counts(job, on=cluster.other(first))
    counting.let_end()
    job.wait_for("COMPLETED")
    counting.assert_none_lost_or_twice(first, cluster.other(first))
    counting.assert_written_once(job)


def test_by_srun_it_is_saved_as_well(cluster: Cluster, counting: Counting) -> None:
    job = counting.submitted("--signal=USR1@60", script=batch_script().replace("exec jupyter", "srun jupyter"))
    first = job.node
    cluster.drained(first)
    job.requeued()
    job.starts_again()
    counting.counts(job, on=cluster.other(first))
    counting.let_end()
    job.wait_for("COMPLETED")
    counting.assert_none_lost_or_twice(first, cluster.other(first))
    assert "nothing will be saved" not in job.output()


def test_preempted_it_makes_way_and_goes_on(cluster: Cluster, counting: Counting) -> None:
    job = counting.submitted("--cpus-per-task=2")
    first = job.node
    urgent = cluster.submits("#!/bin/sh\nsleep 1000", "-p", "urgent", "-c2", "-w", first, user="bob")
    urgent.wait_for("RUNNING")
    job.starts_again()
    counting.counts(job, on=cluster.other(first))
    counting.let_end()
    job.wait_for("COMPLETED")
    counting.assert_none_lost_or_twice(first, cluster.other(first))
    counting.assert_written_once(job)
    assert urgent.state == "RUNNING"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["told before", "at the end", "at the end, by srun"])
def test_at_its_time_limit_it_is_queued_again(cluster: Cluster, counting: Counting, how: str) -> None:
    told = "--signal=B:USR1@30" if how == "told before" else "--signal=B:CONT@1"
    script = batch_script().replace("exec ", "srun ") if "srun" in how else batch_script()
    job = counting.submitted("--time=1", told, script=script)
    first = job.node
    cluster.drained(first)
    wait_until(lambda: int(job.shown()["Restarts"]) == 1, timeout=180)
    job.starts_again()
    counting.counts(job, on=cluster.other(first))
    counting.let_end()
    job.wait_for("COMPLETED")
    counting.assert_none_lost_or_twice(first, cluster.other(first))


@pytest.mark.parametrize("options", [(), ("--full",), ("--signal=KILL",)])
def test_cancelled_it_leaves_nothing_but_a_snapshot_to_go_on_with(
    cluster: Cluster, counting: Counting, options: tuple[str, ...]
) -> None:
    job = counting.submitted()
    node = cluster.hosts[job.node]
    cluster.asks("scancel", *options, job.id, user="alice")
    job.wait_for("CANCELLED")
    wait_until(lambda: not node.processes("alice"), what="processes are left")
    assert cluster.snapshots() == ["hibernated-train"]
    again = counting.submitted()
    counting.let_end()
    again.wait_for("COMPLETED")
    counting.assert_none_lost_or_twice()
    assert cluster.snapshots() == []


def test_it_ends_with_the_status_of_its_program(cluster: Cluster, counting: Counting) -> None:
    job = counting.submitted()
    counting.let_end(7)
    job.wait_for("FAILED")
    assert job.shown()["ExitCode"] == "7:0"


def test_what_is_not_to_be_queued_again_is_not(cluster: Cluster, counting: Counting) -> None:
    job = counting.submitted("--no-requeue")
    cluster.asks("scancel", "--batch", "--signal=USR1", job.id, user="alice")
    job.wait_for("FAILED")
    assert "it was submitted without --requeue" in job.output()
    again = counting.submitted()
    counting.let_end()
    again.wait_for("COMPLETED")
    counting.assert_none_lost_or_twice()


def test_a_second_signal_waits_for_the_first(cluster: Cluster, counting: Counting) -> None:
    job = counting.submitted()
    for name in ("USR1", "TERM", "USR1"):
        cluster.asks("scancel", "--batch", f"--signal={name}", job.id, user="alice", check=False)
    job.starts_again()
    counting.counts(job)
    counting.let_end()
    job.wait_for("COMPLETED")
    counting.assert_none_lost_or_twice()
    assert job.shown()["Restarts"] == "1"


def test_each_task_of_an_array_goes_on_with_its_own(cluster: Cluster) -> None:
    script = batch_script().replace("run train", "run train-$SLURM_ARRAY_TASK_ID")
    script = script.replace("train.py", "train.py train-$SLURM_ARRAY_TASK_ID")
    tasks = [Counting(cluster, f"train-{n}") for n in range(2)]
    job = cluster.submits(script, "--array=0-1")
    jobs = [Job(cluster, f"{job.id}_{n}", "alice") for n in range(2)]
    for task in tasks:
        wait_until(lambda task=task: len(task.steps()) > 5)  # type: ignore[misc]
    for one in jobs:
        one.requeued()
    for one, task in zip(jobs, tasks, strict=True):
        one.starts_again()
        task.counts(one)
        task.let_end()
        one.wait_for("COMPLETED")
        task.assert_none_lost_or_twice()


_GPUS = """
import errno, os, socket, threading, time
def is_given(number):
    try:
        os.close(os.open(f"{folder}/gpu{{number}}", os.O_RDONLY))
    except OSError as e:
        return e.errno == errno.ENXIO  # there is no such device; to one of others, it is EPERM
def look():
    while True:
        with open("half", "w") as file:
            print([number for number in range(2) if is_given(number)], file=file)
        os.replace("half", f"given-{{socket.gethostname()}}")
        time.sleep(0.1)
threading.Thread(target=look, daemon=True).start()
exec(open("count.py").read())
"""


def test_it_goes_on_with_the_gpu_that_slurm_gave_the_new_job(cluster: Cluster, counting: Counting) -> None:
    (counting.home / "count.py").write_text(PROGRAM)
    (counting.home / "train.py").write_text(_GPUS.format(folder=cluster.folder))
    other = cluster.submits("#!/bin/sh\nexec sleep 1000", "--gres=gpu:1", "-w", NODES[1], user="bob")
    other.wait_for("RUNNING")  # it has GPU 0 there
    job = counting.submitted("--gres=gpu:1", "-w", NODES[0])
    wait_until(lambda: (counting.home / f"given-{NODES[0]}").exists())
    cluster.drained(NODES[0])
    job.requeued()
    job.wait_for("PENDING")
    cluster.asks("scontrol", "update", f"JobId={job.id}", f"ReqNodeList={NODES[1]}")
    job.starts_again()
    counting.counts(job, on=NODES[1])
    wait_until(lambda: (counting.home / f"given-{NODES[1]}").exists())
    given = [(counting.home / f"given-{node}").read_text().strip() for node in NODES]
    assert given == ["[0]", "[1]"]
    counting.let_end()
    job.wait_for("COMPLETED")
    counting.assert_none_lost_or_twice(*NODES)


@pytest.mark.slow
def test_a_node_that_dies_costs_what_came_after_the_last_save(cluster: Cluster, counting: Counting) -> None:
    job = counting.submitted(script=batch_script().replace("run train", "run train --every 1"))
    wait_until(lambda: "running-train" in cluster.snapshots())
    saved_at = len(counting.steps())
    wait_until(lambda: len(counting.steps()) > saved_at + 100)  # it is saved again meanwhile
    node = cluster.hosts[job.node]
    node.kill()
    taken = len(counting.steps())
    wait_until(lambda: int(job.shown()["Restarts"]) == 1, timeout=180)
    job.starts_again()
    counting.counts(job, on=cluster.other(node.name))
    cluster.boot(node)
    assert counting.steps()[taken].number > 1
    counting.let_end()
    job.wait_for("COMPLETED")
    counting.assert_none_lost_or_twice(deaths=[taken])


@pytest.mark.slow
def test_on_a_node_that_was_only_taken_for_dead_the_job_ends_once_it_runs_elsewhere(
    cluster: Cluster, counting: Counting
) -> None:
    job = counting.submitted(script=batch_script().replace("run train", "run train --every 2"))
    wait_until(cluster.snapshots)
    node = cluster.hosts[job.node]
    (daemon,) = node.pids("slurmd -N")
    os.kill(daemon, signal.SIGKILL)
    wait_until(lambda: int(job.shown()["Restarts"]) == 1, timeout=180)
    assert node.processes("alice")
    job.starts_again()
    other = cluster.other(node.name)
    counting.counts(job, on=other)
    wait_until(lambda: not node.processes("alice"), what="it runs twice")
    cluster.starts_daemon(node)
    counting.counts(job, on=other)
    counting.let_end()
    job.wait_for("COMPLETED")
    steps = counting.steps()
    elsewhere = [n for n, step in enumerate(steps) if step.host == other]
    assert [step.number for step in steps[elsewhere[0] :] if step.host == other] == list(
        range(steps[elsewhere[0]].number, steps[-1].number + 1)
    )
    assert len({step.secret for step in steps}) == 1
    assert cluster.snapshots() == []
