"""The process that reads a user's images, and judges them: with no right that the user lacks, and few of those.

It is the user's: what it opens, the system judges as it does for the user. It cannot be traced by the user's other
processes, has no capability, no descriptor but two, little memory and a dozen system calls. What it finds it sends in
packets (of a ``SOCK_SEQPACKET`` socket), each a kind and a content; `images` writes them down.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import signal
import stat
from typing import NoReturn

from . import core_image, seccomp
from .core_image import Credentials
from .descriptors import close_all
from .peer import Peer
from .rights import become

__all__ = ["BYTES", "CONTENTS", "DONE", "FILE", "IMAGE_NAME", "MEMORY", "MEMORY_NAME", "PACKET", "REFUSED", "read"]

FILE, BYTES, CONTENTS, REFUSED, DONE = b"f", b"b", b"c", b"r", b"."
"""The kinds: a file begins (its name), more of it, one that is not read (its name), why not, and that this was all."""
PACKET = 1 << 16  # bytes of a packet, at most
MEMORY = 64 << 20
"""Bytes of memory of its own, at most: some 10 MiB are Python's."""

IMAGE_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,100}\.img", re.ASCII)
MEMORY_NAME = re.compile(r"(pages|ghost-file)-[0-9a-f]{1,10}\.img", re.ASCII)
"""What becomes memory or deleted files of the user's processes, and nothing else."""
_CORE = re.compile(r"core-.*\.img", re.ASCII)
_OLD = re.compile(r"creds-.*\.img", re.ASCII)
"""Where very old images have credentials, and criu still looks for them."""
# A FIFO is opened without waiting for whoever would write into it; a link is not followed.
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4

_libc = ctypes.CDLL(None, use_errno=True)


def read(folder: int, peer: Peer, to: int) -> NoReturn:
    """Send what a folder (a descriptor) has for a restore to `to`, and end; in a forked process of root's."""
    try:
        _give_up(folder, peer, to)
        names = os.listdir(folder)
        seccomp.keep_reading(_FLAGS)
        for name in names:
            if MEMORY_NAME.fullmatch(name):
                os.write(to, CONTENTS + name.encode())
            elif IMAGE_NAME.fullmatch(name) and not _OLD.fullmatch(name):
                _send(folder, name, peer, to)
        os.write(to, DONE)
    except ValueError as e:
        _refuse(to, str(e))
    except MemoryError:
        _refuse(to, "reading its images takes more memory than allowed")
    except BaseException as e:  # noqa: BLE001 - nobody else tells of it
        _refuse(to, f"its images could not be read: {type(e).__name__}: {e}")
    finally:
        os._exit(0)


def _refuse(to: int, why: str) -> None:
    with contextlib.suppress(OSError):
        os.write(to, REFUSED + why.encode(errors="replace")[: PACKET - 1])


def _give_up(folder: int, peer: Peer, to: int) -> None:
    parent = os.getppid()
    close_all((folder, to))
    become(peer)
    # Its user's own processes may send it signals; what it says, they must have no say in.
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    for kind, most in ((resource.RLIMIT_DATA, MEMORY), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0)):
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def _send(folder: int, name: str, peer: Peer, to: int) -> None:
    if name == "apparmor.img":
        raise ValueError("it contains its own security policies (AppArmor)")
    try:
        descriptor = os.open(name, _FLAGS, dir_fd=folder)
    except OSError as e:
        raise ValueError(f"{name} cannot be opened by its user: {e.strerror}") from e
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{name} is no file")
        os.write(to, FILE + name.encode())
        if _CORE.fullmatch(name):
            image = _whole(descriptor, core_image.MOST_BYTES + 1)
            _judge(core_image.credentials(image), peer)
            for at in range(0, len(image), PACKET - 1):
                os.write(to, BYTES + image[at : at + PACKET - 1])
            return
        while part := os.read(descriptor, PACKET - 1):
            os.write(to, BYTES + part)
    finally:
        os.close(descriptor)


def _whole(descriptor: int, most: int) -> bytes:
    found = bytearray()
    while len(found) < most and (part := os.read(descriptor, most - len(found))):
        found += part
    return bytes(found)


def _judge(creds: Credentials | None, peer: Peer) -> None:
    """Refuse credentials that are more than this user has."""
    if creds is None:  # of a process that has ended
        return
    if creds.uids != {peer.uid}:
        raise ValueError(f"a process in it is not user {peer.uid}'s")
    if creds.gids != {peer.gid}:
        raise ValueError(f"a process in it is not of group {peer.gid}")
    if more := creds.groups - {peer.gid, *peer.groups}:
        raise ValueError(f"a process in it is of groups that user {peer.uid} is not in: {sorted(more)[:10]}")
    if creds.has_capabilities:
        raise ValueError("a process in it has capabilities")
    if creds.has_securebits:
        raise ValueError("a process in it has securebits")
    if not creds.no_new_privs:
        raise ValueError("a process in it is without no_new_privs")
