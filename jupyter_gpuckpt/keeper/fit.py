"""What would make a save or a restore fail, found before anything is touched."""

from __future__ import annotations

import os
import platform
import stat
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import Refused
from ..freeze import cuda, images, memory, processes
from ..freeze.criu_program import CriuProgram, version_text
from ..store import Manifest, Snapshot
from .record import Launch

_NOT_RESTORED = "The snapshot was not restored; nothing was touched."
_ELSEWHERE = ("/dev/", "/proc/", "/sys/")
"""Not files of the disk: /dev/shm travels with the snapshot, the others are the system's."""


def refuse_unsavable(sleeper: int, tree: Collection[int]) -> None:
    """Refuse a tree with processes that criu cannot dump.

    Raises
    ------
    Refused : naming the process and why.
    """
    strays = set(processes.descendants(sleeper)) - set(tree)
    for pid in sorted(tree):
        tracer = processes.tracer(pid)
        if tracer and tracer not in tree:
            raise Refused(
                "The save was refused; nothing was touched.",
                f"Process {pid} of the kernel is being traced by process {tracer} (a debugger or strace).",
                "Detach it and save again.",
                pid=pid,
                tracer=tracer,
            )
    if strays:
        named = ", ".join(f"{pid} ({processes.name(pid)})" for pid in sorted(strays))
        raise Refused(
            "The save was refused; nothing was touched.",
            f"Processes of the notebook are no longer children of the kernel and would be left behind: {named}.",
            "End them, or wait for them, and save again.",
            pids=sorted(strays),
        )


def check(
    snapshot: Snapshot,
    launch: Launch,
    worker: cuda.CudaWorker,
    program: CriuProgram,
    leaving: Sequence[int],
) -> Mapping[str, str] | None:
    """Refuse a snapshot that does not fit this machine or this kernel; return the GPU map to restore it with.

    `leaving` are the processes (with their memory, ports and GPU memory) that end before the restore.

    Raises
    ------
    Refused : naming what differs, with both values.
    """
    manifest = snapshot.manifest
    _same_machine(manifest.machine, program)
    if not manifest.kernel["agent"] and manifest.kernel["kernel_id"] != launch.kernel_id:
        raise Refused(
            _NOT_RESTORED,
            f"It was saved from kernel {manifest.kernel['kernel_id']}, which has no agent; here is {launch.kernel_id}.",
            "A kernel without the agent can only go back to a snapshot of its own: its connection key cannot change.",
        )
    _files_are_there(snapshot)
    _room_in_memory(manifest, leaving)
    if manifest.process["cuda"]:
        return cuda.fits(worker, manifest.cuda, leaving)
    return None


def _same_machine(saved: Mapping[str, Any], program: CriuProgram) -> None:
    here = platform.machine()
    if saved["arch"] != here:
        raise _differs("Processor architecture", saved["arch"], here)
    missing = set(saved["cpu_flags"]) - set(cpu_flags())
    if missing:
        raise Refused(
            _NOT_RESTORED,
            f"The processor here lacks features of the one it was saved on: {', '.join(sorted(missing))}.",
            "Restore it on a machine whose processor has them.",
            missing=sorted(missing),
        )
    if tuple(map(int, saved["criu"].split(".")))[:2] > program.version[:2]:
        raise _differs("CRIU", saved["criu"], version_text(program.version))


def _differs(what: str, saved: object, here: object) -> Refused:
    return Refused(
        _NOT_RESTORED,
        f"{what}: saved with {saved}, here {here}.",
        "Restore it on a machine like the one it was saved on.",
        of=what,
        saved=saved,
        here=here,
    )


def cpu_flags() -> list[str]:
    """Return the features of this processor (proc(5), cpuinfo), in order."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return sorted(line.partition(":")[2].split())
    return []


def present_size(path: str, saved: int) -> int:
    """Return the size (bytes) that criu shall expect of a file that `check` has let pass."""
    if path.startswith(_ELSEWHERE):
        return saved
    try:
        return Path(path).stat().st_size
    except OSError:
        return saved


def _files_are_there(snapshot: Snapshot) -> None:
    """Hold every file that the tree maps or holds open against the disk.

    A file that is open for writing may have grown: a log goes on, and the kernel with it from its saved offset.
    """
    wrong: list[str] = []
    for path, size, flags in images.regular_files(snapshot.directory / "criu"):
        if path.startswith(_ELSEWHERE):
            continue
        try:
            found = Path(path).stat()
        except OSError as e:
            wrong.append(f"{path}: had {size} bytes, here {e.strerror}")
            continue
        if not stat.S_ISREG(found.st_mode) or found.st_size == size:
            continue
        writable = flags & os.O_ACCMODE in (os.O_WRONLY, os.O_RDWR)
        if not (writable and found.st_size > size):
            wrong.append(f"{path}: had {size} bytes, here {found.st_size}")
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise Refused(
            _NOT_RESTORED,
            f"Files that the kernel holds open have changed since: {'; '.join(wrong[:5])}{more}.",
            "Put them back as they were (reinstall the same versions of changed packages) and restore again.",
            files=wrong,
        )


def _room_in_memory(manifest: Manifest, leaving: Sequence[int]) -> None:
    needed = int(manifest.process["private_bytes"])
    room = memory.available(os.getpid()) + processes.private_bytes(leaving)
    if needed > room:
        raise Refused(
            _NOT_RESTORED,
            f"It needs {needed / 1e6:,.0f} MB of memory, and {room / 1e6:,.0f} MB are free.",
            "End other programs and restore again.",
            needed=needed,
            available=room,
        )
