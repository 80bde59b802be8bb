"""A real Slurm over hosts of the tests' own: a controller and two nodes, with munge, users and a broker on each."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from cluster_hosts import USERS, Host, Hosts
from notebooks import wait_until

__all__ = ["NODES", "Cluster", "Job"]

NODES = ("node1", "node2")
_CONTROLLER = "control"
_GPUS = 2
_FAKE_GPU = 240  # its major device number, for local use
_CONF = """
ClusterName=gpsl
SlurmctldHost={controller}({controller_address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=500
GresTypes=gpu
MinJobAge=600
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=10
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerParameters=bf_interval=2,sched_min_interval=500000
{nodes}
Include {recipe}
"""
_CGROUP_CONF = """
CgroupMountpoint=/sys/fs/cgroup
ConstrainCores=no
ConstrainRAMSpace=yes
ConstrainDevices=yes
"""
_MUNGE = """
mkdir -p /run/munge /var/log/munge /var/lib/munge
cp {key} /run/munge.key
chown munge /run/munge /run/munge.key /var/log/munge /var/lib/munge
chmod 600 /run/munge.key; chmod 755 /run/munge; chmod 700 /var/log/munge; chmod 711 /var/lib/munge
exec setpriv --reuid=munge --regid=munge --init-groups munged --key-file=/run/munge.key
"""


class Cluster:
    """The hosts with Slurm on them, by the recipe's lines; `other` are values of it that are others here."""

    def __init__(self, **other: str) -> None:
        self.hosts = Hosts(_CONTROLLER, *NODES)
        self.folder = self.hosts.folder / "slurm"
        self.folder.mkdir()
        try:
            self._configure(other)
            for host in self.hosts:
                self.boot(host)
            self.wait_for_nodes()
        except BaseException:
            self.close()
            raise

    def _configure(self, other: Mapping[str, str]) -> None:
        folder = self.folder
        (folder / "munge.key").write_bytes(os.urandom(1024))
        recipe = folder / "recipe.conf"
        lines = resources.files("jupyter_gpuckpt").joinpath("recipes", "slurm.conf").read_text()
        for name, value in other.items():
            lines, found = re.subn(rf"\b{name}=\S+", f"{name}={value}", lines)
            assert found, f"the recipe has no {name}"
        recipe.write_text(lines)
        nodes = [
            f"NodeName={name} NodeAddr={self.hosts[name].address} CPUs=2 RealMemory=4000 Gres=gpu:{_GPUS} State=UNKNOWN"
            for name in NODES
        ]
        (folder / "slurm.conf").write_text(
            _CONF.format(
                controller=_CONTROLLER,
                controller_address=self.hosts[_CONTROLLER].address,
                folder=folder,
                nodes="\n".join(nodes),
                recipe=recipe,
            )
        )
        for n in range(_GPUS):
            device = folder / f"gpu{n}"
            os.mknod(device, 0o020666, os.makedev(_FAKE_GPU, n))
            device.chmod(0o666)
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{_GPUS - 1}]\n")
        version = "cgroup/v1" if Path("/sys/fs/cgroup/freezer").exists() else "cgroup/v2"
        (folder / "cgroup.conf").write_text(f"CgroupPlugin={version}\n{_CGROUP_CONF}")

    def boot(self, host: Host) -> None:
        """Start a host with what it has: munge, and a controller, or a broker and a node's daemon."""
        host.start(slurm=str(self.folder))
        host.does("sh", "-c", _MUNGE.format(key=self.folder / "munge.key"))
        if host.name == _CONTROLLER:
            host.does("sh", "-c", "mkdir -p /var/spool/slurmctld; exec slurmctld -c")
        else:
            host.starts_broker()
            self.starts_daemon(host)

    @staticmethod
    def starts_daemon(host: Host) -> None:
        """Start a node's daemon."""
        host.does("sh", "-c", f"mkdir -p /var/spool/slurmd; exec slurmd -N {host.name}")

    def wait_for_nodes(self) -> None:
        """Wait until all nodes take jobs."""
        wait_until(lambda: set(self.asks("sinfo", "-hNo", "%T").split()) == {"idle"}, what="nodes are not idle")

    @property
    def controller(self) -> Host:
        return self.hosts[_CONTROLLER]

    def asks(self, *words: str, user: str | None = None, check: bool = True) -> str:
        """Run a program of Slurm's, as its administrator or as a user; return what it wrote."""
        return self.controller.does(*words, user=user, check=check)

    def submits(self, script: str, *options: str, user: str = "alice") -> Job:
        """Submit a batch script, from the user's home; return the job."""
        path = self.hosts.homes / user / "job.sh"
        path.write_text(script)
        said = self.asks("sbatch", "--parsable", "--output=out-%j.txt", *options, "job.sh", user=user)
        return Job(self, said.strip(), user)

    def snapshots(self, user: str = "alice") -> list[str]:
        """Return the names of the snapshots in a user's store."""
        said = self.controller.does("jupyter", "gpuckpt", "list", "--json", user=user)
        return [one["name"] for one in json.loads(said)["snapshots"]]

    def other(self, node: str) -> str:
        """Return the name of the other node."""
        return next(name for name in NODES if name != node)

    def drained(self, node: str, *, resume: bool = False) -> None:
        """Have a node take no more jobs, or take them again."""
        words = ["State=RESUME"] if resume else ["State=DRAIN", "Reason=test"]
        self.asks("scontrol", "update", f"NodeName={node}", *words)

    def tidy(self) -> None:
        """Cancel all jobs, and have both nodes take new ones."""
        for user in USERS:
            self.asks("scancel", f"--user={user}")
        wait_until(lambda: not self.asks("squeue", "-h"), what="jobs do not end")
        for name in NODES:
            self.asks("scontrol", "update", f"NodeName={name}", "State=RESUME", check=False)
        self.wait_for_nodes()

    def close(self) -> None:
        self.hosts.close()


class Job:
    """One that was submitted."""

    def __init__(self, cluster: Cluster, job_id: str, user: str) -> None:
        self.cluster, self.id, self.user = cluster, job_id, user

    def shown(self) -> dict[str, str]:
        """Return what Slurm says of it."""
        words = self.cluster.asks("scontrol", "show", "job", "--oneliner", self.id).split()
        return dict(word.partition("=")[::2] for word in words)

    def __str__(self) -> str:
        shown = self.shown()
        names = ("JobId", "JobState", "Reason", "Restarts", "ExitCode", "NodeList", "StartTime", "EndTime")
        return f"{' '.join(f'{name}={shown.get(name)}' for name in names)}\n{self.output()}"

    @property
    def state(self) -> str:
        return self.shown()["JobState"]

    @property
    def node(self) -> str:
        return self.shown()["NodeList"]

    def output(self) -> str:
        """Return what it wrote."""
        path = self.cluster.hosts.homes / self.user / f"out-{self.id}.txt"
        return path.read_text() if path.exists() else ""

    def requeued(self) -> None:
        """Have Slurm's administrator requeue it."""
        self.cluster.asks("scontrol", "requeue", self.id)

    def wait_for(self, *states: str) -> None:
        """Wait until it is in one of these states."""
        try:
            wait_until(lambda: self.state in states)
        except AssertionError as e:
            raise AssertionError(f"not {', '.join(states)}: {self}") from e

    def starts_again(self) -> None:
        """Wait until it is queued again, and spare it the two minutes that Slurm has it wait then."""
        self.wait_for("PENDING")
        self.cluster.asks("scontrol", "update", f"JobId={self.id}", "StartTime=now", user=self.user)
