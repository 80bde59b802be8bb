"""Whatever users send to the broker, what takes it apart does no more than refuse it; by atheris.

A program: ``fuzz_broker.py FOLDER`` and options of libFuzzer. Each input is taken for a core image, for what the
process that reads images says, and for a request. FOLDER has to be empty.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import stat
import struct
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["jupyter_gpuckpt"]):
    from jupyter_gpuckpt.broker import deputy, images
    from jupyter_gpuckpt.broker.core_image import credentials
    from jupyter_gpuckpt.broker.image_reader import BYTES, CONTENTS, DONE, FILE, IMAGE_NAME, MEMORY_NAME, REFUSED
    from jupyter_gpuckpt.broker.peer import Peer
    from jupyter_gpuckpt.broker.protocol import Dump, Failed, Restore
    from jupyter_gpuckpt.broker.register import Register
    from jupyter_gpuckpt.errors import Refused
    from jupyter_gpuckpt.freeze.criu_program import CriuProgram

import socket

from core_images import CORE

FOLDER = Path(sys.argv[1])
OUT = FOLDER / "out"
MAGIC = bytes.fromhex("1943565447380555")
ALICE = Peer(1000, 1000, (1000, 2000), {}, {}, None)
BETWEEN = b"\xff\xfe"
"""Stands between two packets."""
REQUESTS = (
    b'{"do": "criu"}',
    b'{"do": "start"}',
    b'{"do": "hold", "pid": 5}',
    b'{"do": "next_pid", "after": 10000}',
    b'{"do": "dump", "pid": 10000, "left": "running", "seconds": 60.5}',
    b'{"do": "check"}',
    b'{"do": "restore", "left": "stopped", "seconds": 60}',
)


class Asked(deputy.Deputy):
    """Answers requests by looking at what it is to do: all that is done comes after that."""

    def _start(self, peer: Peer, *descriptors: int) -> int:
        assert len(descriptors) == 2
        return 1

    def _hold(self, peer: Peer, pid: int) -> bool:
        assert type(pid) is int
        assert 1 <= pid < 1 << 22
        return True

    _next_pid = _hold

    def _dump(self, peer: Peer, asked: Dump, *descriptors: int) -> int | None:
        assert len(descriptors) == 2
        self._hold(peer, asked.pid)
        return self._restore(peer, Restore(asked.left, asked.seconds), *descriptors[:1])

    def _restore(self, peer: Peer, asked: Restore, *descriptors: int) -> int | None:
        assert len(descriptors) == 1
        assert type(asked.left) is str
        assert asked.left in ("running", "stopped")
        assert type(asked.seconds) is float
        assert math.isfinite(asked.seconds)
        assert asked.seconds >= 1
        return 0

    def _check_images(self, peer: Peer, *descriptors: int) -> bool:
        assert len(descriptors) == 1
        return True


def read_core(data: bytes) -> None:
    """Tell that protobuf finds the same credentials in an image, and each once, wherever any are found."""
    for image in (data, MAGIC + struct.pack("<I", len(data)) + data):
        try:
            found = credentials(image)
        except ValueError:
            continue
        core = CORE.FromString(image[12:])
        assert (found is None) == (not core.HasField("thread_core"))
        if found is None:
            continue
        creds = core.thread_core.creds
        assert found.uids == {creds.uid, creds.euid, creds.suid, creds.fsuid}
        assert found.gids == {creds.gid, creds.egid, creds.sgid, creds.fsgid}
        assert found.groups == set(creds.groups)
        assert found.has_capabilities == any((*creds.cap_inh, *creds.cap_prm, *creds.cap_eff, *creds.cap_amb))
        assert found.has_securebits == bool(creds.secbits)
        assert found.no_new_privs == (creds.no_new_privs == 1)
        # Nothing of them is there that is not known, nor twice: that would be longer than what protobuf writes.
        declared = type(creds)()
        declared.CopyFrom(creds)
        declared.DiscardUnknownFields()
        assert declared.ByteSize() == creds.ByteSize()


def write_down(data: bytes) -> None:
    """Tell that nothing but files of images is written, whatever the process that reads them says."""
    OUT.mkdir()
    try:
        with contextlib.suppress(Refused, FileExistsError):
            images.write_down(iter([*data.split(BETWEEN)]), str(OUT))
        assert {path.name for path in FOLDER.iterdir()} <= {"out", "corpus"}
        for path in OUT.iterdir():
            kind = path.lstat().st_mode
            if stat.S_ISLNK(kind):
                assert str(path.readlink()) == f"user/{path.name}"
                assert MEMORY_NAME.fullmatch(path.name)
            else:
                assert kind == stat.S_IFREG | 0o440
                assert IMAGE_NAME.fullmatch(path.name)
    finally:
        shutil.rmtree(OUT)


def answer(data: bytes) -> None:
    """Tell that a request is answered, with what is asked for or a refusal, and with nothing that it said."""
    for count in range(3):
        said = ASKED._answer(ALICE, data, [NULL] * count)
        if isinstance(said, Failed):
            assert said.error["kind"] in ("Refused", "Unavailable")


def each(data: bytes) -> None:
    for look in (read_core, write_down, answer):
        look(data)


def seeds() -> None:
    """Leave whole ones of each kind for the fuzzer to begin with."""
    core = CORE()
    creds = core.thread_core.creds
    for field in ("uid", "gid", "euid", "egid", "suid", "sgid", "fsuid", "fsgid"):
        setattr(creds, field, 1000)
    creds.groups.extend((1000, 2000))
    creds.secbits, creds.no_new_privs = 0, 1
    for capabilities in (creds.cap_inh, creds.cap_prm, creds.cap_eff, creds.cap_bnd, creds.cap_amb):
        capabilities.extend((0, 0))
    body = core.SerializeToString()
    whole = [MAGIC + struct.pack("<I", len(body)) + body, body, *REQUESTS]
    parts = (FILE + b"core-1.img", BYTES + b"x", CONTENTS + b"pages-1.img", FILE + b"files.img", DONE)
    whole += [BETWEEN.join(parts), REFUSED + b"why"]
    corpus = FOLDER / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(whole):
        (corpus / str(number)).write_bytes(seed)


logging.disable()
NULL = os.open("/dev/null", os.O_RDONLY)
ASKED = Asked(socket.socket(), CriuProgram((), (4, 2, 1), "", "system"), Register(FOLDER))
seeds()
atheris.Setup([sys.argv[0], *sys.argv[2:], str(FOLDER / "corpus")], each)
atheris.Fuzz()
