"""A save leaves out the memory that has not changed since the one before, and nothing else."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from keeper_faults import Criu, assert_nothing_left, assert_works, kill_keeper, status, store
from notebooks import Notebook, StartKernel, run_folders, wait_until

from jupyter_gpuckpt.client.record import KernelFolder
from jupyter_gpuckpt.freeze.huge_pages import HugePages
from jupyter_gpuckpt.linux import processes
from jupyter_gpuckpt.store import Store

pytestmark = [
    pytest.mark.criu,
    pytest.mark.skipif(os.geteuid() != 0, reason="memory is copied out of twins, which takes root"),
]

_BEGIN = """
import ctypes, hashlib, mmap, multiprocessing, numpy as np, os, random
libc = ctypes.CDLL(None)
PAGE, random_state = 4096, random.Random({seed})
sizes = (1 << 23, 1 << 16, 3 << 20, 70 << 20)  # the last is put into huge pages
areas = [mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for size in sizes]
for area in areas:
    area[:] = os.urandom(len(area))
areas[2].madvise(mmap.MADV_HUGEPAGE)
arrays = [np.random.default_rng(n).integers(0, 2**62, 1 << 16) for n in range(24)]
objects = [{{"n": n, "text": str(n) * 20}} for n in range(20_000)]
def address(area):
    return ctypes.addressof(ctypes.c_char.from_buffer(area))
def answer(pipe):
    held = [os.urandom(1 << 18) for _ in range(8)]
    while (number := pipe.recv()) is not None:
        if number >= 0:
            held[number] = os.urandom(1 << 18)
        pipe.send(hashlib.blake2b(b"".join(held)).hexdigest())
ours, theirs = multiprocessing.get_context("fork").Pipe()
child = multiprocessing.get_context("fork").Process(target=answer, args=(theirs,)); child.start()
def ask(number=-1):
    ours.send(number)
    return ours.recv()
def digest():
    made = hashlib.blake2b()
    for area in areas: made.update(area)
    for array in arrays: made.update(array)
    made.update(repr(objects).encode())
    return made.hexdigest() + ask()
def change():
    area = random_state.choice(areas)
    at = random_state.randrange(len(area) // PAGE) * PAGE
    what = random_state.choice("write drop map swap array new_array objects child fork grow".split())
    where = ctypes.c_void_p(address(area) + at)
    if what == "write": area[at + 7] ^= 1
    elif what == "drop": area.madvise(mmap.MADV_DONTNEED, at, PAGE)
    elif what == "map":
        libc.mmap(where, ctypes.c_size_t(PAGE), 3, 0x32, -1, ctypes.c_long(0))
        if random_state.random() < 0.5: area[at] = 5
    elif what == "swap":
        there, libc.mremap.restype = random_state.randrange(len(area) // PAGE) * PAGE, ctypes.c_void_p
        other, apart = ctypes.c_void_p(address(area) + there), mmap.mmap(-1, PAGE)
        between, size = ctypes.c_void_p(address(apart)), ctypes.c_size_t(PAGE)
        if there != at:
            for begin, end in ((where, between), (other, where), (between, other)):
                assert libc.mremap(begin, size, size, 3, end) == end.value
            libc.mmap(between, size, 3, 0x32, -1, ctypes.c_long(0))
    elif what == "array": random_state.choice(arrays)[random_state.randrange(1 << 16)] += 1
    elif what == "new_array": arrays[random_state.randrange(24)] = np.arange(random_state.randrange(1 << 17))
    elif what == "objects": objects[random_state.randrange(len(objects))] = os.urandom(200)
    elif what == "child": ask(random_state.randrange(8))
    elif what == "fork":
        if not (pid := os.fork()):
            area[:] = bytes(len(area))
            os._exit(0)
        os.waitpid(pid, 0)
    elif what == "grow":
        areas.append(mmap.mmap(-1, 1 << 18, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        areas[-1][: 1 << 17] = os.urandom(1 << 17)
"""
_FIND = re.compile(r"(\d+) of (\d+) bytes of memory of process (\d+) have not changed")


def sleeper(notebook: Notebook) -> int:
    (pid,) = KernelFolder(notebook.folder).sleepers()
    return pid


def kept(notebook: Notebook) -> list[int]:
    """Return the pids of the twins that are kept."""
    noted = []
    for path in notebook.folder.glob("run-*/kept-*.regions"):
        with contextlib.suppress(FileNotFoundError):
            noted.append(int.from_bytes(path.read_bytes()[:8], "little"))
    found = []
    for pid in processes.descendants(sleeper(notebook)):
        with contextlib.suppress(OSError):  # it has ended since
            if processes.inner_pid(pid) in noted:
                found.append(pid)
    return found


def unchanged(notebook: Notebook) -> list[tuple[int, int]]:
    """Return how much of its memory had not changed, at each save, and how much it was: of the first process."""
    found = _FIND.findall((notebook.folder / "keeper.log").read_text())
    first = min((int(pid) for *_, pid in found), default=0)
    return [(int(same), int(size)) for same, size, pid in found if int(pid) == first]


def has_ended(pid: int) -> bool:
    return processes.start_time(pid) is None


def with_kept_twin(notebook: Notebook) -> int:
    """Save until a twin is kept, and return its pid."""
    notebook.run("import os; much = os.urandom(30_000_000); few = bytearray(5000)")
    for n in range(2):
        notebook.run(f"few[:] = os.urandom(5000)\n%gpuckpt save --wait kept{n} --replace")
    wait_until(lambda: kept(notebook))
    (twin,) = kept(notebook)
    return twin


def test_every_save_has_all_that_the_program_had_then(start: StartKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = int(os.environ.get("GPUCKPT_TEST_SEED", "1"))
    monkeypatch.setenv("GPUCKPT_UNCHANGED", "check")
    notebook = start()
    notebook.run(_BEGIN.format(seed=seed) + "\nseen = []")
    count, huge_pages, gathered = 8, HugePages(), 0
    for n in range(count):
        notebook.run("for _ in range(random_state.randrange(12)): change()\nseen.append(digest())")
        gathered += huge_pages.gather([status(notebook)["pid"]], lambda: True)  # as before an automatic save
        notebook.run(f"%gpuckpt save --wait s{n}")
    found = unchanged(notebook)
    assert len(found) == count
    assert sum(same * 5 > size for same, size in found) >= count - 3  # there is nothing to compare with at first
    assert gathered
    for n in random.Random(seed).sample(range(count), count):
        notebook.run(f"%gpuckpt restore s{n} --discard")
        assert notebook.value("len(seen), digest() == seen[-1]") == f"{n + 1} True"
    notebook.run("change()\n%gpuckpt save --wait last")
    notebook.run("was = digest()\n%gpuckpt save --wait last --replace")
    notebook.run("%gpuckpt restore last --discard")
    assert notebook.value("digest() == was") == "True"
    notebook.run("ours.send(None); child.join()")


def test_a_system_that_is_wrong_about_what_has_changed_fails_the_save(
    start: StartKernel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, keepers_first: Callable[[str], None]
) -> None:
    """Its pagemaps say of every page that it is where it was, from when a file is there on."""
    lies = tmp_path / "lies"
    keepers_first(
        "real = os.pread; os.pread = lambda fd, size, at: bytes([1] * 7 + [128]) * (size // 8) if "
        f"os.path.exists({str(lies)!r}) and os.readlink(f'/proc/self/fd/{{fd}}').endswith('/pagemap') "
        "else real(fd, size, at)"
    )
    monkeypatch.setenv("GPUCKPT_UNCHANGED", "check")
    notebook = start()
    twin = with_kept_twin(notebook)
    notebook.run("few[:] = bytes(5000)")
    lies.touch()
    answer = notebook.fails("%gpuckpt save --wait wrong")
    assert "has changed since it was saved last" in answer.text
    assert "Save again" in answer.text
    lies.unlink()
    wait_until(lambda: has_ended(twin))
    assert not kept(notebook)
    notebook.run("%gpuckpt save --wait right")
    assert unchanged(notebook)[-1][0] == 0  # all of it was copied
    assert_works(notebook)


def test_twins_that_are_kept_are_no_part_of_the_kernel(start: StartKernel) -> None:
    notebook = start()
    twin = with_kept_twin(notebook)
    assert Path(f"/proc/{twin}/oom_score_adj").read_text().strip() == "1000"
    with notebook.keeper as keeper:
        status = keeper.request("status")
    assert twin not in status["pids"]
    notebook.run("%gpuckpt save --wait again")
    wait_until(lambda: has_ended(twin))
    same, size = unchanged(notebook)[-1]
    assert same * 2 > size
    (twin,) = kept(notebook)
    notebook.run("%gpuckpt restore again --discard")
    wait_until(lambda: has_ended(twin))
    notebook.run("%gpuckpt save --wait after_restore")
    assert unchanged(notebook)[-1][0] == 0


def test_a_twin_is_ended_when_much_has_changed(start: StartKernel) -> None:
    notebook = start()
    notebook.run("import os; more = bytearray(os.urandom(80_000_000))")
    twin = with_kept_twin(notebook)
    notebook.run("more[:] = os.urandom(80_000_000)")
    wait_until(lambda: has_ended(twin))
    wait_until(lambda: not kept(notebook))
    notebook.run("%gpuckpt save --wait again")
    assert unchanged(notebook)[-1][0] == 0


def test_a_save_while_a_twin_is_being_ended_is_not_refused(
    start: StartKernel, tmp_path: Path, keepers_first: Callable[[str], None]
) -> None:
    """It is no process that the kernel has left behind."""
    hold, reached = tmp_path / "hold", tmp_path / "reached"
    keepers_first(
        "import signal; kill = signal.pidfd_send_signal; signal.pidfd_send_signal = lambda *how: ("
        f"[(open({str(reached)!r}, 'w').close(), time.sleep(0.01)) for _ in iter(lambda: os.path.exists("
        f"{str(hold)!r}), False)], kill(*how))[1]"
    )
    notebook = start()
    notebook.run("import os; more = bytearray(os.urandom(80_000_000))")
    twin = with_kept_twin(notebook)
    hold.touch()
    notebook.run("more[:] = os.urandom(80_000_000)")
    wait_until(reached.exists)
    try:
        notebook.client.execute("%gpuckpt save --wait again")
        wait_until(lambda: "again" in {manifest.name for manifest in Store(store()).list()})
        assert not has_ended(twin)
    finally:
        hold.unlink()
    assert notebook.reply()["content"]["status"] == "ok"
    assert has_ended(twin)
    assert_works(notebook)


def test_a_twin_that_is_continued_ends_and_the_next_save_copies_all(start: StartKernel) -> None:
    notebook = start()
    twin = with_kept_twin(notebook)
    os.kill(twin, signal.SIGCONT)
    wait_until(lambda: has_ended(twin))
    notebook.run("few[:] = bytes(5000)\n%gpuckpt save --wait again")
    assert unchanged(notebook)[-1][0] == 0
    notebook.run("few[:] = b'x' * 5000\n%gpuckpt restore again --discard")
    assert notebook.value("few == bytes(5000)") == "True"


def test_a_keeper_that_dies_leaves_none(start: StartKernel, tmp_path: Path) -> None:
    notebook = start()
    twin = with_kept_twin(notebook)
    kill_keeper(notebook)
    wait_until(lambda: notebook.manager.is_alive() and has_ended(twin))
    assert_works(notebook)
    with_kept_twin(notebook)
    notebook.close()
    assert_nothing_left(tmp_path)


def test_a_save_that_fails_leaves_the_next_one_right(criu: Criu, start: StartKernel) -> None:
    notebook = start()
    twin = with_kept_twin(notebook)
    criu.first("dump", "exit 1")
    notebook.fails("%gpuckpt save --wait never")
    assert kept(notebook) == [twin]  # nothing was copied: what it knows is as good as before
    criu.honest()
    notebook.run("few[:] = b'y' * 5000\n%gpuckpt save --wait again")
    assert unchanged(notebook)[-1][0] > 0
    notebook.run("few[:] = b'x' * 5000\n%gpuckpt restore again --discard")
    assert notebook.value("few == b'y' * 5000") == "True"


def test_of_what_changed_a_little_only_that_is_stored_and_it_needs_no_other_snapshot(start: StartKernel) -> None:
    notebook = start()
    with_kept_twin(notebook)
    notebook.run("few[:] = b'y' * 5000\n%gpuckpt save --wait little")
    # Python writes to some pages in ten all over its memory, which would take megabytes.
    assert Store(store()).get("little").stored < 2_000_000
    notebook.run("%gpuckpt rm kept0 kept1")
    notebook.run("few[:] = b'x' * 5000\n%gpuckpt restore little --discard")
    assert notebook.value("few == b'y' * 5000, len(much)") == "True 30000000"
    assert Store(store()).check(read_data=True).faults == []


def test_what_the_store_has_no_longer_is_copied_again(start: StartKernel) -> None:
    notebook = start()
    with_kept_twin(notebook)
    notebook.run("%gpuckpt rm kept0 kept1")
    notebook.run("few[:] = b'y' * 5000\n%gpuckpt save --wait again")
    assert unchanged(notebook)[-1][0] < 1 << 20  # but for zeros
    notebook.run("few[:] = b'x' * 5000\n%gpuckpt restore again --discard")
    assert notebook.value("few == b'y' * 5000, len(much)") == "True 30000000"


def test_all_is_copied_where_that_is_wanted(start: StartKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCKPT_UNCHANGED", "copy")
    notebook = start()
    for n in range(3):
        notebook.run(f"%gpuckpt save --wait s{n}")
    assert [same for same, _ in unchanged(notebook)] == [0, 0, 0]
    assert kept(notebook) == []


def test_nobody_is_hung_up_by_a_twin_that_stands_still(start: StartKernel) -> None:
    """The system ends a process group that its leader leaves behind, if one of its processes stands still."""
    notebook = start()
    notebook.run(
        "import os, subprocess\n"
        "shell = subprocess.Popen(['sh', '-c', 'cat /dev/zero > /dev/null & echo $!; read line'], text=True,\n"
        "    stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=os.setpgrp)\n"
        "left = int(shell.stdout.readline())"
    )
    for n in range(2):
        notebook.run(f"%gpuckpt save --wait kept{n}")
    assert len(kept(notebook)) == 3
    notebook.run("import ctypes; ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)")  # a job is no subreaper either
    notebook.run("shell.communicate('go on\\n')")
    assert notebook.value("shell.wait(), os.path.exists(f'/proc/{left}')") == "0 True"
    assert notebook.value("open(f'/proc/{left}/stat').read().split()[2] in 'RS'") == "True"
    notebook.run("os.kill(left, 9)")


def test_what_an_older_dump_has_left_is_not_taken_for_memory(start: StartKernel) -> None:
    notebook = start()
    notebook.run("import os; few = bytearray(5000)\n%gpuckpt save --wait first")
    (run,) = run_folders(notebook.folder)
    left = run / f"twin-{notebook.value('os.getpid()')}.regions"
    left.write_bytes(bytes(8))
    notebook.run("few[:] = b'y' * 5000\n%gpuckpt save --wait again")
    assert kept(notebook)  # there was a twin
    assert not left.exists()
    notebook.run("few[:] = b'x' * 5000\n%gpuckpt restore again --discard")
    assert notebook.value("few == b'y' * 5000") == "True"
