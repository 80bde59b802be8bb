"""Puts the files that a snapshot keeps where they stood.

What the machine has already, with the same bytes, is left as it is. What is gone from the user's own folders is made on
the disk again (`own_folders`). The rest is written into the run folder of the sleeper that the snapshot is restored
into, and mounted in the sleeper's own mount namespace by `placing`: it goes with the sleeper.
"""

from __future__ import annotations

import io
import json
import logging
import os
import stat
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3

from ... import settings
from ...client.kernel_start import run_path
from ...errors import GpuckptError, Refused
from ...snapshots.kept_files import Kept, KeptFile
from ...snapshots.needs import NeededFile
from ...store import Contents
from ..namespace import Namespace
from . import own_folders, placing

__all__ = ["Lacking", "Placement", "bytes_of", "lacking", "missing", "parts_of"]

log = logging.getLogger("gpuckpt.keeper")

_FOLDER = "files"
"""In the run folder: all that is put in place."""
_RAW, _ALONE, _TOGETHER, _PLAN = "raw", "alone", "together", "plan.json"
_OUTPUT = "placing.out"
_TIMEOUT = 120.0  # seconds


@dataclass(frozen=True)
class Lacking:
    """What of a snapshot's own files this machine lacks.

    Attributes
    ----------
    files : parents before what is in them.
    makeable : the paths of those that can be made on the disk; the others stand in for one kernel alone.
    environments : the folders of Python and its packages: what a kernel creates in them goes with it.
    """

    files: Sequence[KeptFile] = ()
    makeable: frozenset[str] = frozenset()
    environments: frozenset[str] = frozenset()

    @property
    def stand_ins(self) -> list[KeptFile]:
        """Those that are not made on the disk."""
        return [file for file in self.files if file.path not in self.makeable]


def lacking(kept: Kept, needed: Iterable[NeededFile], contents: Contents, elsewhere: Collection[str]) -> Lacking:
    """Return what this machine lacks of the kept files, but for what is made `elsewhere`. Raises `ValueError`."""
    files = [file for file in missing(kept, contents) if file.path not in elsewhere]
    if not files:
        return Lacking()
    environments = own_folders.environments(kept.files, needed)
    return Lacking(files, own_folders.makeable(files, environments), environments)


def missing(kept: Kept, contents: Contents) -> list[KeptFile]:
    """Return the kept files that this machine lacks or has with other bytes, parents before what is in them.

    What is `loose` must only be there, with whatever bytes.

    `contents` are those of the snapshot.

    Raises
    ------
    ValueError : a file lies in no part of the snapshot.
    """
    for file in kept.files:
        if file.part and (file.part not in contents.files or file.offset + file.size > contents.size_of(file.part)):
            raise ValueError(f"the snapshot does not hold its file {file.path[:200]!a}")
    found = []
    gone: set[str] = set()
    for file in sorted(kept.files, key=lambda one: one.path.split("/")):
        if file.path.rpartition("/")[0] in gone or not _is_here(file, contents):
            found.append(file)
            if stat.S_ISDIR(file.mode):
                gone.add(file.path)
    return found


def _is_here(file: KeptFile, contents: Contents) -> bool:
    path = Path(file.path)
    try:
        if stat.S_ISDIR(file.mode):
            return path.is_dir()
        now = path.lstat()
        if file.loose:
            return True  # a user's code stays as it is now
        if stat.S_IFMT(now.st_mode) != stat.S_IFMT(file.mode):
            return False
        if stat.S_ISLNK(file.mode):
            return os.readlink(path) == file.link  # noqa: PTH115 - as it is written
        if file.writable and now.st_size >= file.size:
            return True  # a log goes on
        if now.st_size != file.size:
            return False
        if now.st_mtime_ns == file.mtime or not file.size:
            return True
        if file.hash:
            return blake3(path.read_bytes()).hexdigest() == file.hash
        return contents.are_in(file.part, path)
    except OSError:
        return False


def parts_of(files: Sequence[KeptFile]) -> set[str]:
    """Return the parts of the snapshot that hold the bytes of these files."""
    return {file.part for file in files if file.part}


def bytes_of(files: Sequence[KeptFile], contents: Contents) -> int:
    """Return how many bytes are written to put these files in place."""
    return sum(contents.size_of(part) for part in parts_of(files)) + sum(file.size for file in files if file.hash)


@dataclass
class Placement:
    """What is put in place for one restore: `raw` is filled, then follow `build`, `mount` and, after criu, `seal`.

    Attributes
    ----------
    made : what was made on the machine's disk, parents first.
    sealed : the folders of the machine of which the sleeper sees a copy, with more in it, that nothing is created in.
    mixed : those of Python's packages, in which something is: it goes with the sleeper.
    """

    space: Namespace
    lacking: Lacking
    made: list[Path] = field(default_factory=list)
    sealed: list[str] = field(default_factory=list)
    mixed: list[str] = field(default_factory=list)
    _alone: list[tuple[str, str]] = field(default_factory=list)
    _own: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._top = self.space.run_dir / _FOLDER
        for folder in (self._top, self.raw, self._top / _ALONE, self._top / _TOGETHER):
            folder.mkdir(mode=0o700)

    @property
    def raw(self) -> Path:
        """The folder in which the snapshot's parts are wanted, by the names that they have in its folder of files."""
        return self.space.run_dir / _FOLDER / _RAW

    def build(self) -> None:
        """Make files on the disk, write the others into the run folder, and decide where each of these is mounted.

        Raises
        ------
        Refused : it cannot be done here; the text says why.
        """
        try:
            self._build()
        except OSError as e:
            raise _not_placed(f"{e.strerror or e}: {e.filename}") from e

    async def mount(self) -> None:
        """Have what was built stand in the sleeper where it stood. Raises as `build`."""
        if not (self._alone or self._own):
            return
        for folder in sorted(self._own):
            is_mixed = folder in self.lacking.environments or own_folders.is_in(folder, self.lacking.environments)
            (self.mixed if is_mixed else self.sealed).append(folder)
        inside = run_path(_FOLDER)
        plan = {
            "files": [(f"{inside}/{source}", target) for source, target in self._alone],
            "folders": [
                (f"{inside}/{self._together(folder)}", folder, self._own[folder])
                for folder in sorted(self._own, key=lambda path: (-path.count("/"), path == "/"))
            ],
            "sealed": self.sealed,
        }
        (self._top / _PLAN).write_text(json.dumps(plan))
        if failure := await self._run("place"):
            raise _not_placed(failure)

    async def seal(self) -> None:
        """Keep the restored kernel from creating what would be lost with the sleeper, in the folders of `sealed`."""
        if self.sealed and (failure := await self._run("seal")):
            log.warning("folders could not be made read-only: %s", failure)

    async def _run(self, step: str) -> str:
        """Run a step of `placing` in the sleeper; return why it failed, or nothing."""
        program = [sys.executable, "-I", "-S", placing.__file__, step, f"{run_path(_FOLDER)}/{_PLAN}"]
        try:
            status = await self.space.run(program, env={}, stdout=run_path(_OUTPUT), timeout=_TIMEOUT)
        except GpuckptError as e:
            return f"{e.what} {e.why}"
        except OSError as e:
            return e.strerror or str(e) or f"it took more than {_TIMEOUT:.0f} s"
        said = (self.space.run_dir / _OUTPUT).read_text("utf-8", "replace").splitlines()
        return "" if status == 0 else said[-1] if said else f"it ended with status {status}"

    def _together(self, folder: str) -> str:
        return f"{_TOGETHER}/{list(self._own).index(folder)}"

    def _build(self) -> None:
        built: dict[str, Path] = {}
        folders: list[tuple[Path, KeptFile]] = []
        content, part = b"", ""
        for number, file in enumerate(self.lacking.files):
            if file.hash and file.part != part:
                part, content = file.part, (self.raw / Path(file.part).name).read_bytes()
            inside = content[file.offset : file.offset + file.size] if file.hash else b""
            if file.path in self.lacking.makeable:
                self._make(file, inside)
                continue
            at = self._place_of(file, built, number)
            if stat.S_ISDIR(file.mode):
                at.mkdir(mode=0o700)
                built[file.path] = at
                folders.append((at, file))
                continue
            if stat.S_ISLNK(file.mode):
                at.symlink_to(file.link)
            elif file.part and not file.hash:
                (self.raw / Path(file.part).name).rename(at)
            else:
                at.write_bytes(inside)
            _finish(at, file)
        for at, file in reversed(folders):  # what is put into a folder changes its time
            _finish(at, file)
        for file in reversed(self.lacking.files):
            if file.path in self.lacking.makeable and stat.S_ISDIR(file.mode):
                own_folders.finish(file)

    def _make(self, file: KeptFile, inside: bytes) -> None:
        if file.part and not file.hash:
            raw = self.raw / Path(file.part).name
            with raw.open("rb") as large:
                own_folders.make(file, large)
            raw.unlink()
        else:
            own_folders.make(file, io.BytesIO(inside))
        self.made.append(Path(file.path))

    def _place_of(self, file: KeptFile, built: dict[str, Path], number: int) -> Path:
        above, _, name = file.path.rpartition("/")
        if above in built:
            return built[above] / name
        machine = Path(file.path)
        if stat.S_ISREG(file.mode) and machine.is_file() and not machine.is_symlink():
            source = f"{_ALONE}/{number}"
            self._alone.append((source, file.path))
            return self._top / source
        folder = os.path.realpath(above or "/")
        if folder not in self._own:
            self._own[folder] = []
            (self._top / self._together(folder)).mkdir(mode=0o700)
        self._own[folder].append(name)
        return self._top / self._together(folder) / name


def _finish(at: Path, file: KeptFile) -> None:
    os.chown(at, file.uid, file.gid, follow_symlinks=False)
    if not stat.S_ISLNK(file.mode):
        at.chmod(stat.S_IMODE(file.mode))
    os.utime(at, ns=(file.mtime, file.mtime), follow_symlinks=False)


def _not_placed(why: str) -> Refused:
    return Refused(
        "The snapshot was not restored; nothing was touched.",
        f"The files stored in it could not be put in place: {why}",
        f"Check that there is space in {settings.kernels_dir()}, or install the kernel's files on this machine.",
    )
