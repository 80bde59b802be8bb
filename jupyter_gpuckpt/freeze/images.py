"""Reading and editing CRIU's image files: which files and sockets a saved process tree has, and under what names.

An image is two 32-bit magic numbers, then entries, each a 32-bit length and a protobuf message (CRIU's
``images/*.proto``). Only the fields that matter here are declared: protobuf carries all others through unchanged.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import mmap
import os
import re
import shutil
import socket
import stat
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

TCP_CLOSE, TCP_CLOSE_WAIT, TCP_LISTEN = 7, 8, 10  # include/net/tcp_states.h
SOCK_STREAM, SOCK_DGRAM = 1, 2
_TASK_STOPPED = 3  # criu/include/pid.h
_RANGE, _WHOLE_FILE, _OPEN_FILE_S = 1, 2, 4  # criu/include/file-lock.h: of fcntl(2), flock(2), and fcntl(2) again
_VMA_REGULAR, _VMA_PRIVATE, _VMA_VVAR = 1 << 0, 1 << 6 | 1 << 9, 1 << 12  # criu/include/image.h, VMA_AREA_*
_VMA_HEAP, _VMA_FILE, _VMA_ANONYMOUS = 1 << 5, 1 << 6, 1 << 9
_MAP_PLAIN = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
_MAP_KIND, _MAP_DROPPABLE = 0x0F, 0x08  # mmap(2); its pages may go at any time, and criu takes none
_EMPTY = 8  # bytes of an image without entries
_LINKED, _GHOST = 0, 1  # criu's images/remap-file-path.proto
_BOTH = 3  # criu's images/sk-opts.proto
_OF_THREAD = re.compile(r"/proc/(?P<process>\d+)/task/(?P<thread>\d+)(?P<rest>(/\w+)*)", re.ASCII)
_GHOST_MAGIC = struct.pack("<II", 0x54564319, 0x52583605)  # criu/include/magic.h

_U32 = descriptor_pb2.FieldDescriptorProto.TYPE_UINT32
_U64 = descriptor_pb2.FieldDescriptorProto.TYPE_UINT64
_BOOL = descriptor_pb2.FieldDescriptorProto.TYPE_BOOL
_BYTES = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
_MESSAGE = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
_OPTIONAL = descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL
_REPEATED = descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED

_SCHEMA: dict[str, list[tuple[str, int, int, str]]] = {
    # message: (field, number, type, message type); numbers from fdinfo, regfile, sk-inet, sk-opts,
    # sk-unix, remap-file-path, pstree, mm, vma, core, seccomp, file-lock,
    # timerfd and tty
    "vma": [
        ("start", 1, _U64, ""),
        ("end", 2, _U64, ""),
        ("shmid", 4, _U64, ""),
        ("prot", 5, _U32, ""),
        ("flags", 6, _U32, ""),
        ("status", 7, _U32, ""),
        ("fdflags", 10, _U32, ""),
    ],
    "mm": [("vmas", 14, _MESSAGE, "vma")],
    "reg": [
        ("flags", 2, _U32, ""),
        ("name", 6, _BYTES, ""),
        ("size", 8, _U64, ""),
        ("mode", 10, _U32, ""),
        ("build_id", 11, _U32, ""),
    ],
    "socket": [("so_rcvbuf", 2, _U32, "")],
    "inet": [
        ("ino", 2, _U32, ""),
        ("family", 3, _U32, ""),
        ("type", 4, _U32, ""),
        ("state", 6, _U32, ""),
        ("src_port", 7, _U32, ""),
        ("dst_port", 8, _U32, ""),
        ("src_addr", 11, _U32, ""),
        ("dst_addr", 12, _U32, ""),
        ("opts", 14, _MESSAGE, "socket"),
        ("shutdown", 19, _U32, ""),
    ],
    "unix": [
        ("ino", 2, _U32, ""),
        ("type", 3, _U32, ""),
        ("peer", 8, _U32, ""),
        ("name", 11, _BYTES, ""),
        ("name_dir", 14, _BYTES, ""),
        ("deleted", 15, _BOOL, ""),
    ],
    "file": [
        ("type", 1, _U32, ""),
        ("id", 2, _U32, ""),
        ("reg", 3, _MESSAGE, "reg"),
        ("isk", 4, _MESSAGE, "inet"),
        ("tfd", 12, _MESSAGE, "timer"),
        ("usk", 16, _MESSAGE, "unix"),
    ],
    "task": [
        ("task_state", 1, _U32, ""),
        ("comm", 6, _BYTES, ""),
        ("old_seccomp_mode", 11, _U32, ""),
        ("old_seccomp_filter", 12, _U32, ""),
    ],
    "thread": [("pdeath_sig", 8, _U32, ""), ("seccomp_mode", 11, _U32, ""), ("seccomp_filter", 12, _U32, "")],
    "core": [("tc", 3, _MESSAGE, "task"), ("thread_core", 5, _MESSAGE, "thread")],
    "filter": [("filter", 1, _BYTES, "")],
    "seccomp": [("seccomp_filters", 1, _MESSAGE, "filter")],
    "filelock": [
        ("flag", 1, _U32, ""),
        ("type", 2, _U32, ""),
        ("pid", 3, _U32, ""),
        ("fd", 4, _U32, ""),
        ("start", 5, _U64, ""),
        ("len", 6, _U64, ""),
    ],
    "timer": [("vsec", 7, _U64, ""), ("vnsec", 8, _U64, ""), ("isec", 9, _U64, ""), ("insec", 10, _U64, "")],
    "pty": [("index", 1, _U32, "")],
    "tty": [("pty", 12, _MESSAGE, "pty")],
    "ids": [("files_id", 2, _U32, "")],
    "descriptor": [("id", 1, _U32, ""), ("fd", 4, _U32, "")],
    "remap": [("orig_id", 1, _U32, ""), ("remap_id", 2, _U32, ""), ("remap_type", 3, _U32, "")],
    "ghost": [("uid", 1, _U32, ""), ("gid", 2, _U32, ""), ("mode", 3, _U32, ""), ("chunks", 8, _U32, "")],
    "ghost_chunk": [("len", 1, _U64, ""), ("off", 2, _U64, "")],
    "dump_stats": [("freezing_time", 1, _U32, ""), ("frozen_time", 2, _U32, "")],
    "stats": [("dump", 1, _MESSAGE, "dump_stats")],
    "pstree": [
        ("pid", 1, _U32, ""),
        ("ppid", 2, _U32, ""),
        ("pgid", 3, _U32, ""),
        ("sid", 4, _U32, ""),
        ("threads", 5, _U32, ""),
    ],
}
_LISTS = (
    "build_id",
    "threads",
    "vmas",
    "src_addr",
    "dst_addr",
    "seccomp_filters",
)


def _messages() -> dict[str, Any]:
    package = "gpuckpt.criu"
    file = descriptor_pb2.FileDescriptorProto(name="gpuckpt_criu.proto", package=package, syntax="proto2")
    for name, fields in _SCHEMA.items():
        message = file.message_type.add(name=name)
        for field, number, kind, ref in fields:
            message.field.add(
                name=field,
                number=number,
                type=kind,
                type_name=f".{package}.{ref}" if ref else None,
                label=_REPEATED if field in _LISTS else _OPTIONAL,
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in _SCHEMA}


_MESSAGES = _messages()


def _entries(raw: bytes, kind: str) -> Iterator[Any]:
    at = 8
    while at < len(raw):
        (size,) = struct.unpack_from("<I", raw, at)
        yield _MESSAGES[kind].FromString(raw[at + 4 : at + 4 + size])
        at += 4 + size


@dataclass(frozen=True)
class NamedFile:
    """A file, folder or FIFO that a saved tree maps, holds open or stands in.

    Attributes
    ----------
    path : absolute.
    size : in bytes; None but for regular files.
    flags, mode : as open(2) and stat(2) have them.
    build_id : of a program or library, padded with zeros to a multiple of four bytes; else empty.
    """

    path: str
    size: int | None
    flags: int
    mode: int
    build_id: bytes


def is_written(flags: int) -> bool:
    """Tell whether a file with these flags (open(2)) is open for writing."""
    return flags & os.O_ACCMODE in (os.O_WRONLY, os.O_RDWR)


def named_files(images: Path) -> list[NamedFile]:
    """Return what the tree uses of the file system by name.

    Files without a name (deleted, or made anonymous) travel inside the images and are left out.
    """
    nameless = _nameless(images)
    return [
        _named(e.reg)
        for e in _entries((images / "files.img").read_bytes(), "file")
        if e.HasField("reg") and e.id not in nameless
    ]


def _named(reg: Any) -> NamedFile:
    size = reg.size if reg.HasField("size") else None
    return NamedFile(_path(reg), size, reg.flags, reg.mode, struct.pack(f"<{len(reg.build_id)}I", *reg.build_id))


def paths_by_id(raw: bytes) -> dict[int, str]:
    """Return the path of each regular file of a ``files.img`` by the id that areas of memory name it by."""
    return {e.id: _path(e.reg) for e in _entries(raw, "file") if e.HasField("reg")}


def areas(raw: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Yield the areas of memory of an ``mm-N.img``: start, end, status, and the id of the file or shared memory."""
    for entry in _entries(raw, "mm"):
        for vma in entry.vmas:
            yield vma.start, vma.end, vma.status, vma.shmid


def private_areas(raw: bytes) -> Iterator[tuple[int, int]]:
    """Yield start and end of those areas of an ``mm-N.img`` whose pages are in the page image, ascending."""
    for entry in _entries(raw, "mm"):
        for vma in entry.vmas:
            is_private = vma.status & _VMA_REGULAR and vma.status & _VMA_PRIVATE and not vma.status & _VMA_VVAR
            if is_private and vma.flags & _MAP_KIND != _MAP_DROPPABLE:
                yield vma.start, vma.end


def plain_areas(raw: bytes, *, read_only: bool) -> Iterator[tuple[int, int]]:
    """Yield start and end of the areas of an ``mm-N.img`` that are ordinary memory, or private copies of files' pages.

    What of them is not in the page image is zero, or as the file has it. They are in ascending order; `read_only` tells
    whether those are wanted, too, that cannot be written.
    """
    for entry in _entries(raw, "mm"):
        for vma in entry.vmas:
            kind = vma.status & ~(_VMA_REGULAR | _VMA_HEAP)
            is_plain = vma.status & _VMA_REGULAR and vma.flags & ~_MAP_PLAIN == 0
            if is_plain and kind in (_VMA_ANONYMOUS, _VMA_FILE) and (read_only or vma.prot & mmap.PROT_WRITE):
                yield vma.start, vma.end


def heaps(raw: bytes) -> list[tuple[int, int]]:
    """Return start and end of the areas of an ``mm-N.img`` that are the C library's heap (brk(2))."""
    return [(vma.start, vma.end) for entry in _entries(raw, "mm") for vma in entry.vmas if vma.status & _VMA_HEAP]


def mapped_files(images: Path, pid: int | None = None) -> set[str]:
    """Return the paths of the files that areas of the tree's memory lie in, or of one process's."""
    paths = paths_by_id((images / "files.img").read_bytes())
    found = images.glob("mm-*.img" if pid is None else f"mm-{pid}.img")
    return {paths[file] for mm in found for *_, file in areas(mm.read_bytes()) if file in paths}


def written_by_mappings(images: Path) -> set[str]:
    """Return the paths of the files that the tree can write by memory that it shares with them (MAP_SHARED)."""
    paths = paths_by_id((images / "files.img").read_bytes())
    return {
        paths[vma.shmid]
        for mm in images.glob("mm-*.img")
        for entry in _entries(mm.read_bytes(), "mm")
        for vma in entry.vmas
        if vma.shmid in paths and vma.flags & mmap.MAP_SHARED and is_written(vma.fdflags)
    }


def frozen_seconds(images: Path) -> float:
    """Return for how long criu kept the tree stopped during a dump, in seconds, as it writes down itself."""
    (stats,) = _entries((images / "stats-dump").read_bytes(), "stats")
    return float(stats.dump.freezing_time + stats.dump.frozen_time) / 1e6


def _nameless(images: Path) -> set[int]:
    remap = images / "remap-fpath.img"
    return {e.orig_id for e in _entries(remap.read_bytes(), "remap")} if remap.exists() else set()


def lost_names(images: Path) -> dict[int, NamedFile]:
    """Return the files that lost the name by which the tree uses them, and have another one, by id.

    For the time of a dump criu gives them a name beside that one (``--link-remap``), which is gone afterwards.
    """
    remap = images / "remap-fpath.img"
    entries = list(_entries(remap.read_bytes(), "remap")) if remap.exists() else []
    wanted = {e.orig_id for e in entries if e.HasField("remap_type") and e.remap_type == _LINKED}
    files = _entries((images / "files.img").read_bytes(), "file") if wanted else iter(())
    return {e.id: _named(e.reg) for e in files if e.HasField("reg") and e.id in wanted}


def make_nameless(images: Path, contents: Mapping[int, BinaryIO]) -> None:
    """Have files that lost their names (by id, as `lost_names` has them) travel in the images with these contents.

    Raises
    ------
    OSError : a content cannot be read or written.
    """
    ghosts: dict[tuple[int, int], int] = {}  # several ids may be of one file
    for number, content in enumerate(contents.values(), 1 + _highest_ghost(images)):
        about = os.fstat(content.fileno())
        if (about.st_dev, about.st_ino) in ghosts:
            continue
        ghosts[about.st_dev, about.st_ino] = number
        entry = _MESSAGES["ghost"](uid=about.st_uid, gid=about.st_gid, mode=about.st_mode)
        with (images / f"ghost-file-{number:x}.img").open("xb") as image:
            image.write(_GHOST_MAGIC + _packed(entry))
            shutil.copyfileobj(content, image)
    remap, files = (images / "remap-fpath.img").read_bytes(), (images / "files.img").read_bytes()
    names = set()
    out = bytearray(remap[:8])
    for e in _entries(remap, "remap"):
        if e.orig_id in contents:
            about = os.fstat(contents[e.orig_id].fileno())
            names.add(e.remap_id)
            e.remap_id, e.remap_type = ghosts[about.st_dev, about.st_ino], _GHOST
        out += _packed(e)
    (images / "remap-fpath.img").write_bytes(out)
    out = bytearray(files[:8])
    for e in _entries(files, "file"):
        if e.id in contents:
            e.reg.ClearField("size")  # it may be written to, and grow, until its content is read
        if e.id not in names:
            out += _packed(e)
    (images / "files.img").write_bytes(out)


def nameless_pieces(image: Path) -> list[int] | None:
    """Return the sizes (bytes) of the pieces of a ``ghost-file-N.img`` that belong together: what has data is one.

    What is told of it in between has times, and so not always as many bytes: data is found again in the next image all
    the same. None for any other file, and where it is not as this version of CRIU writes it.
    """
    if not image.name.startswith("ghost-file-"):
        return None
    found, size = [], image.stat().st_size
    with image.open("rb") as file, contextlib.suppress(struct.error, DecodeError):
        file.seek(len(_GHOST_MAGIC))
        about = _MESSAGES["ghost"].FromString(_unpacked(file))
        if not about.chunks:
            return [one for one in (file.tell(), size - file.tell()) if one]
        begin = 0
        while begin < size:
            chunk = _MESSAGES["ghost_chunk"].FromString(_unpacked(file))
            found += [file.tell() - begin, chunk.len]
            begin = file.seek(chunk.len, os.SEEK_CUR)
        return found if begin == size and all(found) else None
    return None


def _unpacked(file: BinaryIO) -> bytes:
    """Return the message that comes next in an image. Raises `struct.error` where none does."""
    (length,) = struct.unpack("<I", file.read(4))
    return file.read(length)


def own_deleted_files(images: Path, uid: int, groups: Sequence[int]) -> None:
    """Have all deleted files in the images belong to a user, who cannot give files to others.

    `groups` are the user's; the first is that of files which have another.

    Raises
    ------
    OSError : one cannot be written again.
    """
    for path in images.glob("ghost-file-*.img"):
        with path.open("rb") as image:
            magic = image.read(len(_GHOST_MAGIC))
            entry = _MESSAGES["ghost"].FromString(_unpacked(image))
            if entry.uid == uid and entry.gid in groups:
                continue
            entry.uid = uid
            entry.gid = entry.gid if entry.gid in groups else groups[0]
            anew = path.with_suffix(".own")
            with anew.open("xb") as out:
                out.write(magic + _packed(entry))
                shutil.copyfileobj(image, out)
        anew.replace(path)


def _highest_ghost(images: Path) -> int:
    return max((int(path.stem.rpartition("-")[2], 16) for path in images.glob("ghost-file-*.img")), default=0)


def _path(reg: Any) -> str:
    return "/" + str(reg.name.decode("utf-8", "surrogateescape")).lstrip("/")


@dataclass(frozen=True, order=True)
class BoundSocket:
    """A socket of a saved tree that has a port for itself: one that listens (TCP), or any of UDP.

    Attributes
    ----------
    kind : ``tcp`` or ``udp``.
    is_connected : it is a UDP socket that talks to one other only, and which port it has is nobody's business.
    """

    port: int
    kind: str
    is_connected: bool


def bound_sockets(images: Path) -> list[BoundSocket]:
    """Return the sockets that have a port for themselves, by ascending port."""
    raw = (images / "files.img").read_bytes()
    listening = _listening(raw)
    sockets = (e.isk for e in _entries(raw, "file") if e.HasField("isk") and e.isk.src_port)
    return sorted(
        {
            BoundSocket(isk.src_port, "tcp" if isk.type == SOCK_STREAM else "udp", bool(isk.dst_port))
            for isk in sockets
            if not _is_connection(isk, listening)
        }
    )


def bound_ports(images: Path) -> list[int]:
    """Return the ports that the saved tree has for itself (listening TCP, or UDP), in ascending order."""
    return sorted({socket.port for socket in bound_sockets(images)})


def _listening(raw: bytes) -> set[int]:
    return {e.isk.src_port for e in _entries(raw, "file") if e.HasField("isk") and _listens(e.isk)}


def _is_connection(isk: Any, listening: set[int]) -> bool:
    return bool(isk.type == SOCK_STREAM and not _listens(isk) and (isk.dst_port or isk.src_port in listening))


def has_half_connection(images: Path) -> bool:
    """Tell whether a Unix stream socket of the tree is connected to one outside it.

    criu refuses that in a dump, but for a connection that the other side has not accepted yet: that one is dumped, and
    then cannot be restored ("Peer unresolved").
    """
    sockets = [e.usk for e in _entries((images / "files.img").read_bytes(), "file") if e.HasField("usk")]
    here = {s.ino for s in sockets}
    return any(s.type == SOCK_STREAM and s.peer and s.peer not in here for s in sockets)


def abstract_names(images: Path) -> set[bytes]:
    """Return the abstract names, without their leading NUL, that Unix sockets of the tree are bound to."""
    sockets = (e.usk for e in _entries((images / "files.img").read_bytes(), "file") if e.HasField("usk"))
    return {s.name[1:] for s in sockets if s.name[:1] == b"\0"}


@dataclass(frozen=True)
class Lock:
    """A lock of a file that a saved tree holds: of `length` bytes from `start` on, 0 for all that follow.

    One that `is_whole` is of flock(2), the others are of fcntl(2): of the open file, or of the process, and `is_lost`
    then where the process has mapped the file, too: criu opens it for that, and closes it when it has the lock again.
    """

    path: str
    start: int
    length: int
    writes: bool
    is_whole: bool
    is_lost: bool = False
    pid: int = 0
    """Whose it is, of one that `is_lost`, and by which descriptor."""
    fd: int = -1

    def holds(self, byte: int) -> bool:
        """Tell whether this byte is locked by it."""
        return self.start <= byte and (not self.length or byte < self.start + self.length)


def locks(images: Path) -> list[Lock]:
    """Return the locks that the tree holds of files with a name (flock(2), fcntl(2))."""
    try:
        raw = (images / "filelocks.img").read_bytes()
    except FileNotFoundError:
        return []
    paths, nameless = paths_by_id((images / "files.img").read_bytes()), _nameless(images)
    found = []
    for e in _entries(raw, "filelock"):
        if e.flag not in (_RANGE, _WHOLE_FILE, _OPEN_FILE_S):
            continue
        file = _opened(images, e.pid).get(e.fd, 0)
        if file in paths and file not in nameless:
            is_lost = e.flag == _RANGE and paths[file] in mapped_files(images, e.pid)
            whose = (e.pid, e.fd) if is_lost else ()
            found.append(
                Lock(paths[file], e.start, e.len, e.type == fcntl.F_WRLCK, e.flag == _WHOLE_FILE, is_lost, *whose)
            )
    return found


def terminals(images: Path) -> set[int]:
    """Return the numbers of the terminals that programs of the tree made (pty(7)): restored, they have the same."""
    try:
        raw = (images / "tty-info.img").read_bytes()
    except FileNotFoundError:
        return set()
    return {e.pty.index for e in _entries(raw, "tty") if e.HasField("pty")}


@dataclass(frozen=True)
class ThreadFile:
    """A file or folder of /proc about a thread that is not its process's first, as `pid` has it open by `fd`.

    Attributes
    ----------
    flags : as open(2) has them.
    """

    pid: int
    fd: int
    flags: int
    path: str


def thread_files(images: Path) -> list[ThreadFile]:
    """Return the files of /proc about threads of the tree that it has open: threads are made after criu opens files."""
    opened = {
        e.id: e.reg
        for e in _entries((images / "files.img").read_bytes(), "file")
        if e.HasField("reg") and _of_first_thread(_path(e.reg)) is not None
    }
    if not opened:
        return []
    tree = _tree((images / "pstree.img").read_bytes())
    threads = {thread for e in tree.values() for thread in e.threads}
    found = []
    for pid in tree:
        for fd, file in _opened(images, pid).items():
            match = _OF_THREAD.fullmatch(_path(opened[file])) if file in opened else None
            if match is not None and int(match["thread"]) in threads:
                found.append(ThreadFile(pid, fd, opened[file].flags, match.string))
    return found


def _of_first_thread(path: str) -> str | None:
    """Return the same of its process's first thread for a file of /proc about another thread; None for other files."""
    match = _OF_THREAD.fullmatch(path)
    if match is None or match["thread"] == match["process"]:
        return None
    return f"/proc/{match['process']}/task/{match['process']}{match['rest']}"


def _opened(images: Path, pid: int) -> dict[int, int]:
    """Return the ids of what a saved process has open, by descriptor; nothing for one that has ended."""
    try:
        (ids,) = _entries((images / f"ids-{pid}.img").read_bytes(), "ids")
        table = (images / f"fdinfo-{ids.files_id}.img").read_bytes()
    except FileNotFoundError:
        return {}
    return {descriptor.fd: descriptor.id for descriptor in _entries(table, "descriptor")}


@dataclass(frozen=True)
class TcpEnd:
    """An end of a TCP connection that a saved process has.

    Attributes
    ----------
    id, inode : of the file and its socket.
    here, there : address and port of this end, and of the other; that of IPv4 also where the socket is one of IPv6.
    state : include/net/tcp_states.h.
    pid : the lowest of those that have it open.
    family : of its socket (socket(2)).
    shutdown : the halves that are closed, 1 for what it receives, 2 for what it sends, 3 for both.
    room : for what it receives (SO_RCVBUF), in bytes.
    """

    id: int
    inode: int
    here: tuple[str, int]
    there: tuple[str, int]
    state: int
    pid: int
    family: int
    shutdown: int
    room: int


def tcp_ends(images: Path) -> list[TcpEnd]:
    """Return the ends of TCP connections that the tree has, closed ones included."""
    holders: dict[int, int] = {}
    for pid in sorted(_tree((images / "pstree.img").read_bytes())):
        for id_ in _opened(images, pid).values():
            holders.setdefault(id_, pid)
    return [
        TcpEnd(
            e.id,
            e.isk.ino,
            (_address(e.isk.src_addr), e.isk.src_port),
            (_address(e.isk.dst_addr), e.isk.dst_port),
            e.isk.state,
            holders[e.id],
            e.isk.family,
            e.isk.shutdown,
            e.isk.opts.so_rcvbuf,
        )
        for e in _entries((images / "files.img").read_bytes(), "file")
        if e.HasField("isk") and _has_other_end(e.isk) and e.id in holders
    ]


def _has_other_end(isk: Any) -> bool:
    return bool(isk.type == SOCK_STREAM and not _listens(isk) and isk.dst_port)


def _address(words: Sequence[int]) -> str:
    address = ipaddress.ip_address(struct.pack(f"<{len(words)}I", *words))
    return str(getattr(address, "ipv4_mapped", None) or address)


def unread(images: Path, end: TcpEnd) -> Path:
    """Return the file with what an end of a connection had not read (`criu_connections.c`); none where that is not
    known."""
    return images / f"tcp-unread-{end.inode:x}"


@dataclass(frozen=True)
class NewEnd:
    """An end of a connection that is made anew.

    Attributes
    ----------
    number : by which criu asks for its socket, 1 or more.
    port : its local port.
    shutdown : the halves that criu closes, as in `TcpEnd`.
    """

    number: int
    port: int
    shutdown: int


def process_names(images: Path) -> dict[int, str]:
    """Return the names of the saved processes (comm, proc(5)) by pid."""
    found = {}
    for pid in _tree((images / "pstree.img").read_bytes()):
        with contextlib.suppress(FileNotFoundError):
            for core in _entries((images / f"core-{pid}.img").read_bytes(), "core"):
                found[pid] = core.tc.comm.decode("utf-8", "replace")
    return found


def locks_or_terminals(images: Path) -> str:
    """Return what of a tree only one tree at a time can have, in words: locks of files, terminals; nothing for neither.

    Terminals are those that programs made (pty(7)): a restored one has the number that it had.
    """
    for name, words in (("filelocks.img", "locks of files"), ("tty-info.img", "terminals")):
        with contextlib.suppress(FileNotFoundError):
            if (images / name).stat().st_size > _EMPTY:
                return words
    return ""


def stopped(images: Path) -> set[int]:
    """Return the pids of the saved processes that were stopped already (SIGSTOP and its kin)."""
    found = set()
    for pid in _tree((images / "pstree.img").read_bytes()):
        with contextlib.suppress(FileNotFoundError):
            for core in _entries((images / f"core-{pid}.img").read_bytes(), "core"):
                if core.tc.task_state == _TASK_STOPPED:
                    found.add(pid)
    return found


def socket_paths(images: Path) -> set[Path]:
    """Return the absolute paths that Unix sockets of the tree are bound to."""
    sockets = (e.usk for e in _entries((images / "files.img").read_bytes(), "file") if e.HasField("usk"))
    return {path for path in map(_socket_path, sockets) if path is not None}


def _socket_path(usk: Any) -> Path | None:
    name = os.fsdecode(usk.name.rstrip(b"\0"))
    path = os.path.normpath(os.path.join(os.fsdecode(usk.name_dir), name))  # noqa: PTH118 - it may be a relative one
    return Path(path) if name and path.startswith("/") and not usk.deleted else None


def _listens(isk: Any) -> bool:
    return bool(isk.type == SOCK_STREAM and isk.state == TCP_LISTEN)


def rewrite_files(
    source: Path,
    target: Path,
    *,
    port: Callable[[int], int],
    connected: Mapping[int, NewEnd],
    abstract_name: Callable[[bytes], bytes],
    socket_path: Callable[[Path], Path],
    deleted: Callable[[str], str],
    found: Callable[[str], os.stat_result | None],
) -> None:
    """Copy ``files.img`` with other ports, abstract socket names, and files as they are now.

    Files of /proc about a thread are those about its process's first one: criu opens files before it makes threads.

    Parameters
    ----------
    port : gives the new port for a bound one (listening TCP, or UDP).
    connected : the ends of TCP connections that come back, by the files' ids; all others come back closed.
    abstract_name : gives the new name for an abstract Unix socket's (without its leading NUL).
    socket_path : gives the new path for one that a Unix socket is bound to.
    deleted : gives the new path for that of a deleted file, beside which criu makes it again, to delete it again.
    found : gives what a path is now: criu shall expect that mode, and look at the size of what is as it was and that
        nobody here writes; others may grow before it looks. None leaves it to expect the saved ones.
    """
    nameless = _nameless(source.parent)
    raw = source.read_bytes()
    out = bytearray(raw[:8])
    listening = _listening(raw)
    datagrams = {
        (e.isk.src_port, _address(e.isk.src_addr))
        for e in _entries(raw, "file")
        if e.HasField("isk") and e.isk.type == SOCK_DGRAM and e.isk.src_port
    }
    written = {_path(e.reg) for e in _entries(raw, "file") if e.HasField("reg") and is_written(e.reg.flags)}
    for e in _entries(raw, "file"):
        if e.id in connected:
            _connect(e.isk, connected[e.id])
        elif e.HasField("isk") and _is_connection(e.isk, listening):
            _close(e.isk)
        elif e.HasField("isk") and e.isk.src_port:
            e.isk.src_port = port(e.isk.src_port)
            if e.isk.type == SOCK_DGRAM and _leads_to_one(e.isk, datagrams):
                e.isk.dst_port = port(e.isk.dst_port)
        if e.HasField("tfd"):
            _let_go_on(e.tfd)
        if e.HasField("usk") and e.usk.name[:1] == b"\0":
            e.usk.name = b"\0" + abstract_name(e.usk.name[1:])
        elif e.HasField("usk") and (path := _socket_path(e.usk)) is not None and (to := socket_path(path)) != path:
            e.usk.name = os.fsencode(to) + e.usk.name[len(e.usk.name.rstrip(b"\0")) :]
            e.usk.ClearField("name_dir")
        if e.HasField("reg") and (first := _of_first_thread(_path(e.reg))) is not None:
            e.reg.name = os.fsencode(first)
        if e.HasField("reg") and e.id in nameless:
            e.reg.name = os.fsencode(deleted(_path(e.reg)))
        elif e.HasField("reg") and (now := found(_path(e.reg))) is not None:
            if not stat.S_ISLNK(e.reg.mode):
                e.reg.mode = now.st_mode
            if _path(e.reg) in written or e.reg.size != now.st_size:
                e.reg.ClearField("size")
        out += _packed(e)
    target.write_bytes(bytes(out))


def _leads_to_one(isk: Any, datagrams: set[tuple[int, str]]) -> bool:
    """Tell whether a socket of UDP is connected to one of these, by port and address; some have all addresses."""
    to = _address(isk.dst_addr)
    is_here = ipaddress.ip_address(to).is_loopback or to == _address(isk.src_addr)
    of_all = ("::",) if ":" in to else ("0.0.0.0", "::")  # noqa: S104 - nothing listens by it
    return any((isk.dst_port, address) in datagrams for address in (to, *(of_all if is_here else ())))


def _let_go_on(timer: Any) -> None:
    """Have a timer (timerfd_create(2)) that was due, and not read since, fire again after its interval.

    The system begins the next interval when it is read, and shows no time until then, which criu takes for a timer that
    is off.
    """
    if not (timer.vsec or timer.vnsec):
        timer.vsec, timer.vnsec = timer.isec, timer.insec


def _close(isk: Any) -> None:
    """Have a connection come back closed: it needs no port, and the saved one may be somebody's by now."""
    if isk.dst_port:
        isk.shutdown = _BOTH
    isk.src_port, isk.dst_port, isk.state = 0, 0, TCP_CLOSE


def _connect(isk: Any, end: NewEnd) -> None:
    """Have a socket be taken from who made its connection anew: in place of its address it has a number.

    In IPv4 that is an address of 0.0.0.0/8, in IPv6 one of 100::/64: nobody has these.
    """
    number = end.number.to_bytes(4, "big")
    address = number if isk.family == socket.AF_INET else b"\x01" + bytes(11) + number
    isk.src_addr[: len(address) // 4] = struct.unpack(f"<{len(address) // 4}I", address)
    isk.src_port, isk.dst_port, isk.state, isk.shutdown = end.port, 0, TCP_CLOSE, end.shutdown
    if not end.shutdown:
        isk.ClearField("shutdown")


def drop_filter(images: Path, code: bytes) -> None:
    """Have the tree come back without its filter of system calls, if that is the only one, and has this code.

    Its images may be links to the snapshot's own, which stay as they are.
    """
    try:
        raw = (images / "seccomp.img").read_bytes()
    except FileNotFoundError:
        return  # it has none
    if [one.filter for entry in _entries(raw, "seccomp") for one in entry.seccomp_filters] != [code]:
        return
    for path in images.glob("core-*.img"):
        raw = path.read_bytes()
        out = bytearray(raw[:8])
        for e in _entries(raw, "core"):
            for part, prefix in (("tc", "old_seccomp"), ("thread_core", "seccomp")):
                if e.HasField(part):
                    getattr(e, part).ClearField(f"{prefix}_mode")
                    getattr(e, part).ClearField(f"{prefix}_filter")
            out += _packed(e)
        made = path.with_suffix(".new")
        made.write_bytes(bytes(out))
        made.replace(path)


def outlive_parent(images: Path) -> None:
    """Have the first process of the tree, and all its threads, not be told of its parent's end (PR_SET_PDEATHSIG).

    Its parent is criu, which ends when it is restored; and that signal ends most programs. Process 1, its parent from
    then on, takes it along when it ends. The images may be links to the snapshot's own, which stay as they are.
    """
    tree = _tree((images / "pstree.img").read_bytes())
    first = next(e for e in tree.values() if e.ppid not in tree)
    for thread in first.threads:
        path = images / f"core-{thread}.img"
        (core,) = _entries(raw := path.read_bytes(), "core")
        if core.thread_core.pdeath_sig:
            core.thread_core.ClearField("pdeath_sig")
            made = path.with_suffix(".new")
            made.write_bytes(raw[:8] + _packed(core))
            made.replace(path)


def highest_id(images: Path) -> int:
    """Return the highest id of a process, thread, group or session of the saved tree."""
    tree = _tree((images / "pstree.img").read_bytes()).values()
    return max(int(number) for e in tree for number in (e.pid, e.pgid, e.sid, *e.threads))


def _tree(raw: bytes) -> dict[int, Any]:
    """Return the entries of ``pstree.img`` by pid, parents before their children."""
    tree = {e.pid: e for e in _entries(raw, "pstree")}
    for pid, e in tree.items():
        if len(e.threads) == 1:
            e.threads[0] = pid  # for a zombie, criu writes whatever number stands in its memory
    return tree


def parents(raw: bytes) -> dict[int, int]:
    """Return the parent of each process of the saved tree, by a ``pstree.img``; 0 where it has none there."""
    return {pid: e.ppid for pid, e in _tree(raw).items()}


def rewrite_tree(source: Path, target: Path) -> None:
    """Copy ``pstree.img`` so that processes whose session has lost its leader lead one of their own.

    A daemon that forked twice is such a process. criu would restore it by way of a stand-in for the leader, whose end
    leaves the daemon to process 1: out of the kernel's tree, although the kernel is a subreaper.
    """
    raw = source.read_bytes()
    tree = _tree(raw)
    orphaned = {pid: e.sid for pid, e in tree.items() if e.sid not in tree}
    for pid, session in orphaned.items():
        parent = tree[pid].ppid
        tree[pid].sid = tree[parent].sid if orphaned.get(parent) == session else pid
    for pid in orphaned:
        e = tree[pid]
        if e.sid == pid:
            e.pgid = pid
        elif e.pgid not in tree or tree[e.pgid].sid != e.sid:
            e.pgid = tree[e.ppid].pgid
    target.write_bytes(raw[:8] + b"".join(map(_packed, tree.values())))


def _packed(entry: Any) -> bytes:
    body: bytes = entry.SerializeToString()
    return struct.pack("<I", len(body)) + body
