"""One Kubernetes for all tests, with the container image on its nodes; each test begins and ends without pods."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("deploy", "hub", "pods", "slurm"))

from cluster_hosts import Host
from helm_chart import Chart, what_is_missing
from kube_cluster import KERNELS_IMAGE, NODES, PROGRAMS, ROOT, Kubernetes, wait_for
from podman import PAUSE, Podman

_KINDS = "statefulsets,jobs,services,networkpolicies,pods,secrets,persistentvolumeclaims"


@pytest.fixture(scope="session")
def images() -> Iterator[Path]:
    """An archive of the images that the manifests name, with JupyterHub in it, and of what holds a pod's namespaces."""
    missing = [name for name in ("podman", "crun", "debootstrap", "ip", "nsenter") if shutil.which(name) is None]
    assert not missing, f"{', '.join(missing)}: not installed; `make test-kubernetes` installs them"
    assert (PROGRAMS / "bin" / "kubelet").exists(), "Kubernetes is not there; `make test-kubernetes` builds it"
    assert os.geteuid() == 0, "hosts of their own take root"
    named = yaml.safe_load((ROOT / "deploy/kubernetes/jupyterhub/values.yaml").read_text())["singleuser"]["image"]
    image = f"{named['name']}:{named['tag']}"
    podman = Podman(ROOT / ".pods")
    archive = podman.folder / "images.tar"
    try:
        podman.build(image, extras="jupyterhub")
        podman.build_kernels(KERNELS_IMAGE, image)
        podman.saves(archive, image, KERNELS_IMAGE)
    finally:
        podman.close()
    yield archive
    archive.unlink()


@pytest.fixture(scope="session")
def whole_cluster(images: Path) -> Iterator[Kubernetes]:
    cluster = Kubernetes(images, f"{PAUSE}:latest")
    yield cluster
    cluster.close()


@pytest.fixture
def cluster(whole_cluster: Kubernetes) -> Iterator[Kubernetes]:
    """The cluster, for one test, with the seccomp profile that deploy/kubernetes has the nodes get."""
    cluster = whole_cluster
    cluster.applies_kustomization("seccomp", "kube-system")
    cluster.kubectl("rollout", "status", "daemonset/gpuckpt-seccomp", "--namespace=kube-system", "--timeout=240s")
    for node in map(cluster.hosts.__getitem__, NODES):
        # On one that has just booted again, the rollout still counts the pod that was there before.
        wait_for(lambda node=node: _has_profile(node), f"the seccomp profile does not come to {node.name}")
    before = {name: cluster.hosts[name].mounts() for name in NODES}
    yield cluster
    cluster.kubectl("delete", _KINDS, "--all", "--ignore-not-found", "--timeout=240s")
    cluster.kubectl("delete", "persistentvolumes", "--all", "--timeout=240s")
    shutil.rmtree(cluster.volumes, ignore_errors=True)
    for node in map(cluster.hosts.__getitem__, NODES):
        cluster.kubectl("uncordon", node.name)
        wait_for(lambda node=node: not _left_on(node), f"processes are left on {node.name}")
        wait_for(lambda node=node: node.mounts() <= before[node.name], f"mounts are left on {node.name}")


@pytest.fixture
def node_brokers(cluster: Kubernetes) -> Iterator[None]:
    """A broker on each node."""
    cluster.applies_kustomization("broker", "kube-system")
    cluster.kubectl("rollout", "status", "daemonset/gpuckpt-broker", "--namespace=kube-system", "--timeout=240s")
    yield
    cluster.kubectl("delete", "statefulsets,pods", "--all", "--timeout=240s")
    cluster.kubectl("delete", "daemonset/gpuckpt-broker", "--namespace=kube-system", "--timeout=240s")


@pytest.fixture(scope="session")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Chart:
    """The chart of deploy/helm."""
    assert not what_is_missing(), what_is_missing()
    return Chart(tmp_path_factory.mktemp("chart"))


def _has_profile(node: Host) -> bool:
    return "seccomp/gpuckpt.json" in node.does("find", "/var/lib/kubelet/seccomp", "-name", "gpuckpt.json", check=False)


def _left_on(node: Host) -> list[int]:
    return node.pids("/opt/jupyter/") + node.pids("/opt/criu/")
