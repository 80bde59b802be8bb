"""Servers that are jobs of Slurm's: a notebook goes on where the next one runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hub import PATIENCE, Hub, Server
from notebooks import wait_until

from jupyter_gpuckpt import settings

sys.path.append(str(Path(__file__).parents[1] / "slurm"))
from cluster_hosts import Host
from slurm_cluster import NODES, Cluster

_BIN = Path(sys.executable).parent
_CONFIG = """
import batchspawner
c.JupyterHub.hub_ip = "0.0.0.0"
c.JupyterHub.hub_connect_ip = "{address}"
c.JupyterHub.spawner_class = "batchspawner.SlurmSpawner"
c.BatchSpawnerBase.start_timeout = 180
c.BatchSpawnerBase.req_memory = "3500"
c.BatchSpawnerBase.exec_prefix = "/usr/sbin/runuser -u {{username}} --"
c.SlurmSpawner.batchspawner_singleuser_cmd = "{bin}/batchspawner-singleuser"
c.Spawner.environment.update({{"PATH": "{bin}:/usr/bin:/bin", "JUPYTER_RUNTIME_DIR": {runtime}}})
"""
_BEGIN = "import os, socket; secret = os.urandom(4).hex(); print(secret)"


@dataclass
class _Place:
    folder: Path
    entering: list[str]
    environment: dict[str, str]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(GraceTime="3")
    yield cluster
    cluster.close()


@pytest.fixture
def hub(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Hub]:
    """A hub on the controller's host, which this thread sees the network of; its parameter is more configuration."""
    host: Host = cluster.controller
    with host.joined():
        runtime = 'lambda spawner: f"/tmp/jupyter-{spawner.user.name}"'
        config = _CONFIG.format(address=host.address, bin=_BIN, runtime=runtime) + getattr(request, "param", "")
        environment = {"GPUCKPT_CRIU_PREFIX": str(settings.criu_prefix())}
        folder = cluster.hosts.folder / "hubs"
        folder.mkdir(exist_ok=True)
        hub = Hub(_Place(folder, host.entering(), environment), config=config)
        yield hub
        hub.close()
    cluster.tidy()


def _node(cluster: Cluster) -> str:
    """Return where alice's server runs."""
    return cluster.asks("squeue", "-h", "--user=alice", "-o", "%N").strip()


def _moves(cluster: Cluster, hub: Hub) -> Server:
    """Stop alice's server, and start it on the other node."""
    node = _node(cluster)
    cluster.drained(node)
    hub.stop("alice")
    wait_until(lambda: not cluster.asks("squeue", "-h", "--user=alice"))
    assert not cluster.hosts[node].processes("alice")
    alice = hub.start("alice")
    assert _node(cluster) == cluster.other(node)
    cluster.drained(node, resume=True)
    return alice


def test_a_notebook_goes_on_on_the_other_node(cluster: Cluster, hub: Hub) -> None:
    alice = hub.start("alice")
    node, secret = _node(cluster), alice.run(_BEGIN)
    for _ in NODES:
        alice = _moves(cluster, hub)
        assert alice.run("print(secret)") == secret
        assert f" on {node}; resumed " in alice.run("%gpuckpt status")
        node = cluster.other(node)


def _goes_on_elsewhere(cluster: Cluster, hub: Hub, node: str, secret: str) -> None:
    """Check that alice's server is no more on a node, and that what she had comes back with it on the other."""
    hub.wait_until_stopped("alice")
    cluster.drained(node)
    wait_until(lambda: not cluster.hosts[node].processes("alice"), PATIENCE, "processes are left")
    alice = hub.start("alice")
    assert _node(cluster) == cluster.other(node)
    assert alice.run("print(secret)") == secret
    assert f" on {node}; resumed " in alice.run("%gpuckpt status")
    cluster.drained(node, resume=True)


def test_a_server_that_is_preempted_leaves_its_kernels_to_the_next(cluster: Cluster, hub: Hub) -> None:
    alice = hub.start("alice")
    node, secret = _node(cluster), alice.run(_BEGIN)
    urgent = "#!/bin/sh\nsleep 1000\n"
    job = cluster.submits(urgent, "--partition=urgent", f"--nodelist={node}", "--cpus-per-task=2", user="bob")
    job.wait_for("RUNNING")
    _goes_on_elsewhere(cluster, hub, node, secret)


@pytest.mark.parametrize("hub", ['c.BatchSpawnerBase.req_runtime = "1"\n'], indirect=True)
def test_a_server_at_its_time_limit_leaves_its_kernels_to_the_next(cluster: Cluster, hub: Hub) -> None:
    alice = hub.start("alice")
    node, secret = _node(cluster), alice.run(_BEGIN)
    wait_until(lambda: not cluster.asks("squeue", "-h", "--user=alice"), PATIENCE, "the limit is not kept")
    _goes_on_elsewhere(cluster, hub, node, secret)


def test_a_gigabyte_that_is_opened_on_the_other_node_answers_soon(cluster: Cluster, hub: Hub) -> None:
    hub.start("alice").run("import os; much = os.urandom(1_000_000_000)")
    alice = _moves(cluster, hub)
    began = time.monotonic()
    assert alice.run("print(len(much))") == "1000000000"
    took = time.monotonic() - began
    print(f"a notebook of 1 GB on the other node: {took:.1f} s from opening it to the answer of its next cell")
    assert took < PATIENCE
