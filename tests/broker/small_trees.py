"""A user's small process, dumped and restored by a deputy without a keeper: for tests that edit its images."""

from __future__ import annotations

import asyncio
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from core_images import rewrite_core
from notebooks import wait_until

from jupyter_gpuckpt.client.kernel_start import FIRST_PID
from jupyter_gpuckpt.errors import GpuckptError
from jupyter_gpuckpt.freeze import ptrace
from jupyter_gpuckpt.keeper.namespace import Namespace
from jupyter_gpuckpt.linux import processes
from jupyter_gpuckpt.linux.spawning import Program

PROGRAM = "import time\nwhile True: time.sleep(0.1)"
HOME = Path(os.environ.get("HOME", "/"))


async def sleeping(name: str) -> Namespace:
    """Start a sleeper, in a folder of that name."""
    folder = HOME / "trees" / name
    folder.mkdir(parents=True, exist_ok=True)
    run_dir = folder / "run"
    run_dir.mkdir(0o700)
    (run_dir / "kernel.log").touch(0o600)
    space = await Namespace.start(folder, run_dir)
    # The answer comes a moment before the program is what is asked for: what follows asks it again.
    await space.set_last_pid(100)
    return space


async def dumped(name: str = "first", program: str = PROGRAM, *, sockets: int = 0) -> str:
    """Dump a small process, when it has so many sockets; return the folder with its images."""
    space = await sleeping(name)
    try:
        target = HOME / "trees" / f"{name}-images"
        shutil.rmtree(target, ignore_errors=True)
        (target / "criu").mkdir(parents=True, mode=0o700)
        argv, log = ["/usr/bin/python3", "-c", program], "/dev/shm/gpuckpt/kernel.log"
        pid = await space.spawn(Program(argv, {}, log, after_pid=FIRST_PID - 1))
        assert space.deputy is not None
        wait_until(lambda: len(processes.sockets([space.outer(pid) or 0])) == sockets)
        status = await asyncio.to_thread(space.deputy.dump, pid, target / "criu", target, 60, lambda _: None)
        assert status == 0, (target / "criu" / "dump.log").read_text()
        return str(target / "criu")
    finally:
        await space.kill()


async def restored(folder: str, edit: Callable[[Path], None] = lambda _: None, check: bool = False) -> dict[str, Any]:
    """Restore a copy of images, after `edit` of it; return criu's status, or the error, and what came up."""
    space = await sleeping("second")
    assert space.deputy is not None
    try:
        copy = HOME / "trees" / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)
        edit(copy)
        await space.set_last_pid(FIRST_PID + 100)
        seen = space.path(str(copy))
        try:
            if check:
                await asyncio.to_thread(space.deputy.check, seen)
                return {"status": 0}
            status = await asyncio.to_thread(space.deputy.restore, seen, 60, lambda _: None)
        except GpuckptError as e:
            return {"error": e.why, "kind": type(e).__name__, "pids": processes.descendants(space.pid)}
        log = copy / "restore.log"
        pids = processes.descendants(space.pid)
        return {
            "status": status,
            "log": log.read_text() if log.exists() else "",
            "rights": [rights(pid) for pid in pids],
            "logins": [path.read_text() for pid in pids if (path := Path(f"/proc/{pid}/loginuid")).exists()],
            "mounts": Path(f"/proc/{space.pid}/mountinfo").read_text().count("gpuckpt-images"),
        }
    finally:
        await space.kill()


def rights(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    wanted = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapAmb", "NoNewPrivs")
    pairs = (line.split(":", 1) for line in lines)
    return {name: " ".join(value.split()) for name, value in pairs if name in wanted}


def edit_core(change: Callable[[Any], None]) -> Callable[[Path], None]:
    """Return an edit that changes the credentials of the first thread."""

    def edit(folder: Path) -> None:
        path = folder / f"core-{FIRST_PID}.img"
        path.write_bytes(rewrite_core(path.read_bytes(), change))

    return edit


def append_to_core(more: bytes) -> Callable[[Path], None]:
    """Return an edit that puts further bytes behind the message in a core image: the last of a field counts."""

    def edit(folder: Path) -> None:
        path = folder / f"core-{FIRST_PID}.img"
        raw = path.read_bytes()
        (size,) = struct.unpack_from("<I", raw, 8)
        path.write_bytes(raw[:8] + struct.pack("<I", size + len(more)) + raw[12:] + more)

    return edit


def in_the_old_form(change: Callable[[Any], None]) -> Callable[[Path], None]:
    """Return an edit that has criu read other credentials in a core image than who expects today's form of it.

    The first images of criu had one number in front of their entries, not two, and criu reads both forms. What is the
    second number to one reader is a length to the other; from then on, lengths to the one are fields to the other.
    """

    def edit(folder: Path) -> None:
        path = folder / f"core-{FIRST_PID}.img"
        raw = path.read_bytes()
        evil = rewrite_core(raw, change)[12:]
        unknown = _varint(1000 << 3 | 2)  # the tag of a field that nobody has, which has a length
        # As a message: field 2148 is 0. As a length: 100,000 bytes, in which there are no credentials.
        nothing = b"\xa0\x86\x01\x00" + unknown + _varint(99_995) + bytes(99_995)
        # As a message: field 2148 has these and seven bytes more, and the fields of a core image follow.
        skipped = unknown + _varint(99_996) + bytes(2)
        rest = 100_001 - len(skipped) - len(evil)
        more = b"\xa1\x86\x01\x00" + skipped + evil + unknown + _varint(rest - 5) + bytes(rest - 5)
        message = nothing + more
        path.write_bytes(raw[:8] + struct.pack("<I", len(message)) + message)
        for image in folder.glob("*.img"):
            raw = image.read_bytes()
            if image.name == "inventory.img":
                assert raw[8:10] == b"\x08\x02"  # of the second form
                image.write_bytes(raw[:9] + b"\x01" + raw[10:])
            elif not image.name.startswith("pages-"):
                image.write_bytes(raw[4:])

    return edit


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*out, number))


def make_unshare(pid: int) -> None:
    """Have a process of this user's call unshare(CLONE_NEWUSER | CLONE_NEWNS), as a debugger would.

    It is let go when this process ends.
    """
    tracer = ptrace.Tracer()
    tracer.seize(pid)
    call = tracer.next_call()
    assert call is not None
    result = tracer.insert(call, 272, 0x10000000 | 0x20000)
    assert result == 0, result
    tracer.go_on(call)


def run(what: Any) -> Any:
    return asyncio.run(what)
