"""Kernels of a gateway, each in a pod of its own without any right: what one was or had saved, the next restores."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from jupyter_servers import Server, running
from kernel_gateway import interrupt, kernel_gateway, outcome, save_restore_and_hibernate, started
from kube_cluster import KERNELS_IMAGE, ROOT, Kubernetes, wait_for

pytestmark = [pytest.mark.timeout(1500), pytest.mark.usefixtures("node_brokers")]

_MANIFESTS = ROOT / "deploy" / "kubernetes"
_INSTALL = "from gateway_provisioners.cli.k8s_specapp import K8sProvisionerApp; K8sProvisionerApp.launch_instance()"
_LISTING = ("env", "PATH=/opt/jupyter/bin:/usr/bin:/bin", "HOME=/home/jovyan", "jupyter-gpuckpt", "kernels", "--json")
_STATUS = ("cat", "/proc/1/status")
_HOME = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": "home-alice"},
    "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "100Gi"}}},
}


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """A kernel spec of gateway_provisioners, with our pod; return where Jupyter finds it."""
    install = ["install", "--kernel-name=saved", f"--image-name={KERNELS_IMAGE}", f"--prefix={tmp_path / 'prefix'}"]
    subprocess.run([sys.executable, "-c", _INSTALL, *install], check=True)
    found = tmp_path / "prefix" / "share" / "jupyter"
    template = found / "kernels" / "saved" / "scripts" / "kernel-pod.yaml.j2"
    assert template.exists()
    template.write_text((_MANIFESTS / "gateway" / "kernel-pod.yaml.j2").read_text())
    return found


def test_what_a_gateways_kernel_has_saved_and_what_it_was_at_a_drain_is_restored_in_the_next_ones_pod(
    cluster: Kubernetes, spec: Path, tmp_path: Path
) -> None:
    home = cluster.volume("alice", "100Gi")
    os.chown(home, 1000, 100)
    store = home / ".local/share/jupyter/gpuckpt/store"
    cluster.apply(
        *yaml.safe_load_all((_MANIFESTS / "notebook-without-rights" / "broker-socket.yaml").read_text()), _HOME
    )
    own = {
        "GP_RESPONSE_IP": cluster.control.address,
        "GP_USE_INCLUSTER_CONFIG": "False",
        "JUPYTER_PATH": str(spec),
        "KUBECONFIG": str(cluster.config),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    with (
        cluster.control.joined(),
        kernel_gateway(tmp_path / "gateway", **own) as address,
        running(
            tmp_path / "server",
            f"c.GatewayClient.url = {address!r}\nc.GatewayClient.request_timeout = 300\n",
            KERNEL_USERNAME="alice",
            KERNEL_LAUNCH_TIMEOUT="240",
        ) as server,
    ):
        first = started(server, "saved")
        pod = _pod(cluster)
        node = pod["spec"]["nodeName"]
        with server.channels(first) as ask:
            save_restore_and_hibernate(ask, store)
            assert "CapBnd:\t0000000000000000" in cluster.kubectl("exec", pod["metadata"]["name"], "--", *_STATUS)
            interrupt(ask, lambda: _interrupt(cluster, server, first))
            assert outcome(ask, "%gpuckpt save --wait kept") == "ok"
            assert outcome(ask, "x = 'unsaved'") == "ok"
        cluster.kubectl("drain", node, "--force", "--ignore-daemonsets", "--delete-emptydir-data")
        (hibernated,) = (store / "snapshots").glob("hibernated-*")
        # The gateway starts it anew by itself.
        wait_for(lambda: _runs_elsewhere(cluster, node), "no kernel on the other node")
        with server.channels(first) as ask:
            for name, x in (("kept", 1), (hibernated.stem, "unsaved")):
                assert outcome(ask, f"%gpuckpt restore {name}") == "ok"
                assert outcome(ask, f"assert x == {x!r}") == "ok"
        server.request("DELETE", f"api/kernels/{first}")
        wait_for(lambda: not _pods(cluster), "its pod stays")


def _runs_elsewhere(cluster: Kubernetes, node: str) -> bool:
    """Tell whether a kernel runs in a pod on the other node."""
    pods = [pod for pod in _pods(cluster) if pod["spec"].get("nodeName", node) != node]
    names = [pod["metadata"]["name"] for pod in pods if pod["status"]["phase"] == "Running"]
    return any('"running"' in cluster.kubectl("exec", name, "--", *_LISTING, check=False) for name in names)


def _interrupt(cluster: Kubernetes, server: Server, kernel_id: str) -> None:
    with cluster.control.joined():
        server.request("POST", f"api/kernels/{kernel_id}/interrupt")


def _pods(cluster: Kubernetes) -> list[Any]:
    found: list[Any] = cluster.get("pods", "--selector=component=kernel")["items"]
    return found


def _pod(cluster: Kubernetes) -> Any:
    (pod,) = _pods(cluster)
    return pod
