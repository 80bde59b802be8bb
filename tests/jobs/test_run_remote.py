"""`run` with GPUCKPT_REMOTE: a machine that shares nothing with the last one but the remote goes on with the job."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import run
from job_programs import folder_of
from notebooks import wait_until
from remote_servers import s3_server
from test_run import Counting, end_of, snapshots

from jupyter_gpuckpt.client.record import KernelFolder
from jupyter_gpuckpt.linux.processes import start_time

pytestmark = pytest.mark.criu

Machine = Callable[[str], None]


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """Be on the machine of this name: with a store and run folders of its own, and the user's keys."""
    monkeypatch.setenv("GPUCKPT_KEYS", str(tmp_path / "keys"))

    def become(name: str) -> None:
        monkeypatch.setenv("GPUCKPT_STORE", str(tmp_path / name / "store"))
        monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / name / "runtime"))

    return become


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = tmp_path / "remote"
    monkeypatch.setenv("GPUCKPT_REMOTE", str(folder))
    return folder


def _there(address: str) -> list[str]:
    return [one["name"] for one in run("remote", address, "--json").json["snapshots"]]


def _goes_on_elsewhere(on: Machine, folder: Path, address: str) -> None:
    counting = Counting(folder)
    for machine in ("first", "second", "third"):
        on(machine)
        assert snapshots() == []
        running = counting.start()
        running.send_signal(signal.SIGTERM)
        status, said = end_of(running)
        assert status == 128 + signal.SIGTERM
        assert ("Fetched hibernated-count" in said) is (machine != "first")
        assert len(_there(address)) == 1  # what the job goes on with, and no other
    on("fourth")
    running = counting.start()
    counting.let_end(0)
    assert end_of(running)[0] == 0
    counting.assert_none_lost_or_twice()
    assert _there(address) == []
    # What is over begins afresh, wherever.
    on("fifth")
    counting.gate.unlink()
    running = counting.start()
    counting.let_end(0)
    assert end_of(running)[0] == 0
    assert len({secret for _, secret in counting.steps()}) == 2


def test_a_job_goes_on_from_a_folder(on: Machine, remote: Path, tmp_path: Path) -> None:
    _goes_on_elsewhere(on, tmp_path, str(remote))


def test_a_job_goes_on_from_s3(on: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server(tmp_path / "s3.log") as s3:
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        address = s3.make_bucket("jobs")
        monkeypatch.setenv("GPUCKPT_REMOTE", address)
        _goes_on_elsewhere(on, tmp_path, address)


def test_where_the_remote_cannot_be_read_nothing_begins_anew(
    on: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on("first")
    (tmp_path / "file").touch()
    monkeypatch.setenv("GPUCKPT_REMOTE", str(tmp_path / "file" / "remote"))
    done = run("run", "count", "--", "touch", str(tmp_path / "began"))
    assert done.status not in (0, 128 + signal.SIGTERM)
    assert str(tmp_path / "file") in done.err
    assert not (tmp_path / "began").exists()


def test_what_could_not_be_sent_is_said_and_is_in_the_store(on: Machine, remote: Path, tmp_path: Path) -> None:
    on("first")
    counting = Counting(tmp_path)
    running = counting.start()
    remote.rename(tmp_path / "moved")
    remote.touch()
    running.send_signal(signal.SIGTERM)
    status, said = end_of(running)
    assert status == 128 + signal.SIGTERM
    assert "is not at the remote as it should be" in said
    assert snapshots() == ["hibernated-count"]
    remote.unlink()
    (tmp_path / "moved").rename(remote)
    running = counting.start()
    counting.let_end(0)
    assert end_of(running)[0] == 0
    counting.assert_none_lost_or_twice()


def test_saved_every_so_often_it_goes_on_elsewhere_after_its_machine_has_died(
    on: Machine, remote: Path, tmp_path: Path
) -> None:
    on("first")
    counting = Counting(tmp_path, "--every", "1")
    running = counting.start()
    wait_until(lambda: remote.exists() and _there(str(remote)) == ["running-count"])
    taken = len(counting.steps())
    folder = KernelFolder(folder_of("count"))
    keeper = folder.head().keeper
    assert keeper is not None
    for pid in (running.pid, keeper[0], *folder.sleepers()):
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda pid=pid: start_time(pid) is None or pid == running.pid)  # type: ignore[misc]
    end_of(running)
    on("second")
    running = counting.start()
    again = counting.steps()
    assert len({secret for _, secret in again}) == 1
    assert [n for n, _ in again][:taken] == list(range(1, taken + 1))
    counting.let_end(0)
    status, said = end_of(running)
    assert status == 0
    assert "Fetched running-count" in said
