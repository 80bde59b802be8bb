"""What a restore of a user's images may be made of: checked, and put where the user cannot change it any more.

Images lie in a folder of their user's, who may have written anything into them, and may do so while they are looked
at. criu therefore reads copies in a tmpfs of root's, which is mounted in the sleeper's own mount namespace for as long
as criu runs. Only what becomes memory or deleted files of the user's own processes is not copied. Root reads none of
it: a process without rights does (`image_reader`), and root writes down what that one says.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
from collections.abc import Iterator
from typing import BinaryIO

from ..errors import Refused
from ..linux.spawning import MS_BIND, MS_NODEV, MS_NOEXEC, MS_NOSUID
from . import image_reader
from .peer import Peer
from .rights import act_as

__all__ = ["copy", "lay_out", "take_away", "write_down"]

_USER_FOLDER = "user"
"""In the checked folder: the user's own, for contents."""

_MANY, _MUCH = 200_000, 512 << 20  # files, and bytes of them together: what is copied
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_MNT_DETACH = 2

_libc = ctypes.CDLL(None, use_errno=True)


def lay_out(folder: int, at: str, peer: Peer) -> None:
    """Mount checked copies of the images in a user's folder (a descriptor) at `at`: in the sleeper, by root.

    Raises
    ------
    Refused : they would give the user's processes more than the user has, or are not what criu writes.
    OSError : the system does not let it be done.
    """
    # Set-group-id: what is made in it is the user's to read.
    options = f"mode=2750,uid=0,gid={peer.gid},size={_MUCH},nr_inodes={_MANY}"
    _mount("gpuckpt-images", at, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, options)
    user = os.path.join(at, _USER_FOLDER)  # noqa: PTH118
    os.mkdir(user, 0o700)  # noqa: PTH102
    act_as(peer.uid, peer.gid)
    os.fchdir(folder)
    _mount(".", user, "", MS_BIND, "")
    act_as(0, 0)
    os.chdir("/")
    copy(folder, at, peer)


def take_away(at: str) -> None:
    """Undo `lay_out`, in the sleeper."""
    _libc.umount2(os.fsencode(at), _MNT_DETACH)


def copy(folder: int, at: str, peer: Peer) -> None:
    """Write what a folder (a descriptor) has for a restore into another, as a process without rights reads it.

    Raises
    ------
    Refused, OSError : as `lay_out` raises them.
    """
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reader = os.fork()
    if reader == 0:
        image_reader.read(folder, peer, there.fileno())
    there.close()
    try:
        write_down(iter(lambda: here.recv(image_reader.PACKET), b""), at)
    finally:
        here.close()  # it ends, as long as its user lets it
        with contextlib.suppress(PermissionError):  # without CAP_KILL
            os.kill(reader, signal.SIGKILL)
        os.waitpid(reader, 0)


def write_down(packets: Iterator[bytes], at: str) -> None:
    """Write the files that an `image_reader` sends into a folder, which has to be empty.

    Whatever it sends, nothing is written but files of images, with names and in numbers that images may have.

    Raises
    ------
    Refused : it says so, or ended before it had sent all, or sent too much.
    OSError : they cannot be written.
    """
    left = _MUCH
    with contextlib.ExitStack() as opened:
        file: BinaryIO | None = None
        for packet in packets:
            kind, content = packet[:1], packet[1:]
            if kind == image_reader.DONE:
                return
            if kind == image_reader.REFUSED:
                raise _refused(content.decode(errors="replace"))
            if kind == image_reader.BYTES and file is not None:
                left -= len(content)
                if left < 0:
                    raise _refused(f"its images have more than {_MUCH >> 20} MiB beside memory")
                file.write(content)
                continue
            name = content.decode("ascii", errors="replace")
            path = os.path.join(at, name)  # noqa: PTH118
            if kind == image_reader.CONTENTS and image_reader.MEMORY_NAME.fullmatch(name):
                os.symlink(f"{_USER_FOLDER}/{name}", path)  # noqa: PTH211
            elif kind == image_reader.FILE and image_reader.IMAGE_NAME.fullmatch(name):
                opened.close()
                file = opened.enter_context(os.fdopen(os.open(path, _NEW, 0o440), "wb"))
                os.fchmod(file.fileno(), 0o440)
            else:
                break
        raise _refused("the process that reads its images was killed")


def _refused(why: str) -> Refused:
    return Refused(
        "The snapshot was not restored: the broker refuses it.",
        why[:1].upper() + why[1:1000] + ".",
        "The broker restores only your own kernels that it started. Restore another snapshot.",
    )


def _mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    done = _libc.mount(os.fsencode(source), os.fsencode(target), kind.encode() or None, flags, options.encode() or None)
    if done != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {source} on {target}: {os.strerror(number)}")
