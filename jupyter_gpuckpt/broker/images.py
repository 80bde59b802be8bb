"""What a restore of a user's images may be made of: checked, and put where the user cannot change it any more.

Images lie in a folder of their user's, who may have written anything into them, and may do so while they are looked
at. criu therefore reads copies in a tmpfs of root's, which is mounted in the sleeper's own mount namespace for as long
as criu runs. Only what becomes memory or deleted files of the user's own processes is not copied.
"""

from __future__ import annotations

import ctypes
import os
import re
import stat
from typing import Any

from ..errors import Refused
from ..freeze import images
from ..keeper.spawning import MS_BIND, MS_NODEV, MS_NOEXEC, MS_NOSUID
from .person import Person
from .rights import act_as

__all__ = ["USER_FOLDER", "lay_out", "take_away"]

USER_FOLDER = "user"
"""In the checked folder: the user's own, for criu's log and for contents."""

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,100}\.img", re.ASCII)
_CONTENTS = re.compile(r"(pages|ghost-file)-[0-9a-f]{1,10}\.img", re.ASCII)
_CORE = re.compile(r"core-.*\.img", re.ASCII)
_OLD = re.compile(r"creds-.*\.img", re.ASCII)
"""Where very old images have credentials, and criu still looks for them."""
_MANY, _MUCH = 200_000, 512 << 20  # files, and bytes of them together: what is copied
_MNT_DETACH = 2

_libc = ctypes.CDLL(None, use_errno=True)


def lay_out(folder: int, at: str, person: Person) -> None:
    """Mount checked copies of the images in a user's folder (a descriptor) at `at`: in the sleeper, by root.

    Every file is read with the user's own rights. This process has the user's supplementary groups afterwards.

    Raises
    ------
    Refused : they would give the user's processes more than the user has, or are not what criu writes.
    OSError : the system does not let it be done.
    """
    # Set-group-id: what is made in it is the user's to read.
    options = f"mode=2750,uid=0,gid={person.gid},size={_MUCH},nr_inodes={_MANY}"
    _mount("gpuckpt-images", at, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, options)
    user = os.path.join(at, USER_FOLDER)  # noqa: PTH118
    os.mkdir(user, 0o700)  # noqa: PTH102
    act_as(person.uid, person.gid)
    os.fchdir(folder)
    _mount(".", user, "", MS_BIND, "")
    act_as(0, 0)
    os.setgroups(person.groups)
    left = _MUCH
    for name in os.listdir(folder):
        if not _NAME.fullmatch(name) or _OLD.fullmatch(name):
            continue
        copy = os.path.join(at, name)  # noqa: PTH118
        if _CONTENTS.fullmatch(name):
            os.symlink(f"{USER_FOLDER}/{name}", copy)  # noqa: PTH211
            continue
        raw = _read(folder, name, left, person)
        left -= len(raw)
        if _CORE.fullmatch(name):
            try:
                raw = images.rewrite_core(raw, lambda creds: _judge(creds, person))
            except ValueError as e:
                raise _refused(str(e)) from e
        elif name == "apparmor.img":
            raise _refused("it brings security policies of its own (AppArmor)")
        descriptor = os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o440)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o440)
            file.write(raw)
    os.chdir("/")


def take_away(at: str) -> None:
    """Undo `lay_out`, in the sleeper."""
    _libc.umount2(os.fsencode(at), _MNT_DETACH)


def _read(folder: int, name: str, most: int, person: Person) -> bytes:
    act_as(person.uid, person.gid)
    try:
        # A FIFO is opened without waiting for whoever would write into it; a link is not followed.
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError as e:
        raise _refused(f"{name} cannot be opened by its user: {e.strerror}") from e
    finally:
        act_as(0, 0)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _refused(f"{name} is no file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            raw = file.read(most + 1)
    finally:
        os.close(descriptor)
    if len(raw) > most:
        raise _refused(f"its images have more than {_MUCH >> 20} MiB beside memory")
    return raw


def _judge(creds: Any, person: Person) -> None:
    """Refuse credentials that are more than this person has."""
    if {creds.uid, creds.euid, creds.suid, creds.fsuid} != {person.uid}:
        raise _refused(f"a process in it is not user {person.uid}'s")
    if {creds.gid, creds.egid, creds.sgid, creds.fsgid} != {person.gid}:
        raise _refused(f"a process in it is not of group {person.gid}")
    if more := set(creds.groups) - {person.gid, *person.groups}:
        raise _refused(f"a process in it is of groups that user {person.uid} is not in: {sorted(more)[:10]}")
    if any((*creds.cap_inh, *creds.cap_prm, *creds.cap_eff, *creds.cap_amb)):
        raise _refused("a process in it has capabilities")
    if creds.secbits:
        raise _refused("a process in it has securebits")
    if creds.no_new_privs != 1:
        raise _refused("a process in it is without no_new_privs")
    if images.unknown_bytes(creds):
        raise _refused("a process in it has a security label, or credentials of a kind that is not known here")


def _refused(why: str) -> Refused:
    return Refused(
        "The snapshot was not restored: the broker refuses it.",
        why[0].upper() + why[1:] + ".",
        "Only what a kernel of yours was, started by the broker, comes back through it. Restore another snapshot.",
    )


def _mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    done = _libc.mount(os.fsencode(source), os.fsencode(target), kind.encode() or None, flags, options.encode() or None)
    if done != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {source} on {target}: {os.strerror(number)}")
