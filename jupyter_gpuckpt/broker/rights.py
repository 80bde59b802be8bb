"""Giving up root: a process becomes its user's, and can never have more rights again."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import resource
from collections.abc import Collection, Iterator
from pathlib import Path

from ..linux import capabilities
from .descriptors import close_at_exec
from .peer import NO_LOGIN, Peer, login_of

__all__ = ["CAP_CHECKPOINT_RESTORE", "CAP_SYS_PTRACE", "NEEDED", "act_as", "become", "counting_to", "missing"]

CAP_SYS_PTRACE, CAP_CHECKPOINT_RESTORE = 19, 40  # linux/capability.h
_CAP_SYS_ADMIN = 21

NEEDED = (
    *(f"CAP_{name}" for name in capabilities.BROKER),
    "CAP_KILL",  # ending a criu that hangs
    "CAP_SYS_RESOURCE",  # giving users' limits to their kernels, where they are higher than its own
)
"""The capabilities that the broker has any use for. It works without the last two."""

_PR_SET_KEEPCAPS, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _RAISE = 8, 24, 38, 47, 2
_LAST_CAPABILITY = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
_VERSION_3 = 0x20080522
_KEYCTL, _JOIN_SESSION_KEYRING = {"x86_64": 250, "aarch64": 219}, 1  # keyctl(2)

_libc = ctypes.CDLL(None, use_errno=True)


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Data(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def missing(of: str = "CapEff") -> list[str]:
    """Return which capabilities this process lacks that the broker does not work without (`capabilities.missing`)."""
    return capabilities.missing(capabilities.BROKER, of)


def become(peer: Peer, capabilities: Collection[int] = (), descriptors: Collection[int] = ()) -> None:
    """Make this process the user's: ids, groups, keys, limits, login; of a container's user, its filter of calls, too.

    Of all capabilities it keeps those named, over exec, and of all descriptors those named and the standard ones.
    ``no_new_privs`` is set for good: no set-user-id program gives it, or what it starts, anything more.

    Raises
    ------
    OSError : a step failed; the process must end.
    """
    act_as(0, 0)
    close_at_exec(descriptors)
    _set_login(peer.login)
    for kind, (soft, hard) in peer.limits.items():
        _limit(kind, soft, hard)
    for number in range(_LAST_CAPABILITY + 1):
        if number not in capabilities:
            _check(_libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0), "drop a capability")
    _check(_libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0), "keep capabilities")
    os.setgroups(peer.groups)
    os.setresgid(peer.gid, peer.gid, peer.gid)
    os.setresuid(peer.uid, peer.uid, peer.uid)
    _leave_keyring()
    data = (_Data * 2)()
    for number in capabilities:
        for name in ("effective", "permitted", "inheritable"):
            half = data[number // 32]
            setattr(half, name, getattr(half, name) | 1 << number % 32)
    _check(_libc.capset(ctypes.byref(_Header(_VERSION_3, 0)), data), "set capabilities")
    for number in capabilities:
        _check(_libc.prctl(_PR_CAP_AMBIENT, _RAISE, number, 0, 0), "keep a capability over exec")
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    if peer.container is not None:
        peer.container.confine()


@contextlib.contextmanager
def counting_to(uid: int) -> Iterator[None]:
    """Have the namespaces that this process makes meanwhile count to a user (namespaces(7), ``/proc/sys/user``).

    They count to whose effective id makes them. Of root's rights it has CAP_SYS_ADMIN meanwhile, and all afterwards;
    file accesses are root's again.
    """
    os.seteuid(uid)
    try:
        header, data = _Header(_VERSION_3, 0), (_Data * 2)()
        _check(_libc.capget(ctypes.byref(header), data), "get capabilities")
        data[0].effective |= 1 << _CAP_SYS_ADMIN
        _check(_libc.capset(ctypes.byref(header), data), "set capabilities")
        yield
    finally:
        os.seteuid(0)


def _set_login(login: int | None) -> None:
    """Have audit records name the user's login, in a session of its own (pam_loginuid(8)).

    Where there was none, as in a service, whose process it is could otherwise choose one, for that is given once.
    """
    own = login_of("self")
    if login is None or login == own:
        return
    try:
        Path("/proc/self/loginuid").write_text(str(login))
    except OSError as e:
        # There is one all the same, of somebody who has no id in this user namespace: nobody here can change it.
        if own != NO_LOGIN:
            why = "the login that audit records name cannot be set: run the broker as a service, not from a login"
            raise OSError(e.errno, f"{why} ({e.strerror})") from e


def _leave_keyring() -> None:
    """Take a new session keyring, with nothing in it: whoever has that of root's session can read its keys.

    Where the system has no keys, or forbids the call to this process, and so to all that comes of it, nobody can.
    """
    if _libc.syscall(_KEYCTL[platform.machine()], _JOIN_SESSION_KEYRING, None) < 0:
        number = ctypes.get_errno()
        if number not in (errno.ENOSYS, errno.EPERM):
            raise OSError(number, f"leave the session's keyring: {os.strerror(number)}")


def _limit(kind: int, soft: int, hard: int) -> None:
    try:
        resource.setrlimit(kind, (soft, hard))
    except (OSError, ValueError):  # a broker that may not raise its own: the lower of both
        with contextlib.suppress(OSError, ValueError):
            _, most = resource.getrlimit(kind)
            resource.setrlimit(kind, (soft if most == -1 or 0 <= soft < most else most, most))


def act_as(uid: int, gid: int) -> None:
    """Have the file system judge this process as another user's from now on (setfsuid(2)); with 0, 0 as root's.

    Its supplementary groups are not changed.

    Raises
    ------
    PermissionError : it could not be changed.
    """
    _libc.setfsgid(gid)
    _libc.setfsuid(uid)
    # The call says nothing of its success: asked for an id that there is none of, it gives the one in effect.
    if (_libc.setfsgid(-1), _libc.setfsuid(-1)) != (gid, uid):
        raise PermissionError(1, "the user of file accesses could not be changed")


def _check(result: int, doing: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{doing}: {os.strerror(number)}")
