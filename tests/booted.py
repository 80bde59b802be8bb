"""A machine that has booted systemd, for tests: process 1 of namespaces of its own, over a root that nothing leaves.

What systemd and its units may write is that machine's alone: everything of the real one is mounted read-only, and /etc,
/var, /run, /tmp, /dev and the control groups are its own. Of systemd's units there are only those that are named here:
others clean up and set up whatever they find.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from notebooks import wait_until
from people import GROUP, Machine

from jupyter_gpuckpt.broker import cgroups

_SYSTEMD = Path("/usr/lib/systemd/systemd")
_UNITS = _SYSTEMD.parent / "system"
_TARGETS = ("sysinit", "basic", "sockets", "slices", "shutdown", "umount", "final")
_LOG = "gpuckpt-broker.service.d/log.conf"

_CGROUPS = Path("/sys/fs/cgroup")
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")

_BOOT = """
import ctypes, os, shutil, sys
libc = ctypes.CDLL(None, use_errno=True)
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 8, 0x20, 0x1000, 0x4000, 0x40000
folder, layout, devices, *ways = sys.argv[1:]
root = f"{folder}/root"

def check(result):
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

def mount(source, target, kind, flags=0, data=""):
    check(libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode()))

class Attributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]

mount("none", "/", "none", REC | PRIVATE)
mount("/", root, "none", BIND | REC)
read_only = Attributes(set=1)  # MOUNT_ATTR_RDONLY
check(libc.syscall(442, -100, root.encode(), 0x8000, ctypes.byref(read_only), ctypes.sizeof(read_only)))
own = f"{folder}/own"
os.makedirs(f"{own}/etc")
os.makedirs(f"{own}/work")
mount("overlay", f"{root}/etc", "overlay", 0, f"lowerdir=/etc,upperdir={own}/etc,workdir={own}/work")
for name, mode in ("var", "755"), ("run", "755"), ("dev", "755"), ("tmp", "1777"), ("etc/systemd", "755"):
    mount("own", f"{root}/{name}", "tmpfs", NOSUID, f"mode={mode}")
for name in devices.split():
    open(f"{root}/dev/{name}", "w").close()
    mount(f"/dev/{name}", f"{root}/dev/{name}", "none", BIND)
for name in "pts", "shm":
    os.mkdir(f"{root}/dev/{name}")
os.symlink("/proc/self/fd", f"{root}/dev/fd")
os.symlink("pts/ptmx", f"{root}/dev/ptmx")
mount("devpts", f"{root}/dev/pts", "devpts", 0, "newinstance,ptmxmode=0666,mode=620")
mount("shm", f"{root}/dev/shm", "tmpfs", NOSUID | NODEV, "mode=1777")
mount("proc", f"{root}/proc", "proc", NOSUID | NODEV | NOEXEC)
mount(f"{root}/proc/sys", f"{root}/proc/sys", "none", BIND)
mount("none", f"{root}/proc/sys", "none", REMOUNT | BIND | RDONLY)
mount("sysfs", f"{root}/sys", "sysfs", RDONLY | NOSUID | NODEV | NOEXEC)
if layout == "unified":
    mount("cgroup2", f"{root}/sys/fs/cgroup", "cgroup2")
else:
    mount("own", f"{root}/sys/fs/cgroup", "tmpfs", NOSUID, "mode=755")
    os.mkdir(f"{root}/sys/fs/cgroup/unified")
    os.mkdir(f"{root}/sys/fs/cgroup/systemd")
    mount("cgroup2", f"{root}/sys/fs/cgroup/unified", "cgroup2")
    mount("cgroup", f"{root}/sys/fs/cgroup/systemd", "cgroup", 0, "none,name=systemd")
os.makedirs(f"{root}{folder}")
mount(folder, f"{root}{folder}", "none", BIND)
for way in ways:
    if not os.path.exists(f"{root}{way}"):  # it lies in a folder of which this machine has its own, such as /tmp
        os.makedirs(f"{root}{way}" if os.path.isdir(way) else os.path.dirname(f"{root}{way}"), exist_ok=True)
        if not os.path.isdir(way):
            open(f"{root}{way}", "w").close()
        mount(way, f"{root}{way}", "none", BIND | REC)
        check(libc.syscall(442, -100, (root + way).encode(), 0x8000, ctypes.byref(read_only), ctypes.sizeof(read_only)))
shutil.copytree(f"{folder}/units", f"{root}/etc/systemd/system")
for name in "passwd", "group":
    shutil.copy(f"{folder}/{name}", f"{own}/etc/{name}")
os.chdir(root)
check(libc.pivot_root(b".", b"."))
check(libc.umount2(b".", 2))
os.chdir("/")
# Nothing is started over what is not this machine's own.
its_own = ("/etc", "/var", "/run", "/tmp", "/dev", "/proc", "/sys/fs/cgroup")
with open("/proc/self/mountinfo") as mounts:
    for path, options in (line.split()[4:6] for line in mounts):
        if "rw" in options.split(",") and not any(path == top or path.startswith(top + "/") for top in its_own):
            sys.exit(f"{path} could be written to")
for path in "/", "/usr", "/proc/sys", "/sys":
    if not os.statvfs(path).f_flag & os.ST_RDONLY:
        sys.exit(f"{path} could be written to")
for path in "/etc", "/var", "/run", "/tmp", "/dev":
    if not os.path.ismount(path):
        sys.exit(f"{path} is the real machine's")
argv = ["/usr/lib/systemd/systemd", "--system", "--unit=basic.target", "--log-target=console", "--show-status=no"]
dropped = "-sys_time,-sys_boot,-sys_module,-sys_rawio,-syslog,-mknod,-wake_alarm,-mac_admin,-mac_override"
variables = {
    "container": "gpuckpt-test",
    "PATH": "/usr/bin:/usr/sbin",
    "SYSTEMD_UNIT_PATH": "/etc/systemd/system",
    "SYSTEMD_GENERATOR_PATH": "/nowhere",
    "SYSTEMD_ENVIRONMENT_GENERATOR_PATH": "/nowhere",
}
os.execve("/usr/bin/setpriv", ["setpriv", f"--bounding-set={dropped}", "--", *argv], variables)
"""


class BootedMachine(Machine):
    """A `Machine` with systemd as process 1, and no broker until one is installed; it goes where users look for it.

    Attributes
    ----------
    first : its process 1, as the real machine counts.
    """

    first: int

    def __init__(self, layout: str) -> None:
        self._layout = layout
        super().__init__()

    @classmethod
    def boot_or_skip(cls, layout: str = "") -> BootedMachine:
        """Boot one, or skip the test where that cannot be.

        The `layout` of its control groups is the real machine's; or ``unified``, with those of version 2 alone.
        """
        if os.geteuid() != 0:
            pytest.skip("booting a systemd takes root")
        for program in (str(_SYSTEMD), "systemctl", "systemd-run", "nsenter", "setpriv"):
            if shutil.which(program) is None:
                pytest.skip(f"no systemd is booted: {program} is not there")
        tops = _own_groups()
        if not {_CGROUPS, _CGROUPS / "systemd"} & set(tops):
            pytest.skip("no systemd is booted: there is no hierarchy of control groups for it")
        if locked := [str(top) for top in tops if os.statvfs(top).f_flag & os.ST_RDONLY]:
            pytest.skip(f"no systemd is booted: no control groups can be made in {', '.join(locked)}")
        machine = cls(layout)
        if why := machine.why_not:
            machine.close()
            pytest.skip(f"no systemd is booted: {why}")
        return machine

    def _begin(self, opening_ways: Sequence[str]) -> subprocess.Popen[bytes]:
        units = self.folder / "units"
        (units / _LOG).parent.mkdir(parents=True)
        (units / _LOG).write_text(f"[Service]\nStandardError=append:{self.log}\n")
        for name in _TARGETS:
            shutil.copy(_UNITS / f"{name}.target", units)
        (self.folder / "root").mkdir()
        self.log.touch()
        own = _own_groups()
        layout = self._layout or ("unified" if _CGROUPS in own else "legacy")
        self._groups = [group / self.folder.name for group in own.values()]
        for group in self._groups:
            _make_group(group)
        joining = "".join(f"echo $$ > {group}/cgroup.procs && " for group in self._groups) + 'exec "$@"'
        kinds = ["--mount", "--pid", "--cgroup", "--uts", "--ipc", "--net"]
        unsharing = ["unshare", *kinds, "--propagation", "private", "--fork", "--kill-child"]
        booting = [sys.executable, "-I", "-c", _BOOT, str(self.folder), layout, " ".join(_DEVICES), *self.ways]
        with (self.folder / "systemd.log").open("w") as log:
            holder = subprocess.Popen(
                ["sh", "-c", joining, "sh", *unsharing, *opening_ways, *booting],
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children")
        wait_until(lambda: holder.poll() is not None or children.read_text())
        if holder.poll() is None:
            self.first = int(children.read_text())
            self.entering = ["sh", "-c", joining, "sh", "nsenter", "--all", f"--target={self.first}"]
            wait_until(lambda: holder.poll() is not None or self._is_up())
        return holder

    def _is_up(self) -> bool:
        return self.systemctl("is-active", "basic.target").returncode == 0

    @property
    def why_not(self) -> str:
        """Why there is no systemd; empty where there is one."""
        return "" if self._holder.poll() is None else (self.folder / "systemd.log").read_text().strip()

    def _start(self) -> None:
        """Leave it to systemd."""

    def _write_users(self) -> None:
        """Write them without the broker's group, which is made by whoever installs it."""
        super()._write_users()
        groups = self.folder / "group"
        lines = groups.read_text().splitlines()
        groups.write_text("\n".join(line for line in lines if not line.startswith(f"{GROUP}:")) + "\n")

    def groups_of(self, name: str) -> list[int]:
        lines = [line.split(":") for line in (self.folder / "own/etc/group").read_text().splitlines()]
        return [int(gid) for _, _, gid, members in lines if name in members.split(",")]

    def systemctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.as_root("systemctl", *words)

    def gpuckpt(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command of ours as root."""
        variables = {name: value for name, value in self.environment.items() if name != "GPUCKPT_BROKER"}
        return self.as_root(str(Path(sys.executable).parent / "jupyter"), "gpuckpt", *words, environment=variables)

    def logging_in(self, uid: int) -> list[str]:
        return [*self.entering, "systemd-run", "--quiet", "--scope", f"--slice=user-{uid}.slice", "--"]

    def environment_of(self, name: str) -> dict[str, str]:
        environment = super().environment_of(name)
        del environment["GPUCKPT_BROKER"]
        return environment

    def close(self) -> None:
        for person in self._people:
            with contextlib.suppress(AssertionError, OSError):
                person.close()
        self._holder.kill()
        self._holder.wait(30)
        for group in self._groups:
            for path, _, _ in os.walk(group, topdown=False):
                wait_until(lambda path=path: not Path(path, "cgroup.procs").read_text())
                Path(path).rmdir()
        shutil.rmtree(self.folder)


def _own_groups() -> dict[Path, Path]:
    """Return where each hierarchy of control groups is mounted, and there the group of this process."""
    found = {}
    for controllers, place in cgroups.of("self").items():
        with contextlib.suppress(FileNotFoundError):  # not mounted
            top = cgroups.mounted_at(controllers)
            found[top] = top / place.lstrip("/")
    return found


def _make_group(group: Path) -> None:
    group.mkdir()
    for name in ("cpuset.cpus", "cpuset.mems"):  # without them none can join (cgroup v1)
        if (group / name).exists():
            (group / name).write_text((group.parent / name).read_text())
