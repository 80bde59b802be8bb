"""What would make a save or a restore fail, found before anything is touched."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Protocol

from .. import __version__, settings
from ..client.record import Launch
from ..errors import Refused
from ..freeze import cuda, images, tcp_connections
from ..freeze.criu_program import CriuProgram, version_text
from ..freeze.tcp_connections import Connections, Pair
from ..linux import memory, proc, processes
from ..snapshots import needs
from ..snapshots.databases import DUCKDB, REMEMBERED, log_of
from ..snapshots.naming import NOT_RESTORED as _NOT_RESTORED
from ..snapshots.naming import refuse_other_kind
from ..snapshots.needs import ELSEWHERE, Marks, NeededFile
from ..snapshots.saved import SavedMachine, kernel_of, machine_of, processes_of
from ..store import Manifest, Snapshot
from ..subject import said
from . import ports
from .staging import disk_folder, likely_in_memory

_SHOWN = 20
"""How many files an error or a note names."""
_NAMED = 5
"""How many kinds of connections a warning names."""

# As Linux's arch/x86/include/asm/cpufeatures.h calls them.
_INSTRUCTION_FAMILIES = ("sse", "ssse", "avx", "amx", "bmi", "sha", "xsave", "vpclmul", "vaes", "movdir")
_INSTRUCTIONS = (
    *("3dnow", "3dnowext", "3dnowprefetch", "abm", "adx", "aes", "cldemote", "clflushopt", "clwb", "clzero", "cmov"),
    *("cx16", "cx8", "enqcmd", "erms", "f16c", "fma", "fma4", "fsgsbase", "fsrm", "fxsr", "gfni", "hle", "lahf_lm"),
    *("lwp", "misalignsse", "mmx", "mmxext", "monitorx", "movbe", "ospke", "pclmulqdq", "pku", "popcnt", "ptwrite"),
    *("rdpid", "rdrand", "rdseed", "rdtscp", "rtm", "serialize", "syscall", "tbm", "tsxldtrk", "waitpkg", "xgetbv1"),
    "xop",
)
"""The features that a program can have found and use; it cannot go on without them."""


def refuse_unsavable(sleeper: int, kernel: int, tree: Collection[int], apart: Collection[int] = ()) -> None:
    """Refuse a tree with processes that criu cannot dump; `tree` is the kernel and what is below it.

    Those that are `apart` are no part of it, and stay.

    Raises
    ------
    Refused : naming the process and why.
    """
    for pid in sorted(tree):
        tracer = processes.tracer(pid)
        if tracer:
            raise Refused(
                "The save was refused; nothing was touched.",
                f"Process {pid} of the {{kernel}} is being traced by process {tracer} (a debugger or strace).",
                "Detach it and save again.",
                pid=pid,
                tracer=tracer,
            )
    for pid in sorted(tree):
        for what, then in _obstacles(pid, kernel):
            raise Refused(
                "The save was refused; nothing was touched.",
                f"Process {pid} ({processes.name(pid)}) {what}, which CRIU cannot save.",
                then,
                pid=pid,
            )
    beside = [pid for pid in processes.descendants(sleeper) if pid not in apart]
    strays = [pid for pid in beside if _is_stray(pid, sleeper, kernel)]
    if strays:
        named = ", ".join(f"{pid} ({processes.name(pid)})" for pid in sorted(strays))
        raise Refused(
            "The save was refused; nothing was touched.",
            f"Processes that it started are no longer children of the {{kernel}} and would be left behind: {named}.",
            "End them, or wait for them, and save again.",
            pids=sorted(strays),
        )


_IO_URING = (b"io_uring", b"IO_URING")
"""What stands in a library that can open an io_uring: calls of liburing, or the variable that switches it in libuv."""


_NO_TCP = {"MPTCP": "Multipath TCP", "SMC": "SMC", "SCTP": "SCTP", "AF_VSOCK": "vsock", "XDP": "XDP", "ALG": "AF_ALG"}
"""Sockets that criu does not know, by what the system calls their protocol."""


_UNKNOWN_TO_CRIU = {
    "[userfaultfd]": "a userfaultfd",
    "[perf_event]": "a perf event",
    "bpf-map": "a map of BPF",
    "bpf-prog": "a program of BPF",
}
"""What can be open that criu does not know, by the system's names for it."""

_CRIUS_FILES = 3
"""How many files criu's code in a process needs room for: with two it failed."""


def _obstacles(pid: int, kernel: int) -> Iterator[tuple[str, str]]:
    """Yield what a process has that criu would only refuse when it is paused, or restored, and what to do about it."""
    own, of_kernel = processes.namespaces(pid), processes.namespaces(kernel)
    if other := sorted(kind for kind, link in own.items() if link != of_kernel.get(kind, link)):
        yield (
            f"is in a namespace of its own ({', '.join(other)})",
            "End it for the save (a container, a sandbox such as bubblewrap or a browser's, `unshare`), and try again.",
        )
    if other := sorted(processes.protocols(pid) & _NO_TCP.keys()):
        yield (
            f"has a socket of {' and '.join(_NO_TCP[one] for one in other)}",
            "If it is written in Go, start it again with GODEBUG=multipathtcp=0 in its environment: then it uses TCP. "
            "Else close the socket, and try again."
            if other == ["MPTCP"]
            else "Close the socket, or end the process, and try again.",
        )
    if any(path.startswith("/SYSV") for path in processes.mapped_files(pid)):
        yield (
            "uses System V shared memory",
            (
                "Stop it for the save (a PostgreSQL server can be started again afterwards), or use "
                "multiprocessing.shared_memory instead, and try again."
            ),
        )
    if processes.program(pid).startswith("/memfd:"):
        yield "runs a program that lies in memory alone (memfd_create)", "End it, and try again."
    if processes.lacks_first_thread(pid):
        yield "goes on without its first thread", "End it, and try again."
    elif apart := processes.own_of_threads(pid):
        yield f"has a thread with {' and '.join(apart)} of its own", "End it, and try again."
    opened = set(processes.open_files(pid))
    if "anon_inode:[io_uring]" in opened:
        yield _io_uring(processes.with_text(pid, _IO_URING))
    if unknown := sorted(name for link, name in _UNKNOWN_TO_CRIU.items() if f"anon_inode:{link}" in opened):
        yield f"has {' and '.join(unknown)} open", "Close it, or end the process, and try again."
    limit = processes.open_files_limit(pid)
    if limit is not None and processes.room_for_files(pid, limit) < _CRIUS_FILES:
        yield (
            f"has no room for files that CRIU opens in it (it may open {limit})",
            "Have it close some, raise its limit (`ulimit -n`), or end it, and try again.",
        )


def _io_uring(able: Sequence[str]) -> tuple[str, str]:
    """Return that a process uses io_uring, with those of its libraries that are `able` to, and what to do about it."""
    if os.geteuid() == 0:
        then = f"Start the {{kernel}} again, without {settings.io_uring.variable}=on: then libraries do without it."
    elif any("/torch/" in path for path in able):
        then = "If torch.distributed opened it (for its TCPStore), set USE_LIBUV=0 before using it, and start again."
    else:
        then = "Stop the code that uses it in the {kernel}, and try again."
    by = f" (opened by one of {', '.join(able)})" if len(able) > 1 else f" (opened by {able[0]})" if able else ""
    return f"uses io_uring{by}", then


def _is_stray(pid: int, sleeper: int, kernel: int) -> bool:
    """Tell whether a process is below the sleeper by another way than through the kernel; processes come and go."""
    above = processes.ancestors(pid)
    return sleeper in above and kernel not in (pid, *above) and processes.start_time(pid) is not None


@dataclass(frozen=True)
class PreflightResult:
    """How a snapshot that fits is restored here: the GPU map, and what differs without standing in the way."""

    gpu_map: Mapping[str, str] | None
    notes: list[str]


class Wanted(Protocol):
    """What a restore needs of the machine beside what the manifest says."""

    @property
    def needed(self) -> Sequence[NeededFile]:
        """The files that the processes use by name."""

    @property
    def images(self) -> int:
        """The bytes that criu restores from."""

    @property
    def placed(self) -> int:
        """The bytes that are written to the disk for the kernel's own files."""


def check_machine(
    manifest: Manifest,
    wanted: Wanted,
    launch: Launch,
    worker: cuda.CudaWorker,
    program: CriuProgram,
    leaving: Sequence[int],
    marks: Marks,
    gpus: Sequence[int] = (),
    copies: int = 1,
    *,
    gpu_room_later: bool = False,
) -> PreflightResult:
    """Refuse a snapshot that does not fit this machine or this kernel.

    `leaving` are the processes (with their memory, ports and GPU memory) that end before the restore; `gpus` are the
    numbers of the GPUs that it shall use here, as `cuda.fits` takes them, and `copies` how often it is to be restored.
    With `gpu_room_later` the GPUs need not have room for it yet.

    Raises
    ------
    Refused : naming everything that differs, with both values.
    """
    reasons: list[Refused] = []
    gpu_map = None
    machine, saved = machine_of(manifest), processes_of(manifest)
    checks: tuple[Callable[[], object], ...] = (
        lambda: _same_processor(machine),
        lambda: _criu_is_new_enough(machine, program),
        lambda: _is_for_this_kernel(manifest, launch),
        lambda: _can_be_reached(manifest, launch),
        lambda: _agent_is_understood(manifest),
        lambda: _room_in_memory(manifest, wanted, leaving, copies),
        lambda: has_gpu_state(bool(saved.cuda), gpus, _NOT_RESTORED),
        lambda: _room_on_disk(wanted),
        lambda: _same_files(wanted.needed, Path("/")),
    )
    for check in checks:
        try:
            check()
        except Refused as e:
            reasons.append(e)
    if saved.cuda:
        try:
            gpu_map = cuda.fits(
                worker,
                manifest.cuda,
                leaving,
                gpus=gpus,
                copies=copies,
                room_later=gpu_room_later,
                environment=launch.env or None,
            )
        except Refused as e:
            reasons.append(e)
    if reasons:
        raise Refused.merged(reasons)
    return PreflightResult(gpu_map, _notes(machine, wanted.needed, marks))


def _notes(saved: SavedMachine, files: Sequence[NeededFile], marks: Marks) -> list[str]:
    notes = []
    if saved.kernel != platform.release():
        notes.append(f"Linux: saved with {saved.kernel}, here {platform.release()}.")
    if odd := needs.changed([file for file in files if not _is_history(file.path)], Path("/"), marks):
        named = [f"{_what(file)} ({how})" for file, how in odd.items()]
        more = f" and {len(odd) - _SHOWN} more" if len(odd) > _SHOWN else ""
        notes.append(f"Files that the {{kernel}} uses have changed since the save: {', '.join(named[:_SHOWN])}{more}.")
    for file in odd:
        if file.database == DUCKDB and file.writable:
            notes.append(
                f"DuckDB uses {file.path} as it was at the save, without what was added since. It is in "
                f"{log_of(file.path)} until the {{kernel}} closes the database: copy both files now if you need it, "
                "then run CHECKPOINT."
            )
        elif file.writable and _size(file) < (file.size or 0):
            notes.append(
                f"{file.path} is shorter than it was: unless the {{kernel}} appends, it writes at its old position, "
                "after a gap of zeros."
            )
    # A database knows its own length, and who maps a file writes nothing behind it.
    logs = [file for file in odd if file.writable and not (file.database or file.mapped)]
    if longer := [file for file in logs if _size(file) > (file.size or 0)][:_SHOWN]:
        cut = "; ".join(f"truncate -s {file.size} {shlex.quote(file.path)}" for file in longer)
        notes.append(
            f"Longer than it was: {', '.join(file.path for file in longer)}. Unless the {{kernel}} appends, it writes "
            "at its old position, over what came since, and the rest of that stays behind it. To cut a log there "
            f"before the {{kernel}} writes again, in a terminal: `{cut}`"
        )
    return [said(note) for note in notes]


def _is_history(path: str) -> bool:
    """Tell whether a file is IPython's history: all kernels write it, and forked children have it open and never do."""
    return PurePath(path).match("profile_*/history.sqlite")


def _size(file: NeededFile) -> int:
    """Return how long a file is now; as long as it was where that cannot be seen."""
    try:
        return Path(file.path).stat().st_size
    except OSError:
        return file.size or 0


def _what(file: NeededFile) -> str:
    return f"{file.path}, a database of {file.database}'s" if file.database else file.path


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
    needed, room = size * (count + 2), memory.room(os.getpid())  # one copy lies in memory twice as it comes up
    if needed > room.bytes:
        raise Refused(
            "The {kernel} was not forked; it keeps running.",
            f"{count} copies of it need {needed / 1e6:,.0f} MB of memory, and {room.bytes / 1e6:,.0f} MB are "
            f"free{room.where}.",
            "Ask for fewer, or free memory in the kernel.",
            needed=needed,
            available=room.bytes,
        )


def shared_socket_paths(images_folder: Path) -> set[Path]:
    """Return the paths that Unix sockets of a saved tree are bound to, where other kernels see them as well."""
    return {path for path in images.socket_paths(images_folder) if not str(path).startswith(ELSEWHERE)}


def files_written(images_folder: Path) -> list[str]:
    """Return the paths of the files on disk that a saved tree has open, or mapped, for writing."""
    files = images.named_files(images_folder)
    return sorted(
        {
            file.path
            for file in files
            if file.size is not None
            and images.is_written(file.flags)
            and not file.path.startswith(ELSEWHERE)
            and not _is_history(file.path)
        }
    )


def warnings(snapshot: Snapshot, leaving: Sequence[int], *, may_keep_connections: bool) -> list[str]:
    """Return what the restore takes from other programs, and from the saved ones.

    Those are paths that both others and the snapshot have Unix sockets at, and TCP connections that come back closed.
    `may_keep_connections` tells whether those between its own processes can come back as they were.
    `leaving` are the processes that end before the restore. Paths in /dev/shm are each kernel's own.
    """
    folder = snapshot.directory / "criu"
    ours = processes.sockets(leaving)
    others = [name for inode, name in processes.unix_sockets() if inode not in ours]
    taken = {path for path in images.socket_paths(folder) if any(ports.is_at(name, path) for name in others)}
    return [
        *(
            f"Another program had a Unix socket at {path}; new connections now come to the restored kernel."
            for path in sorted(map(str, taken))
            if not path.startswith(ELSEWHERE)
        ),
        *map(said, _cut_connections(folder, snapshot.manifest, may_keep=may_keep_connections)),
    ]


def connections(images_folder: Path, manifest: Manifest, *, may_keep: bool) -> Connections:
    """Return what becomes of a saved tree's TCP connections, without Jupyter's own, which are made again.

    `may_keep` tells whether those between its own processes can come back as they were.
    """
    kernel = kernel_of(manifest)
    of_jupyter = {*kernel.connection.values(), *kernel.own_ports}
    return tcp_connections.connections(images_folder, of_jupyter, may_keep=may_keep)


def cut_inside(images_folder: Path, manifest: Manifest, pairs: Collection[Pair]) -> str:
    """Return in words that connections between a saved tree's own processes were closed."""
    return said(_cut_inside(pairs, _names(images_folder, manifest)))


def _cut_inside(pairs: Collection[Pair], named: Callable[[int], str]) -> str:
    pids = (sorted((one.pid, other.pid)) for one, other in pairs)
    return (
        f"TCP connections between its own processes that were closed: {len(pairs)} "
        f"({_counted(f'between {named(one)} and {named(other)}' for one, other in pids)}). "
        "Whatever used them, such as a Dask or Spark cluster, must be started again."
    )


def _names(images_folder: Path, manifest: Manifest) -> Callable[[int], str]:
    """Return what says how a saved process is called."""
    names, top = images.process_names(images_folder), processes_of(manifest).pid
    return lambda pid: "the {kernel}" if pid == top else f"{names.get(pid, 'process')} ({pid})"


def _cut_connections(images_folder: Path, manifest: Manifest, *, may_keep: bool) -> list[str]:
    """Return in words which connections of a saved tree are cut."""
    found = connections(images_folder, manifest, may_keep=may_keep)
    named = _names(images_folder, manifest)
    said = [_cut_inside(found.cut, named)] if found.cut else []
    for what, ends in (
        ("to its own ports, which had not been accepted yet,", found.alone),
        ("to other programs", found.outside),
    ):
        if ends:
            peers = (f"{named(end.pid)} to {_written(end.there)}" for end in ends)
            said.append(
                f"TCP connections {what} that were closed: {len(ends)} ({_counted(peers)}). "
                "Whatever uses them must connect again."
            )
    return said


def _written(address: tuple[str, int]) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _counted(items: Iterable[str]) -> str:
    """Return how often there is each, the most frequent first; those that are many more are counted alone."""
    counts = Counter(items)
    first = ", ".join(f"{count} {item}" for item, count in counts.most_common(_NAMED))
    return first + (f", and {len(counts) - _NAMED} more" if len(counts) > _NAMED else "")


def _same_processor(saved: SavedMachine) -> None:
    here = platform.machine()
    if saved.arch != here:
        raise _differs("Processor architecture", saved.arch, here)
    there, now = set(saved.cpu_flags), set(cpu_flags())
    missing = sorted(flag for flag in there - now if _programs_use(flag))
    if missing:
        named = ", ".join(missing)
        raise Refused(
            _NOT_RESTORED,
            f"Processor features: saved with {named}, here without {'it' if len(missing) == 1 else 'them'}.",
            "Restore it on a machine whose processor has them.",
            of="Processor features",
            saved=sorted(there),
            here=sorted(now),
            missing=missing,
        )


def _programs_use(flag: str) -> bool:
    """Tell whether a flag of /proc/cpuinfo is an instruction that programs choose to use where it is there.

    The others tell of the system, of mitigations and of virtual machines, and differ between machines that are alike.
    """
    return platform.machine() != "x86_64" or flag.startswith(_INSTRUCTION_FAMILIES) or flag in _INSTRUCTIONS


def _criu_is_new_enough(saved: SavedMachine, program: CriuProgram) -> None:
    if tuple(map(int, saved.criu.split(".")))[:2] > program.version[:2]:
        raise _differs("CRIU", saved.criu, version_text(program.version))


def _is_for_this_kernel(manifest: Manifest, launch: Launch) -> None:
    refuse_other_kind(manifest, launch.job)
    if launch.job:
        return
    kernel = kernel_of(manifest)
    if not kernel.agent and kernel.kernel_id != launch.kernel_id:
        raise Refused(
            _NOT_RESTORED,
            f"It was saved from kernel {kernel.kernel_id}, which has no agent; here is {launch.kernel_id}.",
            "A kernel without the agent can only go back to a snapshot of its own: its connection key cannot change.",
        )


def refuse_ipc(launch: Launch, what: str) -> None:
    """Refuse what needs a dump, or a restore, of a kernel that its clients reach by Unix sockets.

    Raises
    ------
    Refused : `what` is said to have happened.
    """
    if ports.endpoint(launch.connection_file).get("transport") == "ipc":
        raise Refused(
            what,
            "Its clients reach this kernel by Unix sockets (transport ipc), whose connections CRIU cannot save.",
            "Save your variables yourself, and start the kernel with the default transport, tcp (leave out "
            "`KernelManager.transport`). `KernelManager.transport_encryption` encrypts it.",
        )


def _can_be_reached(manifest: Manifest, launch: Launch) -> None:
    """Refuse a kernel that would come back where its clients do not find it, or with keys that they do not have."""
    refuse_ipc(launch, _NOT_RESTORED)
    kernel = kernel_of(manifest)
    if kernel.rebinds or not ports.endpoint_differs(kernel, launch.connection_file):
        return
    raise Refused(
        _NOT_RESTORED,
        "Its clients used another address or other keys (CurveZMQ, `transport_encryption`) than this kernel's, and "
        "it cannot change them: it has no agent, an older agent, or an older ipykernel.",
        "Restore it in the kernel that it was saved from; or, if that had no encryption, in one without: start Jupyter "
        "with GPUCKPT_ENCRYPTION=off.",
    )


def _agent_is_understood(manifest: Manifest) -> None:
    oldest, newest = settings.OLDEST_AGENT_PROTOCOL, settings.AGENT_PROTOCOL
    # Agents of before there were several said nothing of it.
    kernel = kernel_of(manifest)
    spoken = kernel.protocol or 1
    if kernel.agent and not oldest <= spoken <= newest:
        raise Refused(
            _NOT_RESTORED,
            f"Its agent is of jupyter_gpuckpt {kernel.version} (agent protocol {spoken}); this is "
            f"{__version__} (agent protocol {oldest} to {newest}).",
            f"Restore it with a {'newer' if spoken > newest else 'older'} jupyter_gpuckpt.",
            of="agent protocol",
            saved=spoken,
            here=newest,
        )


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
    for line in proc.lines("/proc/cpuinfo"):
        if line.startswith(("flags", "Features")):
            return sorted(line.partition(":")[2].split())
    return []


def found(path: str, root: Path) -> os.stat_result | None:
    """Return what criu shall expect a path to be, now that `check_files` has let it pass; None for what was saved.

    `root` is the folder that is ``/`` to the restored processes.
    """
    if path.startswith(ELSEWHERE):
        return None
    try:
        return (root / path[1:]).stat()
    except OSError:
        return None


def check_files(snapshot: Snapshot, root: Path) -> None:
    """Hold everything that the tree uses of the file system by name against what is there.

    `root` is the folder that is ``/`` to the processes when they are restored.

    Raises
    ------
    Refused : naming what differs.
    """
    _same_files(needs.of_snapshot(snapshot.directory), root)


def _same_files(files: Sequence[NeededFile], root: Path) -> None:
    _databases_as_they_were(files, root)
    wrong = sorted({change for change in (needs.difference(file, root) for file in files) if change})
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise Refused(
            _NOT_RESTORED,
            f"Files that the {{kernel}} uses have changed since: {'; '.join(wrong[:_SHOWN])}{more}.",
            "Put them back as they were (reinstall the same versions of changed packages) and restore again; "
            "`save --with-files` keeps them in the snapshot.",
            files=wrong,
        )


def _databases_as_they_were(files: Sequence[NeededFile], root: Path) -> None:
    paths = {file.path for file in files}
    for file in files:
        if file.database not in REMEMBERED or not file.writable or file.mtime is None:
            continue
        if why := needs.obstacle_in_database(file, paths, root):
            log = log_of(file.path, file.database)
            both = f"{file.path} and {log} away, if they are there," if log else f"{file.path} away"
            raise Refused(
                _NOT_RESTORED,
                f"The {{kernel}} has {file.path} open, a database of {file.database}'s, and would use it as it was at "
                f"the save. But {why}: the {{kernel}} would destroy it.",
                f"Move {both} and restore again: the snapshot has a copy from the save."
                if file.kept
                else "Put back a copy from before, or restore an earlier snapshot. Close the database before you save.",
                files=[file.path],
            )


def _room_in_memory(manifest: Manifest, wanted: Wanted, leaving: Sequence[int], copies: int) -> None:
    files = wanted.placed if memory.is_in_memory(settings.kernels_dir()) else 0
    if memory.is_in_memory(disk_folder()) and not likely_in_memory(wanted.images):
        files += wanted.images
    # What was in VRAM lies in memory from before the running kernel ends until it is on the GPU.
    vram = copies * cuda.in_use(manifest.cuda)
    now = memory.room(os.getpid())
    for needed, room in (
        (vram, now.bytes),
        (vram + files + copies * processes_of(manifest).private_bytes, now.bytes + processes.private_bytes(leaving)),
    ):
        if needed > room:
            raise Refused(
                _NOT_RESTORED,
                f"It needs {needed / 1e6:,.0f} MB of memory, and {room / 1e6:,.0f} MB are free{now.where}.",
                "End other programs and restore again.",
                needed=needed,
                available=room,
            )


def _room_on_disk(wanted: Wanted) -> None:
    runtime, images = settings.kernels_dir(), disk_folder()
    needed = Counter({runtime: wanted.placed})
    needed[images] += 0 if likely_in_memory(wanted.images) else wanted.images
    for folder, size in needed.items():
        free = shutil.disk_usage(folder).free
        if size > free:
            variable = "JUPYTER_RUNTIME_DIR" if folder == runtime else settings.store_dir.variable
            raise Refused(
                _NOT_RESTORED,
                f"It needs {size / 1e6:,.0f} MB on the disk of {folder}, and {free / 1e6:,.0f} MB are free.",
                f"Free space there, or set {variable} to a folder on a larger disk before starting the Jupyter server.",
                needed=size,
                available=free,
            )
