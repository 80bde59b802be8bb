"""Hosts of a cluster on one machine: each has namespaces and control groups of its own, and a network joins them.

They share the machine's files but for what a host keeps to itself (/tmp, /run, /dev/shm, /var/spool, /var/log,
/var/lib), and homes, which all of them have. Nothing of it is seen by the machine but processes, mounts in their
namespaces, a network namespace and control groups, all of which `close` removes.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from networks import in_network_of
from notebooks import PATIENCE, wait_until
from people import OPEN_WAYS

from jupyter_gpuckpt import settings

__all__ = ["GROUP", "USERS", "Host", "Hosts"]

GROUP, _GID = "gpuckpt", 61_890
USERS = {"alice": 61_891, "bob": 61_892}
"""Users of all hosts, who may use the broker."""
_HERE = Path(__file__).parent
_NETWORK = "10.77.0."
_NAMESPACES = ("--mount", "--uts", "--ipc", "--net", "--cgroup", "--pid")
_PYTHON = [sys.executable, "-I", "-S", "-B"]


class Hosts:
    """Hosts by their names, the users that they have, and the network between them."""

    def __init__(self, *names: str) -> None:
        self.id = secrets.token_hex(3)
        self.folder = Path(tempfile.mkdtemp(prefix="gpsl-", dir="/var/tmp"))
        self.folder.chmod(0o755)
        self.network = f"gpsl-{self.id}"
        self.homes = self.folder / "home"
        for name, uid in USERS.items():
            (self.homes / name).mkdir(parents=True, mode=0o700)
            os.chown(self.homes / name, uid, uid)
        self._write_etc(names)
        self._hosts = {name: Host(self, name, f"{_NETWORK}{n}") for n, name in enumerate(names, 1)}
        _ip("netns", "add", self.network)
        _ip("-n", self.network, "link", "add", "br0", "type", "bridge")
        _ip("-n", self.network, "link", "set", "br0", "up")

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts.values())

    @property
    def ways(self) -> list[str]:
        """What users must be able to reach: the Python that runs this with what it imports, and criu."""
        found = {sys.base_prefix, os.path.realpath(sys.base_prefix), sys.prefix, str(_HERE.parent.parent)}
        found |= {str(settings.criu_prefix()), str(Path(sys.executable).parent)}
        found |= {path for path in sys.path if Path(path).is_dir()}
        return sorted(path for path in found if Path(path).exists())

    def _write_etc(self, names: Sequence[str]) -> None:
        etc = self.folder / "etc"
        etc.mkdir()
        users = [f"{name}:x:{uid}:{uid}::{self.homes / name}:/bin/bash" for name, uid in USERS.items()]
        groups = [f"{GROUP}:x:{_GID}:{','.join(USERS)}", *(f"{name}:x:{uid}:" for name, uid in USERS.items())]
        for file, lines in (("passwd", users), ("group", groups)):
            (etc / file).write_text("\n".join([Path("/etc", file).read_text().strip(), *lines, ""]))
        addresses = [f"{_NETWORK}{n} {name}" for n, name in enumerate(names, 1)]
        (etc / "hosts").write_text("\n".join(["127.0.0.1 localhost", *addresses, ""]))

    def close(self) -> None:
        """End all processes, and remove everything."""
        for host in self._hosts.values():
            host.kill()
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("netns", "del", self.network)
        shutil.rmtree(self.folder)


class Host:
    """One of them: it is down until it is started, and can be started again."""

    def __init__(self, hosts: Hosts, name: str, address: str) -> None:
        self._hosts, self.name, self.address = hosts, name, address
        self._holder: subprocess.Popen[bytes] | None = None
        self._init = 0
        self._machine_id = hosts.folder / "etc" / f"machine-id-{name}"
        self._machine_id.write_text(f"{uuid.uuid4().hex}\n")
        self._group, self._groups = f"gpsl-{hosts.id}-{name}", list[Path]()
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, **binds: str) -> None:
        """Boot it; `binds` are folders and files, by the names that they have below /etc."""
        hosts = self._hosts
        self._make_groups()
        up = hosts.folder / f"{self.name}.up"
        etc = {"passwd": "etc/passwd", "group": "etc/group", "hosts": "etc/hosts"}
        placed = {str(hosts.folder / path): f"/etc/{name}" for name, path in etc.items()}
        placed |= {str(self._machine_id): "/etc/machine-id"}
        placed |= {path: f"/etc/{name}" for name, path in binds.items()}
        told = {"name": self.name, "ways": [*hosts.ways, str(hosts.folder)], "binds": placed, "up": str(up)}
        opening = [*_PYTHON, "-c", OPEN_WAYS, str(hosts.folder / "etc"), *hosts.ways, "--"]
        self._holder = subprocess.Popen(
            [
                *self._in_groups(),
                *("unshare", *_NAMESPACES, "--fork", "--kill-child"),
                *opening,
                *(*_PYTHON, str(_HERE / "host_start.py"), json.dumps(told)),
            ],
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
        wait_until(lambda: up.exists() or self._holder is None or self._holder.poll() is not None)
        assert self._holder.poll() is None, f"{self.name} did not start"
        up.unlink()
        (self._init,) = _children(self._holder.pid)
        port = f"port-{self.name}"
        _ip("-n", hosts.network, *("link", "add", port, "type", "veth"), *("peer", "eth0", "netns", str(self._init)))
        _ip("-n", hosts.network, "link", "set", port, "master", "br0", "up")
        for words in (
            ("addr", "add", f"{self.address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            self.does("ip", *words)

    def _make_groups(self) -> None:
        """Make control groups of this host, one in each hierarchy, below those of this process."""
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            mounted = _cgroups_at(controllers)
            if mounted is None:
                continue
            parent = mounted / path.lstrip("/")
            group = parent / self._group
            group.mkdir(exist_ok=True)
            for file in ("cpuset.cpus", "cpuset.mems"):
                if (group / file).exists():
                    (group / file).write_text((parent / file).read_text())
            self._groups.append(group)

    def _in_groups(self) -> list[str]:
        return [*_PYTHON, str(_HERE / "host_enter.py"), *map(str, self._groups), "--"]

    def entering(self, user: str | None = None, environment: Mapping[str, str] | None = None) -> list[str]:
        """Return what runs a program on this host, as root or as a user."""
        assert self._holder is not None, f"{self.name} is down"
        home = str(self._hosts.homes / user) if user else "/root"
        path = f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
        has = {"HOME": home, "USER": user or "root", "PATH": path, "LANG": "C.UTF-8", **(environment or {})}
        becoming = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "--"] if user else []
        return [
            *self._in_groups(),
            *("nsenter", f"--target={self._init}", *_NAMESPACES, f"--wdns={home if user else '/'}"),
            *("env", "-i", *(f"{name}={value}" for name, value in has.items())),
            *becoming,
        ]

    def does(self, *words: str, user: str | None = None, check: bool = True, timeout: float = PATIENCE) -> str:
        """Run a program here, as root or as a user; return what it wrote."""
        done = subprocess.run(
            [*self.entering(user), *words], capture_output=True, text=True, timeout=timeout, check=False, cwd="/"
        )
        assert not check or done.returncode == 0, f"{words} on {self.name}: {done.stdout}{done.stderr}"
        return done.stdout + ("" if check else done.stderr)

    def starts_broker(self) -> None:
        """Start a broker, for the users, and wait until it listens."""
        program = [sys.executable, "-I", "-m", "jupyter_gpuckpt.broker", GROUP]
        log = self.begins("broker", *program, environment={"GPUCKPT_CRIU_PREFIX": str(settings.criu_prefix())})
        broker = self._started[-1]
        wait_until(lambda: broker.poll() is not None or "listens" in log.read_text())
        assert broker.poll() is None, log.read_text()

    def begins(self, name: str, *words: str, environment: Mapping[str, str] | None = None) -> Path:
        """Start a daemon as root, which ends with the host; return its log."""
        log = self._hosts.folder / f"{name}-{self.name}.log"
        with log.open("wb") as out:
            daemon = subprocess.Popen(
                [*self.entering(environment=environment), *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd="/",
                start_new_session=True,
            )
        self._started.append(daemon)
        return log

    def joined(self) -> contextlib.AbstractContextManager[None]:
        """Have this thread make its connections on this host, for a block."""
        return in_network_of(self._init)

    def processes(self, user: str) -> list[str]:
        """Return the command lines of a user's processes here."""
        return [line for pid, line in self._command_lines() if _owner(pid) == USERS[user]]

    def pids(self, *words: str) -> list[int]:
        """Return the pids, as the machine has them, of what runs here with these words in its command line."""
        return [pid for pid, line in self._command_lines() if all(word in line for word in words)]

    def _command_lines(self) -> Iterator[tuple[int, str]]:
        """Yield the pid and the command line of each process here, also of those in namespaces of their own."""
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"/{self._group}/" in (path / "cgroup").read_text().replace("\n", "/"):
                    line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
                    if line:
                        yield int(path.name), line

    def mounts(self) -> set[str]:
        """Return what is mounted where on this host."""
        lines = Path(f"/proc/{self._init}/mountinfo").read_text().splitlines()
        # The machine's network namespaces are hidden here, and come and go with others' tests.
        return {" ".join(line.split()[3:5]) for line in lines if " - nsfs " not in line}

    def kill(self) -> None:
        """End the host as a power failure does, and remove what the machine has of it."""
        if self._holder is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._init, signal.SIGKILL)  # and with it all that is in its namespace
        self._holder.kill()
        self._holder.wait(PATIENCE)
        self._holder = None
        for process in self._started:
            process.wait(PATIENCE)
        self._started.clear()
        for group in self._groups:
            _remove_group(group)
        self._groups.clear()


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _owner(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}").stat().st_uid
    return None


def _cgroups_at(controllers: str) -> Path | None:
    """Return where a hierarchy is mounted; None where it is not."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, at, kind, options, *_ = line.split()
        if kind == "cgroup2" and not controllers:
            return Path(at)
        if kind == "cgroup" and controllers and set(controllers.split(",")) <= set(options.split(",")):
            return Path(at)
    return None


def _remove_group(group: Path) -> None:
    """Remove a control group with those below it, once their last processes have ended."""
    deadline = time.monotonic() + PATIENCE
    for folder in [*sorted((f for f in group.rglob("*") if f.is_dir()), reverse=True), group]:
        while True:
            try:
                folder.rmdir()
                break
            except FileNotFoundError:
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
