"""One Slurm for the tests of a file; each begins with idle nodes and empty homes, and leaves nothing on them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
from cluster_hosts import USERS
from counting import Counting
from notebooks import wait_until
from slurm_cluster import NODES, Cluster

PROGRAMS = ("slurmctld", "slurmd", "munged", "ip", "nsenter", "setpriv")


@pytest.fixture(scope="module")
def whole_cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The cluster, which takes two seconds to come up; a file's `SLURM_CONF` are values in place of the recipe's."""
    missing = [name for name in PROGRAMS if shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin") is None]
    assert not missing, f"{', '.join(missing)}: not installed; `make test-slurm` installs them"
    assert os.geteuid() == 0, "hosts of their own take root"
    cluster = Cluster(**getattr(request.module, "SLURM_CONF", {}))
    yield cluster
    cluster.close()


@pytest.fixture
def cluster(whole_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, for one test: what it leaves is an error."""
    cluster = whole_cluster
    before = {name: cluster.hosts[name].mounts() for name in NODES}
    yield cluster
    try:
        cluster.tidy()
        for node in map(cluster.hosts.__getitem__, NODES):
            wait_until(lambda node=node: not node.processes("alice"), what="a user's processes are left")
            assert node.mounts() == before[node.name]
            assert node.does("find", "/tmp", "/dev/shm", "-mindepth", "1", "-user", "alice") == ""
    finally:
        for user, uid in USERS.items():
            home = cluster.hosts.homes / user
            shutil.rmtree(home)
            home.mkdir(mode=0o700)
            os.chown(home, uid, uid)


@pytest.fixture
def counting(cluster: Cluster) -> Counting:
    """The program that counts."""
    return Counting(cluster)
