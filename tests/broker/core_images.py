"""criu's ``core`` images as protobuf itself reads and writes them: to edit the credentials in them, and to compare."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_Field = descriptor_pb2.FieldDescriptorProto
_IDS = ("uid", "gid", "euid", "egid", "suid", "sgid", "fsuid", "fsgid")
_LISTS = {9: "cap_inh", 10: "cap_prm", 11: "cap_eff", 12: "cap_bnd", 14: "groups", 19: "cap_amb"}


def _core() -> Any:
    """Return the class of CRIU's ``core_entry``, with the fields down to ``creds_entry``."""
    file = descriptor_pb2.FileDescriptorProto(name="gpuckpt_core.proto", package="gpuckpt.core", syntax="proto2")
    for message, field, number, inner in (("core", "thread_core", 5, "thread"), ("thread", "creds", 10, "creds")):
        kind = {"type": _Field.TYPE_MESSAGE, "type_name": f".gpuckpt.core.{inner}", "label": _Field.LABEL_OPTIONAL}
        file.message_type.add(name=message).field.add(name=field, number=number, **kind)
    creds = file.message_type.add(name="creds")
    for number, name in {**dict(enumerate(_IDS, 1)), 13: "secbits", 18: "no_new_privs", **_LISTS}.items():
        label = _Field.LABEL_REPEATED if number in _LISTS else _Field.LABEL_OPTIONAL
        creds.field.add(name=name, number=number, type=_Field.TYPE_UINT32, label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("gpuckpt.core.core"))


CORE = _core()


def rewrite_core(raw: bytes, change: Callable[[Any], None]) -> bytes:
    """Return a ``core-N.img`` with its credentials changed."""
    core = CORE.FromString(raw[12:])
    change(core.thread_core.creds)
    body = core.SerializeToString()
    return raw[:8] + struct.pack("<I", len(body)) + bytes(body)
