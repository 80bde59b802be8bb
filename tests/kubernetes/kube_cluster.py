"""A real Kubernetes over hosts of the tests' own: etcd and the control plane on one, kubelets on two others.

Nodes have containerd with runc, and a network that reaches the other hosts. Volumes are folders that all hosts have, as
of a disk that is attached where it is needed.
"""

from __future__ import annotations

import json
import secrets
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from cluster_hosts import Host, Hosts
from notebooks import wait_until

__all__ = ["KERNELS_IMAGE", "NODES", "PROGRAMS", "ROOT", "Kubernetes", "wait_for"]

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / ".venv" / "kubernetes"
"""Where `fetch_and_build.sh` puts them."""
NODES = ("node1", "node2")
KERNELS_IMAGE = "registry.example.com/gpuckpt-kernel:1"
"""That of a gateway's kernels."""
_CONTROL = "control"
PATIENCE = 300.0
"""For how long something may take to come up or to go, in seconds: a hang's end, and no promise."""
_SOCKET = "/run/containerd/containerd.sock"
_SET_BY_KUBELET = {
    "kernel/keys/root_maxbytes": 25000000,
    "kernel/keys/root_maxkeys": 1000000,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
}
"""Settings of the whole machine, which a kubelet makes where they are not so already: it is to read that they are."""
_KUBELET = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    "cgroupDriver": "cgroupfs",
    "failSwapOn": False,
    "enforceNodeAllocatable": [],
    "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
    "authorization": {"mode": "AlwaysAllow"},
    "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
    "resolvConf": "",
    "makeIPTablesUtilChains": False,
}
_CONTAINERD = """
version = 2
root = "{root}"
state = "/run/containerd"
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs",
    "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.aufs"]
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{programs}/cni"
    conf_dir = "{network}"
"""


def wait_for(condition: Callable[[], Any], what: str = "") -> Any:
    """Wait for something that the cluster does; fail when it does not come. Looking for it is work."""
    return wait_until(condition, PATIENCE, what, every=0.5)


class Kubernetes:
    """It, with images that its nodes have."""

    def __init__(self, images: Path, pause: str) -> None:
        """Start it; `images` is an archive, and `pause` the one of them that holds a pod's namespaces."""
        self.hosts = Hosts(_CONTROL, *NODES)
        self.folder = self.hosts.folder / "kubernetes"
        self.folder.mkdir(mode=0o700)
        self.config = self.folder / "kubeconfig"
        self.volumes = self.hosts.folder / "volumes"
        self._images = images
        self._networks = {name: f"10.78.{n}.0/24" for n, name in enumerate(NODES, 1)}
        try:
            self._configure(pause)
            self._start_control()
            for name in NODES:
                self.boots(name)
            wait_for(lambda: self.ready_nodes() == set(NODES), "nodes are not ready")
        except BaseException:
            print(self.logs())
            self.close()
            raise

    @property
    def control(self) -> Host:
        """The host without pods, where the API is."""
        return self.hosts[_CONTROL]

    def _configure(self, pause: str) -> None:
        folder, token = self.folder, secrets.token_hex(16)
        (folder / "tokens").write_text(f"{token},admin,1,system:masters\n")
        key = ["openssl", "genrsa", "-out", str(folder / "accounts.key"), "2048"]
        subprocess.run(key, check=True, capture_output=True)
        server = {"server": f"https://{self.control.address}:6443", "insecure-skip-tls-verify": True}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "tests",
            "clusters": [{"name": "tests", "cluster": server}],
            "users": [{"name": "admin", "user": {"token": token}}],
            "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "admin"}}],
        }
        self.config.write_text(json.dumps(config))
        (folder / "kubelet.yaml").write_text(json.dumps(_KUBELET))
        for node, subnet in self._networks.items():
            network = folder / f"network-{node}"
            network.mkdir()
            addresses = {"type": "host-local", "subnet": subnet, "dataDir": "/run/cni"}
            bridge = {"type": "bridge", "bridge": "cni0", "isDefaultGateway": True, "ipam": addresses}
            chain = {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge]}
            (network / "10.conflist").write_text(json.dumps(chain))
            about = {"root": folder / f"containerd-{node}", "programs": PROGRAMS, "network": network, "pause": pause}
            (folder / f"containerd-{node}.toml").write_text(_CONTAINERD.format(**about))

    def _begins(self, host: Host, program: str, *words: str) -> None:
        path = f"{PROGRAMS / 'bin'}:/usr/sbin:/usr/bin:/sbin:/bin"
        host.begins(program, str(PROGRAMS / "bin" / program), *words, environment={"PATH": path})

    def _start_control(self) -> None:
        control, folder = self.control, self.folder
        control.start()
        for node, subnet in self._networks.items():
            control.does("ip", "route", "add", subnet, "via", self.hosts[node].address)
        etcd, key = "http://127.0.0.1:2379", folder / "accounts.key"
        addresses = (f"--listen-client-urls={etcd}", f"--advertise-client-urls={etcd}")
        self._begins(control, "etcd", f"--data-dir={folder / 'etcd'}", "--unsafe-no-fsync", *addresses)
        self._begins(
            control,
            "kube-apiserver",
            f"--etcd-servers={etcd}",
            f"--advertise-address={control.address}",
            f"--cert-dir={folder / 'certificates'}",
            f"--token-auth-file={folder / 'tokens'}",
            "--authorization-mode=RBAC",
            "--allow-privileged=true",
            "--service-cluster-ip-range=10.79.0.0/24",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-account-issuer=https://control",
        )
        wait_for(lambda: self.kubectl("get", "--raw", "/readyz", check=False) == "ok", "no API")
        own = (f"--kubeconfig={self.config}", "--leader-elect=false", f"--cert-dir={folder / 'certificates'}")
        self._begins(control, "kube-controller-manager", *own, f"--service-account-private-key-file={key}")
        self._begins(control, "kube-scheduler", *own)

    def boots(self, name: str) -> None:
        """Start a node."""
        node = self.hosts[name]
        node.start()
        node.does("sh", "-c", "\n".join(_furnishing()))
        self._begins(node, "containerd", f"--config={self.folder / f'containerd-{node.name}.toml'}")
        asking = [str(PROGRAMS / "bin" / "ctr"), "--namespace=k8s.io"]
        wait_for(lambda: "SERVER" in node.does(*asking, "version", check=False).upper(), "no containerd")
        node.does(*asking, "images", "import", str(self._images), timeout=PATIENCE)
        self._begins(
            node,
            "kubelet",
            f"--config={self.folder / 'kubelet.yaml'}",
            f"--kubeconfig={self.config}",
            "--cert-dir=/run/kubelet",
            f"--hostname-override={node.name}",
            f"--node-ip={node.address}",
            "--container-runtime=remote",
            f"--container-runtime-endpoint=unix://{_SOCKET}",
        )

    def dies(self, name: str) -> None:
        """End a node as a power failure does."""
        self.hosts[name].kill()

    def ready_nodes(self) -> set[str]:
        """Return the names of the nodes that take pods."""
        found = (line.split() for line in self.kubectl("get", "nodes", "--no-headers", check=False).splitlines())
        return {name for name, state, *_ in found if state == "Ready"}

    def kubectl(self, *words: str, check: bool = True) -> str:
        """Run kubectl as the administrator; return what it wrote."""
        own = [f"--kubeconfig={self.config}", f"--cache-dir={self.folder / 'cache'}"]
        program = str(PROGRAMS / "bin" / "kubectl")
        return self.control.does(program, *own, *words, check=check, timeout=PATIENCE)

    def get(self, *words: str) -> dict[str, Any]:
        """Return an object, or a list of them, as the API has it."""
        found: dict[str, Any] = json.loads(self.kubectl("get", *words, "--output=json"))
        return found

    def apply(self, *objects: dict[str, Any], namespace: str = "default") -> None:
        """Create objects, or change them."""
        file = self.folder / "applied.json"
        told = {"apiVersion": "v1", "kind": "List", "items": [_for_this_version(one) for one in objects]}
        file.write_text(json.dumps(told))
        self.kubectl("apply", f"--filename={file}", f"--namespace={namespace}")

    def applies_kustomization(self, name: str, namespace: str = "default") -> None:
        """Create what a folder of deploy/kubernetes has: the kubectl of a newer Kubernetes reads what is in it."""
        program = str(PROGRAMS / "bin" / "newer-kubectl")
        text = self.control.does(program, "kustomize", str(ROOT / "deploy" / "kubernetes" / name))
        self.apply(*yaml.safe_load_all(text), namespace=namespace)

    def volume(self, name: str, capacity: str) -> Path:
        """Make a volume that claims find; return its folder, which is root's and empty."""
        folder = self.volumes / name
        folder.mkdir(parents=True)
        told = {"capacity": {"storage": capacity}, "accessModes": ["ReadWriteOnce"], "hostPath": {"path": str(folder)}}
        self.apply({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": told})
        return folder

    def logs(self) -> str:
        """Return the ends of the daemons' logs."""
        found = sorted(self.hosts.folder.glob("*.log"))
        return "\n".join(f"{log.name}:\n" + "\n".join(log.read_text().splitlines()[-15:]) for log in found)

    def close(self) -> None:
        """End all, and remove it."""
        self.hosts.close()


def _for_this_version(value: Any) -> Any:
    """Return an object without what Kubernetes has since 1.30 only, as docs/kubernetes.md says."""
    if isinstance(value, dict):
        return {name: _for_this_version(one) for name, one in value.items() if name != "appArmorProfile"}
    return [_for_this_version(one) for one in value] if isinstance(value, list) else value


def _furnishing() -> Iterator[str]:
    yield "set -e"
    yield "mount --make-rshared /"  # the mounts of a pod's volumes are its containers', too
    yield "! mountpoint -q /sys/fs/cgroup/unified || umount /sys/fs/cgroup/unified"
    yield "mkdir /var/lib/kubelet"
    for setting, value in _SET_BY_KUBELET.items():
        file = f"/run/{setting.replace('/', '.')}"
        yield f"echo {value} >{file}; mount --bind {file} /proc/sys/{setting}"
