"""Whatever bytes come from elsewhere, what takes them apart does no more than raise the errors it says; by atheris.

A program: ``fuzz_parsers.py FOLDER`` and options of libFuzzer. Each input is given to all that read what a stranger may
have written, with its hash or signature put right, so that it gets behind that.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["jupyter_gpuckpt"]):
    from jupyter_gpuckpt.errors import Damaged, GpuckptError, Incompatible
    from jupyter_gpuckpt.store import Store
    from jupyter_gpuckpt.store.codec import RAW, ZSTD, decode
    from jupyter_gpuckpt.store.contents import MAGIC as CONTENTS
    from jupyter_gpuckpt.store.contents import Contents
    from jupyter_gpuckpt.store.index import MAGIC as INDEX
    from jupyter_gpuckpt.store.index import part_from_bytes
    from jupyter_gpuckpt.store.manifest import Manifest, name_in
    from jupyter_gpuckpt.store.names import is_plain_path
    from jupyter_gpuckpt.store.signatures import split
    from jupyter_gpuckpt.store.transfer.container import export_snapshot, import_snapshot
    from jupyter_gpuckpt.store.transfer.remote_store import RemoteStore
    from jupyter_gpuckpt.store.transfer.remotes.remote import Remote
    from jupyter_gpuckpt.store.transfer.sealing import Secrets, make_seal
    from jupyter_gpuckpt.store.transfer.vouching import vouch, vouched
    from jupyter_gpuckpt.store.trust import Trust

from blake3 import blake3
from store_helpers import FILES, everything, read_back, save

FOLDER = Path(sys.argv[1])
STORE = Store(FOLDER / "store", Trust(FOLDER / "keys"))
SECRETS = Secrets(FOLDER / "keys")


def import_it(data: bytes) -> None:
    with contextlib.suppress(GpuckptError):
        import_snapshot(STORE, io.BytesIO(data), "fuzz", SECRETS)
        assert read_back(STORE, "it") == FILES
        STORE.remove("it")
    assert everything(STORE.root) == BEFORE


def read_manifest(data: bytes) -> None:
    body = data.rstrip(b"}\n")
    for sealed in (data, body + b',"blake3":"' + blake3(body).hexdigest().encode() + b'"}\n'):
        with contextlib.suppress(Damaged):
            name_in(sealed, "fuzz")
        with contextlib.suppress(Damaged, Incompatible):
            Manifest.from_json(sealed, "it")
        with contextlib.suppress(ValueError):
            split(sealed)


def read_lists(data: bytes) -> None:
    for raw in (data, CONTENTS + data):
        with contextlib.suppress(ValueError):
            assert all(map(is_plain_path, Contents.from_bytes(raw).files))
    for raw in (data, INDEX + data + blake3(INDEX + data).digest()):
        with contextlib.suppress(ValueError):
            part_from_bytes(raw)


def read_chunk(data: bytes) -> None:
    for codec in (RAW, ZSTD, 2):
        for size in (len(data), 4096):
            with contextlib.suppress(ValueError):
                assert len(decode(codec, data, size)) == size


class Files(Remote):
    """A remote with these files, which nobody writes."""

    shown = "/remote"

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files

    def read(self, path: str, start: int, size: int) -> bytes:
        return self.files[path][start : start + size]

    def list(self, folder: str) -> dict[str, int]:
        return {}

    def write(self, path: str, content: bytes) -> None:
        raise NotImplementedError

    def create(self, path: str, content: bytes) -> bool:
        raise NotImplementedError

    def delete(self, path: str) -> None:
        raise NotImplementedError


def read_remote(data: bytes) -> None:
    vouched(data.decode("ascii", "replace").replace("\ufffd", "?"), "age1")
    with contextlib.suppress(GpuckptError):
        RemoteStore(Files({"format.json": data}), SECRETS)
    assert (
        RemoteStore(Files({"format.json": b'{"features":[],"format":2}', "condemned.json": data}), SECRETS).condemned()
        is not None
    )


def each(data: bytes) -> None:
    for read in (import_it, read_manifest, read_lists, read_chunk, read_remote):
        read(data)


def seeds() -> None:
    """Leave whole ones of each kind for the fuzzer to begin with."""
    maker = Store(FOLDER / "maker", STORE.trust)
    manifest = save(maker, "it", files=FILES)
    corpus = FOLDER / "corpus"
    corpus.mkdir()
    with (corpus / "export").open("wb") as out:
        export_snapshot(maker, "it", out, SECRETS)
    for kind, path in (("manifest", "snapshots/it.json"), ("contents", f"contents/{manifest.id}")):
        (corpus / kind).write_bytes((maker.root / path).read_bytes())
    (corpus / "mark").write_bytes(
        json.dumps({**make_seal(SECRETS)[0], "format": 2, "key": "", "recipient": "age1"}).encode()
    )
    (corpus / "said").write_text(vouch("# recipient: age1\n", "age1", "/remote", STORE.trust))
    (corpus / "index").write_bytes((maker.root / "index" / manifest.id).read_bytes())


save(STORE, "own", files=FILES)
STORE.collect()
BEFORE = everything(STORE.root)
seeds()
atheris.Setup([sys.argv[0], *sys.argv[2:], str(FOLDER / "corpus")], each)
atheris.Fuzz()
