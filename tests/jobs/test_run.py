"""`run`: a command that is stopped by signals and started again by the same line, as batch systems do with jobs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import COMMAND, run
from job_programs import folder_of, program
from keeper_faults import assert_no_litter, processes_of
from notebooks import PATIENCE, wait_until

from jupyter_gpuckpt.client.record import KernelFolder
from jupyter_gpuckpt.linux.processes import descendants, start_time

COUNT = """
import os, sys, time
steps, gate = open(sys.argv[1], "a"), sys.argv[2]
secret, n = os.urandom(4).hex(), 0
while not os.path.exists(gate):
    n += 1
    print(n, flush=True)
    print(n, secret, file=steps, flush=True)
    time.sleep(0.02)
sys.exit(int(open(gate).read()))
"""
UNSAVED = """
import signal, socket, sys, time
s = socket.socket(socket.AF_UNIX)
s.connect(sys.argv[1])
def leave(number, _):
    print("got", number, flush=True)
    sys.exit(9)
signal.signal(signal.SIGTERM, leave)
print("ready", flush=True)
while True: time.sleep(0.05)
"""
Running = subprocess.Popen[str]


class Counting:
    """A program that counts steps into a file, and is run again and again by the same line."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._steps, self.gate, self.output = folder / "steps", folder / "gate", folder / "output"
        words = [sys.executable, program(folder, COUNT), str(self._steps), str(self.gate)]
        self.line = [*COMMAND, "run", "count", *options, "--", *words]

    def start(self) -> Running:
        """Start it, or go on with it, and wait until it takes steps."""
        before = len(self.steps())
        with self.output.open("a") as out:
            running = subprocess.Popen(self.line, stdout=out, stderr=subprocess.PIPE, text=True)
        wait_until(lambda: len(self.steps()) > before + 3 or running.poll() is not None, what="no steps are taken")
        assert running.returncode is None, end_of(running)
        return running

    def steps(self) -> list[tuple[int, str]]:
        """Return the steps that were taken, each with what the process that took it remembers from its beginning."""
        lines = self._steps.read_text().splitlines() if self._steps.exists() else []
        return [(int(n), secret) for n, secret in (line.split() for line in lines)]

    def let_end(self, status: int) -> None:
        """Have the program end with this status."""
        half = self.gate.with_name("half")
        half.write_text(str(status))
        half.replace(self.gate)

    def assert_none_lost_or_twice(self) -> None:
        """Check that one program has taken all steps, each of them once."""
        assert len({secret for _, secret in self.steps()}) == 1
        numbers = [n for n, _ in self.steps()]
        assert numbers == list(range(1, len(numbers) + 1))


def end_of(running: Running) -> tuple[int, str]:
    """Return with what status it has ended, and what it said."""
    _, said = running.communicate(timeout=PATIENCE)
    return running.returncode, said


def snapshots() -> list[str]:
    return [one["name"] for one in run("list", "--json").json["snapshots"]]


def test_the_same_line_goes_on_where_a_signal_has_stopped_it(tmp_path: Path) -> None:
    counting = Counting(tmp_path)
    running = counting.start()
    running.send_signal(signal.SIGUSR1)
    running.send_signal(signal.SIGTERM)  # the one that it is stopped by does not cut short what the other has begun
    status, said = end_of(running)
    assert (status, snapshots()) == (128 + signal.SIGUSR1, ["hibernated-count"])
    assert said.startswith("Job count is hibernated as hibernated-count")
    assert not processes_of(tmp_path)
    counting.line[3:3] = ["--requeue", "exit:85"]
    running = counting.start()
    running.send_signal(signal.SIGTERM)
    status, said = end_of(running)
    assert (status, snapshots()) == (85, ["hibernated-count-2"])
    assert said.startswith("Job count goes on as hibernated-count has it")
    running = counting.start()
    assert "It runs." in run("run", "count", "--", "true").err
    counting.let_end(0)
    assert end_of(running)[0] == 0
    counting.assert_none_lost_or_twice()
    assert counting.output.read_text().split() == [str(n) for n, _ in counting.steps()]
    assert snapshots() == []
    assert_no_litter()
    # What is over begins afresh.
    counting.gate.unlink()
    running = counting.start()
    assert len({secret for _, secret in counting.steps()}) == 2
    counting.let_end(0)
    assert end_of(running)[0] == 0


def test_one_that_fails_does_not_fail_again_from_its_snapshot_which_is_kept(tmp_path: Path) -> None:
    counting = Counting(tmp_path)
    running = counting.start()
    running.send_signal(signal.SIGTERM)
    assert end_of(running)[0] == 128 + signal.SIGTERM
    running = counting.start()
    counting.let_end(3)
    status, said = end_of(running)
    assert (status, snapshots()) == (3, ["ended-count"])
    assert "`jupyter gpuckpt restore count ended-count`" in said
    counting.gate.unlink()
    running = counting.start()
    assert len({secret for _, secret in counting.steps()}) == 2
    counting.let_end(0)
    assert end_of(running)[0] == 0
    assert snapshots() == ["ended-count"]


def test_saved_every_so_often_it_goes_on_after_its_machine_has_died(tmp_path: Path) -> None:
    counting = Counting(tmp_path, "--every", "0.2")
    running = counting.start()
    wait_until(lambda: len(_ids()) == 1)
    (first,) = _ids()
    wait_until(lambda: _ids() not in (set(), {first}), what="it is not saved again")
    folder = KernelFolder(folder_of("count"))
    keeper = folder.head().keeper
    assert keeper is not None
    for pid in (running.pid, keeper[0], *folder.sleepers()):
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda pid=pid: start_time(pid) is None or pid == running.pid)  # type: ignore[misc]
    end_of(running)
    before = counting.steps()
    running = counting.start()
    counting.let_end(0)
    status, said = end_of(running)
    assert (status, snapshots()) == (0, [])
    assert "goes on as running-count has it" in said
    assert len({secret for _, secret in counting.steps()}) == 1
    again = [n for n, _ in counting.steps()[len(before) :]]
    assert 1 < again[0] <= before[-1][0] + 1  # what was done since the last save is done once more
    assert again == list(range(again[0], again[-1] + 1))


def test_restored_by_hand_it_runs_without_the_run_that_it_was_of(tmp_path: Path) -> None:
    counting = Counting(tmp_path)
    running = counting.start()
    running.send_signal(signal.SIGTERM)
    assert end_of(running)[0] == 128 + signal.SIGTERM
    taken = len(counting.steps())
    assert run("restore", "count").status == 0
    wait_until(lambda: len(counting.steps()) > taken + 150)  # its keeper looks every second whether the `run` lives
    assert run("ps", "--json").json["jobs"][0]["state"] == "running"
    counting.let_end(0)
    counting.assert_none_lost_or_twice()


def _ids() -> set[str]:
    return {one["id"] for one in run("list", "--json").json["snapshots"]}


@pytest.mark.parametrize("when", ["as soon as it runs", "later"])
def test_killed_itself_it_has_its_job_saved(tmp_path: Path, when: str) -> None:
    counting = Counting(tmp_path)
    running = counting.start()
    if when == "later":  # at first, it waits for the keeper
        wait_until(lambda: counting.output.read_text() != "")
    running.kill()
    end_of(running)
    running = counting.start()  # it waits until that is done
    counting.let_end(0)
    assert end_of(running)[0] == 0
    counting.assert_none_lost_or_twice()


def test_a_signal_at_which_it_cannot_be_saved_reaches_the_program(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(str(tmp_path / "socket"))
        stranger.listen()
        words = [sys.executable, program(tmp_path, UNSAVED), str(tmp_path / "socket")]
        running = subprocess.Popen(
            [*COMMAND, "run", "talking", "--", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        running.send_signal(signal.SIGTERM)
        out, said = running.communicate(timeout=PATIENCE)
    assert (running.returncode, out) == (9, f"got {signal.SIGTERM.value}\n")
    assert "could not be saved; it keeps running" in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=["TERM", "USR1"])
def test_it_is_hibernated_where_every_process_gets_the_signal(tmp_path: Path, number: signal.Signals) -> None:
    """As by scancel of a step of Slurm's, or a systemd service that is stopped: its keeper and its program, too."""
    counting = Counting(tmp_path)
    running = counting.start()
    found = processes_of(tmp_path)
    everybody = {running.pid, *found, *(below for pid in found for below in descendants(pid))}
    assert len(everybody) >= 4  # `run`, the keeper, the sleeper, and the program
    for pid in everybody:
        os.kill(pid, number)
    status, said = end_of(running)
    assert (status, snapshots()) == (128 + number, ["hibernated-count"]), said
    running = counting.start()
    counting.let_end(0)
    assert end_of(running)[0] == 0
    counting.assert_none_lost_or_twice()


def test_other_signals_are_the_program_s() -> None:
    running = subprocess.Popen([*COMMAND, "run", "waits", "--", "sleep", "1000"], stderr=subprocess.PIPE, text=True)
    wait_until(lambda: folder_of("waits").exists() and KernelFolder(folder_of("waits")).has_keeper())
    running.send_signal(signal.SIGINT)
    assert end_of(running) == (128 + signal.SIGINT, "")
    assert snapshots() == []


@pytest.mark.parametrize(
    "words",
    [
        ("--on-signal", "KILL"),
        ("--on-signal", "NEVER"),
        ("--requeue", "exit:300"),
        ("--every", "often"),
        ("--json",),
    ],
)
def test_what_is_typed_wrong_starts_nothing(words: tuple[str, ...]) -> None:
    assert run("run", "never", *words, "--", "true").status == 2
    assert run("run", "never").status == 2
    assert run("run", "x" * 61, "--", "true").status == 1
    assert run("ps", "--json").json["jobs"] == []
