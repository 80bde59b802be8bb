"""Counting all there is of a kernel, to see what grows."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from keeper_faults import keeper_pid, processes_of
from notebooks import Notebook, wait_until

from jupyter_gpuckpt.client.record import KernelFolder
from jupyter_gpuckpt.keeper.ports import of_connection_file
from jupyter_gpuckpt.linux.processes import resident_bytes
from jupyter_gpuckpt.linux.socket_ports import established


def children(pid: int) -> list[int]:
    """Return all children of a process, zombies too."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def listening(pids: set[int]) -> int:
    """Return how many TCP sockets these processes listen at."""
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            target = str(fd.readlink())
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[3] == "0A" and row[9] in inodes for row in rows)


def connected(notebook: Notebook) -> int:
    """Return how many connections of clients the kernel has."""
    ports = of_connection_file(notebook.manager.connection_file).values()
    return sum(one.port in ports for one in established())


def clients_of(notebook: Notebook) -> int:
    """Return how many connections of clients the kernel has, once all have come: one client has several."""
    seen: list[int] = []

    def stays() -> bool:
        time.sleep(0.2)
        seen.append(connected(notebook))
        return seen[-5:] == [seen[-1]] * 5

    wait_until(stays)
    return seen[-1]


def mounts(pid: int | str, folder: Path) -> list[str]:
    """Return the mounts that a process sees and that may be ours: other programs mount what they like."""
    signs = (str(folder), "gpuckpt", "criu", "/dev/shm")
    rows = [line.split() for line in Path(f"/proc/{pid}/mounts").read_text().splitlines()]
    return sorted(where for what, where, *_ in rows if where == "/proc" or any(s in f"{what} {where}" for s in signs))


def look(notebook: Notebook, folder: Path, clients: int) -> dict[str, Any]:
    """Count all there is of a kernel, its keeper and its store, once so many connections of clients are back."""
    wait_until(lambda: not (notebook.folder / "restore").exists())
    wait_until(lambda: connected(notebook) == clients)
    counted: dict[str, Any] = wait_until(lambda: _count(notebook, folder))
    return counted


def assert_no_more(notebook: Notebook, folder: Path, clients: int, before: dict[str, Any]) -> None:
    """There is no more of anything than there was, once what comes and goes has gone: threads above all."""
    grown: list[str] = []

    def has_not_grown() -> bool:
        now = look(notebook, folder, clients)
        grown[:] = [f"{what}: {before[what]}, then {now[what]}" for what in now if is_more(now[what], before[what])]
        return not grown

    try:
        wait_until(has_not_grown, 20)
    except AssertionError:
        raise AssertionError(grown) from None


def is_more(now: Any, before: Any) -> bool:
    """Tell whether a count has grown, or a list has what it had not."""
    return bool(set(now) - set(before)) if isinstance(now, list) else now > before


def _count(notebook: Notebook, folder: Path) -> dict[str, Any] | None:
    """Return what there is; None where something ended while it was counted."""
    try:
        return _counted(notebook, folder)
    except (OSError, ValueError):
        return None


def _counted(notebook: Notebook, folder: Path) -> dict[str, Any]:
    keeper = keeper_pid(notebook)
    (sleeper,) = KernelFolder(notebook.folder).sleepers()
    (kernel,) = children(sleeper)
    pids = processes_of(folder)
    names = {path.name.replace(f"run-{n}", "run-N") for path in notebook.folder.rglob("*") for n in range(300, 0, -1)}
    return {
        "processes": len(pids),
        "of the keeper's": len(children(keeper)),
        "of the kernel's": len(children(kernel)),
        "ports": listening(pids),
        "descriptors of the keeper": len(list(Path(f"/proc/{keeper}/fd").iterdir())),
        "descriptors of the kernel": len(list(Path(f"/proc/{kernel}/fd").iterdir())),
        "threads of the kernel": len(list(Path(f"/proc/{kernel}/task").iterdir())),
        "mounts": mounts(sleeper, folder),
        "mounts here": mounts("self", folder),
        "files": len([name for name in names if not name.startswith(".")]),
        "shared memory": sorted(path.name for path in Path(f"/proc/{sleeper}/root/dev/shm").iterdir()),
    }


def memory(notebook: Notebook) -> dict[str, int]:
    (sleeper,) = KernelFolder(notebook.folder).sleepers()
    return {
        "keeper": resident_bytes([keeper_pid(notebook)]),
        "sleeper": resident_bytes([sleeper]),
        "kernel": resident_bytes(children(sleeper)),
    }


def assert_no_growth(notebook: Notebook, held: dict[str, int], room: float) -> None:
    """That each process comes back to within `room` bytes and a tenth of what it held.

    Right after a restore the keeper may hold tens of megabytes more for what it does in the background.
    """

    grown: list[str] = []

    def has_not_grown() -> bool:
        now = memory(notebook)
        grown[:] = [f"{who}: {held[who]}, then {now[who]} bytes" for who in now if now[who] > 1.1 * held[who] + room]
        return not grown

    try:
        wait_until(has_not_grown, 20)
    except AssertionError:
        raise AssertionError(grown) from None
