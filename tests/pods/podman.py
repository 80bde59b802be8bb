"""Podman, with storage of its own, and the image that deploy/container builds, from Debian's packages alone."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from notebooks import wait_until

__all__ = ["FETCHED", "IMAGE", "PAUSE", "MachinesBroker", "Podman"]

ROOT = Path(__file__).parents[2]
IMAGE = "localhost/gpuckpt"
_BASE = "localhost/gpuckpt-base"
PAUSE = "localhost/gpuckpt-pause"
_PAUSING = f"""
FROM {_BASE}
ENTRYPOINT ["sh", "-c", "trap 'exit 0' TERM; sleep infinity & wait"]
"""
"""What holds a pod's namespaces, and ends when it is told to."""
_PROFILES = "/var/lib/kubelet/seccomp"
_CONTAINERS = """
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=30000:30000"]
log_driver = "k8s-file"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "crun"
infra_image = "localhost/gpuckpt-pause"
"""
_STORAGE = """
[storage]
driver = "overlay"
graphroot = "{folder}/storage"
runroot = "{folder}/run"
"""
FETCHED = ROOT / ".venv" / "pods" / "root"
"""Podman, and what it needs, where it is not installed."""
_IN_MOUNTS = f"""
set -e
mount --make-rprivate /
if [ -x "$FETCHED/usr/bin/podman" ]; then
    for folder in usr etc; do
        mount -t overlay -o "lowerdir=$FETCHED/$folder:/$folder" fetched /$folder
    done
    # A container's own are mounted.
    for file in hosts resolv.conf; do
        mount --bind /proc/$PPID/root/etc/$file /etc/$file || true
    done
fi
if [ -d /sys/fs/cgroup/unified ]; then
    # crun takes cgroups of the first kind or of the second, not both.
    umount -l /sys/fs/cgroup
    mount -t tmpfs -o mode=755 cgroup /sys/fs/cgroup
    for kind in cpu cpuacct cpuset memory devices freezer blkio pids; do
        mkdir /sys/fs/cgroup/$kind
        mount -t cgroup -o $kind cgroup /sys/fs/cgroup/$kind
    done
    mkdir /sys/fs/cgroup/systemd
    mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd
fi
mkdir -p {_PROFILES}
mount -t tmpfs profiles {_PROFILES}
cp "$PROFILE" {_PROFILES}/gpuckpt.json
echo ready
exec sleep infinity
"""


class Podman:
    """Podman of one folder, where its images stay from one run of the tests to the next."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder = folder
        (folder / "containers.conf").write_text(_CONTAINERS)
        (folder / "storage.conf").write_text(_STORAGE.format(folder=folder))
        self.profile = ROOT / "jupyter_gpuckpt" / "recipes" / "seccomp.json"
        # What podman mounts is in mounts of its own, and gone with them.
        self._mounts = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", _IN_MOUNTS],
            env=os.environ | {"PROFILE": str(self.profile), "FETCHED": str(FETCHED)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._mounts.stdout is not None
        assert self._mounts.stdout.readline() == "ready\n"

    def close(self) -> None:
        """Leave nothing but the images."""
        self.remove_all()
        self._mounts.kill()
        self._mounts.communicate()

    def does(self, *words: str, check: bool = True, timeout: float = 600) -> str:
        """Run podman; return what it and its container said."""
        done = subprocess.run(
            [*self._inside, "podman", *words],
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout,
        )
        assert done.returncode == 0 or not check, f"podman {' '.join(words)}:\n{done.stdout}"
        return done.stdout

    @contextlib.contextmanager
    def serves(self, api: Path) -> Iterator[None]:
        """Answer as Docker does, at a socket."""
        serving = ["podman", "system", "service", "--time=0", f"unix://{api}"]
        with subprocess.Popen([*self._inside, *serving], env=self._environment()) as service:
            try:
                wait_until(api.exists)
                yield
            finally:
                service.terminate()

    @property
    def _inside(self) -> list[str]:
        """What runs a program in these mounts."""
        return ["nsenter", f"--target={self._mounts.pid}", "--mount", "sh", "-c", 'cd / && exec "$@"', "sh"]

    def _environment(self) -> dict[str, str]:
        files = {"CONTAINERS_CONF": "containers.conf", "CONTAINERS_STORAGE_CONF": "storage.conf"}
        return os.environ | {name: str(self.folder / file) for name, file in files.items()}

    def build(self, image: str = IMAGE, extras: str = "") -> None:
        """Build the image, with further packages, unless that of these sources is there."""
        mark, label = _state_of_sources(), "gpuckpt.sources"
        if not self.does("images", "--quiet", _BASE):
            self._make_base()
        if not self.does("images", "--quiet", PAUSE):
            file = self.folder / "pause"
            file.write_text(_PAUSING)
            self.does("build", "-f", str(file), "-t", PAUSE, str(self.folder / "run"))
        if self.does("images", "--quiet", "--filter", f"label={label}={mark}", "--filter", f"reference={image}"):
            return
        told = (f"BASE={_BASE}", "SIDEBAR=no", f"EXTRAS={extras}")
        self._builds(image, "deploy/container/Containerfile", told, "--label", f"{label}={mark}")

    def build_kernels(self, image: str, base: str) -> None:
        """Build the image of a gateway's kernels upon ours."""
        self._builds(image, "deploy/kubernetes/gateway/Containerfile", [f"BASE={base}"])

    def _builds(self, image: str, file: str, told: Iterable[str], *options: str) -> None:
        # How this machine reaches its mirrors is what the build uses, too.
        settings = [path for path in ("/etc/ssl/certs", "/etc/pip.conf", "/etc/apt/apt.conf.d") if Path(path).exists()]
        volumes = [word for path in settings for word in ("--volume", f"{path}:{path}:ro")]
        arguments = [word for one in told for word in ("--build-arg", one)]
        words = [*volumes, *arguments, *options, "-f", str(ROOT / file), "-t", image]
        # What each step has made would be kept for a next build, which is much of podman's own work in a first one.
        self.does("build", "--layers=false", "--network", "host", *words, str(ROOT), timeout=1800)

    def saves(self, file: Path, *images: str) -> None:
        """Write images into a file that other programs read, with what holds a pod's namespaces."""
        file.unlink(missing_ok=True)
        self.does("save", "--quiet", "--multi-image-archive", "-o", str(file), *images, PAUSE)

    def _make_base(self) -> None:
        """Make Debian's base system an image: what docker.io/library/debian is, without a registry."""
        folder = self.folder / "base"
        subprocess.run(["rm", "-rf", folder], check=True)
        (folder / "etc" / "dpkg" / "dpkg.cfg.d").mkdir(parents=True)
        # As in that image: nothing waits for the disk while packages are installed.
        (folder / "etc" / "dpkg" / "dpkg.cfg.d" / "docker-apt-speedup").write_text("force-unsafe-io\n")
        command = ["debootstrap", "--variant=minbase", "--include=ca-certificates", "bookworm", str(folder)]
        subprocess.run([*self._inside, *command], stdout=subprocess.DEVNULL, check=True)
        subprocess.run(["tar", "-C", folder, "-cf", folder.with_suffix(".tar"), "."], check=True)
        self.does("import", str(folder.with_suffix(".tar")), _BASE)
        subprocess.run(["rm", "-rf", folder, folder.with_suffix(".tar")], check=True)

    def play(self, pod: dict[str, Any], file: Path) -> None:
        """Start a pod as its manifest says."""
        file.write_text(json.dumps(pod))
        self.does("kube", "play", "--network", "none", str(file))

    def stop(self, pod: str, grace: int) -> None:
        """Stop a pod as a kubelet does: SIGTERM, and SIGKILL after so many seconds; and remove it."""
        self.does("pod", "stop", "-t", str(grace), pod)
        self.does("pod", "rm", "-f", pod)

    def python(self, container: str, script: str, *words: str) -> str:
        """Run Python in a container, as the user whose notebooks they are."""
        who = ["--user", "jovyan", "-e", "HOME=/home/jovyan"]
        return self.does("exec", *who, container, "python", "-c", script, *words)

    def remove_all(self) -> None:
        """End and remove every container of these tests."""
        self.does("pod", "rm", "-f", "-a", check=False)
        self.does("rm", "-f", "-t", "0", "-a", check=False)


class MachinesBroker:
    """A broker for containers, in one that sees the machine's processes."""

    def __init__(self, podman: Podman, image: str = IMAGE) -> None:
        self._podman = podman
        self.folder = Path(tempfile.mkdtemp(prefix="gpuckpt-broker-", dir="/run"))
        self.folder.chmod(0o755)
        seeing = ["--privileged", "--pid=host", "--cgroupns=host", "-v", "/sys/fs/cgroup:/sys/fs/cgroup"]
        own = ["-v", f"{self.folder}:/run/gpuckpt", "--network", "none", "--entrypoint", "/opt/jupyter/bin/python"]
        broker = ["-I", "-m", "jupyter_gpuckpt.broker", "gpuckpt", "--containers"]
        podman.does("run", "-d", "--name", "broker", *seeing, *own, image, *broker)
        wait_until((self.folder / "broker.sock").exists)
        self.group = (self.folder / "broker.sock").stat().st_gid

    @property
    def options(self) -> list[str]:
        """Those of podman's for a container that it serves."""
        return ["--user", "1000:1000", "--group-add", str(self.group), "-v", f"{self.folder}:/run/gpuckpt:ro"]

    def close(self) -> None:
        self._podman.does("rm", "-f", "-t", "5", "broker")
        shutil.rmtree(self.folder)


def _state_of_sources() -> str:
    """Return what changes with anything that the image is built from."""
    digest = hashlib.blake2b()
    folders = ("deploy/container", "jupyter_gpuckpt", "jupyter-config")
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*")) if path.is_file()]
    for path in [*files, ROOT / "pyproject.toml", ROOT / "hatch_libraries.py"]:
        if "__pycache__" not in path.parts and "labextension" not in path.parts and ".so" not in path.suffixes:
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
