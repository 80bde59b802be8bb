"""The client: what the system itself says of the process at the other end of a connection.

Nothing of it is taken from what that process sends. A broker that is asked from within a confinement (a namespace, a
seccomp filter, a security label) would be the way out of it: such a process is refused.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import Refused
from ..linux import proc, processes
from ..linux.readiness import readable
from . import cgroups, mounts
from .containers import Container

__all__ = ["NO_LOGIN", "Peer", "has_only", "login_of"]

_SO_PEERGROUPS, _SO_PEERPIDFD = 59, 77  # asm-generic/socket.h
NO_LOGIN = 2**32 - 1
_GROUPS = 1024  # bytes, four for a group: Python's limit
_NAMESPACES = ("user", "pid", "net", "ipc", "uts", "cgroup", "time")

_OUTSIDE = (
    "Start it outside of that namespace (a unit of systemd's without PrivateUsers=, PrivateNetwork=, PrivateIPC= and "
    "ProtectHostname=). In a container, run a broker inside, or have the machine's serve containers (--containers)."
)

_LIMITS = {
    # as /proc/PID/limits calls them
    "Max cpu time": resource.RLIMIT_CPU,
    "Max file size": resource.RLIMIT_FSIZE,
    "Max data size": resource.RLIMIT_DATA,
    "Max stack size": resource.RLIMIT_STACK,
    "Max core file size": resource.RLIMIT_CORE,
    "Max resident set": resource.RLIMIT_RSS,
    "Max processes": resource.RLIMIT_NPROC,
    "Max open files": resource.RLIMIT_NOFILE,
    "Max locked memory": resource.RLIMIT_MEMLOCK,
    "Max address space": resource.RLIMIT_AS,
    "Max pending signals": resource.RLIMIT_SIGPENDING,
    "Max msgqueue size": resource.RLIMIT_MSGQUEUE,
    "Max nice priority": resource.RLIMIT_NICE,
    "Max realtime priority": resource.RLIMIT_RTPRIO,
    "Max realtime timeout": resource.RLIMIT_RTTIME,
}
_LIMIT = re.compile(r"(\S.*?)\s{2,}(\d+|unlimited)\s+(\d+|unlimited)\b")


@dataclass(frozen=True)
class Peer:
    """A user as one process of theirs is: ids, supplementary groups, resource limits (soft and hard), cgroups, login.

    The login is what audit records name, and None where the system keeps none. The mount namespace is as `mounts.of`
    returns it, and that of the process `pid`; a client in a container has its namespaces there.
    """

    uid: int
    gid: int
    groups: tuple[int, ...]
    limits: dict[int, tuple[int, int]]
    cgroups: cgroups.Places
    login: int | None
    mount_namespace: int = -1
    pid: int = 0
    container: Container | None = None

    @classmethod
    def at(
        cls, connection: socket.socket, own: Sequence[Path] = (), container_of: Callable[[int], Container] | None = None
    ) -> Peer:
        """Return who is at the other end; `own` are the folders of the broker's, as `mounts.of` takes them.

        `container_of` is asked about processes in another namespace of pids, where such are served.

        Raises
        ------
        Refused : it is root, has ended, runs with other rights than its user has, or is confined.
        """
        pid, uid, gid = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid == 0:
            raise _refused("The client is root, which needs no broker.")
        pidfd = _pidfd(connection, pid)
        try:
            raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS)
            groups = struct.unpack(f"{len(raw) // 4}I", raw)
            _refuse_other_rights(pid, uid, gid)
            container, namespace = None, -1
            if container_of is not None and _is_elsewhere(pid, "pid"):
                container = container_of(pid)
            else:
                _refuse_confined(pid)
                _refuse_label(pid)
                namespace = _mount_namespace(pid, own)
            login = login_of(pid)
            login = uid if login == NO_LOGIN else login
            found = cls(uid, gid, groups, _limits(pid), cgroups.of(pid), login, namespace, pid, container)
            # It may have become a set-user-id program meanwhile: then these are not its user's.
            _refuse_other_rights(pid, uid, gid)
            if readable(pidfd, seconds=0):
                raise _refused("The client process has ended.")
            return found
        except OSError as e:
            raise _refused(f"The client process cannot be inspected: {e.strerror}") from e
        finally:
            os.close(pidfd)

    def enter(self) -> None:
        """Have this process live where the client does; in a container, its children have the client's pids, too.

        Raises
        ------
        OSError, Refused : the system does not let it be done.
        """
        cgroups.join(self.cgroups)  # as the broker's own folders name them
        if self.container is not None:
            self.container.enter()
        else:
            mounts.enter(self.mount_namespace)


def _pidfd(connection: socket.socket, pid: int) -> int:
    """Return what holds the process that made the connection; before Linux 6.5, the one that has its pid now."""
    with contextlib.suppress(OSError):
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4)
        return int(struct.unpack("i", raw)[0])
    try:
        return os.pidfd_open(pid)
    except OSError as e:
        raise _refused("The client process has ended.") from e


def _refused(why: str, then: str = "`gpuckpt doctor` has the details.") -> Refused:
    return Refused("The broker does not serve this process.", why, then)


def _refuse_other_rights(pid: int, uid: int, gid: int) -> None:
    if not has_only(pid, uid, gid):
        raise _refused(f"Process {pid} runs with other rights than those of user {uid}.")


def has_only(pid: int, uid: int, gid: int) -> bool:
    """Tell whether a process has this user's ids as all of its own, and no capability.

    Raises
    ------
    OSError : it has ended.
    """
    status = processes.status(pid)
    ids = status["Uid"].split() + status["Gid"].split()
    capabilities = [int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")]
    return ids == [str(uid)] * 4 + [str(gid)] * 4 and not any(capabilities)


def login_of(pid: int | str) -> int | None:
    """Return the uid that a process was logged in as, as audit records name it; None where the system keeps none.

    Raises
    ------
    OSError : it has ended.
    """
    try:
        return int(proc.read(f"/proc/{pid}/loginuid"))
    except FileNotFoundError:
        return None


def _is_elsewhere(pid: int, kind: str) -> bool:
    """Tell whether a process is in another namespace of this kind than the broker."""
    with contextlib.suppress(FileNotFoundError):  # a kernel without namespaces of that kind
        return os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}")  # noqa: PTH115
    return False


def _refuse_confined(pid: int) -> None:
    for name in _NAMESPACES:
        if _is_elsewhere(pid, name):
            raise _refused(f"Process {pid} lives in another {name} namespace than the broker.", _OUTSIDE)
    for name in ("Seccomp", "Seccomp_filters"):
        if processes.status(pid).get(name) != processes.status("self").get(name):
            raise _refused(f"Process {pid} has a different seccomp filter from the broker.")


def _refuse_label(pid: int) -> None:
    if processes.label(pid) != processes.label("self"):
        raise _refused(f"Process {pid} has a different security label (AppArmor, SELinux) from the broker.")


def _mount_namespace(pid: int, own: Sequence[Path]) -> int:
    namespace = mounts.of(pid, own)
    if namespace < 0 and _root_folder(pid) != _root_folder("self"):
        raise _refused(f"Process {pid} has a different root folder from the broker (chroot).")
    return namespace


def _root_folder(pid: int | str) -> tuple[int, int, str]:
    """Return what tells a process's root folder from all others, and from itself mounted elsewhere, too."""
    folder = os.open(f"/proc/{pid}/root", os.O_PATH)
    try:
        about = os.fstat(folder)
        mount = next(line for line in proc.lines(f"/proc/self/fdinfo/{folder}") if line.startswith("mnt_id:"))
        return about.st_dev, about.st_ino, mount
    finally:
        os.close(folder)


def _limits(pid: int) -> dict[int, tuple[int, int]]:
    found = {}
    for line in proc.lines(f"/proc/{pid}/limits")[1:]:
        match = _LIMIT.match(line)
        if match and match[1] in _LIMITS:
            soft, hard = (resource.RLIM_INFINITY if text == "unlimited" else int(text) for text in match.groups()[1:])
            found[_LIMITS[match[1]]] = (soft, hard)
    return found
