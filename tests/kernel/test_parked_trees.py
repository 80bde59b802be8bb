"""Jobs and their children park their GPU memory, all at once: by the real keeper, holder and criu, on a made-up GPU."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from command_line import run
from job_programs import Job, folder_of, program
from keeper_faults import Asked, Criu, Requested, is_asleep
from notebooks import Notebook, StartKernel, wait_until

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.client.record import KernelFolder
from jupyter_gpuckpt.freeze.parking import PARKED
from jupyter_gpuckpt.store import HOLE, Store
from jupyter_gpuckpt.store.reading import locate

pytestmark = [
    pytest.mark.criu,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="parking is for x86-64"),
    pytest.mark.timeout(300),
]

SIZE = 260 << 20

# Each has memory of its own, touches it through the driver all the time, and says whether all is as it was.
WORKER = """
import ctypes, os, subprocess, sys, time
cu = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    result = getattr(cu, name)(*arguments)
    assert result == 0, (name, result)
mine, *others = map(int, sys.argv[1:])
children = [subprocess.Popen([sys.executable, __file__, str(n)]) for n in others]
context, address, word = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_uint64()
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
call("cuCtxSetCurrent", context)
call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(260 << 20))
def are_peers(): return True
if mine == SEVERAL_GPUS:
    other, more = ctypes.c_void_p(), ctypes.c_uint64()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(other), 1)
    call("cuCtxEnablePeerAccess", other, 0)
    call("cuCtxSetCurrent", other)
    call("cuMemAlloc_v2", ctypes.byref(more), ctypes.c_size_t(8 << 20))
    call("cuCtxSetCurrent", context)
    def are_peers(): return cu.cuCtxEnablePeerAccess(other, 0) == 704  # they are already
places = [ctypes.c_uint64(address.value + (n * 50 << 20)) for n in range(6)]
def write(n):
    for place in places:
        word.value = place.value + n
        call("cuMemcpyHtoD_v2", place, ctypes.byref(word), ctypes.c_size_t(8))
def is_there(place, n):
    call("cuMemcpyDtoH_v2", ctypes.byref(word), place, ctypes.c_size_t(8))
    return word.value == place.value + n
n = 1000 * mine
write(n)
holds = os.open(__file__ + ".fifo", os.O_RDWR) if mine == HOLDS_PYTHON else None
while True:
    right = all(is_there(place, n) for place in places) and are_peers()
    n += 1
    write(n)
    os.write(1, b"%d %d %s\\n" % (mine, n, b"right" if right else b"WRONG"))
    time.sleep(0.1)
    if holds is not None:
        ctypes.PyDLL(None).read(holds, ctypes.create_string_buffer(1), ctypes.c_size_t(1))
""".replace("HOLDS_PYTHON", "4").replace("SEVERAL_GPUS", "5")


@pytest.fixture(autouse=True)
def gpu(made_up_driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give everything that is started the made-up driver and its GPU, of 1 TiB."""
    gpu = tmp_path / "gpu"
    gpu.write_bytes((1 << 40).to_bytes(8, "little") + bytes(8 + 32 * 8192))
    monkeypatch.setenv("MADE_UP_GPU", str(gpu))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(made_up_driver.parent))


@pytest.fixture
def worker(tmp_path: Path) -> str:
    """The program; the fourth of them holds Python's lock until something comes by a FIFO."""
    worker = program(tmp_path, WORKER)
    os.mkfifo(f"{worker}.fifo")
    return worker


@pytest.fixture
def start_job(worker: str) -> Iterator[Callable[..., Job]]:
    """Start a job of these workers."""
    job = Job("tree")

    def start(*numbers: str) -> Job:
        job.start(sys.executable, worker, *numbers)
        all_have_begun(job, numbers)
        return job

    yield start
    job.kill()


def all_have_begun(job: Job, numbers: Collection[str], after: int = 0) -> None:
    """Wait until each of these has said something beyond the first `after` lines."""
    wait_until(lambda: {line.split()[0] for line in lines(job)[after:]} >= set(numbers), what="one says nothing more")


def lines(job: Job) -> list[str]:
    paths = folder_of(job.name).glob("run-*/kernel.log")
    return [line for path in paths for line in path.read_text().splitlines() if line]


def log(job: Job) -> str:
    return (folder_of(job.name) / "keeper.log").read_text()


def parked_files(name: str) -> list[int]:
    """Return the sizes of the files with what was parked."""
    store = Store(settings.store_dir())
    contents = store.contents(store.get(name))
    return [contents.size_of(path) for path in contents.files if path.endswith(PARKED)]


def all_go_on(job: Job, *numbers: str) -> None:
    """See that these go on, each with its memory as it was."""
    all_have_begun(job, numbers, len(lines(job)))
    assert [line for line in lines(job) if not line.endswith("right")] == []


def test_all_processes_of_a_job_park_and_come_back(start_job: Callable[..., Job]) -> None:
    job = start_job("1", "2", "3")
    for name in ("one", "two"):
        job.save(name)
        assert parked_files(name) == [SIZE] * 3, log(job)
        all_go_on(job, "1", "2", "3")
    job.kill()
    job.restore("one")
    all_go_on(job, "1", "2", "3")
    job.save("three")
    assert parked_files("three") == [SIZE] * 3, log(job)
    job.restore("two")
    all_go_on(job, "1", "2", "3")


def test_a_job_that_does_not_fit_is_refused_though_it_is_read_meanwhile(start_job: Callable[..., Job]) -> None:
    job = start_job("1", "2")
    job.save("here")
    job.kill()
    refused = run("restore", job.name, "here", "--gpu", "7", "--json").json["error"]
    assert refused["kind"] == "Refused"
    assert job.told()["state"] == "ended"
    assert Store(settings.store_dir()).check().faults == []
    job.restore("here")
    all_go_on(job, "1", "2")


def test_a_process_that_does_not_come_is_left_to_the_driver(start_job: Callable[..., Job], worker: str) -> None:
    job = start_job("1", "2", "4")
    job.save("here")
    assert parked_files("here") == [SIZE] * 2, log(job)
    all_go_on(job, "1", "2")
    job.restore("here")
    before = len(lines(job))
    Path(f"{worker}.fifo").write_bytes(b"go on")
    all_have_begun(job, ["1", "2", "4"], before)
    all_go_on(job, "1", "2")


def test_gpus_have_access_to_each_other_again_before_anything_runs(
    start_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The made-up driver refuses to checkpoint a process that has it; the real one loses it."""
    monkeypatch.setenv("MADE_UP_GPUS", "2")
    job = start_job("5", "1")
    for name in ("one", "two"):
        job.save(name)
        assert sorted(parked_files(name)) == [SIZE, SIZE + (8 << 20)], log(job)
        all_go_on(job, "5", "1")
    job.restore("one")
    all_go_on(job, "5", "1")


def test_a_holder_that_is_killed_before_it_holds_anything_is_done_without(start_job: Callable[..., Job]) -> None:
    job = start_job("1", "2")
    with ThreadPoolExecutor(1) as beside:
        saving = beside.submit(job.save, "here")
        wait_until(lambda: len(holders(folder_of(job.name))) == 2)
        holders(folder_of(job.name))[0].kill()
        saving.result()
    assert parked_files("here") == [SIZE], log(job)
    all_go_on(job, "1", "2")
    job.restore("here")
    all_go_on(job, "1", "2")


def holders(folder: Path) -> list[psutil.Process]:
    """Return the programs that hold GPU memory for the kernel or job with this folder."""
    keeper = KernelFolder(folder).head().keeper
    assert keeper is not None
    return [one for one in psutil.Process(keeper[0]).children() if "jupyter_gpuckpt.freeze.vram_holder" in _words(one)]


def _words(process: psutil.Process) -> list[str]:
    try:
        words: list[str] = process.cmdline()
    except psutil.Error:
        words = []
    return words


# The program has a block of its child's open, and says whenever what the child has written there is another number.
SHARES = """
import ctypes, os, pathlib, subprocess, sys, time
cu = ctypes.CDLL("libcuda.so.1")
class Handle(ctypes.Structure): _fields_ = [("bytes", ctypes.c_char * 64)]
handle, context, address, word = Handle(), ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_uint64()
def call(name, *arguments): assert getattr(cu, name)(*arguments) == 0, name
def said(answer): os.write(1, f"{answer}\\n".encode())
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
call("cuCtxSetCurrent", context)
there = 100 << 20
if len(sys.argv) > 1:
    call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(260 << 20))
    call("cuIpcGetMemHandle", ctypes.byref(handle), address)
    print(bytes(handle).hex(), flush=True)
    wanted, n = pathlib.Path(sys.argv[1]), 0
    while n != 9:
        time.sleep(0.02)
        if (new := int(wanted.read_text() or n)) != n:
            n = word.value = new
            call("cuMemcpyHtoD_v2", ctypes.c_uint64(address.value + there), ctypes.byref(word), ctypes.c_size_t(8))
else:
    child = subprocess.Popen([sys.executable, __file__, __file__ + ".wanted"], stdout=subprocess.PIPE)
    handle, n = Handle.from_buffer_copy(bytes.fromhex(child.stdout.readline().decode())), None
    call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, 1)
    while True:
        time.sleep(0.02)
        call("cuMemcpyDtoH_v2", ctypes.byref(word), ctypes.c_uint64(address.value + there), ctypes.c_size_t(8))
        if word.value != n:
            n = word.value
            said(n)
        if n == 9 and child.poll() is not None:
            said("alone")
            n = 10
"""


def test_processes_that_share_memory_share_it_after_a_save_and_a_restore(tmp_path: Path) -> None:
    job, source = Job("shares"), program(tmp_path, SHARES)
    wanted = Path(f"{source}.wanted")
    wanted.write_text("1")
    try:
        job.start(sys.executable, source)
        wait_until(lambda: job.lines()[-1:] == ["1"])
        for name in ("here", "again"):
            job.save(name)
            assert parked_files(name) == [SIZE], log(job)
        wanted.write_text("2")
        wait_until(lambda: job.lines()[-1:] == ["2"])
        assert job.lines()[-2:] == ["1", "2"]
        job.kill()
        for number in ("3", "4"):
            wanted.write_text(number)
            job.restore("here")
            wait_until(lambda n=number: job.lines()[-1:] == [n])  # type: ignore[misc]
            job.save(f"at-{number}")
            job.kill()
        job.restore("at-3")
        wait_until(lambda: job.lines()[-1:] == ["4"])
        wanted.write_text("9")
        wait_until(lambda: job.lines()[-1:] == ["alone"])
        refused = run("save", job.name, "alone", "--json").json
        assert refused["error"]["kind"] == "Refused"
        assert "GPU memory of another process open" in refused["error"]["why"]
        assert "does not have all" not in log(job)
    finally:
        job.kill()


def test_a_save_that_fails_leaves_shared_memory_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    criu = Criu(tmp_path / "criu")
    monkeypatch.setenv("GPUCKPT_CRIU", str(criu.program))
    job, source = Job("shares"), program(tmp_path, SHARES)
    wanted = Path(f"{source}.wanted")

    def still_shares(number: str) -> None:
        wanted.write_text(number)
        wait_until(lambda: job.lines()[-1:] == [number])

    wanted.write_text("1")
    try:
        job.start(sys.executable, source)
        still_shares("2")
        criu.first("dump", "exit 1")
        assert run("save", job.name, "never").status != 0
        criu.honest()
        still_shares("3")
        keeper = KernelFolder(folder_of(job.name)).head().keeper
        assert keeper is not None
        with criu.held_at("dump", "start") as reached, ThreadPoolExecutor(1) as beside:
            saving = beside.submit(run, "save", job.name, "never")
            reached()
            os.kill(keeper[0], signal.SIGKILL)
            assert saving.result().status != 0
        wait_until(lambda: job.told()["state"] == "running", what="the next keeper has not brought it back")
        still_shares("4")
        job.save("here")
        still_shares("5")
        assert "does not have all" not in log(job)
    finally:
        job.kill()


NCCL = Path(__file__).parents[1] / "nccl"


def test_ranks_with_communicators_between_them_are_parked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """These are taken down before, and made again when each rank has its memory."""
    library = tmp_path / "libnccl.so.2"
    words = ["cc", "-O2", "-fPIC", "-shared", "-Wl,-soname,libnccl.so.2", "-o", library, NCCL / "made_up_nccl.c"]
    subprocess.run(words, check=True)

    def steps() -> int:
        written = [tmp_path / f"steps-{rank}" for rank in range(2)]
        return min(len(each.read_text().splitlines()) if each.exists() else 0 for each in written)

    def go_on() -> None:
        before = steps()
        wait_until(lambda: steps() >= before + 10, what="a rank takes no more steps")

    job = Job("ranks")
    job.start(sys.executable, str(NCCL / "ranks.py"), str(library), "2", str(tmp_path), "gpu")
    go_on()
    try:
        job.save("one")
        assert parked_files("one") == [SIZE] * 2, log(job)
        go_on()
        job.kill()
        job.restore("one")
        go_on()
        assert job.lines() == []
    finally:
        job.kill()
        for left in Path("/dev/shm").glob("made-up-nccl-*"):
            left.unlink()


CHILD = """
import json, subprocess, sys
child = subprocess.Popen([sys.executable, {worker!r}, "1"], stdout=subprocess.PIPE)
def child_says(): return child.stdout.readline().decode().split()[2]
assert child_says() == "right"
"""


MUCH = """
import ctypes
cu, context, much = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
cu.cuInit(0), cu.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), cu.cuCtxSetCurrent(context)
assert cu.cuMemAlloc_v2(ctypes.byref(much), ctypes.c_size_t(22 << 30)) == 0
"""


def test_what_a_cell_starts_parks_too(start: StartKernel, worker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCKPT_KEEP_UNSAVED", "20s")
    notebook = start()
    notebook.run(CHILD.format(worker=worker))
    notebook.run("%gpuckpt save here")
    assert parked_files("here") == [SIZE]
    for _ in range(2):
        assert notebook.value("{child_says() for _ in range(20)}") == "{'right'}"
        notebook.run("%gpuckpt restore here")
    assert notebook.value("{child_says() for _ in range(20)}") == "{'right'}"
    # Whether a restore keeps what is in no snapshot is told by how much there is, not by a look at it on the GPU.
    notebook.run(MUCH)
    notebook.run("%gpuckpt restore here")
    log = (notebook.folder / "keeper.log").read_text()
    assert "It has too much memory for that to take a moment" in log
    assert "restore of 'here', in seconds: plan " in log


ON_THE_GPU = """
import ctypes, threading
cu = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    result = getattr(cu, name)(*arguments)
    assert result == 0, (name, result)
context, word, blocks = ctypes.c_void_p(), ctypes.c_uint64(), []
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
def alloc(mib):
    call("cuCtxSetCurrent", context)
    address = ctypes.c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(mib << 20))
    return address.value
def write(block, mib, value):
    call("cuCtxSetCurrent", context)
    word.value = value
    call("cuMemcpyHtoD_v2", ctypes.c_uint64(block + (mib << 20)), ctypes.byref(word), ctypes.c_size_t(8))
def read(block, mib):
    call("cuCtxSetCurrent", context)
    call("cuMemcpyDtoH_v2", ctypes.byref(word), ctypes.c_uint64(block + (mib << 20)), ctypes.c_size_t(8))
    return word.value
blocks = [alloc(150), alloc(150)]
for n, block in enumerate(blocks):
    for mib in range(0, 150, 2): write(block, mib, 1000 * (n + 1) + mib)
def is_right(n, block): return all(read(block, mib) == 1000 * (n + 1) + mib for mib in range(0, 150, 2))
def are_right(): return all(is_right(n, block) for n, block in enumerate(blocks))
def keep_writing():
    while True: write(blocks[0], 0, read(blocks[0], 0) + 1)
"""


def test_what_the_running_kernel_has_on_the_gpu_is_copied_there_and_the_rest_is_read(
    start: StartKernel, tmp_path: Path
) -> None:
    notebook = start()

    def log() -> str:
        return (notebook.folder / "keeper.log").read_text()

    def were_there() -> list[str]:
        return re.findall(r"(\d+ of \d+ MB) of GPU memory were there", log())

    notebook.run(ON_THE_GPU)
    notebook.run("%gpuckpt save here")
    notebook.run("write(blocks[0], 6, 5); write(blocks[1], 148, 5)")
    notebook.run("%gpuckpt restore here --discard")
    assert notebook.value("are_right()") == "True"
    assert were_there() == ["310 of 314 MB"]
    torn = tmp_path / "gpu.torn"
    torn.touch()
    notebook.run("%gpuckpt restore here --discard")
    assert not torn.exists()
    assert notebook.value("are_right()") == "True"
    assert were_there()[1:] == ["314 of 314 MB"]
    assert "2 MB of GPU memory are not what was saved; they are read again" in log()
    # It lies elsewhere, what is new is in its place, and some of it changes all the time.
    notebook.run("more = alloc(20); [write(more, mib, 7) for mib in range(0, 20, 2)]")
    notebook.run("cu.cuMemFree_v2(ctypes.c_uint64(blocks[0])); blocks[0] = alloc(160); write(blocks[0], 0, 1)")
    notebook.run("threading.Thread(target=keep_writing, daemon=True).start()")
    notebook.run("%gpuckpt restore here --discard")
    assert notebook.value("are_right()") == "True"
    assert were_there()[2:] == ["157 of 314 MB"]
    no_imports = tmp_path / "gpu.fails"
    no_imports.touch()
    notebook.run("%gpuckpt restore here --discard")
    no_imports.unlink()
    assert "was borrowed: nothing was borrowed: cuMemImportFromShareableHandle gave" in log()
    assert notebook.value("are_right()") == "True"
    notebook.run("[write(block, mib, 3) for block in blocks for mib in range(0, 150, 2)]")
    notebook.run("%gpuckpt save other")
    notebook.run("%gpuckpt restore here --discard")
    assert notebook.value("are_right()") == "True"
    assert len(were_there()) == 3, "with nothing in common it is not looked for"


def test_what_comes_to_the_gpu_otherwise_than_it_was_saved_is_read_again_or_refused(
    start: StartKernel, tmp_path: Path
) -> None:
    """It is not verified on its way: that is done on the GPU, when all of it is there."""
    notebook = start()

    def log() -> str:
        return (notebook.folder / "keeper.log").read_text()

    notebook.run(ON_THE_GPU)
    notebook.run("%gpuckpt save here")
    again = "[write(block, mib, 3) for block in blocks for mib in range(0, 150, 2)]"
    notebook.run(again)
    notebook.run("%gpuckpt save other")
    torn = tmp_path / "gpu.torn-in"
    torn.touch()
    notebook.run("%gpuckpt restore here --discard")
    assert not torn.exists()
    assert notebook.value("are_right()") == "True"
    assert log().count("2 MB of GPU memory are not what was saved; they are read again") == 1
    notebook.run("%gpuckpt restore other --discard")
    flip_last_chunk_on_gpu("here")
    failed = notebook.fails("%gpuckpt restore here --discard")
    assert failed.ename == "Damaged", failed.text
    assert "-parked" in failed.text
    assert notebook.value("{read(block, mib) for block in blocks for mib in range(0, 150, 2)}") == "{3}"
    flip_last_chunk_on_gpu("here")
    notebook.run("%gpuckpt restore here --discard")
    assert notebook.value("are_right()") == "True"


WAITING_HOOK = """
import jupyter_gpuckpt
refuses = False
@jupyter_gpuckpt.before_save
def wait():
    with open({fifo!r}) as gate: gate.read()
    assert not refuses
"""


def test_what_will_hold_the_memory_starts_while_hooks_run_and_ends_where_one_refuses(
    start: StartKernel, tmp_path: Path
) -> None:
    fifo = tmp_path / "gate"
    os.mkfifo(fifo)
    notebook = start()
    notebook.run(ON_THE_GPU)
    notebook.run(WAITING_HOOK.format(fifo=str(fifo)))
    for refuses in ("True", "False"):
        notebook.run(f"refuses = {refuses}")
        asked = Asked(notebook, "%gpuckpt save here")
        wait_until(lambda: len(holders(notebook.folder)) == 1, what="nothing has been started")
        (holder,) = holders(notebook.folder)
        fifo.write_text("go on")
        assert (asked.answer(60)["status"] == "error") == (refuses == "True")
        assert not holder.is_running() or holder.status() == psutil.STATUS_ZOMBIE
    assert parked_files("here") == [2 * 150 << 20]


def flip_last_chunk_on_gpu(name: str) -> None:
    """Change a bit of what is stored of a snapshot's GPU memory, or change it back."""
    store = Store(settings.store_dir())
    manifest = store.get(name)
    contents = store.contents(manifest)
    (path,) = (path for path in contents.files if path.endswith(PARKED))
    at = locate(store._layout, manifest, contents)[[one.hash for one in contents.files[path] if one.hash != HOLE][-1]]
    with (store._layout.packs / at.pack).open("r+b") as pack:
        pack.seek(at.offset + at.stored // 2)
        byte = pack.read(1)[0]
        pack.seek(-1, os.SEEK_CUR)
        pack.write(bytes([byte ^ 1]))


IN_A_CELL = """
import ctypes, time
from pathlib import Path
cu = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    result = getattr(cu, name)(*arguments)
    assert result == 0, (name, result)
contexts, blocks = [ctypes.c_void_p() for _ in range(2)], [ctypes.c_uint64() for _ in range(2)]
word = ctypes.c_uint64()
call("cuInit", 0)
for gpu in (0, 1):
    call("cuDevicePrimaryCtxRetain", ctypes.byref(contexts[gpu]), gpu)
    call("cuCtxSetCurrent", contexts[gpu])
    call("cuMemAlloc_v2", ctypes.byref(blocks[gpu]), ctypes.c_size_t(150 << 20))
call("cuCtxSetCurrent", contexts[0])
call("cuCtxEnablePeerAccess", contexts[1], 0)
steps = wrong = 0
def step():
    global steps, wrong
    wrong += cu.cuCtxEnablePeerAccess(contexts[1], 0) != 704  # it is on already
    for block in blocks:
        if steps:
            call("cuMemcpyDtoH_v2", ctypes.byref(word), block, ctypes.c_size_t(8))
            wrong += word.value != steps
        word.value = steps + 1
        call("cuMemcpyHtoD_v2", block, ctypes.byref(word), ctypes.c_size_t(8))
    steps += 1
"""


def have_no_room_for_a_helper(folder: Path) -> None:
    """Have the made-up GPUs too full for memory to be parked."""
    (folder / "gpu.crowded").touch()


@pytest.mark.parametrize("parked", [[300 << 20], []], ids=["", "no room for a helper"])
def test_a_cell_that_uses_several_gpus_is_saved_in_its_middle(
    start: StartKernel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, parked: list[int]
) -> None:
    monkeypatch.setenv("MADE_UP_GPUS", "2")
    if not parked:
        have_no_room_for_a_helper(tmp_path)
    begun, go_on = tmp_path / "begun", tmp_path / "go_on"
    notebook = start()
    notebook.run(IN_A_CELL)
    asked = Asked(notebook, f"while not Path({str(go_on)!r}).exists(): step(); Path({str(begun)!r}).touch()")
    wait_until(begun.exists)
    for name in ("one", "two"):
        assert isinstance(Requested(notebook, "save", {"name": name}).outcome(), dict)
        assert parked_files(name) == parked
    go_on.touch()
    assert asked.answer()["status"] == "ok"
    assert notebook.value("wrong") == "0"
    notebook.run("steps = -10**9")
    notebook.run("%gpuckpt restore two")  # which has the rest of that loop run
    assert notebook.look("wrong == 0 and steps > 0") == "True"
    assert notebook.value("step(), wrong") == "None 0"


IN_A_THREAD = """
import threading
def use_both():
    while True: step()
def is_used():
    before = steps
    while steps < before + 3: time.sleep(0.01)
    return wrong
threading.Thread(target=use_both, daemon=True).start()
"""


@pytest.mark.parametrize("parked", [[300 << 20], []], ids=["", "no room for a helper"])
def test_a_thread_that_uses_several_gpus_goes_on_through_saves_sleep_and_restores(
    start: StartKernel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, parked: list[int]
) -> None:
    monkeypatch.setenv("MADE_UP_GPUS", "2")
    if not parked:
        have_no_room_for_a_helper(tmp_path)
    notebook = start()
    notebook.run(IN_A_CELL + IN_A_THREAD)
    notebook.run("%gpuckpt save one")
    assert notebook.value("is_used()") == "0"
    assert isinstance(Requested(notebook, "save", {"name": "two"}).outcome(), dict)
    assert parked_files("one") == parked_files("two") == parked
    assert notebook.value("is_used()") == "0"
    assert isinstance(Requested(notebook, "sleep", {}).outcome(), dict)
    notebook.run("%gpuckpt wake")  # if the thread has not woken it yet
    assert notebook.value("is_used()") == "0"
    notebook.run("steps = -10**9")
    for lazily in ("", " --lazy"):
        notebook.run("%gpuckpt restore two" + lazily)
        assert notebook.value("is_used()") == "0"
        assert notebook.value("steps > 0") == "True"


def test_a_thread_that_uses_several_gpus_goes_on_when_these_take_each_others_place(
    start: StartKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MADE_UP_GPUS", "2")
    notebook = start()
    notebook.run(IN_A_CELL + IN_A_THREAD)
    moved = Requested(notebook, "move", {"gpus": [1, 0]}).outcome()
    assert len(moved["moves"]) == 2
    assert notebook.value("is_used()") == "0"
    notebook.run("%gpuckpt save moved")
    assert notebook.value("is_used()") == "0"


def test_gpus_are_kept_apart_of_which_the_driver_does_not_say_that_they_are_used(
    start: StartKernel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MADE_UP_GPUS", "2")
    have_no_room_for_a_helper(tmp_path)
    (tmp_path / "gpu.unlisted").touch()
    notebook = start()
    notebook.run(IN_A_CELL + IN_A_THREAD)
    notebook.run("%gpuckpt save here")
    assert parked_files("here") == []
    assert notebook.value("is_used()") == "0"
    (tmp_path / "gpu.crowded").unlink()
    notebook.run("%gpuckpt restore here")
    assert notebook.value("is_used()") == "0"


def test_a_job_with_several_gpus_is_saved_where_they_have_no_room_for_a_helper(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MADE_UP_GPUS", "2")
    have_no_room_for_a_helper(tmp_path)
    job = Job("both")
    says = "\nwhile True: step(); print(0, 'wrong' if wrong else 'right', flush=True); time.sleep(0.01)"
    try:
        job.start(sys.executable, program(tmp_path, IN_A_CELL + says))
        all_have_begun(job, "0")
        job.save("here")
        assert parked_files("here") == []
        all_go_on(job, "0")
        job.kill()
        (tmp_path / "gpu.crowded").unlink()
        job.restore("here")
        all_go_on(job, "0")
        job.save("again")
        assert parked_files("again") == [300 << 20]
        all_go_on(job, "0")
    finally:
        run("stop", job.name, "--force")


def test_a_keeper_dies_while_gpus_are_kept_apart_whose_memory_is_not_parked(
    start: StartKernel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MADE_UP_GPUS", "2")
    have_no_room_for_a_helper(tmp_path)
    gpu, notebook = Gpu(tmp_path), start()
    notebook.run(IN_A_CELL + IN_A_THREAD)
    with gpu.held_while_it("checkpoints"):
        asked = Asked(notebook, "%gpuckpt save here")
        gpu.until_it("checkpoints")
        notebook.kill_keeper()
    assert asked.answer()["ename"] == "KeeperGone"
    assert notebook.value("is_used()") == "0"
    notebook.run("%gpuckpt save here")
    assert notebook.value("is_used()") == "0"


@pytest.mark.parametrize("why", ["no room for a helper", "a thread that computes"])
def test_gpus_are_kept_apart_all_the_same_where_their_memory_is_not_parked(
    start: StartKernel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, why: str
) -> None:
    monkeypatch.setenv("MADE_UP_GPUS", "2")
    notebook = start()
    notebook.run(IN_A_CELL + "step()")
    if why == "a thread that computes":
        notebook.run("import hashlib, threading")
        notebook.run("threading.Thread(target=hashlib.pbkdf2_hmac, args=('sha256', b'', b'', 10**9)).start()")
    else:
        have_no_room_for_a_helper(tmp_path)
    for name in ("one", "two"):
        notebook.run(f"%gpuckpt save {name}")
        assert parked_files(name) == []
        assert notebook.value("step(), wrong") == "None 0"
    assert isinstance(Requested(notebook, "sleep", {}).outcome(), dict)
    notebook.kill_keeper()
    assert isinstance(Requested(notebook, "save", {"name": "asleep"}).outcome(), dict)
    assert is_asleep(notebook)
    (tmp_path / "gpu.crowded").unlink(missing_ok=True)
    notebook.run("%gpuckpt wake")
    assert notebook.value("step(), wrong") == "None 0"
    notebook.run("%gpuckpt restore one")
    assert notebook.value("step(), wrong, steps") == "None 0 2"


def test_several_gpus_with_much_memory_that_cannot_be_parked_are_refused_beforehand(
    start: StartKernel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The driver might not give them access to each other's memory again."""
    monkeypatch.setenv("MADE_UP_GPUS", "2")
    notebook = start()
    notebook.run(IN_A_CELL + "step()")
    (tmp_path / "gpu.beside").touch()
    assert "copies between GPUs would not work afterwards" in notebook.fails("%gpuckpt save one").text
    assert "copies between GPUs would not work afterwards" in str(Requested(notebook, "sleep", {}).outcome())
    refused = Requested(notebook, "move", {"gpus": [1, 0]}).outcome()
    assert "was not moved" in refused.what
    assert "copies between GPUs would not work afterwards" in refused.why
    (tmp_path / "gpu.beside").unlink()
    notebook.run("%gpuckpt save one")
    assert parked_files("one") == [300 << 20]
    assert notebook.value("step(), wrong") == "None 0"


TICKS = """
import gc, time, weakref
from pathlib import Path
def tick():
    n = 0
    while True:
        n += 1
        Path({ticks!r}).write_text(str(n))
        time.sleep(0.005)
class Node: pass
def garbage():
    one = Node()
    one.self = one
    gc.collect()
    return weakref.ref(one)
garbage = garbage()
threading.Thread(target=tick, daemon=True).start()
"""


class Gpu:
    """The made-up GPU, whose driver can be held in the middle of a call."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextlib.contextmanager
    def held_while_it(self, does: str) -> Iterator[None]:
        """Have the driver not go on from when it ``checkpoints`` or ``restores`` until the end of the block."""
        held = self._folder / f"gpu.{does}"
        held.touch()
        try:
            yield
        finally:
            held.unlink()

    def until_it(self, does: str) -> None:
        wait_until((self._folder / f"gpu.{does}.reached").exists, what=f"it does not {does}")


def run_ticking(notebook: Notebook, ticks: Path) -> None:
    """Have a kernel use the GPU, and a thread of it count in a file."""
    notebook.run(ON_THE_GPU)
    notebook.run(TICKS.format(ticks=str(ticks)))


def go_on(ticks: Path) -> None:
    def ticked() -> int:
        return int(ticks.read_text() or 0)

    before = ticked()
    wait_until(lambda: ticked() > before + 5, what="its threads do not run")


def test_the_threads_of_a_kernel_run_while_the_driver_saves_it(start: StartKernel, tmp_path: Path) -> None:
    gpu, ticks, notebook = Gpu(tmp_path), tmp_path / "ticks", start()
    run_ticking(notebook, ticks)
    with gpu.held_while_it("restores"):
        with gpu.held_while_it("checkpoints"):
            asked = Asked(notebook, "saved = %gpuckpt save here\nprint(saved)\nare_right()")
            gpu.until_it("checkpoints")
            go_on(ticks)
            assert not asked.is_answered()
        gpu.until_it("restores")
        go_on(ticks)
    assert asked.answer()["status"] == "ok"
    assert parked_files("here") == [2 * 150 << 20]
    assert notebook.value("0 < saved.frozen_seconds < saved.gpu_seconds, garbage()") == "True None"
    assert notebook.value("' ms, its GPU work for ' in str(saved)") == "True"
    notebook.run("%gpuckpt restore here --discard")
    assert notebook.value("are_right()") == "True"
    go_on(ticks)


@pytest.mark.parametrize("gpus", ["1", "2"])
def test_a_gpu_that_does_not_come_to_an_end_holds_nothing_up_but_what_uses_it(
    start: StartKernel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpus: str
) -> None:
    monkeypatch.setenv("GPUCKPT_LOCK_TIMEOUT", "1")
    monkeypatch.setenv("MADE_UP_GPUS", gpus)
    if gpus == "2":
        have_no_room_for_a_helper(tmp_path)
    gpu, ticks, notebook = Gpu(tmp_path), tmp_path / "ticks", start()
    notebook.run(ON_THE_GPU if gpus == "1" else "import threading" + IN_A_CELL + "step()")
    notebook.run(TICKS.format(ticks=str(ticks)))
    with gpu.held_while_it("computes"):
        for _ in range(2):
            failed = Requested(notebook, "save", {"name": "here"}).outcome()
            assert "did not pause within the time limit" in failed.why
            go_on(ticks)
            assert notebook.value("1") == "1"
        if gpus == "2":
            failed = Requested(notebook, "move", {"gpus": [1, 0]}).outcome()
            assert "was not moved" in failed.what
            assert "did not pause within the time limit" in failed.why
            go_on(ticks)
    notebook.run("%gpuckpt save here")
    assert parked_files("here") == ([2 * 150 << 20] if gpus == "1" else [])
    assert notebook.value("are_right()" if gpus == "1" else "step(), wrong") in ("True", "None 0")
    names = notebook.value("[one.read_text() for one in Path('/proc/self/task').glob('*/comm')]")
    assert "gpuckpt-parking" in names
    assert "gpuckpt-waiting" not in names


def test_a_keeper_that_dies_while_the_kernel_gives_up_its_memory_is_followed_by_one_that_gives_it_back(
    start: StartKernel, tmp_path: Path
) -> None:
    gpu, ticks, notebook = Gpu(tmp_path), tmp_path / "ticks", start()
    run_ticking(notebook, ticks)
    with gpu.held_while_it("releases"):
        asked = Asked(notebook, "%gpuckpt save here")
        gpu.until_it("releases")
        go_on(ticks)
        notebook.kill_keeper()
    assert asked.answer()["ename"] == "KeeperGone"
    assert notebook.value("are_right()") == "True"
    notebook.run("%gpuckpt save here")
    assert parked_files("here") == [2 * 150 << 20]
    assert notebook.value("are_right()") == "True"


def test_the_threads_of_an_idle_kernel_run_once_it_was_dumped(start: StartKernel, tmp_path: Path) -> None:
    """Not before: a cell could begin that would be in the snapshot."""
    gpu, ticks, notebook = Gpu(tmp_path), tmp_path / "ticks", start()
    run_ticking(notebook, ticks)
    with gpu.held_while_it("restores"):
        with gpu.held_while_it("checkpoints"):
            asked = Requested(notebook, "save", {"name": "here"})
            gpu.until_it("checkpoints")
            cell = Asked(notebook, "later = 1")
        gpu.until_it("restores")
        go_on(ticks)
        assert cell.answer()["status"] == "ok"
    assert isinstance(asked.outcome(), dict)
    notebook.run("%gpuckpt restore here --discard")
    assert notebook.value("'later' in globals(), are_right()") == "False True"


def test_a_save_of_a_kernel_that_sleeps_tells_of_no_work_on_a_gpu(start: StartKernel) -> None:
    notebook = start()
    notebook.run(ON_THE_GPU)
    for name, asleep in (("awake", False), ("asleep", True)):
        if asleep:
            Requested(notebook, "sleep", {}).outcome()
            assert is_asleep(notebook)
        saved = Requested(notebook, "save", {"name": name}).outcome()
        assert saved["frozen_seconds"] > 0
        assert (saved.get("gpu_seconds") is None) == asleep


def test_a_cell_that_does_not_use_the_gpu_is_executed_while_the_driver_saves_the_kernel(
    start: StartKernel, tmp_path: Path
) -> None:
    """There is no automatic snapshot of the moment before it then."""
    gpu, ticks = Gpu(tmp_path), tmp_path / "ticks"
    notebook = start()
    notebook.run(ON_THE_GPU)

    def log() -> str:
        return (notebook.folder / "keeper.log").read_text()

    def saved() -> set[str]:
        return {manifest.id for manifest in Store(settings.store_dir()).list()}

    def saved_after(cell: str) -> None:
        before = saved()
        notebook.run(cell)
        wait_until(lambda: saved() - before, what="it is not saved by itself")

    notebook.run("%gpuckpt auto on")
    saved_after("n = 0")
    saved_after(TICKS.format(ticks=str(ticks)))
    assert notebook.value("garbage() is not None") == "True"
    before = saved()
    with gpu.held_while_it("checkpoints"):
        notebook.run("n = 1")
        gpu.until_it("checkpoints")
        assert notebook.value("n + 1") == "2"
        uses_it = Asked(notebook, "assert are_right()")
        go_on(ticks)
        assert not uses_it.is_answered()
    assert uses_it.answer()["status"] == "ok"
    wait_until(lambda: "The next cell has begun." in log(), what="the save is not given up")
    wait_until(lambda: saved() - before, what="it is not saved by itself")
    with gpu.held_while_it("restores"):
        notebook.run("n = 2")
        gpu.until_it("restores")
        assert notebook.value("n + 1") == "3"
        n_is_3 = Asked(notebook, "n = 3; assert are_right()")
        go_on(ticks)
    assert n_is_3.answer()["status"] == "ok"
    # What was taken before that cell began is kept.
    wait_until(lambda: any(m.message == "n = 2" for m in Store(settings.store_dir()).list()))
    notebook.run("%gpuckpt undo")
    assert notebook.value("n, are_right()") == "2 True"
