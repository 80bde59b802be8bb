"""Processes with NCCL communicators between them: taken down at one point, and made again, with nobody the wiser."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from job_programs import Job, folder_of
from keeper_faults import assert_no_litter
from notebooks import PATIENCE, Notebook, run_folders, wait_until

from jupyter_gpuckpt.errors import DriverError, Refused
from jupyter_gpuckpt.freeze import nccl
from jupyter_gpuckpt.freeze.nccl import Communicators
from jupyter_gpuckpt.installed import NCCL_LIBRARY
from jupyter_gpuckpt.linux.readiness import readable

_HERE = Path(__file__).parent
_SIZE = 4
_DRIVER = "int cuStreamIsCapturing(void *stream, int *status) { *status = stream == (void *)7; return 0; }"


class Training:
    """A made-up training of several ranks, and what it has done."""

    def __init__(self, folder: Path, library: Path, way: str = "", size: int = _SIZE) -> None:
        self.folder, self.size = folder, size
        self.words = [sys.executable, str(_HERE / "ranks.py"), str(library), str(size), str(folder), way]
        self.environment = {"LD_PRELOAD": str(NCCL_LIBRARY), "LD_LIBRARY_PATH": str(library.parent)}

    def steps(self) -> list[int]:
        paths = [self.folder / f"steps-{rank}" for rank in range(self.size)]
        return [len(path.read_text().splitlines()) if path.exists() else 0 for path in paths]

    def goes_on(self, steps: int = 10) -> None:
        """See that each rank computes so many more steps."""
        before = self.steps()
        wait_until(lambda: all(now >= was + steps for now, was in zip(self.steps(), before, strict=True)))

    def pids(self) -> list[int]:
        return [int(pid) for pid in (self.folder / "pids").read_text().split()]


class Alone(Training):
    """One that no keeper holds: the test does what a keeper does."""

    def __init__(self, folder: Path, library: Path, way: str = "", size: int = _SIZE, **environment: str) -> None:
        super().__init__(folder, library, way, size)
        self.run_dir = folder / "run"
        self.run_dir.mkdir()
        environment = {**os.environ, **self.environment, **environment, "GPUCKPT_RUN_DIR": str(self.run_dir)}
        self.process = subprocess.Popen(self.words, env=environment, stderr=subprocess.PIPE, text=True)

    def communicators(self) -> Communicators:
        found = Communicators(self.run_dir)
        found.look(self.pids())
        return found

    def take_down(self) -> Communicators:
        found = self.communicators()
        found.take_down()
        assert found.pids == sorted(self.pids())
        return found

    def end(self) -> str:
        """Kill what is left, and return what was said about errors."""
        for pid in self.pids():
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)
        return self.process.communicate(timeout=PATIENCE)[1]


@pytest.fixture
def alone(tmp_path: Path, made_up_nccl: Path) -> Iterator[Callable[..., Alone]]:
    """Start such a training, and wait for its first steps."""
    started: list[Alone] = []

    def start(way: str = "", size: int = _SIZE, **environment: str) -> Alone:
        training = Alone(tmp_path, made_up_nccl, way, size, **environment)
        started.append(training)
        training.goes_on()
        return training

    yield start
    for training in started:
        training.end()
    for left in Path("/dev/shm").glob("made-up-nccl-*"):
        left.unlink()


def _holdings(pid: int) -> tuple[int, int]:
    return len(os.listdir(f"/proc/{pid}/task")), len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208


def test_a_training_is_saved_while_it_runs_and_comes_back(tmp_path: Path, made_up_nccl: Path) -> None:
    training, job = Training(tmp_path, made_up_nccl, "ways"), Job("ranks")
    job.start(*training.words, **training.environment)
    training.goes_on()
    for n in range(2):
        job.save(f"at-{n}")
        training.goes_on()
    job.kill()
    job.restore("at-1")
    training.goes_on()
    job.save("again")
    training.goes_on()
    job.restore("again")  # over the running one
    training.goes_on()
    assert job.lines() == []
    assert job.told()["state"] == "running"
    job.kill()
    assert_no_litter()


def test_ranks_that_a_cell_started_are_saved_by_a_cell_and_come_back(
    tmp_path: Path, made_up_nccl: Path, notebook: Notebook
) -> None:
    training = Training(tmp_path, made_up_nccl)
    environment = f"{{**os.environ, **{training.environment!r}}}"
    notebook.run(f"import os, subprocess; ranks = subprocess.Popen({training.words!r}, env={environment})")
    training.goes_on()
    notebook.run("%gpuckpt save one")
    training.goes_on()
    notebook.run("%gpuckpt restore one")
    training.goes_on()
    assert notebook.value("ranks.poll()") == "None"


def test_the_job_of_a_keeper_that_was_killed_goes_on(tmp_path: Path, made_up_nccl: Path) -> None:
    training, job = Training(tmp_path, made_up_nccl), Job("ranks")
    job.start(*training.words, **training.environment)
    training.goes_on()
    (run_dir,) = run_folders(folder_of("ranks"))
    inner = [int(path.stem.removeprefix("nccl-")) for path in run_dir.glob("nccl-*.said")]
    found = Communicators(run_dir)
    found.look(inner)
    found.take_down()  # what a keeper has done that dies now
    keeper = os.pidfd_open(int(json.loads((folder_of("ranks") / "state.json").read_text())["keeper"][0]))
    signal.pidfd_send_signal(keeper, signal.SIGKILL)
    assert readable(keeper, seconds=PATIENCE)
    os.close(keeper)
    job.save("after")  # by another keeper
    training.goes_on()
    job.kill()


def test_twenty_times_in_a_row_nothing_is_left_behind(alone: Callable[..., Alone]) -> None:
    training = alone()
    training.take_down().make_again()
    training.goes_on()
    before = [_holdings(pid) for pid in training.pids()]
    for _ in range(20):
        found = training.take_down()
        stopped = training.steps()
        time.sleep(0.05)
        assert training.steps() == stopped
        found.make_again()
        training.goes_on(2)
    assert [_holdings(pid) for pid in training.pids()] == before


def test_a_rank_that_does_not_come_ends_the_save_and_all_go_on(
    alone: Callable[..., Alone], monkeypatch: pytest.MonkeyPatch
) -> None:
    training = alone()
    hold = training.folder / "hold"
    hold.touch()
    wait_until((training.folder / "holds").exists)
    wait_until(lambda: len({*training.steps()}) == 1)
    with monkeypatch.context() as shorter:
        shorter.setattr(nccl, "_TAKE_DOWN", 1.0)
        with pytest.raises(Refused, match=rf"process {training.pids()[1]} did not come to the NCCL operation"):
            training.take_down()
    hold.unlink()
    training.goes_on()
    training.take_down().make_again()
    training.goes_on()


def test_a_rank_in_its_data_loader_is_not_waited_for_where_nobody_else_waits(alone: Callable[..., Alone]) -> None:
    training = alone()
    (training.folder / "hold").touch()
    # All have begun and ended the sum over all; the others of the halves wait where rank 1 has not been yet.
    wait_until((training.folder / "holds").exists)
    found = training.communicators()
    (training.folder / "hold").unlink()
    found.take_down()
    found.make_again()
    training.goes_on()


def test_a_rank_that_has_ended_is_missed_in_words(alone: Callable[..., Alone], monkeypatch: pytest.MonkeyPatch) -> None:
    training = alone()
    os.kill(training.pids()[2], signal.SIGKILL)
    monkeypatch.setattr(nccl, "_TAKE_DOWN", 1.0)
    living = [pid for n, pid in enumerate(training.pids()) if n != 2]
    found = Communicators(training.run_dir)
    found.look(living)
    with pytest.raises(Refused, match=rf"has {_SIZE} ranks, of which {_SIZE - 1} are processes here"):
        found.take_down()


def test_where_a_rank_dies_meanwhile_the_others_fail_and_nothing_hangs(alone: Callable[..., Alone]) -> None:
    training = alone()
    found = training.take_down()
    os.kill(training.pids()[0], signal.SIGKILL)
    with pytest.raises(DriverError, match="could not be made again"):
        found.make_again()
    training.process.wait(PATIENCE)
    said = training.end()
    # ncclRemoteError: the training itself is told, or what watches beside it, whichever asks first.
    told = re.findall(r"rank (\d): (?:nccl\w+ gave|the watchdog is told 0) (\d)", said)
    assert {rank for rank, _ in told} == {str(rank) for rank in range(1, _SIZE)}, said
    assert "6" in {error for _, error in told}, said


def test_a_keeper_that_dies_leaves_no_gate_shut(alone: Callable[..., Alone]) -> None:
    training = alone()
    talk = nccl._Process(training.run_dir, training.pids()[0])
    talk.ask("stop")
    assert talk.state().phase == "stopping"
    talk.close()
    training.goes_on()
    training.take_down()  # and its keeper is gone
    Communicators.left_behind(training.run_dir, training.pids()).make_again()
    training.goes_on()


def test_what_cannot_be_made_again_is_refused_before_anything_is_touched(alone: Callable[..., Alone]) -> None:
    training = alone("register")
    with pytest.raises(Refused, match="has memory of the program registered"):
        training.communicators()
    training.goes_on()


def test_a_captured_graph_is_refused(
    alone: Callable[..., Alone], tmp_path: Path, compiled: Callable[..., Path]
) -> None:
    source = tmp_path / "driver.c"
    source.write_text(_DRIVER)
    driver = compiled(source, tmp_path / "libcuda.so.1")
    training = alone("capture", MADE_UP_DRIVER=str(driver))
    with pytest.raises(Refused, match="was used in a CUDA graph that was captured"):
        training.communicators()
    training.goes_on()


def test_a_process_without_a_communicator_has_nothing_of_it(tmp_path: Path) -> None:
    code = "import os; print(len(os.listdir('/proc/self/task')))"
    environment = {**os.environ, "LD_PRELOAD": str(NCCL_LIBRARY), "GPUCKPT_RUN_DIR": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr, list(tmp_path.iterdir())) == ("1\n", "", [])


def test_programs_get_the_handles_of_an_nccl_that_is_newer_than_what_is_known(alone: Callable[..., Alone]) -> None:
    training = alone(MADE_UP_NCCL_VERSION="23300")
    assert training.communicators().pids == []
    assert list(training.run_dir.glob("nccl-*")) == []
    training.goes_on()


def test_communicators_of_one_process_stay(alone: Callable[..., Alone]) -> None:
    training = alone(size=1)
    found = training.communicators()
    assert found.pids == []
    found.take_down()
    training.goes_on()
