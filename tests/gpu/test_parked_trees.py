"""The GPU memory of jobs, of their ranks, and of a kernel's children is parked, all at once."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from command_line import run
from job_programs import Job, folder_of, program
from notebooks import Notebook, wait_until

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.freeze.parking import PARKED
from jupyter_gpuckpt.linux.processes import inner_pid
from jupyter_gpuckpt.store import Store

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

_WARM = 120.0
"""For how long programs may take to import torch and to begin, in seconds."""

# It trains without a pause, and looks at all that it has on the GPU all the time.
WORKER = """
import os, sys, time, torch
rank, gib = sys.argv[1], int(sys.argv[2])
torch.manual_seed(int(rank))
big = [torch.randint(0, 2**62, (2**27,), device="cuda") for _ in range(gib)]
small = [torch.full((1000,), float(n), device="cuda") for n in range(100)]
sums = [int(b.sum()) for b in big]
a, step, begun = torch.randn(1024, 1024, device="cuda"), 0, time.time()
while True:
    for _ in range(100): a = torch.nn.functional.normalize(a @ a.T + 1e-3, dim=1)
    step += 1
    right = [int(b.sum()) for b in big] == sums and all(bool((s == n).all()) for n, s in enumerate(small))
    os.write(1, f"{rank} {os.getpid()} {step} {'right' if right else 'WRONG'}\\n".encode())
"""
RANKS = """
import subprocess, sys
ranks = [subprocess.Popen([sys.executable, sys.argv[1], str(n), "1"]) for n in range(2)]
for rank in ranks: rank.wait()
"""


class Workers:
    """A job with workers."""

    def __init__(self, folder: Path, worker: str, ranks: int) -> None:
        self.job, self._ranks = Job("workers"), {str(n) for n in range(ranks)}
        command = [worker, "0", "2"] if ranks == 1 else [program(folder, RANKS), worker]
        self.job.start(sys.executable, *command)
        self.all_go_on()

    def all_go_on(self, but: str = "") -> None:
        """See that all work on, each with its memory as it was."""
        before = len(self.right())
        wait_until(lambda: {line[0] for line in self.right()[before:]} >= self._ranks - {but}, _WARM)

    def right(self) -> list[list[str]]:
        lines = [line for line in _text(self.job).splitlines() if line.count(" ") == 3]
        assert [line for line in lines if line.endswith("WRONG")] == []
        return [line.split() for line in lines if line.endswith("right")]

    def pid(self, rank: str) -> int:
        """Return a rank's pid in the sleeper."""
        return next(int(line[1]) for line in reversed(self.right()) if line[0] == rank)


def _text(job: Job) -> str:
    return "".join(path.read_text() for path in folder_of(job.name).glob("run-*/kernel.log"))


def _parked(name: str) -> list[int]:
    store = Store(settings.store_dir())
    contents = store.contents(store.get(name))
    return [contents.size_of(path) for path in contents.files if path.endswith(PARKED)]


def _log(job: Job) -> str:
    return (folder_of(job.name) / "keeper.log").read_text()


@pytest.fixture(params=[1, 2], ids=["one process", "two ranks"])
def workers(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Workers]:
    workers = Workers(tmp_path, program(tmp_path, WORKER), request.param)
    yield workers
    print(_log(workers.job))
    run("stop", workers.job.name, "--force")


def test_a_job_parks_what_all_its_processes_have(workers: Workers) -> None:
    job = workers.job
    for name in ("one", "two"):
        saved = run("save", job.name, name, "--json")
        print(saved.out)
        assert sum(_parked(name)) >= 2 << 30, _log(job)
        workers.all_go_on()
    job.kill()
    print(run("restore", job.name, "one", "--json").out)
    workers.all_go_on()
    job.save("three")
    assert sum(_parked("three")) >= 2 << 30, _log(job)
    workers.all_go_on()


def test_children_that_a_kernel_starts_park_too(notebook: Notebook, tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(
        """
import torch
def child(asked, answers):
    x = torch.arange(2**27, device="cuda")
    total = int(x.sum())
    answers.put("begun")
    for _ in iter(asked.get, None):
        answers.put(int(x.sum()) == total)
"""
    )
    notebook.run(
        f"""
import sys, torch, torch.multiprocessing as mp
sys.path.insert(0, {str(tmp_path)!r})
from child import child
spawn = mp.get_context("spawn")
asked, answers = spawn.Queue(), spawn.Queue()
process = spawn.Process(target=child, args=(asked, answers), daemon=True); process.start()
y = torch.arange(2**27, device="cuda"); total = int(y.sum())
assert answers.get() == "begun"
def same():
    asked.put(1)
    return answers.get(timeout=60) and int(y.sum()) == total
""",
        timeout=120,
    )
    notebook.run("%gpuckpt save here", timeout=120)
    assert len(_parked("here")) == 2
    assert all(1 << 30 <= size < 5 << 28 for size in _parked("here"))
    assert notebook.value("same()") == "True"
    for _ in range(2):
        notebook.run("%gpuckpt restore here", timeout=120)
        assert notebook.value("same()") == "True"


def test_memory_that_was_shared_by_cuda_ipc_is_parked_and_can_be_shared_again(
    notebook: Notebook, tmp_path: Path
) -> None:
    (tmp_path / "child.py").write_text(
        """
import torch
def child(given, answers):
    torch.zeros(1, device="cuda")
    for x in iter(given.get, None):
        x += 1
        answers.put(int(x.sum()))
        del x
        torch.cuda.synchronize(); torch.cuda.ipc_collect()
"""
    )
    notebook.run(
        f"""
import sys, torch, torch.multiprocessing as mp
sys.path.insert(0, {str(tmp_path)!r})
from child import child
spawn = mp.get_context("spawn")
given, answers = spawn.Queue(), spawn.Queue()
process = spawn.Process(target=child, args=(given, answers), daemon=True); process.start()
y = torch.zeros(2**27, dtype=torch.int64, device="cuda")
def shared():
    given.put(y)
    return answers.get(timeout=100), int(y.sum())
""",
        timeout=120,
    )
    assert notebook.value("shared()") == f"({2**27}, {2**27})"
    notebook.run("import time; time.sleep(1); torch.cuda.ipc_collect()")
    notebook.run("%gpuckpt save here", timeout=120)
    assert max(_parked("here")) >= 1 << 30
    notebook.run("y.zero_()")
    notebook.run("%gpuckpt restore here", timeout=120)
    assert notebook.value("shared()") == f"({2**28}, {2**28})"


@pytest.mark.parametrize("workers", [2], indirect=True)
def test_a_rank_that_has_ended_takes_nothing_with_it(workers: Workers) -> None:
    job = workers.job
    job.save("both")
    ranks = _processes(job)
    os.kill(ranks[workers.pid("1")], signal.SIGKILL)
    wait_until(lambda: len(_processes(job)) < len(ranks))
    job.save("alone")
    workers.all_go_on(but="1")
    assert len(_parked("alone")) == 1, _log(job)
    job.restore("both")
    workers.all_go_on()


def _processes(job: Job) -> dict[int, int]:
    """Return the pids here of a job's processes that have not ended, by their pids in the sleeper."""
    top = psutil.Process(job.told()["pid"])
    tree = [top, *top.children(recursive=True)]
    return {inner_pid(one.pid): one.pid for one in tree if one.status() != psutil.STATUS_ZOMBIE}
