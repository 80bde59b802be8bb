"""The processes of a tree, as /proc shows them."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from . import proc

_libc = ctypes.CDLL(None)
_PF_EXITING = 0x4
_LOOK = 0.001  # seconds
_LARGEST = 1 << 30  # bytes
_KCMP = {"x86_64": 312, "aarch64": 272}.get(os.uname().machine, -1)  # asm/unistd.h
_ESCAPE = re.compile(r"\\([0-7]{3})")
_OF_THREADS = {2: "open files", 3: "a working folder"}  # linux/kcmp.h: KCMP_FILES, KCMP_FS


def start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot, or None when it is gone.

    Together with the pid it names one process for good: pids are used again (proc_pid_stat(5), field 22).
    """
    try:
        stat = proc.read(f"/proc/{pid}/stat")
    except OSError:
        return None
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


def status(pid: int | str) -> dict[str, str]:
    """Return what the system says of a process in a line each (proc_pid_status(5)).

    Raises
    ------
    OSError : it is gone.
    """
    lines = proc.lines(f"/proc/{pid}/status")
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def label(pid: int | str) -> bytes:
    """Return what a security module (AppArmor, SELinux) calls a process; nothing where the system has none."""
    try:
        return Path(f"/proc/{pid}/attr/current").read_bytes().rstrip(b"\0\n")
    except OSError:
        return b""


def descendants(pid: int) -> list[int]:
    """Return the pids of all living processes below `pid`, parents before their children."""
    found: list[int] = []
    queue = [pid]
    while queue:
        parent = queue.pop(0)
        try:
            threads = os.listdir(f"/proc/{parent}/task")  # noqa: PTH208 - half the cost of Path.iterdir
        except OSError:
            continue
        for thread in threads:
            try:
                text = proc.read(f"/proc/{parent}/task/{thread}/children")
            except OSError:
                continue
            children = [int(child) for child in text.split()]
            found += children
            queue += children
    return found


def end_session(top: int, leader: int) -> None:
    """Kill the processes below `top` that are of the session of `leader`, which may have ended."""
    for pid in descendants(top):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(pid) == leader:
                os.kill(pid, signal.SIGKILL)


def signal_group(top: int, leader: int, number: int) -> None:
    """Send a signal to the processes below `top` that are of the group of `leader`.

    It is queued, by which those that are shielded from signals from outside know that it is meant for them
    (`shield.c`).
    """
    for pid in descendants(top):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(pid) == leader:
                _libc.sigqueue(pid, number, None)


def kill(pids: Iterable[int], seconds: float) -> bool:
    """Kill processes; tell whether none executes anything of its own any more, which is waited for so many seconds.

    To be gone may take them much longer, where a driver takes down what they had.
    """
    left = set(pids)
    for pid in left:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + seconds
    while left := {pid for pid in left if _executes(pid)}:
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK)
    return True


def _executes(pid: int) -> bool:
    """Tell whether a thread of a process is not on its way out yet (proc_pid_stat(5), field 9; linux/sched.h)."""
    return any(not int(fields[6]) & _PF_EXITING for fields in _threads(pid))


def _threads(pid: int) -> Iterator[list[str]]:
    """Yield what is known of each thread of a process, from its state on (proc_pid_stat(5), field 3)."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
            with contextlib.suppress(OSError):
                stat = proc.read(f"/proc/{pid}/task/{thread}/stat")
                yield stat[stat.rindex(")") + 2 :].split()


def lacks_first_thread(pid: int) -> bool:
    """Tell whether the first thread of a process has ended, and others go on (pthread_exit(3) in `main`)."""
    with contextlib.suppress(OSError):
        return status(pid)["State"].startswith("Z") and _executes(pid)
    return False


def own_of_threads(pid: int) -> list[str]:
    """Return what threads of a process have each for themselves (unshare(2)): open files, a working folder.

    Nothing where it may not be looked into.
    """
    with contextlib.suppress(OSError):
        others = [thread for thread in os.listdir(f"/proc/{pid}/task") if thread != str(pid)]  # noqa: PTH208
        return [
            what for kind, what in _OF_THREADS.items() if any(_is_apart(pid, int(thread), kind) for thread in others)
        ]
    return []


def _is_apart(pid: int, thread: int, kind: int) -> bool:
    """Tell whether a thread has not the same as its process's first one; one that is on its way out has nothing."""
    if _libc.syscall(_KCMP, pid, thread, kind, 0, 0) <= 0:
        return False
    with contextlib.suppress(OSError):
        stat = proc.read(f"/proc/{pid}/task/{thread}/stat")
        return not int(stat[stat.rindex(")") + 2 :].split()[6]) & _PF_EXITING
    return False


def stopped(pids: Iterable[int]) -> list[int]:
    """Return those of the processes that are stopped by a signal (SIGSTOP and its kin), or are about to be.

    One that was sent SIGSTOP stops when a processor is free for it, which may be long after its sender has ended.
    """
    # In this order: what is not to be stopped any more when it is looked at is stopped already.
    return [pid for pid in pids if _is_to_stop(pid) or any(fields[0] == "T" for fields in _threads(pid))]


def _is_to_stop(pid: int) -> bool:
    try:
        return bool(int(status(pid)["ShdPnd"], 16) & 1 << signal.SIGSTOP - 1)
    except (OSError, KeyError):
        return False


def held(pids: Iterable[int]) -> list[int]:
    """Return those of the processes that a tracer holds still, with a thread at least."""
    return [pid for pid in pids if any(fields[0] == "t" for fields in _threads(pid))]


def inner_pid(pid: int) -> int:
    """Return a process's pid in its own, innermost namespace."""
    return namespace_pids(pid)[-1]


def pids_beside(top: int, pids: Iterable[int]) -> list[int]:
    """Return the pids of processes in the namespace of another, though they may have made some of their own in it."""
    depth = len(namespace_pids(top)) - 1
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            found += namespace_pids(pid)[depth : depth + 1]
    return found


def namespace_pids(pid: int) -> list[int]:
    """Return a process's pid in each of its namespaces, the innermost last (proc_pid_status(5), NSpid)."""
    for line in proc.lines(f"/proc/{pid}/status"):
        if line.startswith("NSpid:"):
            return [int(one) for one in line.split()[1:]]
    return [pid]


def threads_by_inner(pid: int) -> dict[int, int]:
    """Return the ids here of a process's threads, by those that they have in its own namespace."""
    found = {}
    for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
        with contextlib.suppress(OSError):
            found[inner_pid(int(thread))] = int(thread)
    return found


def inner_pids(pids: Iterable[int]) -> list[int]:
    """Return the pids that these processes have in their namespace; those that are gone by now are left out."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            found.append(inner_pid(pid))
    return found


def ancestors(pid: int) -> list[int]:
    """Return the pids of a process's parent, its parent's parent and so on; cut short where one ends meanwhile."""
    found: list[int] = []
    while pid := parent(pid):
        found.append(pid)
    return found


def parent(pid: int) -> int:
    """Return the pid of a process's parent; 0 when it is gone or has none."""
    return _status_number(pid, "PPid:")


def name(pid: int) -> str:
    """Return the name of a process's program, to be shown; empty when it is gone."""
    try:
        return proc.shown(proc.read(f"/proc/{pid}/comm").removesuffix("\n"))
    except OSError:
        return ""


def tracer(pid: int) -> int:
    """Return the pid of the process that traces this one, 0 for none (proc_pid_status(5), TracerPid)."""
    return _status_number(pid, "TracerPid:")


def private_bytes(pids: Iterable[int]) -> int:
    """Return the memory of these processes that no file stands behind, in bytes: what a dump must write."""
    return sum(_status_number(pid, "RssAnon:") + _status_number(pid, "RssShmem:") for pid in pids) * 1024


def anonymous_bytes(pids: Iterable[int]) -> int:
    """Return the memory of these processes that is their own and in no file, in memory either; in bytes."""
    return sum(_status_number(pid, "RssAnon:") for pid in pids) * 1024


def swapped_bytes(pids: Iterable[int]) -> int:
    """Return the memory of these processes that is their own and lies in the swap space, in bytes."""
    return sum(_status_number(pid, "VmSwap:") for pid in pids) * 1024


def has_huge_pages(pids: Iterable[int]) -> bool:
    """Tell whether these processes have memory in reserved huge pages (MAP_HUGETLB; transparent ones are not meant)."""
    return any(_status_number(pid, "HugetlbPages:") for pid in pids)


def mapped_bytes(pids: Iterable[int], folder: str) -> int:
    """Return how many bytes of files in a folder, by its path, these processes have mapped and in memory.

    What several of them have counts several times; a process's own copy of a page is no part of a file.
    """
    total = 0
    for pid in pids:
        if any(path.startswith(folder) for path in mapped_files(pid)):
            with contextlib.suppress(OSError):
                total += _resident_of(proc.lines(f"/proc/{pid}/smaps"), folder)
    return total


def _resident_of(smaps: Iterable[str], folder: str) -> int:
    total, counts = 0, False
    for line in smaps:  # each mapping as in maps, then what there is to say of it: "Rss: 4 kB" and so on
        columns = line.split(maxsplit=5)
        if not columns[0].endswith(":"):
            counts = len(columns) == 6 and columns[5].startswith(folder)
        elif counts and columns[0] in ("Rss:", "Anonymous:"):
            total += int(columns[1]) * (1024 if columns[0] == "Rss:" else -1024)
    return total


def _status_number(pid: int, key: str) -> int:
    try:
        for line in proc.lines(f"/proc/{pid}/status"):
            if line.startswith(key):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


def mapped_files(pid: int) -> Iterator[str]:
    """Yield the path of every file that a process maps, once a mapping; none when it is gone."""
    try:
        for line in proc.lines(f"/proc/{pid}/maps"):
            columns = line.split(maxsplit=5)
            if len(columns) == 6:
                yield columns[5]
    except (FileNotFoundError, ProcessLookupError):
        return


def with_text(pid: int, texts: Sequence[bytes]) -> list[str]:
    """Return the programs and libraries of a process that have one of these texts in them.

    Larger ones than `_LARGEST` are not looked into: that takes too long, and what is in them is code for GPUs.
    """
    return sorted({path for path in _programs(pid) if _has_one(f"/proc/{pid}/root{path}", texts)})


def _programs(pid: int) -> set[str]:
    """Return the files that a process has mapped to execute them (proc_pid_maps(5))."""
    with contextlib.suppress(OSError):
        rows = (line.split(maxsplit=5) for line in proc.lines(f"/proc/{pid}/maps"))
        return {row[5] for row in rows if len(row) == 6 and "x" in row[1] and row[5].startswith("/")}
    return set()


def _has_one(path: str, texts: Sequence[bytes]) -> bool:
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return len(content) <= _LARGEST and any(content.find(text) >= 0 for text in texts)
    except (OSError, ValueError):  # it is gone, or empty
        return False


def program(pid: int) -> str:
    """Return the path of the program that a process runs; nothing when it is gone, or is another's."""
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/{pid}/exe").readlink())
    return ""


def open_files(pid: int) -> Iterator[str]:
    """Yield what each file descriptor of a process leads to (proc(5), fd); none when it is gone."""
    with contextlib.suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                yield str(fd.readlink())


def namespaces(pid: int) -> dict[str, str]:
    """Return the namespaces that a process is in (namespaces(7)), by kind; none when it is gone, or is another's."""
    with contextlib.suppress(OSError):
        links = {kind.name: str(kind.readlink()) for kind in Path(f"/proc/{pid}/ns").iterdir()}
        return {kind: link for kind, link in links.items() if not kind.endswith("_for_children")}
    return {}


def mount_points(pid: int | str) -> set[str]:
    """Return where something is mounted for a process (proc_pid_mountinfo(5)); nothing when it is gone."""
    with contextlib.suppress(OSError):
        return {
            _ESCAPE.sub(lambda code: chr(int(code[1], 8)), line.split(maxsplit=5)[4])
            for line in proc.lines(f"/proc/{pid}/mountinfo")
        }
    return set()


def protocols(pid: int) -> set[str]:
    """Return the protocols of a process's sockets, as the system calls them (`TCP`, `NETLINK`)."""
    found = set()
    with contextlib.suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if str(fd.readlink()).startswith("socket:"):
                    found.add(os.getxattr(fd, "system.sockprotoname").rstrip(b"\0").decode("ascii", "replace"))
    return found


def open_files_limit(pid: int) -> int | None:
    """Return below which number files of a process get theirs; None where there is no limit, or it is not known."""
    with contextlib.suppress(OSError, ValueError):
        for line in proc.lines(f"/proc/{pid}/limits"):
            if line.startswith("Max open files"):
                return int(line.split()[3])
    return None


def room_for_files(pid: int, limit: int) -> int:
    """Return how many numbers below a limit are free for files of a process; all where it cannot be looked into."""
    with contextlib.suppress(OSError):
        return limit - sum(int(fd.name) < limit for fd in Path(f"/proc/{pid}/fd").iterdir())
    return limit


def resident_bytes(pids: Iterable[int]) -> int:
    """Return the resident memory of these processes together, in bytes."""
    pages = 0
    for pid in pids:
        try:
            pages += int(proc.read(f"/proc/{pid}/statm").split()[1])
        except OSError:
            continue
    return pages * os.sysconf("SC_PAGE_SIZE")


def work_done(pid: int) -> tuple[int, int]:
    """Return two numbers that grow while a process works: its time on the CPU (clock ticks) and the bytes it wrote.

    The second stays 0 for a process with more rights than this one.
    """
    io = ""
    try:
        stat = proc.read(f"/proc/{pid}/stat")
        with contextlib.suppress(PermissionError):
            io = proc.read(f"/proc/{pid}/io")
    except OSError:
        return 0, 0
    fields = stat[stat.rindex(")") + 2 :].split()
    written = next((int(line.split()[1]) for line in io.splitlines() if line.startswith("wchar:")), 0)
    return int(fields[11]) + int(fields[12]), written


def unix_sockets() -> Iterator[tuple[int, str]]:
    """Yield inode and name of every Unix socket that has one (proc(5), net/unix); the NUL of abstract ones is an @."""
    for line in proc.lines("/proc/net/unix")[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) == 8:
            yield int(fields[6]), fields[7]


def sockets(pids: Iterable[int]) -> set[int]:
    """Return the inodes of the sockets that these processes have open."""
    kinds = (target.partition(":") for pid in pids for target in open_files(pid))
    return {int(inode.strip("[]")) for kind, _, inode in kinds if kind == "socket"}


def holder_of(inode: int) -> int | None:
    """Return the pid of a process that has the socket with this inode open, where one can be seen."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and f"socket:[{inode}]" in open_files(int(entry.name)):
            return int(entry.name)
    return None
