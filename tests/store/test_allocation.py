"""Room is made for what is there, not for what somebody says is there."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from store_helpers import save
from test_export import HEAD, contents_of, record, signed_by
from transfer_helpers import LARGE, at, person

from jupyter_gpuckpt.errors import GpuckptError
from jupyter_gpuckpt.store import Store
from jupyter_gpuckpt.store.chunks import HOLE
from jupyter_gpuckpt.store.contents import MAX_TOTAL, Contents
from jupyter_gpuckpt.store.index import part_to_bytes
from jupyter_gpuckpt.store.pack import Location
from jupyter_gpuckpt.store.transfer.push import push

MIB = 2**20

WITHIN = """
import resource, sys
sys.path[:0] = sys.argv[1].split(":")
from pathlib import Path
from jupyter_gpuckpt.errors import GpuckptError
from jupyter_gpuckpt.store.durable import read_small
from jupyter_gpuckpt.store.transfer.container import import_snapshot
from jupyter_gpuckpt.store.transfer.push import push
from jupyter_gpuckpt.store.transfer.remote_collect import collect_remote
from transfer_helpers import at, person, secrets_of
folder, room = Path(sys.argv[2]), int(sys.argv[3])
ann = person(folder, "ann")
ann.trusted("it")
taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + room, taken + room))
"""


def done_within(room: int, folder: Path, work: str) -> None:
    """Check that some work is done in so much more memory than a program has that has begun."""
    path = ":".join(p for p in sys.path if p)
    words = [sys.executable, "-c", WITHIN + work, path, str(folder), str(room)]
    said = subprocess.run(
        words, capture_output=True, text=True, timeout=300, env={**os.environ, "MALLOC_ARENA_MAX": "1"}
    )
    assert said.returncode == 0, said.stderr


@pytest.fixture
def ann(tmp_path: Path) -> Store:
    ann = person(tmp_path, "ann")
    save(ann, "it", files=LARGE)
    return ann


def test_a_small_file_takes_little_whatever_it_may_have(ann: Store, tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"x" * 100)
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 2**40)
    done_within(
        100 * MIB,
        tmp_path,
        "assert read_small(folder / 'small', 4 * 2**30) == b'x' * 100\n"
        "assert len(read_small(folder / 'sparse', 2**20)) == 2**20 + 1\n"
        "assert read_small(Path('/proc/self/status'), 2**20).startswith(b'Name:')",
    )


def test_an_exported_file_takes_what_it_has_not_what_it_says(ann: Store, tmp_path: Path) -> None:
    manifest = signed_by(ann, "evil", b"", 2**45)
    (tmp_path / "file").write_bytes(HEAD + record(b"MNFT", manifest) + struct.pack("<4sQ", b"CONT", 2**30 - 1))
    done_within(
        300 * MIB,
        tmp_path,
        "with (folder / 'file').open('rb') as file:\n"
        "    try:\n"
        "        import_snapshot(ann, file, 'file', secrets_of(ann))\n"
        "    except GpuckptError as e:\n"
        "        assert 'it ends too early' in e.why",
    )


def test_what_others_have_written_into_an_index_is_not_taken_apart_further_than_it_is_needed(
    ann: Store, tmp_path: Path
) -> None:
    push(ann, "it", at(tmp_path / "remote", ann))
    (tmp_path / "remote" / "snapshots" / "it.json").unlink()
    strange = {
        number.to_bytes(32, "big"): Location(f"{number:032x}-000001", 2**50, 4096, 4096, 0) for number in range(120_000)
    }
    part = part_to_bytes(strange)
    for number in range(6):
        (tmp_path / "remote" / "index" / f"{number:032x}").write_bytes(part)
    done_within(
        250 * MIB,
        tmp_path,
        "assert push(ann, 'it', at(folder / 'remote', ann)).sent == 0\n"
        "assert collect_remote(at(folder / 'remote', ann), 0).obstacle == ''",
    )


@pytest.mark.parametrize("sizes", [[2**64 - 1], [2**63], [MAX_TOTAL + 1], [MAX_TOTAL // 2 + 1] * 2])
def test_holes_are_no_longer_than_files_can_be(ann: Store, sizes: list[int]) -> None:
    files = [[f"f{number}", size, 1] for number, size in enumerate(sizes)]
    raw = contents_of(files) + b"".join(HOLE + struct.pack("<Q", size) for size in sizes)
    with pytest.raises(ValueError, match="bytes together"):
        Contents.from_bytes(raw)


@pytest.mark.parametrize(
    "record", [b"[]", b"{", b'{"packs/x": 1e999}', b'{"packs/x": NaN}', b'{"x": ' + b"9" * 400 + b"}", b"[" * 9999]
)
def test_a_remote_s_record_of_what_is_needless_may_be_anything(ann: Store, tmp_path: Path, record: bytes) -> None:
    there = at(tmp_path / "remote", ann)
    push(ann, "it", there)
    (tmp_path / "remote" / "condemned.json").write_bytes(record)
    assert there.condemned() == {}


def test_a_passphrase_is_not_tried_at_any_price(ann: Store, tmp_path: Path) -> None:
    import base64
    import json

    costly = b"age-encryption.org/v1\n-> scrypt " + b"A" * 22 + b" 23\n" + b"A" * 43 + b"\n--- " + b"A" * 43 + b"\n"
    key = base64.b64encode(costly).decode()
    mark = {"features": ["age"], "format": 2, "key": key, "recipient": "age1" + "q" * 58}
    (tmp_path / "remote").mkdir()
    (tmp_path / "remote" / "format.json").write_text(json.dumps(mark))
    with pytest.raises(GpuckptError, match=r"2\^23 KiB of memory"):
        at(tmp_path / "remote", ann, passphrase=lambda: "open sesame")
