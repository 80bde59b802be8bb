"""What deploy/kubernetes has, on a real Kubernetes of two nodes: what runs on one goes on on the other."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_chart import Chart
from hub import Hub, Server
from kube_cluster import ROOT, Kubernetes, wait_for

pytestmark = pytest.mark.timeout(1500)

_MANIFESTS = ROOT / "deploy" / "kubernetes"
_CLIENT = (ROOT / "tests" / "pods" / "notebook_client.py").read_text()
_AS_JOVYAN = ("setpriv", "--reuid=jovyan", "--regid=jovyan", "--init-groups", "env", "HOME=/home/jovyan")
_WITHOUT_RIGHTS = "notebook-without-rights"
_STEPS = """
def step(number, state=__import__("os").urandom(8).hex()):
    with open("steps", "a") as steps:
        print(number, state, file=steps)
"""
_COUNTING = f"""
import threading, time
{_STEPS}
def count():
    number = 0
    while True:
        step(number)
        number += 1
        time.sleep(0.05)
threading.Thread(target=count, daemon=True).start()
"""
_TRAIN = f"""
import itertools, os, time
{_STEPS}
for number in itertools.count():
    step(number)
    print(number, flush=True)
    time.sleep(0.05)
    if os.path.exists("enough"):
        break
print("done", flush=True)
"""


_IMAGE = "registry.example.com/gpuckpt:1"
"""What the kustomizations name."""


def _steps(volume: Path) -> list[list[str]]:
    file = volume / "steps"
    return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


def _wait_for_more_steps(volume: Path) -> None:
    before = len(_steps(volume))
    wait_for(lambda: len(_steps(volume)) > before + 20, "it does not go on")


def _assert_each_step_once(volume: Path) -> None:
    """Check that one program has done all steps, none of them twice."""
    steps = _steps(volume)
    assert [int(number) for number, _ in steps] == list(range(len(steps)))
    assert len({state for _, state in steps}) == 1


class _Notebook:
    """The StatefulSet of a notebook, with its volume and its token."""

    def __init__(
        self, cluster: Kubernetes, resources: list[dict[str, Any]] | None = None, kustomization: str = "notebook"
    ) -> None:
        """Start it, as a kustomization has it, or of the resources that a chart makes."""
        self.cluster = cluster
        self.volume = cluster.volume("lab", "100Gi")
        self._becoming = _AS_JOVYAN
        if kustomization == _WITHOUT_RIGHTS:
            os.chown(self.volume, 1000, 1000)  # as storage that heeds fsGroup does; such folders do not
            self._becoming = ()
        cluster.kubectl("create", "secret", "generic", "lab", "--from-literal=token=token")
        if resources is None:
            cluster.applies_kustomization(kustomization)
        else:
            cluster.apply(*resources)
        self.uid = ""
        self.wait_until_ready()

    def pod(self) -> dict[str, Any]:
        found = self.cluster.get("pods", "--selector=app=lab")["items"]
        return found[0] if found else {"metadata": {"uid": ""}, "spec": {}, "status": {}}

    def wait_until_ready(self) -> None:
        """Wait until there is another pod than the last, and its server answers."""
        wait_for(lambda: self.pod()["metadata"]["uid"] not in ("", self.uid), "no pod")
        wait_for(lambda: _is_ready(self.pod()), "the pod is not ready")
        pod = self.pod()
        self.uid, self.node = pod["metadata"]["uid"], pod["spec"]["nodeName"]

    def does(self, *words: str, check: bool = True) -> str:
        """Run a program in the pod, as the user whose notebooks they are."""
        return self.cluster.kubectl("exec", "lab-0", "--", *self._becoming, *words, check=check)

    def run(self, cell: str) -> str:
        return self.does("python", "-c", _CLIENT, "token", "train.ipynb", cell).strip()


def _is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod["status"].get("conditions", [])
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _drain(cluster: Kubernetes, node: str, *other: str) -> None:
    cluster.kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", *other)


def _delete_pod(cluster: Kubernetes, node: str) -> None:
    cluster.kubectl("cordon", node)
    cluster.kubectl("delete", "pods", "--selector=app in (lab, train)")


@pytest.mark.parametrize("installed", ["by kustomize", "by the chart"])
def test_a_notebooks_kernel_goes_on_on_the_other_node_when_its_node_is_drained_or_its_pod_deleted(
    cluster: Kubernetes, request: pytest.FixtureRequest, installed: str
) -> None:
    resources = None
    if installed == "by the chart":
        chart: Chart = request.getfixturevalue("chart")
        resources = chart.renders({"seccomp": {"enabled": False}})  # the nodes have the profile already
    _goes_on_on_the_other_node(_Notebook(cluster, resources))


@pytest.mark.usefixtures("node_brokers")
def test_so_it_does_in_pods_without_any_right_where_the_nodes_have_brokers(cluster: Kubernetes) -> None:
    lab = _Notebook(cluster, kustomization=_WITHOUT_RIGHTS)
    server = lab.does("cat", "/proc/1/status")
    assert "CapBnd:\t0000000000000000" in server
    assert "Uid:\t1000\t1000\t1000\t1000" in server
    _goes_on_on_the_other_node(lab)
    # A broker that is updated leaves kernels as they are, and the next one serves them.
    lab.run("here = 'saved'")
    cluster.kubectl("rollout", "restart", "daemonset/gpuckpt-broker", "--namespace=kube-system")
    cluster.kubectl("rollout", "status", "daemonset/gpuckpt-broker", "--namespace=kube-system", "--timeout=240s")
    lab.run("%gpuckpt save --wait later")
    lab.run("here = 'changed'")
    lab.run("%gpuckpt restore later")
    assert lab.run("print(here)") == "saved"


def _goes_on_on_the_other_node(lab: _Notebook) -> None:
    cluster = lab.cluster
    assert "Kernels can be saved and restored here." in lab.does("jupyter", "gpuckpt", "doctor", check=False)
    lab.run(_COUNTING)
    status = lab.run("print(open('/proc/self/status').read())")
    assert "CapEff:\t0000000000000000" in status
    assert "NoNewPrivs:\t1" in status
    assert "Seccomp:\t2" in status
    for leave in (_drain, _delete_pod):
        _wait_for_more_steps(lab.volume)
        node, began = lab.node, time.monotonic()
        leave(cluster, node)
        stopped = time.monotonic()
        done = len(_steps(lab.volume))
        lab.wait_until_ready()
        assert lab.node != node
        opened = time.monotonic()
        assert lab.run("print(step)").startswith("<function step")
        took = (stopped - began, opened - began, time.monotonic() - opened)
        print(f"{leave.__name__}: stopped after {took[0]:.1f} s, ready after {took[1]:.1f}, a cell in {took[2]:.1f} s")
        assert "resumed from  hibernated-train-" in lab.run("%gpuckpt status")
        assert len(_steps(lab.volume)) > done
        _wait_for_more_steps(lab.volume)
        _assert_each_step_once(lab.volume)
        cluster.kubectl("uncordon", node)


class _Job:
    """The Job, with its volume, and the command that counts in place of its own."""

    def __init__(self, cluster: Kubernetes, *other: tuple[str, str]) -> None:
        """Start it, with other words in its command where that is said."""
        self.cluster = cluster
        self.volume = cluster.volume("train", "100Gi")
        (self.volume / "train.py").write_text(_TRAIN)
        job, claim = yaml.safe_load_all((_MANIFESTS / "job" / "job.yaml").read_text())
        (container,) = job["spec"]["template"]["spec"]["containers"]
        container["image"] = _IMAGE
        container["args"] = [dict(other).get(word, word) for word in container["args"]]
        cluster.apply(job, claim)

    def pods(self) -> list[tuple[str, str, str]]:
        """Return the name, the node and the phase of each of its pods."""
        found = self.cluster.get("pods", "--selector=app=train")["items"]
        return [(one["metadata"]["name"], one["spec"].get("nodeName", ""), one["status"]["phase"]) for one in found]

    def snapshots(self) -> list[Path]:
        """Return those in its store."""
        return list((self.volume / ".local/share/jupyter/gpuckpt/store/snapshots").glob("*"))

    def node(self) -> str:
        """Wait until it does more steps, and return on which node."""
        _wait_for_more_steps(self.volume)
        return next(node for _, node, phase in self.pods() if phase == "Running")

    def ends(self) -> str:
        """Have it end by itself; return what its last pod wrote."""
        (self.volume / "enough").touch()
        self.cluster.kubectl("wait", "--for=condition=complete", "job/train", "--timeout=240s")
        (last,) = (name for name, _, phase in self.pods() if phase == "Succeeded")
        return self.cluster.kubectl("logs", last)


def test_a_job_goes_on_on_the_other_node_to_its_end_without_a_step_lost_or_done_twice(cluster: Kubernetes) -> None:
    job = _Job(cluster)
    for leave in (_drain, _delete_pod):
        node = job.node()
        leave(cluster, node)
        assert job.node() != node
        cluster.kubectl("uncordon", node)
    assert job.ends().splitlines()[-1] == "done"
    _assert_each_step_once(job.volume)
    assert job.snapshots() == []


def test_a_job_whose_node_dies_goes_on_with_its_last_save(cluster: Kubernetes) -> None:
    job = _Job(cluster, ("15m", "2s"))
    node = job.node()
    wait_for(lambda: job.snapshots(), "no save")
    job.node()
    cluster.dies(node)
    done = _steps(job.volume)
    wait_for(lambda: node not in cluster.ready_nodes())
    (pod,) = (name for name, _, phase in job.pods() if phase == "Running")
    cluster.kubectl("delete", "pod", pod, "--force", "--grace-period=0")  # the node is certainly off
    assert job.node() != node
    job.ends()
    steps = [(int(number), state) for number, state in _steps(job.volume)]
    again = steps[len(done) :]
    assert 0 < again[0][0] <= len(done)
    assert [number for number, _ in again] == list(range(again[0][0], again[0][0] + len(again)))
    assert len({state for _, state in steps}) == 1
    cluster.boots(node)


_HUB = """
import yaml
c.JupyterHub.hub_ip = "0.0.0.0"
c.JupyterHub.hub_connect_ip = "{address}"
c.JupyterHub.spawner_class = "kubespawner.KubeSpawner"
def merged(values, others):
    both = isinstance(values, dict) and isinstance(others, dict)
    return {{**values, **{{name: merged(values.get(name), one) for name, one in others.items()}}}} if both else others
# As Zero to JupyterHub makes it of the values.
values = {{}}
for file in {values}:
    values = merged(values, yaml.safe_load(open(file)))
user = values["singleuser"]
spawner = c.KubeSpawner
spawner.namespace = "default"
spawner.image = f"{{user['image']['name']}}:{{user['image']['tag']}}"
spawner.cmd = user["cmd"]
spawner.uid, spawner.fs_gid = user["uid"], user["fsGid"]
spawner.allow_privilege_escalation = user["allowPrivilegeEscalation"]
spawner.environment = user["extraEnv"]
spawner.extra_pod_config = user["extraPodConfig"]
spawner.mem_guarantee, spawner.mem_limit = user["memory"]["guarantee"], user["memory"]["limit"]
spawner.storage_pvc_ensure = True
spawner.storage_capacity = user["storage"]["capacity"]
spawner.storage_access_modes = ["ReadWriteOnce"]
home = {{"name": "home", "persistentVolumeClaim": {{"claimName": "{{pvc_name}}"}}}}
spawner.volumes = [home, *user["storage"].get("extraVolumes", [])]
mount = {{"name": "home", "mountPath": user["storage"]["homeMountPath"]}}
spawner.volume_mounts = [mount, *user["storage"].get("extraVolumeMounts", [])]
exec(values["hub"]["extraConfig"]["gpuckpt"])
"""


@dataclass
class _Place:
    folder: Path
    entering: list[str]
    environment: dict[str, str]


@contextlib.contextmanager
def _hub(cluster: Kubernetes, *values: str) -> Iterator[Hub]:
    """Start a hub outside of the cluster, whose servers are pods in it; this thread sees its network."""
    control, files = cluster.control, [str(_MANIFESTS / "jupyterhub" / name) for name in values]
    with control.joined():
        folder = cluster.hosts.folder / "hubs"
        folder.mkdir(exist_ok=True)
        place = _Place(folder, control.entering(environment={"KUBECONFIG": str(cluster.config)}), {})
        hub = Hub(place, config=_HUB.format(address=control.address, values=files))
        try:
            yield hub
        finally:
            hub.close()


def test_a_hubs_notebook_goes_on_in_the_next_pod_on_the_other_node(cluster: Kubernetes) -> None:
    volume = cluster.volume("alice", "100Gi")
    with _hub(cluster, "values.yaml") as hub:
        _goes_on_in_the_next_pod(cluster, hub, hub.start("alice"), volume)


@pytest.mark.usefixtures("node_brokers")
def test_so_it_does_without_any_right_where_the_nodes_have_brokers(cluster: Kubernetes) -> None:
    volume = cluster.volume("alice", "100Gi")
    os.chown(volume, 1000, 1000)
    cluster.apply(*yaml.safe_load_all((_MANIFESTS / _WITHOUT_RIGHTS / "broker-socket.yaml").read_text()))
    with _hub(cluster, "values.yaml", "values-without-rights.yaml") as hub:
        alice = hub.start("alice")
        assert "CapBnd:\t0000000000000000" in alice.run("print(open('/proc/1/status').read())")
        _goes_on_in_the_next_pod(cluster, hub, alice, volume)


def _goes_on_in_the_next_pod(cluster: Kubernetes, hub: Hub, alice: Server, volume: Path) -> None:

    def node() -> str:
        (pod,) = cluster.get("pods", "--selector=component=singleuser-server")["items"]
        return str(pod["spec"]["nodeName"])

    alice.run(_COUNTING)
    for stop in (lambda _: hub.stop("alice"), lambda where: _drain(cluster, where, "--force")):
        _wait_for_more_steps(volume)
        where = node()
        cluster.kubectl("cordon", where)
        stop(where)
        hub.wait_until_stopped("alice")
        done = len(_steps(volume))
        alice = hub.start("alice")
        assert node() != where
        cluster.kubectl("uncordon", where)
        assert alice.run("print(step)").startswith("<function step")
        assert "resumed from  hibernated-train-" in alice.run("%gpuckpt status")
        assert len(_steps(volume)) > done
        _assert_each_step_once(volume)
