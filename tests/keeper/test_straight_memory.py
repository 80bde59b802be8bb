"""Large arrays go straight from the store into the restored process; what criu is given lacks them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType

import psutil
import pytest
from command_line import run
from job_programs import Job, folder_of, program
from keeper_faults import Asked, Criu, keeper_pid
from notebooks import Notebook, wait_until

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.errors import RestoreFailed
from jupyter_gpuckpt.freeze import areas, pages
from jupyter_gpuckpt.freeze.placing import Run, into_process, reaches_read_only
from jupyter_gpuckpt.freeze.ranges import joined, size_of, within, without
from jupyter_gpuckpt.freeze.straight_runs import StraightRuns, plan
from jupyter_gpuckpt.store import HOLE, Store
from jupyter_gpuckpt.store.index import read_part

pytestmark = [
    pytest.mark.criu,
    pytest.mark.shared_kernel(False),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root's keepers write there"),
]

MIB = 1 << 20

STATE = f"""
import ctypes, hashlib, mmap, os
random = bytearray(os.urandom({100 * MIB}))
mostly = bytearray({150 * MIB}); mostly[{60 * MIB}:{80 * MIB}] = os.urandom({20 * MIB})
own = mmap.mmap(-1, {20 * MIB}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
own[::4096] = os.urandom({20 * MIB // 4096})
small = [os.urandom(1000) for _ in range(2000)]
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
size = ctypes.c_size_t({4 * MIB})
def protect(at, how): assert libc.mprotect(ctypes.c_void_p(at), size, how) == 0
def mapped(fd, flags, how):
    at = libc.mmap(None, size, 3, mmap.MAP_PRIVATE | flags, fd, ctypes.c_long(0))
    for page in range(at, at + size.value, 8192): ctypes.memmove(page, os.urandom(4096), 4096)
    protect(at, how)
    return at
library = max((line.split()[-1] for line in open("/proc/self/maps") if ".so" in line), key=os.path.getsize)
with open(library, "rb") as file:
    places = [mapped(file.fileno(), 0, 3), mapped(file.fileno(), 0, 1), mapped(-1, mmap.MAP_ANONYMOUS, 1)]
def digest():
    there = [ctypes.string_at(at, size.value) for at in places]
    return hashlib.blake2b(b"".join([random, mostly, own[:], *small, *there])).hexdigest()
d = digest()
"""
CHANGE = """
random[:] = bytes(len(random)); mostly[:] = b'x' * len(mostly); own[:] = bytes(len(own)); small.clear()
for at in places: protect(at, 3); ctypes.memset(at, 0, size.value)
"""


def log(notebook: Notebook) -> str:
    return (notebook.folder / "keeper.log").read_text()


def straight(notebook: Notebook) -> list[int]:
    """Return how many bytes went straight into the process, of each restore."""
    return [int(size) for size in re.findall(r"(\d+) bytes of memory went straight into", log(notebook))]


def test_all_of_it_is_back(notebook: Notebook) -> None:
    notebook.run(STATE)
    notebook.run("%gpuckpt save here")
    for _ in range(2):
        notebook.run(CHANGE)
        notebook.run("%gpuckpt restore here --discard")
        assert notebook.value("digest() == d") == "True"
    assert len(straight(notebook)) == 2
    assert all(size > 200 * MIB for size in straight(notebook))
    # What is saved of the restored kernel is whole, too.
    notebook.run("%gpuckpt save there")
    notebook.run(CHANGE)
    notebook.run("%gpuckpt restore there --discard")
    assert notebook.value("digest() == d") == "True"


def test_where_the_kernel_has_to_be_given_up_before_criu_has_all_of_it(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run(STATE)
    notebook.run(f"import fcntl; one = open({str(tmp_path / 'one')!r}, 'w'); fcntl.flock(one, fcntl.LOCK_EX)")
    notebook.run("%gpuckpt save here")
    for line in ("restore here --discard", "restore here --discard --in-place"):
        notebook.run(CHANGE)
        notebook.run(f"%gpuckpt {line}")
        assert notebook.value("digest() == d") == "True"
    assert "is given up before the snapshot comes up" in log(notebook)
    assert straight(notebook) == []
    with (tmp_path / "one").open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


_CHILD = f"""
import hashlib, os, sys
def digest(): return hashlib.blake2b(data).hexdigest()
data = bytearray(os.urandom({80 * MIB})); d = digest()
for _ in iter(sys.stdin.readline, ""):
    print(digest() == d, flush=True)
"""


def test_all_of_a_tree_is_back_but_what_a_fork_left_to_both_is_criu_s_own(notebook: Notebook) -> None:
    notebook.run(STATE)
    notebook.run(f"import subprocess, sys; program = {_CHILD!r}")
    notebook.run(
        "children = [subprocess.Popen([sys.executable, '-c', program], text=True, stdin=-1, stdout=-1) for _ in 'ab']"
    )
    ask = "[(c.stdin.write('?\\n'), c.stdin.flush(), c.stdout.readline())[2] for c in children]"
    assert notebook.value(ask) == r"['True\n', 'True\n']"
    notebook.run("%gpuckpt save here")
    notebook.run(CHANGE)
    notebook.run("%gpuckpt restore here --discard")
    assert notebook.value("digest() == d") == "True"
    assert notebook.value(ask) == r"['True\n', 'True\n']"
    assert len(straight(notebook)) == 1, log(notebook)
    assert straight(notebook)[0] > 300 * MIB
    # What a child has of the kernel's by a fork stays one memory for both.
    notebook.run("""
asked, answer = os.pipe(), os.pipe()
if not (pid := os.fork()):
    while os.read(asked[0], 1):
        os.write(answer[1], b"1" if digest() == d else b"0")
    os._exit(0)
""")
    notebook.run("%gpuckpt save forked")
    notebook.run("%gpuckpt restore forked --discard")
    assert notebook.value("digest() == d, os.write(asked[1], b'?') and os.read(answer[0], 1)") == "True b'1'"
    assert notebook.value(ask) == r"['True\n', 'True\n']"
    assert len(straight(notebook)) == 2, log(notebook)
    assert 150 * MIB < straight(notebook)[1] < 250 * MIB
    shared = sum(
        int(size)
        for size in re.findall(
            r"^Shared_Dirty: +(\d+)", notebook.run("print(open(f'/proc/{pid}/smaps').read())").text, re.M
        )
    )
    assert shared > 100 * 1024
    notebook.run("import signal; os.kill(pid, signal.SIGKILL); os.waitpid(pid, 0)")


def _long_chunk(name: str) -> tuple[Path, int]:
    """Return the pack with the bytes of a large array, and where they are in it."""
    store = Store(settings.store_dir())
    manifest = store.get(name)
    contents = store.contents(manifest)
    path = max((path for path in contents.files if "/pages-" in path), key=contents.size_of)
    index = read_part(store._layout, manifest.id)
    chunk = max((chunk for chunk in contents.files[path] if chunk.hash != HOLE), key=lambda chunk: chunk.size)
    at = index[chunk.hash]
    return settings.store_dir() / "packs" / at.pack, at.offset


def _flip(name: str) -> None:
    """Change a bit of a large array in the store, or put it right."""
    pack, offset = _long_chunk(name)
    with pack.open("r+b") as file:
        byte = os.pread(file.fileno(), 1, offset)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), offset)


def test_damage_that_is_found_when_criu_is_done_leaves_the_running_kernel(notebook: Notebook, criu: Criu) -> None:
    notebook.run(STATE)
    notebook.run("%gpuckpt save here")
    notebook.run("random[:] = bytes(len(random)); now = digest()")
    with criu.held_at("restore", "start") as until_there:
        asked = Asked(notebook, "%gpuckpt restore here --discard")
        until_there()
        _flip("here")
    assert asked.answer(120)["status"] == "error"
    assert notebook.value("digest() == now") == "True"
    assert straight(notebook) == []
    _flip("here")
    notebook.run("%gpuckpt restore here --discard")
    assert notebook.value("digest() == d") == "True"


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    """Have several processes write, as where there are many processors; return how many."""
    count: int = getattr(request, "param", 3)
    monkeypatch.setenv("GPUCKPT_MEMORY_WRITERS", str(count))
    return count


def _writers(notebook: Notebook) -> list[psutil.Process]:
    """Return the programs whose processes are to write, or do, for this notebook's keeper."""
    keeper = psutil.Process(keeper_pid(notebook))
    return [one for one in keeper.children() if any("memory_writer" in word for word in one.cmdline())]


@contextlib.contextmanager
def _restore_held(notebook: Notebook, criu: Criu, count: int = 3) -> Iterator[tuple[Asked, list[psutil.Process]]]:
    """Give a restore that is held before criu begins, and the program whose processes wait, with these."""
    with criu.held_at("restore", "start") as until_there:
        asked = Asked(notebook, "%gpuckpt restore here --discard")
        until_there()
        (program,) = _writers(notebook)
        wait_until(lambda: len(program.children()) == count, what="they never began")
        yield asked, [program, *program.children()]


def _waits_at_pipe(pid: int) -> bool:
    number, _, arguments = Path(f"/proc/{pid}/syscall").read_text().partition(" ")
    if number != "0":  # read
        return False
    return str(Path(f"/proc/{pid}/fd/{int(arguments.split()[0], 16)}").readlink()).startswith("pipe:")


@pytest.mark.parametrize("several", [2, 6], indirect=True)
def test_several_processes_write_it(several: int, notebook: Notebook) -> None:
    """Two cannot keep all of it until it can be written, six can."""
    notebook.run(STATE)
    notebook.run("%gpuckpt save here")
    notebook.run(CHANGE)
    notebook.run("%gpuckpt restore here --discard")
    assert notebook.value("digest() == d") == "True"
    assert f"straight into 1 processes, by {several}" in log(notebook)
    assert _writers(notebook) == []


@pytest.mark.parametrize("several", [6], indirect=True)
def test_they_read_it_before_criu_begins(several: int, notebook: Notebook, criu: Criu) -> None:
    notebook.run(STATE)
    notebook.run("%gpuckpt save here")
    notebook.run(CHANGE)
    with _restore_held(notebook, criu, several) as (asked, begun):
        wait_until(lambda: all(_waits_at_pipe(one.pid) for one in begun[1:]), what="they still read")
        _flip("here")  # nobody reads it any more
    assert asked.answer(120)["status"] == "ok"
    assert notebook.value("digest() == d") == "True"
    _flip("here")


def test_where_they_find_damage_the_running_kernel_stays(several: int, notebook: Notebook) -> None:
    notebook.run(STATE)
    notebook.run("%gpuckpt save here")
    notebook.run("random[:] = bytes(len(random)); now = digest()")
    _flip("here")
    asked = Asked(notebook, "%gpuckpt restore here --discard")
    answer = asked.answer(120)
    assert answer["status"] == "error"
    assert "damaged" in answer["evalue"]
    assert notebook.value("digest() == now") == "True"
    (said,) = re.findall(r"other processes did not write the memory: (.*)", log(notebook))
    assert "damaged" in said, said
    assert _writers(notebook) == []


def test_where_they_are_killed_the_keeper_writes(several: int, notebook: Notebook, criu: Criu) -> None:
    notebook.run(STATE)
    notebook.run("%gpuckpt save here")
    notebook.run(CHANGE)
    with _restore_held(notebook, criu) as (asked, begun):
        begun[0].kill()
    assert asked.answer(120)["status"] == "ok"
    assert notebook.value("digest() == d") == "True"
    assert "straight into 1 processes, by 1" in log(notebook)
    assert psutil.wait_procs(begun, 10)[1] == []


def test_they_end_where_the_restore_is_cancelled(several: int, notebook: Notebook, criu: Criu) -> None:
    notebook.run(STATE)
    notebook.run("%gpuckpt save here")
    with _restore_held(notebook, criu) as (asked, begun):
        notebook.manager.interrupt_kernel()
        assert asked.answer(120)["status"] == "error"
        assert psutil.wait_procs(begun, 10)[1] == []
    assert notebook.value("digest() == d") == "True"


def test_they_end_with_a_keeper_that_is_killed(several: int, notebook: Notebook, criu: Criu) -> None:
    notebook.run(STATE)
    notebook.run("%gpuckpt save here")
    with _restore_held(notebook, criu) as (asked, begun):
        notebook.kill_keeper()
        assert psutil.wait_procs(begun, 10)[1] == []
    assert asked.answer(120)["status"] == "error"
    assert notebook.value("digest() == d") == "True"


_JOB = f"""
import hashlib, os, sys, time
data = bytearray(os.urandom({150 * MIB})); d = hashlib.blake2b(data).hexdigest()
print("ready", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
print(hashlib.blake2b(data).hexdigest() == d, flush=True)
time.sleep(1000)
"""


def test_a_job_that_comes_up_alone_has_all_of_it_or_does_not_run(folders: None, tmp_path: Path) -> None:
    job, asked = Job("work"), tmp_path / "asked"
    job.start(sys.executable, program(tmp_path, _JOB), str(asked))
    try:
        job.wait_for(1)
        job.save("here")
        job.kill()
        _flip("here")
        failed = run("restore", "work", "here")
        assert failed.status != 0
        assert "is damaged" in failed.err
        assert job.told()["state"] == "ended"
        _flip("here")
        job.restore("here")
        asked.touch()
        job.wait_for(2)
        assert job.lines() == ["ready", "True"]
        assert "went straight into" in (folder_of("work") / "keeper.log").read_text()
    finally:
        run("stop", "work", "--force")


@pytest.mark.timeout(30)
def test_what_is_written_into_a_process_that_was_killed_is_an_error() -> None:
    process = subprocess.Popen(["sleep", "100"])
    placing = into_process([Run(0, 4096, 1 << 20)], lambda: process.pid)
    opened = placing._opened()
    process.kill()
    process.wait()
    with pytest.raises(RestoreFailed, match="was killed"), placing.room(0, 4096) as room:
        room[:] = bytes(4096)
    assert opened == placing._opened()
    placing.close()


@dataclass(frozen=True)
class Images:
    """What a snapshot of a kernel has of its memory."""

    folder: Path
    mm: Path
    pagemap: Path
    chunks: Mapping[str, Sequence[int]]
    """Where the chunks of its file with pages end."""

    def plan(
        self, parents: Mapping[int, int] = MappingProxyType({}), *pids: int, read_only: bool = True
    ) -> Sequence[StraightRuns]:
        both = self.pagemap.read_bytes(), self.mm.read_bytes()
        processes = dict.fromkeys(pids or (int(self.mm.stem[3:]),), both)
        return plan(parents, processes, self.chunks, read_only=read_only)


@pytest.fixture
def images(notebook: Notebook, tmp_path: Path) -> Iterator[Images]:
    notebook.run(STATE)
    notebook.run("%gpuckpt save here")
    store = Store(settings.store_dir())
    files = store.contents(store.get("here")).files
    chunks = {Path(p).name: list(accumulate(c.size for c in files[p])) for p in files if "criu/pages-" in p}
    with store.open("here", tmp_path / "out") as snapshot:
        folder = snapshot.directory / "criu"
        (mm,) = folder.glob("mm-*.img")
        yield Images(folder, mm, mm.with_name(mm.name.replace("mm-", "pagemap-")), chunks)


def test_only_what_a_process_and_its_parent_have_at_the_same_addresses_is_left_to_criu(images: Images) -> None:
    assert [runs.pid for runs in images.plan({2: 1, 3: 1}, 2, 3)] == [2, 3]
    assert images.plan({2: 1, 3: 2}, 2, 3) == []


def test_a_process_s_own_copies_of_a_file_s_pages_go_straight_and_what_it_may_only_read_where_that_can_be_written(
    images: Images, notebook: Notebook
) -> None:
    assert reaches_read_only()
    places = json.loads(notebook.value("places"))
    for read_only, expected in ((True, [True, True, True]), (False, [True, False, False])):
        (runs,) = images.plan(read_only=read_only)
        went = joined(sorted((run.to, run.to + run.end - run.begin) for run in runs.straight))
        assert [size_of(within([(at, at + 4 * MIB)], went)) > MIB for at in places] == expected


def test_each_chunk_is_read_once(images: Images) -> None:
    (runs,) = images.plan()
    straight, others = into_process(runs.straight, lambda: 0), runs.others(images.folder)
    begin = 0
    for end in images.chunks[runs.image]:
        assert straight.wants(begin, end - begin) != others.wants(begin, end - begin)
        begin = end


def test_what_criu_is_told_of_lacks_these_runs_and_nothing_else(images: Images) -> None:
    (straight,) = images.plan()
    number, runs = pages.placed(images.pagemap.read_bytes())
    assert straight.image == f"pages-{number}.img"
    straight.write_pagemap(images.folder)
    left = [(begin, end) for begin, end, _ in pages.placed(images.pagemap.read_bytes())[1]]
    before = [(begin, end) for begin, end, _ in runs]
    assert list(without(left, before)) == []
    lacking = list(without(before, left))
    assert size_of(lacking) == straight.size
    files = {path.name: path.read_bytes() for path in images.folder.iterdir() if areas.wanted(path.name)}
    (memory,) = areas.memories(files)
    plain = joined((area.start, area.end) for area in memory.areas if area.what not in ("stack", "shared memory"))
    assert list(without(lacking, plain)) == []
    straight.write_pagemap(images.folder, whole=True)
    assert pages.placed(images.pagemap.read_bytes()) == (number, runs)
