"""Clients in containers: whom of a container the broker serves, and what it does there (docs/security.md).

The files of a container are its image's. So nothing that root runs or reads is looked up there: before root enters a
container it gives up importing modules, and criu is run from descriptors of the broker's own folders. What is looked
up there all the same are the places where a sleeper gets mounts of its own, which the container's runtime has mounted;
and the programs that run as the container's user, with no more rights than that user has.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import Refused
from ..linux import proc, processes, seccomp, spawning
from . import filter_reader, mounts

__all__ = ["IMAGES_AT", "Container", "furnish", "of"]

_OWN = "/proc/fs"
"""A folder of every /proc. A sleeper in a container gets one of root's over it: what leads there nobody can move or
replace, as a user could do with folders of the image or the user's own, also from outside of the sleeper's mounts."""
IMAGES_AT = f"{_OWN}/images"
"""Where such a sleeper has the images that were judged."""
_NOTHING = f"{_OWN}/nothing"
"""An empty file that nobody may open."""

_NS_GET_PARENT = 0xB702  # linux/nsfs.h
_SHARED = ("user", "time")
_ENTERED = ("net", "ipc", "uts", "cgroup", "mnt")
"""The namespaces of a container, in the order in which they are entered; that of pids is for children, which follow."""
_RIGHTS = ("CapInh", "CapPrm", "CapEff", "CapAmb", "CapBnd")
_APPARMOR = Path("/sys/module/apparmor")
_PROFILE = re.compile(rb"([\w./-]+) \((?:enforce|complain)\)")
"""What the label of a process says that is under one profile, of the machine's own."""
_MS_RDONLY, _MS_REMOUNT = 1, 32  # linux/mount.h
_FLAGS = spawning.MS_NOSUID | spawning.MS_NODEV | spawning.MS_NOEXEC

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Container:
    """A container, as it was when one of its processes became a client.

    Parameters
    ----------
    namespaces : descriptors of those that are entered, by their names in /proc/PID/ns.
    depth : how many namespaces of pids it is below the machine's first one.
    filter : the instructions of its filter of system calls; empty where it has none.
    profile : the one of AppArmor's that it is under; empty where the broker is under the same, or none.
    python : the client's own program, as a path in the container.
    hidden : the paths below /proc that its runtime has hidden or made read-only; the latter are true.
    oom_score : how soon the system ends a process of it, where memory is short.
    """

    namespaces: dict[str, int]
    depth: int
    filter: bytes
    profile: str
    python: str
    hidden: dict[str, bool]
    oom_score: str

    def enter(self, but: Collection[str] = ()) -> None:
        """Enter its namespaces, but for those named; that of pids is its children's.

        Nothing is imported by this process from here on: modules would be the container's.

        Raises
        ------
        OSError : the system does not let it be done.
        """
        for found_by in (sys.meta_path, sys.path_hooks, sys.path):
            found_by.clear()
        Path("/proc/self/oom_score_adj").write_text(self.oom_score)
        for kind in ("pid", *_ENTERED):
            if kind not in but and _libc.setns(self.namespaces[kind], 0) != 0:
                number = ctypes.get_errno()
                raise OSError(number, f"setns ({kind}): {os.strerror(number)}")

    def confine(self) -> None:
        """Put this process under the container's filter of system calls, and its profile once it is another program.

        It must have ``no_new_privs``.

        Raises
        ------
        OSError : the system does not let it be done.
        """
        if self.profile:
            Path("/proc/self/attr/exec").write_text(f"exec {self.profile}")  # apparmor(7), aa_change_onexec(2)
        if self.filter:
            seccomp.install([self.filter])

    def inner(self, pid: int) -> int:
        """Return the pid that a process of the container, or of namespaces in it, has in the container.

        Raises
        ------
        OSError : it has ended.
        """
        return processes.namespace_pids(pid)[self.depth]

    def outer(self, inner: int, among: Iterable[int]) -> int:
        """Return which of these sleepers is in the container and has this pid there; 0 where none is."""
        for pid in among:
            with contextlib.suppress(OSError):
                pids = processes.namespace_pids(pid)
                if pids[self.depth : self.depth + 1] == [inner] and self.has(pid):
                    return pid
        return 0

    def has(self, sleeper: int) -> bool:
        """Tell whether a sleeper's namespace of pids is directly below the container's.

        Raises
        ------
        OSError : it has ended.
        """
        namespace = os.open(f"/proc/{sleeper}/ns/pid", os.O_RDONLY)
        try:
            return _parent_is(namespace, os.fstat(self.namespaces["pid"]))
        finally:
            os.close(namespace)


def of(pid: int, sleepers: Collection[int]) -> Container:
    """Return the container that a process lives in, if it may be served; `sleepers` are processes 1 of kernels.

    Raises
    ------
    Refused : it has rights, or more than the container's runtime can have decided about its namespaces.
    OSError : it has ended.
    """
    for kind in _SHARED:
        with contextlib.suppress(FileNotFoundError):  # a kernel without namespaces of that kind
            if not _is_same(f"/proc/{pid}/ns/{kind}", f"/proc/self/ns/{kind}"):
                raise _refused(pid, f"in another {kind} namespace than the broker", "Do without one for the container.")
    with contextlib.ExitStack() as held:
        namespaces = {}
        for kind in ("pid", *_ENTERED):
            namespaces[kind] = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
            held.callback(os.close, namespaces[kind])
            # A user's own belong to a user namespace of that user's making; those of runtimes to the machine's.
            if not mounts.is_of_own_user_namespace(namespaces[kind]):
                raise _refused(pid, f"in a {kind} namespace that was not made by root")
        if not _parent_is(namespaces["pid"], os.stat("/proc/self/ns/pid")):  # noqa: PTH116
            raise _refused(pid, "in a pid namespace inside another one")
        first = _process_one_of(pid)
        if first in sleepers:
            raise _refused(pid, "inside a kernel or job", "Start kernels and jobs outside of others.")
        for one in (first, pid):
            _refuse_rights(one)
        for kind, namespace in namespaces.items():
            if not os.path.samestat(os.fstat(namespace), os.stat(f"/proc/{first}/ns/{kind}")):  # noqa: PTH116
                raise _refused(pid, f"in another {kind} namespace than process 1 of its container")
        mounts.refuse_other_root(pid, namespaces["mnt"])
        found = Container(
            namespaces=namespaces,
            depth=len(processes.namespace_pids(pid)) - 1,
            filter=_filter_of(pid, first),
            profile=_profile_of(pid, first),
            python=os.readlink(f"/proc/{pid}/exe"),  # noqa: PTH115
            hidden=_hidden_in(pid),
            oom_score=proc.read(f"/proc/{pid}/oom_score_adj").strip(),
        )
        held.pop_all()
        return found


def furnish(container: Container) -> None:
    """Give a sleeper in a container what others have of the machine, and hide what the container's runtime hides.

    Raises
    ------
    OSError : the system does not let it be done.
    """
    _mount("gpuckpt-checked", _OWN, "tmpfs", _FLAGS, "mode=0755,uid=0,gid=0,size=64k")
    os.mkdir(IMAGES_AT)  # noqa: PTH102
    os.close(os.open(_NOTHING, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0))
    for path, is_readable in container.hidden.items():
        if f"{path}/".startswith(f"{_OWN}/") or not os.path.exists(path):  # noqa: PTH110
            continue
        if is_readable:
            _mount(path, path, "", spawning.MS_BIND, "")
            _mount("", path, "", spawning.MS_BIND | _MS_REMOUNT | _MS_RDONLY | _FLAGS, "")
        elif os.path.isdir(path):  # noqa: PTH112
            _mount("gpuckpt-hidden", path, "tmpfs", _MS_RDONLY | _FLAGS, "mode=0755,size=4k")
        else:
            _mount(_NOTHING, path, "", spawning.MS_BIND, "")


def _process_one_of(pid: int) -> int:
    """Return process 1 of the namespace of pids that a process is in: nearly always one of its ancestors."""
    depth, own = len(processes.namespace_pids(pid)), os.stat(f"/proc/{pid}/ns/pid")  # noqa: PTH116
    for one in (*_line_of(pid), *map(int, filter(str.isdigit, os.listdir("/proc")))):  # noqa: PTH208
        with contextlib.suppress(OSError):
            pids = processes.namespace_pids(one)
            if pids[-1] == 1 and len(pids) == depth and os.path.samestat(os.stat(f"/proc/{one}/ns/pid"), own):  # noqa: PTH116
                return one
    raise _refused(pid, "without a process 1")


def _line_of(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        while pid > 1:
            yield pid
            pid = int(processes.status(pid)["PPid"])


def _refuse_rights(pid: int) -> None:
    """Refuse a process that has, or could come to have, any right: what it makes of its namespaces is the runtime's.

    Nothing that it starts can have more: ``no_new_privs`` and the bounds are for good.
    """
    status = processes.status(pid)
    if any(int(status[name], 16) for name in _RIGHTS):
        raise _refused(
            pid, "with capabilities, or with bounds that allow some", "Drop all: `--cap-drop=ALL`, `drop: [ALL]`."
        )
    if status["NoNewPrivs"] != "1":
        raise _refused(
            pid,
            "without `no_new_privs`",
            "Set it: `--security-opt no-new-privileges`, `allowPrivilegeEscalation: false`.",
        )
    if status["Uid"].split()[0] == "0":
        raise _refused(pid, "whose process 1 is root's", "Run the container as a user: `--user`, `runAsUser`.")


def _filter_of(pid: int, first: int) -> bytes:
    """Return the container's filter of system calls.

    A process can only add filters: one that has as many as process 1 has none of its own.
    """
    status = processes.status(pid)
    count = status.get("Seccomp_filters")
    if count != processes.status(first).get("Seccomp_filters") or count not in ("0", "1"):
        raise _refused(pid, "with a filter of system calls of its own")
    return filter_reader.filter_of(pid) if count == "1" else b""


def _profile_of(pid: int, first: int) -> str:
    """Return the container's profile of AppArmor's: whoever is under none can come under each, at an exec."""
    own, label = processes.label("self"), processes.label(pid)
    if label == own:
        return ""
    match = _PROFILE.fullmatch(label)
    if match is None or own != b"unconfined" or label != processes.label(first) or not _APPARMOR.exists():
        raise _refused(pid, "with a security label (AppArmor, SELinux) that the broker cannot give")
    return match[1].decode()


def _hidden_in(pid: int) -> dict[str, bool]:
    """Return what a container's runtime has mounted below its /proc: true where it can be read.

    Raises
    ------
    Refused : /proc and /dev/shm are not mounts of their own, so that the image decides what is there.
    """
    found, own = {}, set()
    for at, kind, options in mounts.mounted(pid):
        if (at, kind) in (("/proc", "proc"), ("/dev/shm", "tmpfs")):  # noqa: S108
            own.add(at)
        if at.startswith("/proc/"):
            found[at] = kind == "proc" and "ro" in options.split(",")
    if len(own) != 2:
        raise _refused(pid, "without a /proc and a /dev/shm of its own")
    return found


def _parent_is(namespace: int, other: os.stat_result) -> bool:
    try:
        parent = fcntl.ioctl(namespace, _NS_GET_PARENT)
    except OSError:  # it is outside of what the broker can see
        return False
    try:
        return os.path.samestat(os.fstat(parent), other)
    finally:
        os.close(parent)


def _is_same(path: str, other: str) -> bool:
    return os.path.samestat(os.stat(path), os.stat(other))  # noqa: PTH116


def _mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    done = _libc.mount(source.encode() or None, target.encode(), kind.encode() or None, flags, options.encode() or None)
    spawning.check(done, f"mount {source} on {target}")


def _refused(pid: int, why: str, then: str = "Run a broker inside, as root of the container.") -> Refused:
    return Refused("The broker does not serve this process.", f"Process {pid} runs in a container, {why}.", then)
