"""Process 1 of a host of tests' own: it furnishes the namespaces that it was started in, and reaps until it is killed.

It is run as a program, with a description in JSON: `Furnishing` in cluster_hosts.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import time
import uuid
from pathlib import Path

_MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 0x1000, 0x4000, 0x40000, 2
_OWN = {"/tmp": "1777", "/run": "755", "/dev/shm": "1777", "/var/spool": "755", "/var/log": "755", "/var/lib": "755"}
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Furnish the host, say that it is up, and reap."""
    told = json.loads(sys.argv[1])
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    socket.sethostname(told["name"])
    _mount("none", "/", "none", _MS_REC | _MS_PRIVATE)
    kept = {path: os.open(path, os.O_PATH) for path in told["ways"] if Path(path).exists() and _is_hidden(path)}
    for path, mode in _OWN.items():
        _mount("own", path, "tmpfs", 0, f"mode={mode}")
    for path, held in kept.items():
        at = Path(path)
        if Path(f"/proc/self/fd/{held}").is_dir():
            at.mkdir(parents=True, exist_ok=True)
        else:
            at.parent.mkdir(parents=True, exist_ok=True)
            at.touch()
        _mount(f"/proc/self/fd/{held}", path, "none", _MS_BIND | _MS_REC)
    for source, target in told["binds"].items():
        if Path(source).is_dir():
            Path(target).mkdir(parents=True, exist_ok=True)
        _mount(source, target, "none", _MS_BIND)
    _mount("proc", "/proc", "proc")
    boot = Path("/run/boot_id")
    boot.write_text(f"{uuid.uuid4()}\n")
    _mount(str(boot), "/proc/sys/kernel/random/boot_id", "none", _MS_BIND)
    _mount_cgroups()
    Path(told["up"]).touch()
    while True:
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(0.2)  # whoever enters later may leave orphans


def _is_hidden(path: str) -> bool:
    return any(path == own or path.startswith(f"{own}/") for own in _OWN)


def _mount_cgroups() -> None:
    """Mount what the machine has again: seen from here, the groups that this process is in are the topmost ones."""
    kinds = [line.split()[1:4] for line in Path("/proc/mounts").read_text().splitlines()]
    groups = [(at, kind, options) for at, kind, options in kinds if kind in ("cgroup", "cgroup2")]
    with contextlib.suppress(OSError):
        _check(_libc.umount2(b"/sys/fs/cgroup", _MNT_DETACH), "umount")
    if groups == [("/sys/fs/cgroup", "cgroup2", groups[0][2])]:
        _mount("cgroup2", "/sys/fs/cgroup", "cgroup2")
        return
    _mount("own", "/sys/fs/cgroup", "tmpfs", 0, "mode=755")
    for at, kind, options in groups:
        Path(at).mkdir(parents=True, exist_ok=True)
        ours = ",".join(one for one in options.split(",") if one not in _GENERAL) if kind == "cgroup" else ""
        _mount(kind, at, kind, 0, ours)


_GENERAL = ("rw", "ro", "nosuid", "nodev", "noexec", "relatime", "noatime", "xattr")


def _mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
    result = _libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode() or None)
    _check(result, f"mount {source} at {target}")


def _check(result: int, doing: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{doing}: {os.strerror(number)}")


main()
