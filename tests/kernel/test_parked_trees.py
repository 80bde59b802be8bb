"""Jobs and their children park their GPU memory, all at once: by the real keeper, holder and criu, on a made-up GPU."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_programs import Job, folder_of, program
from notebooks import wait_until

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.freeze.parking import PARKED
from jupyter_gpuckpt.store import Store

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
while True:
    right = all(is_there(place, n) for place in places)
    n += 1
    write(n)
    os.write(1, b"%d %d %s\\n" % (mine, n, b"right" if right else b"WRONG"))
    time.sleep(0.1)
"""


@pytest.fixture(autouse=True)
def gpu(made_up_driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give everything that is started the made-up driver and its GPU, of 1 TiB."""
    gpu = tmp_path / "gpu"
    gpu.write_bytes((1 << 40).to_bytes(8, "little") + bytes(8 + 32 * 8192))
    monkeypatch.setenv("MADE_UP_GPU", str(gpu))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(made_up_driver.parent))


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job("tree")
    job.start(sys.executable, program(tmp_path, WORKER), "1", "2", "3")
    all_have_begun(job)
    yield job
    job.kill()


def all_have_begun(job: Job, after: int = 0) -> None:
    """Wait until each of the three has said something beyond the first `after` lines."""
    wait_until(
        lambda: {line.split()[0] for line in lines(job)[after:]} >= {"1", "2", "3"}, what="a process says nothing more"
    )


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


def all_go_on(job: Job) -> None:
    """See that all go on, each with its memory as it was."""
    before = lines(job)
    all_have_begun(job, len(before))
    assert [line for line in lines(job) if not line.endswith("right")] == []


def test_all_processes_of_a_job_park_and_come_back(job: Job) -> None:
    for name in ("one", "two"):
        job.save(name)
        assert parked_files(name) == [SIZE] * 3, log(job)
        all_go_on(job)
    job.kill()
    job.restore("one")
    all_go_on(job)
    job.save("three")
    assert parked_files("three") == [SIZE] * 3, log(job)
    job.restore("two")
    all_go_on(job)
