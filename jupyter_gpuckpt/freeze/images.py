"""Reading and editing CRIU's image files: which files and sockets a saved process tree has, and under what names.

An image is two 32-bit magic numbers, then entries, each a 32-bit length and a protobuf message (CRIU's
``images/*.proto``). Only the fields that matter here are declared: protobuf carries all others through unchanged.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

TCP_LISTEN = 10  # include/net/tcp_states.h
SOCK_STREAM = 1

_U32 = descriptor_pb2.FieldDescriptorProto.TYPE_UINT32
_U64 = descriptor_pb2.FieldDescriptorProto.TYPE_UINT64
_BOOL = descriptor_pb2.FieldDescriptorProto.TYPE_BOOL
_BYTES = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
_MESSAGE = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE

_SCHEMA: dict[str, list[tuple[str, int, int, str]]] = {
    # message: (field, number, type, message type); numbers from fdinfo, regfile, sk-inet, sk-unix and remap-file-path
    "reg": [("flags", 2, _U32, ""), ("name", 6, _BYTES, ""), ("size", 8, _U64, "")],
    "inet": [
        ("type", 4, _U32, ""),
        ("state", 6, _U32, ""),
        ("src_port", 7, _U32, ""),
        ("dst_port", 8, _U32, ""),
    ],
    "unix": [("name", 11, _BYTES, ""), ("deleted", 15, _BOOL, "")],
    "file": [
        ("type", 1, _U32, ""),
        ("id", 2, _U32, ""),
        ("reg", 3, _MESSAGE, "reg"),
        ("isk", 4, _MESSAGE, "inet"),
        ("usk", 16, _MESSAGE, "unix"),
    ],
    "remap": [("orig_id", 1, _U32, ""), ("remap_id", 2, _U32, "")],
}


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
                label=descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL,
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


def regular_files(images: Path) -> list[tuple[str, int, int]]:
    """Return (absolute path, size in bytes, open flags) of every file that the tree maps or holds open by name.

    Files without a name (deleted, or made anonymous) travel inside the images and are left out.
    """
    remap = images / "remap-fpath.img"
    nameless = {e.orig_id for e in _entries(remap.read_bytes(), "remap")} if remap.exists() else set()
    return [
        ("/" + e.reg.name.decode("utf-8", "surrogateescape").lstrip("/"), e.reg.size, e.reg.flags)
        for e in _entries((images / "files.img").read_bytes(), "file")
        if e.HasField("reg") and e.reg.HasField("size") and e.id not in nameless
    ]


def listening_ports(images: Path) -> list[int]:
    """Return the TCP ports that the saved tree listens on, in ascending order."""
    entries = _entries((images / "files.img").read_bytes(), "file")
    return sorted({e.isk.src_port for e in entries if e.HasField("isk") and _listens(e.isk)})


def socket_folders(images: Path) -> set[Path]:
    """Return the folders in which the tree has Unix sockets that are bound to an absolute path."""
    names = [
        e.usk.name.rstrip(b"\0").decode("utf-8", "surrogateescape")
        for e in _entries((images / "files.img").read_bytes(), "file")
        if e.HasField("usk") and not e.usk.deleted
    ]
    return {Path(name).parent for name in names if name.startswith("/")}


def _listens(isk: Any) -> bool:
    return bool(isk.type == SOCK_STREAM and isk.state == TCP_LISTEN)


def rewrite_files(
    source: Path,
    target: Path,
    *,
    port: Callable[[int], int],
    abstract_name: Callable[[bytes], bytes],
    file_size: Callable[[str, int], int],
) -> None:
    """Copy ``files.img`` with other ports, abstract socket names and expected file sizes.

    Parameters
    ----------
    port : gives the new port for a bound one (listening TCP, or UDP).
    abstract_name : gives the new name for an abstract Unix socket's (without its leading NUL).
    file_size : gives the size in bytes that criu shall expect of a path, from the size that was saved.
    """
    raw = source.read_bytes()
    out = bytearray(raw[:8])
    listening = {e.isk.src_port for e in _entries(raw, "file") if e.HasField("isk") and _listens(e.isk)}
    for e in _entries(raw, "file"):
        if e.HasField("isk") and e.isk.src_port:
            isk = e.isk
            accepted = isk.type == SOCK_STREAM and not _listens(isk)
            if accepted and (isk.dst_port or isk.src_port in listening):
                # A connection comes back closed: it needs no port, and the saved one may be somebody's by now.
                isk.src_port = 0
            else:
                isk.src_port = port(isk.src_port)
        if e.HasField("usk") and e.usk.name[:1] == b"\0":
            e.usk.name = b"\0" + abstract_name(e.usk.name[1:])
        if e.HasField("reg") and e.reg.HasField("size"):
            path = "/" + e.reg.name.decode("utf-8", "surrogateescape").lstrip("/")
            e.reg.size = file_size(path, e.reg.size)
        body = e.SerializeToString()
        out += struct.pack("<I", len(body)) + body
    target.write_bytes(bytes(out))
