"""What the tests of the store share."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from jupyter_gpuckpt.store import Manifest, Store, Writer
from jupyter_gpuckpt.store.index import named_packs

ABOUT: dict[str, Any] = {
    "parent": None,
    "kernel": {"id": "k"},
    "machine": {},
    "cuda": {},
    "process": {},
}
FILES = {"pages-1.img": b"pages" * 5000, "core-1.img": b"core" * 10, "vram/0": b"\0" * 9000}


def fill(writer: Writer, files: dict[str, bytes] = FILES) -> None:
    """Put files where criu would, in the way that criu does: 0644 and not synced."""
    for path, content in files.items():
        target = writer.directory / path
        if not target.parent.exists():
            target.parent.mkdir()
        target.write_bytes(content)
        target.chmod(0o644)


def save(store: Store, name: str, message: str = "", files: dict[str, bytes] = FILES, **how: bool) -> Manifest:
    with store.writer(name, **how) as writer:
        fill(writer, files)
        return writer.commit(message=message, **ABOUT)


def everything(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return mode and content of all that is in a folder."""
    found = {}
    for path in sorted([folder, *folder.rglob("*")]):
        about = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(about.st_mode) else b""
        found[str(path.relative_to(folder))] = (about.st_mode, content)
    return found


def read_back(store: Store, name: str) -> dict[str, bytes]:
    """Return the files of a snapshot, as they come out of the store."""
    with tempfile.TemporaryDirectory() as folder, store.open(name, Path(folder, "files")) as snapshot:
        return {
            str(path.relative_to(snapshot.directory)): path.read_bytes()
            for path in snapshot.directory.rglob("*")
            if path.is_file()
        }


def abandon(writer: Writer) -> None:
    """Leave a writer as the end of its process would."""
    writer._session._lock.release()


def packs_of(store: Store, name: str) -> list[Path]:
    """Return the packs that a snapshot needs."""
    return [store.root / "packs" / pack for pack in sorted(named_packs(store._layout, [store.get(name).id]))]


def litter(store: Store) -> list[str]:
    """Return the paths in a store that belong to none of its snapshots."""
    if not store.root.exists():
        return []
    manifests = store.list()
    layout = store._layout
    owned = {".", "format.json", "listing.json", "locks/collect", *(folder.name for folder in layout.folders)}
    owned |= {"hints", *(str(path.relative_to(store.root)) for path in layout.hinted())}
    owned |= {f"snapshots/{m.name}.json" for m in manifests}
    owned |= {f"{folder}/{m.id}" for m in manifests for folder in ("contents", "index")}
    owned |= {f"labels/{m.id}.json" for m in manifests}
    owned |= {f"packs/{pack}" for pack in named_packs(layout, [m.id for m in manifests])}
    named = [".", *(str(path.relative_to(store.root)) for path in store.root.rglob("*"))]
    return [path for path in sorted(named) if path not in owned and _is_there(store.root / path)]


def _is_there(path: Path) -> bool:
    """Tell whether a file can be opened: another machine may have removed what a folder's listing still has."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK))
    except OSError as exc:
        return exc.errno != errno.ENOENT
    return True


def readable_by_others(folder: Path) -> list[str]:
    """Return what in `folder` somebody else could read or write, by the modes on the way to it."""
    open_paths = []
    pending = [folder]
    while pending:
        path = pending.pop()
        mode = path.lstat().st_mode
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            open_paths.append(f"{path.relative_to(folder.parent)} {stat.S_IMODE(mode):04o}")
            if stat.S_ISDIR(mode):
                pending += path.iterdir()
    return open_paths


def open_by_mode(root: Path) -> list[str]:
    """Return what the store itself created with a mode that is not its owner's alone."""
    own = [root, *root.glob("*"), *root.glob("*/*")]
    return [str(p) for p in own if p.lstat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)]


def python(script: Path, *arguments: object, **how: Any) -> subprocess.Popen[str]:
    """Start a Python process that finds the modules that this one finds."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.Popen(
        [sys.executable, str(script), *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        **how,
    )
