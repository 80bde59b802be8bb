"""A save copies memory while the kernel runs on, out of twins of its processes, as it was in one instant."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from keeper_faults import Criu, assert_nothing_left, assert_works, kill_keeper
from notebooks import Notebook, StartKernel, wait_until

from jupyter_gpuckpt.client.record import KernelFolder
from jupyter_gpuckpt.linux import processes

pytestmark = pytest.mark.criu

_PIDS = Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup")


def regions(notebook: Notebook) -> list[Path]:
    """Return what is written down of the twins of a kernel's processes."""
    return sorted(notebook.folder.glob("run-*/twin-*.regions"))


def sleeper(notebook: Notebook) -> int:
    (pid,) = KernelFolder(notebook.folder).sleepers()
    return pid


def twins(notebook: Notebook) -> list[int]:
    noted = [int.from_bytes(path.read_bytes()[:8], "little") for path in regions(notebook)]
    found = []
    for pid in processes.descendants(sleeper(notebook)):
        with contextlib.suppress(OSError):  # one of what the script starts, which has ended since
            if processes.inner_pid(pid) in noted:
                found.append(pid)
    return found


def status_of(pid: int) -> dict[str, str]:
    rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (row.partition(":") for row in rows)}


def has_ended(pid: int) -> bool:
    try:
        return status_of(pid)["State"][0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@contextlib.contextmanager
def before_it_is_copied(criu: Criu, start: StartKernel, *cells: str) -> Iterator[Notebook]:
    """Give a kernel, some cells on, in the middle of a save: it runs again, and nothing of its memory is copied yet."""
    reached, go = criu.folder / "reached", criu.folder / "go"
    notebook = start()
    for cell in cells:
        notebook.run(cell)
    for path in (reached, go):
        path.unlink(missing_ok=True)
    real = criu.program.read_text().splitlines()[-1].removeprefix("exec ")
    criu.first("dump", f"{real}\nstatus=$?\n: > {reached}\nwhile [ ! -e {go} ]; do sleep 0.02; done\nexit $status")
    asked = notebook.client.execute("%gpuckpt save here")
    try:
        wait_until(reached.exists)
        yield notebook
    finally:
        go.touch()
    reply = notebook.reply()
    assert reply["parent_header"]["msg_id"] == asked
    notebook.status = reply["content"]  # type: ignore[attr-defined]


_CHANGING = """
import mmap, threading, time
area = mmap.mmap(-1, 4 << 20)  # shared: never one mapping with what is beside it, which would be seen
area[:] = bytes(4 << 20)
changes = True
def change():
    while changes:
        for advice in (mmap.MADV_DONTDUMP, mmap.MADV_DODUMP):
            area.madvise(advice)
            time.sleep(0.0001)
thread = threading.Thread(target=change)
thread.start()
"""


def test_a_kernel_that_changes_its_mappings_without_end_is_saved_at_another_attempt(notebook: Notebook) -> None:
    """They are read right before it is paused, and then are others as often as not."""
    notebook.run(_CHANGING)
    saves = (notebook.run("%gpuckpt save here --replace", allow_error=True) for _ in range(40))
    failed = next(one for one in saves if one.status == "error")
    assert "changed how it uses its memory" in failed.text
    assert "Save again" in failed.text
    for _ in range(5):
        notebook.run("%gpuckpt save here --replace")
    notebook.run("changes = False; thread.join()")
    assert_works(notebook)


def test_memory_is_of_one_instant(start: StartKernel) -> None:
    """A thread writes all of it again and again, and looks whether all of it is what it has written."""
    notebook = start()
    notebook.run(
        "import numpy, threading\n"
        "memory, torn, over, n = numpy.zeros((20_000, 512), 'i8'), 0, False, 0\n"
        "def write():\n"
        "    global n, torn\n"
        "    while not over:\n"
        "        n += 1\n"
        "        memory[:, 0] = n\n"
        "        torn += not (memory[:, 0] == n).all()\n"
        "writing = threading.Thread(target=write); writing.start()"
    )
    for _ in range(3):
        notebook.run("%gpuckpt save here --replace")
        saved = int(notebook.value("n"))
        notebook.run("%gpuckpt restore here")
        wait_until(lambda saved=saved: int(notebook.value("n")) > saved)
        assert notebook.value("torn") == "0"
    notebook.run("over = True; writing.join()")


def test_memory_that_no_child_has_comes_back_and_so_does_that_of_children(start: StartKernel) -> None:
    notebook = start()
    notebook.run(
        "import ctypes, mmap, multiprocessing, os, signal\n"
        "kinds = {'not forked': mmap.MADV_DONTFORK, 'wiped when forked': 18, 'plain': mmap.MADV_NORMAL}\n"
        "areas = {}\n"
        "for kind, advice in kinds.items():\n"
        "    areas[kind] = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
        "    areas[kind].madvise(advice)\n"
        "    areas[kind][:] = kind.encode().ljust(1 << 20)\n"
        "out_of_reach = mmap.mmap(-1, 1 << 16, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
        "out_of_reach[:4] = b'kept'\n"
        "address = ctypes.addressof(ctypes.c_char.from_buffer(out_of_reach))\n"
        "protect = ctypes.CDLL(None).mprotect\n"
        "protect(ctypes.c_void_p(address), 1 << 16, 0)\n"
        "def answer(pipe):\n"
        "    held = os.urandom(1 << 20)\n"
        "    while pipe.recv():\n"
        "        pipe.send(hash(held))\n"
        "        held = held[1:] + b'x'\n"
        "ends = [multiprocessing.get_context('fork').Pipe() for _ in range(2)]\n"
        "children = [multiprocessing.get_context('fork').Process(target=answer, args=(end,)) for _, end in ends]\n"
        "[child.start() for child in children]\n"
        "def ask():\n"
        "    [end.send(True) for end, _ in ends]\n"
        "    return [end.recv() for end, _ in ends]"
    )
    notebook.run("%gpuckpt save here")
    first = notebook.value("ask()")
    notebook.run("[area.__setitem__(slice(None), bytes(1 << 20)) for area in areas.values()]; ask()")
    notebook.run("protect(ctypes.c_void_p(address), 1 << 16, 3); out_of_reach[:4] = b'lost'")
    notebook.run("%gpuckpt restore here")
    assert notebook.value("[area[:].decode().strip() for area in areas.values()] == list(kinds)") == "True"
    assert notebook.value("ask()") == first
    assert notebook.value("protect(ctypes.c_void_p(address), 1 << 16, 3), out_of_reach[:4]") == "0 b'kept'"
    notebook.run("[end.send(False) for end, _ in ends]; [child.join() for child in children]")


def test_a_program_does_not_see_its_twin_and_a_twin_does_nothing(criu: Criu, start: StartKernel) -> None:
    cells = (
        "import os, signal, subprocess\n"
        "ended = []\n"
        "signal.signal(signal.SIGCHLD, lambda *_: ended.append(1))\n"
        "child = subprocess.Popen(['cat'], stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "reading, writing = os.pipe()",
    )
    with before_it_is_copied(criu, start, *cells) as notebook:
        made = twins(notebook)
        assert len(made) == 2
        for twin in made:  # each stops as soon as a processor is free for it
            wait_until(lambda twin=twin: status_of(twin)["State"][0] == "T")
        for status in map(status_of, made):
            assert status["TracerPid"] == "0"
            assert status["PPid"] == str(sleeper(notebook))
            assert int(status["SigBlk"], 16) | 1 << 8 | 1 << 18 == 2**64 - 1  # but SIGKILL and SIGSTOP
        assert [list(Path(f"/proc/{twin}/fd").iterdir()) for twin in made] == [[], []]
    assert notebook.status["status"] == "ok"  # type: ignore[attr-defined]
    assert notebook.value("os.close(writing), os.read(reading, 1)") == "None b''"
    assert notebook.value("ended, os.waitpid(-1, os.WNOHANG | 0x40000000)") == "[] (0, 0)"  # __WALL
    notebook.run("out, _ = child.communicate(b'x')")
    assert notebook.value("out, ended") == "b'x' [1]"
    wait_until(lambda: not regions(notebook))
    notebook.run("%gpuckpt restore here")
    assert notebook.value("child.communicate(b'y')[0]") == "b'y'"


def test_a_twin_that_is_continued_ends_and_the_save_fails(criu: Criu, start: StartKernel) -> None:
    with before_it_is_copied(criu, start, "ran = 0", "import threading; x = bytearray(b'x' * 10**7)") as notebook:
        (twin,) = twins(notebook)
        os.kill(twin, signal.SIGCONT)
        wait_until(lambda: has_ended(twin))
    status = notebook.status  # type: ignore[attr-defined]
    assert (status["status"], status["ename"]) == ("error", "SaveFailed")
    assert "memory" in status["evalue"]
    assert_works(notebook)


def test_a_keeper_that_dies_leaves_no_twin(criu: Criu, start: StartKernel, tmp_path: Path) -> None:
    with before_it_is_copied(criu, start) as notebook:
        (twin,) = twins(notebook)
        kill_keeper(notebook)
    assert notebook.status["ename"] == "KeeperGone"  # type: ignore[attr-defined]
    criu.honest()
    wait_until(lambda: notebook.manager.is_alive() and has_ended(twin) and not regions(notebook))
    assert_works(notebook)
    notebook.close()
    assert_nothing_left(tmp_path)


@pytest.fixture
def limit(notebook: Notebook) -> Iterator[Path]:
    """The file with the number of threads that the kernel's process may have."""
    root = next((folder for folder in _PIDS if (folder / "cgroup.procs").exists()), _PIDS[-1])
    folder = root / f"gpuckpt-test-{secrets.token_hex(4)}"
    folder.mkdir()
    kernel = int(notebook.value("__import__('os').getpid()"))
    (pid,) = (pid for pid in processes.descendants(sleeper(notebook)) if processes.inner_pid(pid) == kernel)
    try:
        (folder / "cgroup.procs").write_text(str(pid))
        yield folder / "pids.max"
    finally:
        notebook.close()
        wait_until(lambda: not (folder / "cgroup.procs").read_text())
        folder.rmdir()


def test_a_kernel_that_cannot_be_forked_is_copied_while_it_is_paused(
    criu: Criu, notebook: Notebook, limit: Path
) -> None:
    notebook.run("import os; x = os.urandom(10**7); kept = hash(x)")
    criu.first("dump", f"echo 1 > {limit}")
    notebook.run("%gpuckpt save here")
    notebook.fails("os.fork()")
    limit.write_text("max")
    notebook.run("del x, kept")
    notebook.run("%gpuckpt restore here")
    assert notebook.value("hash(x) == kept") == "True"
