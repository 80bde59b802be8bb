"""Files without a name, which the library in criu has several processes copy into their images, and out of them."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from jupyter_gpuckpt import installed
from jupyter_gpuckpt.freeze import images

_CHOOSES_PIDS = os.geteuid() == 0
"""As criu may. Without, the system copies by itself, and all is the same but for the time."""

_BEGIN = """
import os, resource, sys
folder, MIB = sys.argv[1], 1 << 20
def opened(name, data=b""):
    fd = os.open(f"{folder}/{name}", os.O_RDWR | os.O_CREAT)
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
def at(fd):
    return os.lseek(fd, 0, os.SEEK_CUR)
def all_of(fd):
    return os.pread(fd, 1 << 30, 0)
def copied_by_others():
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt > 0
data = os.urandom(37 * MIB + 123)
"""


def under_the_library(code: str, folder: Path, *more: Path) -> str:
    preload = ":".join(map(str, (installed.CRIU_SOCKETS_LIBRARY, *more)))
    words = ["env", f"LD_PRELOAD={preload}", sys.executable, "-c", _BEGIN + code, folder]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("step", ["dump", "restore"])
def test_all_bytes_and_both_places_are_as_the_system_leaves_them(many: Path, tmp_path: Path, step: str) -> None:
    """In a dump an image is written behind its head; in a restore a file is filled where it has a hole."""
    said = under_the_library(
        """
source, image = opened("source", data), opened("image")
os.write(image, b"head")
assert os.sendfile(image, source, 4096, 20 * MIB + 5) == 20 * MIB + 5
assert (at(source), at(image)) == (0, 4 + 20 * MIB + 5)
os.write(image, b"tail")
assert all_of(image) == b"head" + data[4096 : 4096 + 20 * MIB + 5] + b"tail"
print(copied_by_others())
"""
        if step == "dump"
        else """
image, made = opened("image", b"head" + data), opened("made")
os.ftruncate(made, 50 * MIB)
os.lseek(image, 4, os.SEEK_SET)
os.lseek(made, 8192, os.SEEK_SET)
assert os.sendfile(made, image, None, 37 * MIB) == 37 * MIB
assert (at(image), at(made)) == (4 + 37 * MIB, 8192 + 37 * MIB)
assert all_of(made) == bytes(8192) + data[: 37 * MIB] + bytes(13 * MIB - 8192)
print(copied_by_others())
""",
        tmp_path,
        many,
    )
    assert said == f"{_CHOOSES_PIDS}\n"


def test_small_ones_are_left_to_the_system(many: Path, tmp_path: Path) -> None:
    code = """
os.sendfile(opened("image"), opened("source", data), 0, 15 * MIB)
print(copied_by_others())
"""
    assert under_the_library(code, tmp_path, many) == "False\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="a full disk of its own takes root")
def test_where_there_is_no_room_the_system_says_so(many: Path, tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=45M", "none", tmp_path], check=True)
    try:
        said = under_the_library(
            """
source, image = opened("source", data), opened("image", b"head")
os.lseek(image, 4, os.SEEK_SET)
sent = os.sendfile(image, source, 0, 30 * MIB)
assert sent < 10 * MIB and at(image) == 4 + sent == os.fstat(image).st_size
assert all_of(image) == b"head" + data[:sent]
try:
    os.sendfile(image, source, sent, 30 * MIB - sent)
except OSError as e:
    print(e.strerror)
""",
            tmp_path,
            many,
        )
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    assert said == "No space left on device\n"


def _number(value: int) -> bytes:
    """Return a number as protobuf writes it."""
    return bytes([value & 0x7F | 0x80]) + _number(value >> 7) if value > 0x7F else bytes([value])


def _message(raw: bytes) -> bytes:
    return struct.pack("<I", len(raw)) + raw


def _ghost(microseconds: int, parts: Sequence[bytes], *, chunked: bool) -> bytes:
    """Return a ``ghost-file-N.img`` of a file that was written to then (criu's images/ghost-file.proto)."""
    written = b"\x08\x01\x10" + _number(microseconds)
    about = b"\x08\x00\x10\x00\x18\x00\x3a" + _number(len(written)) + written + b"\x40" + _number(chunked)
    image = struct.pack("<II", 0x54564319, 0x52583605) + _message(about)
    for number, part in enumerate(parts):
        told = b"\x08" + _number(len(part)) + b"\x10" + _number(number << 24)
        image += (_message(told) if chunked else b"") + part
    return image


@pytest.mark.parametrize("chunked", [True, False])
def test_what_they_have_is_found_again_however_much_is_told_of_them(tmp_path: Path, chunked: bool) -> None:
    """Where they were written to in the first 16 ms of a second, criu needs a byte less for that."""
    parts = [os.urandom(9_000_000), os.urandom(5_000)] if chunked else [os.urandom(9_000_000)]
    image = tmp_path / "ghost-file-1.img"
    lengths = set()
    for microseconds in (100, 5_000, 20_000):
        raw = _ghost(microseconds, parts, chunked=chunked)
        image.write_bytes(raw)
        sizes = images.nameless_pieces(image)
        assert sizes is not None
        assert sum(sizes) == len(raw)
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        pieces = [raw[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        assert pieces[1::2] == parts
        lengths.add(len(raw))
    assert len(lengths) == 3


def test_what_is_no_image_of_one_is_cut_as_all_else(tmp_path: Path) -> None:
    raw = _ghost(5, [bytes(5000), bytes(7000)], chunked=True)
    for name, content in (
        ("pages-1.img", raw),
        ("ghost-file-1.img", raw[:-1]),
        ("ghost-file-1.img", raw + b"1"),
        ("ghost-file-1.img", raw[:10]),
        ("ghost-file-1.img", raw[:8] + b"\xff" * 100),
        ("ghost-file-1.img", b""),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        assert images.nameless_pieces(path) is None
