"""What would make a save or a restore fail, found before anything is touched."""

from __future__ import annotations

import mmap
import os
import platform
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
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


def refuse_unsavable(sleeper: int, kernel: int, tree: Collection[int]) -> None:
    """Refuse a tree with processes that criu cannot dump; `tree` is the kernel and what is below it.

    Raises
    ------
    Refused : naming the process and why.
    """
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
    for pid in sorted(tree):
        for what, then in _obstacles(pid):
            raise Refused(
                "The save was refused; nothing was touched.",
                f"Process {pid} ({processes.name(pid)}) {what}, which CRIU cannot save.",
                then,
                pid=pid,
            )
    strays = [pid for pid in processes.descendants(sleeper) if _is_stray(pid, sleeper, kernel)]
    if strays:
        named = ", ".join(f"{pid} ({processes.name(pid)})" for pid in sorted(strays))
        raise Refused(
            "The save was refused; nothing was touched.",
            f"Processes of the notebook are no longer children of the kernel and would be left behind: {named}.",
            "End them, or wait for them, and save again.",
            pids=sorted(strays),
        )


def _obstacles(pid: int) -> Iterator[tuple[str, str]]:
    """Yield what a process has that criu would only refuse when it stands still, and what to do about it."""
    if any(path.startswith("/SYSV") for path in processes.mapped_files(pid)):
        yield "uses System V shared memory", "Detach it, or use multiprocessing.shared_memory instead, and try again."
    if "anon_inode:[io_uring]" in processes.open_files(pid):
        yield "uses io_uring", "Stop what uses io_uring in the kernel, and try again."


def _is_stray(pid: int, sleeper: int, kernel: int) -> bool:
    """Tell whether a process is below the sleeper by another way than through the kernel; processes come and go."""
    above = processes.ancestors(pid)
    return sleeper in above and kernel not in (pid, *above) and processes.start_time(pid) is not None


def check_machine(
    manifest: Manifest,
    launch: Launch,
    worker: cuda.CudaWorker,
    program: CriuProgram,
    leaving: Sequence[int],
    gpus: Sequence[int] = (),
    copies: int = 1,
) -> Mapping[str, str] | None:
    """Refuse a snapshot that does not fit this machine or this kernel; return the GPU map to restore it with.

    `leaving` are the processes (with their memory, ports and GPU memory) that end before the restore; `gpus` are the
    numbers of the GPUs that it shall use here, as `cuda.fits` takes them, and `copies` how often it is to be restored.

    Raises
    ------
    Refused : naming what differs, with both values.
    """
    _same_machine(manifest.machine, program)
    if not manifest.kernel["agent"] and manifest.kernel["kernel_id"] != launch.kernel_id:
        raise Refused(
            _NOT_RESTORED,
            f"It was saved from kernel {manifest.kernel['kernel_id']}, which has no agent; here is {launch.kernel_id}.",
            "A kernel without the agent can only go back to a snapshot of its own: its connection key cannot change.",
        )
    _room_in_memory(manifest, leaving, copies)
    has_gpu_state(bool(manifest.process["cuda"]), gpus, _NOT_RESTORED)
    if manifest.process["cuda"]:
        return cuda.fits(worker, manifest.cuda, leaving, gpus=gpus, copies=copies)
    return None


def has_gpu_state(has: bool, gpus: Sequence[int], what: str) -> None:
    """Refuse to put something on GPUs that has no state there; `what` is said to have happened.

    Raises
    ------
    Refused : GPUs were named for nothing.
    """
    if gpus and not has:
        raise Refused(what, "It has nothing on a GPU.", "Leave out --gpu.")


def room_for_copies(size: int, count: int) -> None:
    """Refuse a fork that there is no memory for: `size` bytes that are taken once, and come up `count` times.

    Raises
    ------
    Refused : with both values.
    """
    needed, room = size * (count + 2), memory.available(os.getpid())  # one copy lies in memory twice as it comes up
    if needed > room:
        raise Refused(
            "The kernel was not forked; it goes on as before.",
            f"{count} copies of it need {needed / 1e6:,.0f} MB of memory, and {room / 1e6:,.0f} MB are free.",
            "Ask for fewer, or free memory in the kernel.",
            needed=needed,
            available=room,
        )


def shared_socket_paths(images_folder: Path) -> set[Path]:
    """Return the paths that Unix sockets of a saved tree are bound to, where other kernels see them as well."""
    return {path for path in images.socket_paths(images_folder) if not str(path).startswith(_ELSEWHERE)}


def files_written(images_folder: Path) -> list[str]:
    """Return the paths of the files on disk that a saved tree has open, or mapped, for writing."""
    files = images.named_files(images_folder)
    return sorted(
        {
            file.path
            for file in files
            if file.size is not None and _is_written(file) and not file.path.startswith(_ELSEWHERE)
        }
    )


def _is_written(file: images.NamedFile) -> bool:
    return file.flags & os.O_ACCMODE in (os.O_WRONLY, os.O_RDWR)


def warnings(snapshot: Snapshot, leaving: Sequence[int]) -> list[str]:
    """Return what the restore takes from other programs: paths that both they and the snapshot have Unix sockets at.

    `leaving` are the processes that end before the restore. Paths in /dev/shm are each kernel's own.
    """
    wanted = {str(path) for path in images.socket_paths(snapshot.directory / "criu")}
    ours = processes.sockets(leaving)
    taken = {name for inode, name in processes.unix_sockets() if name in wanted and inode not in ours}
    return [
        f"Another program had a Unix socket at {path}; new connections now come to the restored kernel."
        for path in sorted(taken)
        if not path.startswith(_ELSEWHERE)
    ]


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


def found(path: str) -> os.stat_result | None:
    """Return what criu shall expect a path to be, now that `check_files` has let it pass; None for what was saved."""
    if path.startswith(_ELSEWHERE):
        return None
    try:
        return Path(path).stat()
    except OSError:
        return None


def check_files(snapshot: Snapshot) -> None:
    """Hold everything that the tree uses of the file system by name against the disk.

    Raises
    ------
    Refused : naming what differs.
    """
    files = images.named_files(snapshot.directory / "criu")
    changes = (_change(file) for file in files if not file.path.startswith(_ELSEWHERE))
    wrong = sorted({change for change in changes if change})
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise Refused(
            _NOT_RESTORED,
            f"Files that the kernel uses have changed since: {'; '.join(wrong[:5])}{more}.",
            "Put them back as they were (reinstall the same versions of changed packages) and restore again.",
            files=wrong,
        )


def _change(file: images.NamedFile) -> str:
    """Return what keeps a file from being opened again, with its path; empty where nothing does.

    A file that is open for writing may have grown: a log goes on, and the kernel with it from its saved offset.
    """
    was = _kind(file.mode) if file.size is None else f"{file.size} bytes"
    try:
        now = Path(file.path).stat()
    except OSError as e:
        return f"{file.path}: had {was}, here {e.strerror}" if file.size is not None else f"{file.path}: {e.strerror}"
    if stat.S_IFMT(now.st_mode) != stat.S_IFMT(file.mode):
        return f"{file.path}: was {_kind(file.mode)}, here {_kind(now.st_mode)}"
    if file.size is None:
        return ""
    if now.st_size != file.size and not (_is_written(file) and now.st_size > file.size):
        return f"{file.path}: had {was}, here {now.st_size}"
    if file.build_id and not _has_build_id(Path(file.path), file.build_id):
        return f"{file.path}: another build, of the same size"
    return ""


def _kind(mode: int) -> str:
    names = {stat.S_IFREG: "a file", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    return names.get(stat.S_IFMT(mode), "a device")


def _has_build_id(path: Path, padded: bytes) -> bool:
    """Tell whether a build id stands in a program or library; criu compares it before it maps the file again."""
    # It stands near the beginning: the rest is hardly ever read.
    with path.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(padded.rstrip(b"\0")) >= 0


def _room_in_memory(manifest: Manifest, leaving: Sequence[int], copies: int) -> None:
    # What was in VRAM lies in memory from before the running kernel ends until it is on the GPU.
    vram = copies * sum(cuda.needs(manifest.cuda).values())
    now = memory.available(os.getpid())
    for needed, room in (
        (vram, now),
        (vram + copies * int(manifest.process["private_bytes"]), now + processes.private_bytes(leaving)),
    ):
        if needed > room:
            raise Refused(
                _NOT_RESTORED,
                f"It needs {needed / 1e6:,.0f} MB of memory, and {room / 1e6:,.0f} MB are free.",
                "End other programs and restore again.",
                needed=needed,
                available=room,
            )
