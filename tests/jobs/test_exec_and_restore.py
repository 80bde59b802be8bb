"""A job: any command that is started, saved, restored and stopped as a kernel is."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from command_line import COMMAND, PROGRAM, Ran, run
from job_programs import TRAIN, Job, ask, folder_of, program, start_counter
from keeper_faults import assert_no_litter, processes_of
from notebooks import PATIENCE, Notebook, wait_until
from rings import CALLS, NO_CALLS

from jupyter_gpuckpt.client import jobs, keepers
from jupyter_gpuckpt.client.record import KernelFolder
from jupyter_gpuckpt.linux.processes import start_time
from jupyter_gpuckpt.linux.socket_ports import ports_of_ended_connections


@pytest.mark.parametrize("kind", ["udp", "tcp"])
def test_a_server_counts_on_at_the_same_port_after_it_was_killed(tmp_path: Path, kind: str) -> None:
    counter, port = start_counter(tmp_path, "counter", kind)
    assert ask(kind, port) == "101"
    counter.save("at-101")
    counter.kill()
    with pytest.raises(OSError, match=r"refused"):
        ask(kind, port)
    assert counter.told()["exit_status"] == -signal.SIGKILL
    counter.restore("at-101")
    assert ask(kind, port) == "102"
    assert ask(kind, port) == "103"
    # Over the running one: what it did since is given up, and so is what it wrote since.
    restored = counter.restore()
    assert (restored.err, restored.out[:15]) == ("", "Restored at-101")
    assert ask(kind, port) == "102"
    assert counter.lines() == ["ready", "101", "102"]
    assert counter.told()["parent"]["name"] == "at-101"
    assert_no_litter()


def test_a_second_one_beside_it_gets_another_port_only_when_asked_to(tmp_path: Path) -> None:
    first, port = start_counter(tmp_path, "first", "udp")
    first.save("zero")
    assert ask("udp", port) == "101"
    refused = run("restore", "first", "zero", "--as", "second", "--json")
    assert refused.json["error"]["kind"] == "Refused"
    assert f"UDP port {port}, which process {first.told()['pid']} (python" in refused.json["error"]["why"]
    assert not folder_of("second").exists()
    brought_up = run("restore", "first", "zero", "--as", "second", "--other-ports", "--json")
    assert brought_up.status == 0
    (note,) = brought_up.json["warnings"]
    other = int(note.split()[4])
    assert note == f"Port {port} is port {other} now."
    assert [ask("udp", other), ask("udp", other), ask("udp", port)] == ["101", "102", "102"]
    second = Job("second")
    second.save()
    assert ask("udp", other) == "103"
    second.restore("second")
    assert ask("udp", other) == "103"
    assert run("restore", "first", "zero", "--as", "second").status == 1  # the name is taken


def test_a_port_that_a_stranger_took_meanwhile_is_refused_with_its_holder(tmp_path: Path) -> None:
    counter, port = start_counter(tmp_path, "counter", "tcp")
    counter.save("zero")
    counter.kill()
    with socket.create_server(("127.0.0.1", port)):
        refused = run("restore", "counter", "zero")
        assert refused.status == 1
        assert f"TCP port {port}, which process {os.getpid()} (" in refused.err
        # It is as it was: ended, with its output.
        assert counter.told()["exit_status"] == -signal.SIGKILL
        assert counter.lines() == ["ready"]
    counter.restore("zero")
    assert ask("tcp", port) == "101"


def test_a_restore_does_not_wait_for_the_ports_of_connections_that_are_over(tmp_path: Path) -> None:
    # The system keeps a server's port for a minute when the server closed a connection, or died in the middle of one.
    counter, port = start_counter(tmp_path, "counter", "tcp", reuse=False)
    counter.save("zero")
    stages: list[str] = []
    for _ in range(2):
        with socket.create_connection(("127.0.0.1", port)) as asker:
            assert (asker.recv(100), asker.recv(100)) == (b"101", b"")  # it is the server who closes it
        wait_until(lambda: port in ports_of_ended_connections())
        folder = KernelFolder(folder_of("counter"))
        with keepers.connect(folder) as keeper:
            keeper.request("restore", {"name": "zero"}, timeout=None, progress=lambda told: stages.append(told.stage))
    assert {stage for stage in stages if "port" in stage} == set()
    assert stages
    # Also where it runs no more, and where a client outside has not closed its end yet.
    with socket.create_connection(("127.0.0.1", port)) as late:
        assert late.recv(100) == b"101"
        counter.kill()
        wait_until(lambda: port in ports_of_ended_connections())
        told = run("restore", "counter", "zero", "--json").json
        assert told["warnings"] == []
    assert ask("tcp", port) == "101"


def test_a_training_goes_on_bit_for_bit_as_an_uninterrupted_one(tmp_path: Path) -> None:
    source, gate = program(tmp_path, TRAIN), tmp_path / "gate"
    gate.touch()
    whole = subprocess.run(
        [sys.executable, source, str(gate)], capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    gate.unlink()
    training = Job("train")
    training.start(sys.executable, source, str(gate))
    training.wait_for(30)
    training.save("half")
    gate.touch()
    assert training.wait_for_end() == 0
    assert training.output() == whole.stdout
    training.restore("half")  # it has ended
    assert training.wait_for_end() == 0
    assert training.output() == whole.stdout


def test_a_pipeline_of_the_shell_goes_on(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    line = (
        "i=0; while [ $i -lt 6 ]; do i=$((i+1)); echo $i; "
        f'while [ $i = 3 ] && [ ! -e "{gate}" ]; do sleep 0.05; done; done | while read n; do echo got $n; done'
    )
    pipeline = Job("pipeline")
    pipeline.start("sh", "-c", line)
    pipeline.wait_for(3)
    pipeline.save("three")
    pipeline.kill()
    assert pipeline.lines() == ["got 1", "got 2", "got 3"]
    pipeline.restore("three")
    gate.touch()
    assert pipeline.wait_for_end() == 0
    assert pipeline.lines() == [f"got {n}" for n in range(1, 7)]


def test_how_one_ended_and_what_it_wrote_are_kept_until_it_is_forgotten() -> None:
    job = Job("short")
    job.start("sh", "-c", "echo out; echo err >&2; exit 3")
    assert job.wait_for_end() == 3
    assert job.output() == "out\nerr\n"
    table = run("ps").out
    assert "ended with status 3" in table
    assert "secret" not in (folder_of("short") / "launch.json").read_text()
    taken = run("exec", "short", "--", "true")
    assert taken.status == 1
    assert "--replace" in taken.err
    for word in ("stop", "save"):
        assert "ended with status 3" in run(word, "short").err
    assert run("exec", "short", "--replace", "--", "sh", "-c", "exit 0").status == 0
    assert job.wait_for_end() == 0
    assert job.output() == ""
    assert run("forget", "short", "--json").json == {"forgotten": ["short"], "errors": []}
    assert run("ps", "--json").json == {"jobs": [], "elsewhere": [], "faults": []}
    assert not folder_of("short").exists()
    for words in (
        ["stop", "short"],
        ["save", "short", "x"],
        ["logs", "short"],
        ["restore", "short"],
        ["forget", "short"],
    ):
        assert run(*words).status == 3, words


def test_the_environment_goes_with_the_job() -> None:
    job = Job("env")
    job.start("sh", "-c", 'echo "$TOKEN in $PWD"', TOKEN="opensesame")
    job.wait_for_end()
    assert job.output() == f"opensesame in {Path.cwd()}\n"
    kept = b"".join(path.read_bytes() for path in folder_of("env").iterdir() if path.name != "output")
    assert b"opensesame" not in kept


def test_the_oldest_that_have_ended_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "KEPT", 2)
    for name in "abc":
        jobs.start(jobs.launch_of(name, ["true"], {}, "/", 0o077))
        Job(name).wait_for_end()
    assert {folder.launch().job for folder in jobs.all_folders()} == {"b", "c"}


@pytest.mark.parametrize("name", ["", "../x", ".x", "-x", "a/b", "x" * 101, "tr\u0430in"])
def test_what_can_be_no_name(name: str) -> None:
    told = run("exec", "--json", "--", "true") if name == "-x" else run("exec", name, "--json", "--", "true")
    assert told.json["error"]["kind"] == ("Usage" if name == "-x" else "BadName")
    assert run("ps", "--json").json["jobs"] == []


def test_a_command_that_cannot_be_started(tmp_path: Path) -> None:
    for word in ("no-such-program", str(tmp_path)):
        told = run("exec", "x", "--", word, "--json")
        assert told.status == 1
        assert word in told.err
    assert run("exec", "x").status == 2
    assert "two dashes" in run("exec", "x", "--").err
    broken = tmp_path / "broken"
    broken.write_bytes(b"#!/no/such/interpreter\n")
    broken.chmod(0o700)
    assert run("exec", "x", "--", str(broken)).status == 1
    assert run("ps", "--json").json == {"jobs": [], "elsewhere": [], "faults": []}
    assert not folder_of("x").exists()


def test_inside_a_kernel_no_job_is_started() -> None:
    refused = run("exec", "x", "--", "true", GPUCKPT_RUN_DIR="/dev/shm/gpuckpt")
    assert "inside a notebook or job" in refused.err


def test_of_two_that_want_one_name_one_gets_it_and_others_run_beside() -> None:
    with ThreadPoolExecutor(3) as pool:
        same = [pool.submit(run, "exec", "one", "--", "sleep", "100") for _ in range(2)]
        other = pool.submit(run, "exec", "other", "--", "sleep", "100")
    assert other.result().status == 0
    assert sorted(ran.result().status for ran in same) == [0, 1]
    assert [job["job"] for job in run("ps", "--json").json["jobs"] if job["state"] == "running"]
    assert "is busy" not in "".join(ran.result().err for ran in same)
    listed = run("ps", "--json").json["jobs"]
    assert {job["job"]: job["state"] for job in listed} == {"one": "running", "other": "running"}


def _keeper(name: str) -> int:
    found: int = json.loads((folder_of(name) / "state.json").read_text())["keeper"][0]
    return found


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: start_time(pid) is None)


def test_one_whose_keeper_is_killed_gets_another(tmp_path: Path) -> None:
    counter, port = start_counter(tmp_path, "counter", "udp")
    pid, keeper = counter.told()["pid"], _keeper("counter")
    _kill(keeper)
    assert ask("udp", port) == "101"
    told = counter.told()
    assert (told["state"], told["pid"]) == ("running", pid)
    assert told["keeper_pid"] != keeper
    counter.save("after")
    counter.kill()
    counter.restore("after")
    assert ask("udp", port) == "102"


def test_the_status_of_one_that_ends_without_a_keeper_is_learnt_by_the_next(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    job = Job("late")
    job.start("sh", "-c", f'while [ ! -e "{gate}" ]; do sleep 0.02; done; echo bye; exit 7')
    pid = job.told()["pid"]
    _kill(_keeper("late"))
    gate.touch()
    wait_until(lambda: start_time(pid) is None)
    assert job.wait_for_end() == 7
    assert job.output() == "bye\n"


def test_one_that_ends_while_it_is_asked_for_is_no_fault(tmp_path: Path) -> None:
    job = Job("ending")
    job.start("sleep", "1000")
    keeper, pid = _keeper("ending"), job.told()["pid"]
    os.kill(keeper, signal.SIGSTOP)
    with subprocess.Popen([*COMMAND, "ps", "--json"], stdout=subprocess.PIPE, text=True) as listing:
        family = psutil.Process(listing.pid)
        wait_until(lambda: family.net_connections(kind="unix"), what="ps asks the keeper")
        _kill(pid)
        os.kill(keeper, signal.SIGKILL)
        assert listing.stdout is not None
        assert json.loads(listing.stdout.read())["faults"] == []
    assert job.told()["state"] == "ended"


def test_one_that_dies_with_its_keeper_has_ended_unseen(tmp_path: Path) -> None:
    job = Job("lost")
    job.start("sh", "-c", "echo here; sleep 100")
    job.wait_for(1)
    (sleeper,) = KernelFolder(folder_of("lost")).sleepers()
    _kill(_keeper("lost"))
    _kill(sleeper)
    assert job.told()["exit_status"] is None
    assert "ended, unseen" in run("ps").out
    assert job.output() == "here\n"
    assert run("exec", "lost", "--replace", "--", "true").status == 0


def test_stop_asks_first_and_then_kills() -> None:
    polite, deaf = Job("polite"), Job("deaf")
    polite.start("sh", "-c", "trap 'echo bye; exit 5' TERM; echo up; while :; do sleep 0.05; done")
    deaf.start("sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.05; done")
    polite.wait_for(1)
    deaf.wait_for(1)
    stopped = run("stop", "polite", "--json")
    assert stopped.json == {"job": "polite", "stopped": True, "exit_status": 5}
    assert (polite.lines()[0], polite.lines()[-1]) == ("up", "bye")
    assert run("stop", "deaf", "--force").out == "Stopped job deaf: it ended by SIGKILL.\n"


def test_following_goes_on_through_a_restore_until_the_end(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.mkdir()
    job = Job("talk")
    job.start(
        "sh", "-c", f'for i in 1 2 3 4; do echo line $i; while [ ! -e "{gate}/$i" ]; do sleep 0.02; done; done; exit 1'
    )
    job.wait_for(1)
    following = subprocess.Popen([PROGRAM, "logs", "talk", "--follow"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert following.stdout is not None
    assert following.stdout.readline() == b"line 1\n"
    job.save("one")
    (gate / "1").touch()
    assert following.stdout.readline() == b"line 2\n"
    job.restore("one")
    assert following.stdout.readline() == b"line 2\n"  # written again, by the restored one; line 1 is not
    for n in (2, 3, 4):
        (gate / str(n)).touch()
    rest, said = following.communicate(timeout=PATIENCE)
    assert rest == b"line 3\nline 4\n"
    assert said == b"-- restored: one\n"
    assert following.returncode == 0
    assert job.output() == "line 1\nline 2\nline 3\nline 4\n"


def test_snapshots_of_jobs_and_of_kernels_are_kept_apart(notebook: Notebook) -> None:
    job = Job("job")
    job.start("sleep", "100")
    job.save("of-job")
    notebook.run("x = 1")
    notebook.run("%gpuckpt save of-kernel")
    told = notebook.fails("%gpuckpt restore of-job")
    # What is said next is what can be done with a job's: `--from`, which is for other notebooks', would fail.
    assert "of-job was saved from the job job" in told.text
    assert "In a terminal, `jupyter gpuckpt restore job of-job`" in told.text
    assert "--from" not in told.text
    told = notebook.fails("%gpuckpt fork of-job")
    assert "The kernel was not forked" in told.text
    assert "In a terminal, `jupyter gpuckpt restore job of-job`" in told.text
    kernels, jobs = run("log").out.split("\n\n")
    assert kernels.startswith("without a notebook:\n* of-kernel (here: kernel ")
    assert jobs.startswith("job job:\n* of-job (here)  ")
    assert jobs.count("job job") == 1
    assert notebook.value("x") == "1"
    for words in (("restore", "job", "of-kernel"), ("restore", "job", "of-kernel", "--as", "new")):
        refused = run(*words)
        assert "from a notebook's kernel" in refused.err, words
    # Without a name, each takes the latest of its own kind, and each list has its own.
    assert job.restore().out.startswith("Restored of-job")
    notebook.run("%gpuckpt restore")
    assert notebook.value("x") == "1"
    assert len(run("kernels", "--json").json["kernels"]) == 1
    assert [one["job"] for one in run("ps", "--json").json["jobs"]] == ["job"]
    assert run("fork", "job").status == 1


def test_nothing_of_one_is_left_when_it_is_forgotten(tmp_path: Path) -> None:
    job = Job("tidy")
    job.start("sh", "-c", f'touch "{tmp_path}/up"; sleep 1000 & sleep 1000')
    wait_until((tmp_path / "up").exists)
    job.save("here")
    job.restore("here")
    assert len(processes_of(tmp_path)) >= 4
    job.kill()
    wait_until(lambda: not processes_of(tmp_path), what="processes are left")
    left = {path.name for path in folder_of("tidy").iterdir()}
    assert left == {"launch.json", "state.json", "output", "keeper.log", "keeper.lock"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder_of("tidy").iterdir())
    assert run("forget", "tidy").status == 0
    assert list(folder_of("tidy").parent.glob("[!.]*")) == []


def test_one_is_hibernated_with_all_others_and_comes_back(tmp_path: Path) -> None:
    counter, port = start_counter(tmp_path, "counter", "udp")
    assert ask("udp", port) == "101"
    done = run("hibernate", "--all")
    assert done.status == 0
    assert "job counter" in done.out
    told = counter.told()
    assert (told["state"], told["exit_status"], told["hibernated_as"]) == ("ended", None, "hibernated-counter")
    assert "hibernated as hibernated-counter" in run("ps").out
    assert "hibernated as hibernated-counter" in run("stop", "counter").err
    counter.restore()
    assert ask("udp", port) == "102"
    assert counter.lines() == ["ready", "101", "102"]


def test_one_that_is_hibernated_alone_comes_back(tmp_path: Path) -> None:
    counter, port = start_counter(tmp_path, "counter", "udp")
    assert ask("udp", port) == "101"
    assert "`restore counter` brings the job back." in run("hibernate", "counter").out
    assert counter.told()["hibernated_as"]
    refused = run("save", "counter", "later").err
    assert "It is hibernated as hibernated-counter." in refused
    assert "`jupyter gpuckpt restore counter` restores it." in refused
    counter.restore()
    assert ask("udp", port) == "102"


def test_words_behind_the_dashes_are_the_command_s() -> None:
    job = Job("words")
    told: Ran = run("exec", "words", "--json", "--", "echo", "--json", "--", "--debug", "a b")
    assert told.json["job"] == "words"
    job.wait_for_end()
    assert job.output() == "--json -- --debug a b\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="what is saved by the broker can have no filter")
def test_a_job_finds_no_io_uring_unless_it_is_to(tmp_path: Path) -> None:
    calls = program(tmp_path, f"{CALLS}import time\nwhile True: print(calls(), flush=True); time.sleep(0.05)\n")
    job, free = Job("plain"), Job("free")
    job.start(sys.executable, calls)
    free.start(sys.executable, calls, GPUCKPT_IO_URING="on")
    for one in (job, free):
        one.wait_for(1)
    job.save("here")
    job.kill()
    job.restore("here")
    job.wait_for(len(job.lines()) + 2)
    assert set(job.lines()) == {str(NO_CALLS)}
    assert str(NO_CALLS) not in free.lines(), "it is to find what the machine has"
    for one in (job, free):
        one.kill()
