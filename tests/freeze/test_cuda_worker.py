"""The worker's protocol, time limits and end: all of it true without a GPU."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from notebooks import wait_until

from jupyter_gpuckpt.errors import DriverError
from jupyter_gpuckpt.freeze import cuda
from jupyter_gpuckpt.freeze.cuda import CudaWorker
from jupyter_gpuckpt.freeze.gpu_processes import stopped

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _import_from_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


@pytest.fixture
def worker() -> Iterator[CudaWorker]:
    with CudaWorker() as worker:
        yield worker


def test_process_without_cuda_has_no_state(worker: CudaWorker) -> None:
    assert worker.state(os.getpid()) == "none"


def test_worker_starts_at_the_first_call_and_is_kept(worker: CudaWorker) -> None:
    assert worker.pid is None
    worker.gpus()
    first = worker.pid
    assert first is not None
    assert os.getsid(first) == first
    worker.state(os.getpid())
    assert worker.pid == first


def test_close_ends_it(worker: CudaWorker) -> None:
    worker.gpus()
    pid = worker.pid
    worker.close()
    assert worker.pid is None
    assert pid is not None
    wait_until(lambda: not Path(f"/proc/{pid}").exists())


def test_hung_worker_is_killed_and_the_next_call_starts_another(
    worker: CudaWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.gpus()
    first = worker.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    monkeypatch.setenv("GPUCKPT_DRIVER_TIMEOUT", "0.5")
    with pytest.raises(DriverError, match=r"did not return within 0\.5 s") as caught:
        worker.state(os.getpid())
    assert caught.value.data == {
        "call": "state",
        "pid": os.getpid(),
        "number": None,
        "name": "TIMEOUT",
        "timeout_s": 0.5,
    }
    wait_until(lambda: not Path(f"/proc/{first}").exists())
    monkeypatch.delenv("GPUCKPT_DRIVER_TIMEOUT")
    assert worker.state(os.getpid()) == "none"
    assert worker.pid != first


def test_worker_that_dies_in_a_call(worker: CudaWorker) -> None:
    worker.gpus()
    first = worker.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)  # so that it is in the call when it dies
    stat = Path(f"/proc/{first}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")  # it is told while it still runs

    def kill() -> None:
        wait_until(lambda: unread(first))
        worker.kill()

    killing = threading.Thread(target=kill)
    killing.start()
    with pytest.raises(DriverError) as caught:
        worker.state(os.getpid())
    killing.join()
    assert caught.value.data["name"] == "WORKER_DIED"
    assert worker.state(os.getpid()) == "none"


def unread(pid: int) -> int:
    """Return how many bytes lie at a process's standard input."""
    fd = os.open(f"/proc/{pid}/fd/0", os.O_RDONLY | os.O_NONBLOCK)
    try:
        (count,) = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))
    finally:
        os.close(fd)
    return int(count)


def test_worker_that_was_killed_between_calls_is_replaced(worker: CudaWorker) -> None:
    worker.gpus()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    wait_until(lambda: worker.pid is None)
    assert worker.state(os.getpid()) == "none"


def test_calls_from_several_threads_take_turns(worker: CudaWorker) -> None:
    answers: list[object] = []
    calls = [lambda: answers.append(worker.state(os.getpid())) for _ in range(20)]
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == ["none"] * 20


def test_stopped_process_is_named_at_once(worker: CudaWorker) -> None:
    with subprocess.Popen(["sleep", "100"]) as sleeping:
        os.kill(sleeping.pid, signal.SIGSTOP)
        wait_until(lambda: stopped(sleeping.pid))
        with pytest.raises(DriverError, match="stopped") as caught:
            worker.lock(sleeping.pid, 1)
        assert caught.value.data["name"] == "STOPPED"
        sleeping.kill()


@pytest.mark.parametrize(
    "line",
    [
        *("no json", "[]", '{"call": "nothing"}', '{"call": "state"}', '{"call": "state", "pid": "1"}'),
        *('{"call": "restore"}', '{"call": "work", "since": true}'),
    ],
)
def test_worker_answers_what_it_cannot_read_and_ends_with_its_input(line: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "jupyter_gpuckpt.freeze.cuda_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        out, _ = process.communicate(f"{line}\n" + '{"call": "gpus"}\n', timeout=60)
    ready, first, second = map(json.loads, out.splitlines())
    assert ready == {"value": process.pid}
    assert first["error"]["name"] == "WORKER"
    assert isinstance(second["value"], list)
    assert process.returncode == 0


@pytest.mark.parametrize("said", ["no json", "{}", '{"value": 1}'])
def test_a_worker_that_answers_nonsense_is_named_and_replaced(
    said: str, worker: CudaWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = f"import sys\nif any('cuda_worker' in one for one in sys.orig_argv): print({said!r}, flush=True)\n"
    (tmp_path / "sitecustomize.py").write_text(program)
    with monkeypatch.context() as patched:
        patched.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
        # `{"value": 1}` is taken for the line by which a worker begins, and that line for what it was asked.
        with pytest.raises(DriverError, match="invalid answer") as caught:
            worker.gpus()
    assert caught.value.data["name"] == "WORKER"
    worker.close()
    assert worker.state(os.getpid()) == "none"


def test_nothing_to_freeze_is_no_error(worker: CudaWorker) -> None:
    assert cuda.freezable(worker, [os.getpid()]) == []
    cuda.preflight(worker, [])
    cuda.freeze(worker, [])
    cuda.thaw(worker, [])
    manifest = cuda.describe(worker, [])
    assert manifest["processes"] == []
    assert json.loads(json.dumps(manifest)) == manifest
    assert cuda.fits(worker, manifest) is None
    assert cuda.needs(manifest) == {}


def test_mend_leaves_a_process_without_cuda_alone(worker: CudaWorker) -> None:
    assert cuda.mend(worker, [os.getpid()]) == {os.getpid(): "none"}
