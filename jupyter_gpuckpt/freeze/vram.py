"""VRAM that never passes through criu: at a checkpoint it goes straight into files, from which a restore takes it.

The files lie in a tmpfs that the processes reach under the same path in every sleeper, so that criu finds them mapped
there, and maps them again. `vram_tracer` is how they come to be mapped.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ..linux.processes import mapped_files
from . import ptrace
from .line_program import LineProgram
from .parking import PARKED
from .populate import populate

__all__ = ["VramFiles"]

log = logging.getLogger("gpuckpt.vram")

_PREPARE_TIMEOUT = 60.0
_ATTACH_TIMEOUT = 5.0
_END_TIMEOUT = 5.0
_LINKS = "links"
_BLOCK = 512
"""What `st_blocks` counts, in bytes."""


class VramFiles:
    """The files of one checkpoint, in a folder that is `outside` for the keeper and `inside` for the processes.

    Whatever goes wrong here costs time and nothing else: VRAM that is not diverted lies in the process's own memory,
    where criu finds it.
    """

    def __init__(self, outside: Path, inside: str) -> None:
        self.outside, self.inside = outside, inside
        self._tracers: dict[int, LineProgram] = {}

    def prepare(self, processes: Mapping[int, tuple[str, int]]) -> None:
        """Get ready for the checkpoint of processes, by pid: the name for their files, and their bytes of VRAM."""
        if not ptrace.is_supported():
            return
        for pid, (name, size) in processes.items():
            self._tracers[pid] = LineProgram(
                "jupyter_gpuckpt.freeze.vram_tracer", str(self.outside), self.inside, str(pid), f"{name}-0", str(size)
            )
        for pid in list(self._tracers):
            self._hear(pid, b"ready", _PREPARE_TIMEOUT)

    @contextlib.contextmanager
    def taking(self, pid: int) -> Iterator[None]:
        """Divert the VRAM of a process that is checkpointed within the block."""
        tracer = self._tracers.get(pid)
        if tracer is not None:
            tracer.tell(b"go")
            self._hear(pid, b"tracing", _ATTACH_TIMEOUT)
        try:
            yield
        finally:
            self._end(pid)

    def populate(self) -> None:
        """Give the files the memory that they lack for zeros, which the driver would wait for one after the other."""
        for file in self._files():
            if PARKED not in file.name:
                with contextlib.suppress(OSError):
                    populate(file, file.stat().st_size)

    def taken(self, pids: Iterable[int]) -> int:
        """Return how many bytes the checkpointed processes have in files; files that none of them has are removed."""
        everything = (path for pid in pids for path in mapped_files(pid))
        mapped = {Path(path).name for path in everything if path.startswith(self.inside + "/")}
        size = 0
        for file in self._files():
            if file.name in mapped:
                size += file.stat().st_size
            elif PARKED not in file.name:
                file.unlink()
        return size

    def allocated(self) -> int:
        """Return how many bytes of memory the files take."""
        return sum(file.stat().st_blocks * _BLOCK for file in self._files())

    def holes(self) -> int:
        """Return how many bytes of the files take no memory, since they are zeros."""
        return max(0, sum(file.stat().st_size for file in self._files()) - self.allocated())

    def are_mapped_by(self, pid: int) -> bool:
        """Tell whether a process has some of the files for its VRAM."""
        return any(path.startswith(self.inside + "/") for path in mapped_files(pid))

    def discard(self) -> None:
        """End what `prepare` began, and remove the files; what is mapped of them stays until it is unmapped."""
        for pid in list(self._tracers):
            self._end(pid)
        for file in self._files():
            file.unlink(missing_ok=True)

    def linked(self) -> VramFiles:
        """Give each of the files a second name, in a folder beside them: where one is discarded, the other stays."""
        self.discard_links()
        folder = self.outside / _LINKS
        folder.mkdir(mode=0o700)
        for file in self._files():
            (folder / file.name).hardlink_to(file)
        return VramFiles(folder, f"{self.inside}/{_LINKS}")

    def discard_links(self) -> None:
        """Remove these second names."""
        shutil.rmtree(self.outside / _LINKS, ignore_errors=True)

    def _files(self) -> list[Path]:
        with contextlib.suppress(FileNotFoundError):
            return [path for path in self.outside.iterdir() if path.name != _LINKS]
        return []

    def _hear(self, pid: int, expected: bytes, limit: float) -> None:
        tracer = self._tracers[pid]
        try:
            said = tracer.hear(limit)
        except TimeoutError:
            said = b""
        if said != expected:
            tracer.kill()
            log.warning("the VRAM of process %d is not diverted: %s", pid, tracer.last_words())
            self._end(pid)

    def _end(self, pid: int) -> None:
        tracer = self._tracers.pop(pid, None)
        if tracer is None:
            return
        tracer.tell(b"end")
        try:
            tracer.wait(_END_TIMEOUT)
        except TimeoutError:
            tracer.kill()
        tracer.close()
