"""Rows 16 and 17: criu fails, or is killed, at any point of a dump and of a restore."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from keeper_faults import (
    Asked,
    Criu,
    Requested,
    assert_nothing_left,
    assert_works,
    kill_keeper,
    names,
    status,
)
from notebooks import Notebook, StartKernel, wait_until

pytestmark = pytest.mark.shared_kernel

# criu/include/fault-injection.h
DUMP_EARLY, RESTORE_ROOT_ONLY, DUMP_PAGES, PARASITE_CONNECT, POST_RESTORE, DUMP_CRASH = 1, 2, 3, 5, 6, 136
NOT_FATAL = {128: "CHECK_OPEN_HANDLE", 130: "NO_BREAKPOINTS", 131: "PARTIAL_PAGES", 132: "HUGE_ANON_SHMEM_ID"}

_STATE = """
import threading, time
x, ticks = 1, []
def tick():
    while True:
        ticks.append(1); time.sleep(0.01)
threading.Thread(target=tick, daemon=True).start()
"""


def assert_runs_on(notebook: Notebook) -> None:
    """The kernel has its variables, and its threads go on."""
    assert notebook.value("x") == "1"
    before = int(notebook.value("len(ticks)"))
    wait_until(lambda: int(notebook.value("len(ticks)")) > before)


@contextlib.contextmanager
def held_by_this_thread(pid: int) -> Iterator[None]:
    """Hold a process, as a criu does that hangs in the system, and that no signal ends."""
    seize, interrupt, detach, wait_for_any_thread = 0x4206, 0x4207, 17, 0x40000000  # ptrace(2), waitpid(2)
    libc = ctypes.CDLL(None, use_errno=True)
    for request in (seize, interrupt):
        assert libc.ptrace(request, pid, None, None) == 0, os.strerror(ctypes.get_errno())
    os.waitpid(pid, wait_for_any_thread)
    try:
        yield
    finally:
        libc.ptrace(detach, pid, None, None)


@pytest.mark.parametrize("fault", [DUMP_EARLY, DUMP_PAGES, PARASITE_CONNECT])
def test_a_dump_that_fails_leaves_the_kernel_as_it_was(criu: Criu, notebook: Notebook, fault: int) -> None:
    notebook.run(_STATE)
    criu.fault("dump", fault)
    answer = notebook.fails("%gpuckpt save never")
    assert answer.ename == "SaveFailed"
    assert "keeps running" in answer.text
    assert "criu" in answer.text
    assert not names()
    criu.honest()
    assert_runs_on(notebook)
    assert_works(notebook)


_GIVES_UP = """
while [ "$1" != -D ]; do shift; done
echo "(00.01) Error (compel/src/lib/infect.c:1): Unexpected 17 task interruption, aborting" > "$2/dump.log"
exit 1
"""


def test_criu_that_gives_up_since_a_child_has_just_ended_is_run_again(criu: Criu, notebook: Notebook) -> None:
    notebook.run(_STATE)
    criu.first("dump", f'rm "{criu.folder}/first-dump"\n{_GIVES_UP}')
    notebook.run("%gpuckpt save here")
    assert_runs_on(notebook)
    criu.first("dump", f'echo >> "{criu.folder}/tries"\n{_GIVES_UP}')
    assert "save again" in notebook.fails("%gpuckpt save never").text
    assert (criu.folder / "tries").read_text() == "\n" * 3
    criu.honest()
    notebook.run("%gpuckpt restore here")
    assert_runs_on(notebook)


@pytest.mark.shared_kernel(False)
def test_a_dump_that_fails_continues_nothing_that_had_not_stopped(criu: Criu, notebook: Notebook) -> None:
    notebook.run("import signal; told = []; signal.signal(signal.SIGCONT, lambda *_: told.append(1))")
    criu.first("dump", "exit 1")
    assert notebook.fails("%gpuckpt save never").ename == "SaveFailed"
    assert notebook.value("told") == "[]"


@pytest.mark.shared_kernel(False)
def test_the_log_of_a_criu_that_failed_outlives_its_kernel(criu: Criu, notebook: Notebook) -> None:
    logs = Path(os.environ["GPUCKPT_LOGS"])
    logs.mkdir(mode=0o700)
    earlier = [logs / f"2000-01-{day:02}T00-00-00.000000-1-dump.log" for day in range(1, 26)]
    for log in earlier:
        log.touch()
    criu.fault("dump", DUMP_EARLY)
    answer = notebook.fails("%gpuckpt save never")
    notebook.manager.shutdown_kernel(now=True)
    assert not notebook.folder.exists()
    path = Path(answer.text.rpartition("criu's log: ")[2].strip())
    assert path.parent == logs
    assert "Error (" in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    # The newest 20 are kept.
    assert sorted(logs.glob("*.log")) == [*earlier[-19:], path]


def test_a_log_that_cannot_be_kept_is_not_named(
    criu: Criu, start: StartKernel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a file").touch()
    monkeypatch.setenv("GPUCKPT_LOGS", str(tmp_path / "a file"))
    notebook = start()
    criu.fault("dump", DUMP_EARLY)
    answer = notebook.fails("%gpuckpt save never")
    assert answer.ename == "SaveFailed"
    assert "criu's log:" not in answer.text
    assert notebook.value("1 + 1") == "2"


def test_a_dump_that_aborts_leaves_the_kernel_as_it_was(criu: Criu, notebook: Notebook) -> None:
    notebook.run(_STATE)
    criu.at("dump", "post-dump", "exit 1", fault=DUMP_CRASH)
    answer = notebook.fails("%gpuckpt save never")
    assert answer.ename == "SaveFailed"
    assert not names()
    criu.honest()
    assert_runs_on(notebook)
    assert_works(notebook)


@pytest.mark.shared_kernel(False)
def test_a_save_that_ends_as_nobody_thought_of_runs_the_hooks_after_it(criu: Criu, notebook: Notebook) -> None:
    notebook.run("import jupyter_gpuckpt; hooks = []")
    notebook.run("jupyter_gpuckpt.before_save(lambda: hooks.append('before'))")
    notebook.run("jupyter_gpuckpt.after_restore(lambda how: hooks.append(str(how.error)[:8]))")
    criu.at("dump", "post-dump", 'printf "no image of any kind" > "$CRTOOLS_IMAGE_DIR/files.img"')
    answer = notebook.fails("%gpuckpt save never")
    assert "unexpected error" in answer.text
    assert not names()
    criu.honest()
    assert notebook.value("hooks") == "['before', 'The kern']"
    assert_works(notebook)


def test_a_restore_that_ends_as_nobody_thought_of_leaves_a_fresh_kernel(criu: Criu, notebook: Notebook) -> None:
    """It fails when the kernel before it has just been given up."""
    notebook.run("x = 1")
    notebook.run("%gpuckpt save here")
    spoil = 'for image in "$CRTOOLS_IMAGE_DIR"/core-*; do rm "$image"; printf "no image of any kind" > "$image"; done'
    criu.at("restore", "pre-resume", spoil)
    answer = notebook.fails("%gpuckpt restore here")
    assert answer.ename == "RestoreFailed"
    assert "a fresh, empty one runs in its place" in answer.text
    criu.honest()
    assert notebook.value("'x' in globals()") == "False"
    notebook.run("%gpuckpt restore here")
    assert notebook.value("x") == "1"
    assert_works(notebook)


def test_detours_of_criu_change_nothing(criu: Criu, notebook: Notebook) -> None:
    notebook.run(_STATE)
    for fault, name in NOT_FATAL.items():
        criu.fault("dump", fault)
        notebook.run(f"%gpuckpt save {name}")
        criu.fault("restore", fault)
        notebook.run("x = 2")
        notebook.run(f"%gpuckpt restore {name}")
        assert_runs_on(notebook)


@pytest.mark.parametrize("fault", [RESTORE_ROOT_ONLY, POST_RESTORE])
def test_a_restore_that_fails_leaves_the_kernel_as_it_was(criu: Criu, notebook: Notebook, fault: int) -> None:
    notebook.run("%gpuckpt save here")
    notebook.run(_STATE)
    criu.fault("restore", fault)
    for line in ("restore here", "restore here --lazy"):
        answer = notebook.fails(f"%gpuckpt {line}")
        assert answer.ename == "RestoreFailed"
        assert "The snapshot and the kernel are as they were" in answer.text
        assert "--in-place" in answer.text
        assert_runs_on(notebook)
    criu.honest()
    notebook.run("%gpuckpt restore here")
    assert notebook.value("'x' in globals()") == "False"
    assert_works(notebook)


@pytest.mark.parametrize("fault", [RESTORE_ROOT_ONLY, POST_RESTORE])
def test_a_restore_in_place_that_fails_is_answered_by_a_fresh_kernel(
    criu: Criu, notebook: Notebook, fault: int
) -> None:
    notebook.run(_STATE)
    notebook.run("%gpuckpt save here")
    criu.fault("restore", fault)
    answer = notebook.fails("%gpuckpt restore here --in-place")
    assert answer.ename == "RestoreFailed"
    assert "a fresh, empty one runs in its place" in answer.text
    assert notebook.value("'x' in globals()") == "False"
    criu.honest()
    notebook.run("%gpuckpt restore here")
    assert_runs_on(notebook)
    assert_works(notebook)


@pytest.mark.parametrize("stage", ["pre-dump", "post-dump"])
def test_criu_is_killed_at_a_stage_of_a_dump(criu: Criu, notebook: Notebook, stage: str) -> None:
    notebook.run(_STATE)
    criu.kill_at("dump", stage)
    answer = notebook.fails("%gpuckpt save never")
    assert answer.ename == "SaveFailed"
    assert "was killed by signal 9" in answer.text
    assert not names()
    criu.honest()
    assert_runs_on(notebook)
    notebook.run("%gpuckpt save after")  # what the killed one left of its own is gone with this one's
    assert notebook.value("[name for name in __import__('os').listdir('/dev/shm') if 'criu' in name]") == "[]"
    assert_works(notebook)


@pytest.mark.shared_kernel(False)
@pytest.mark.parametrize("after", [0.01, 0.03, 0.05])
def test_criu_is_killed_in_mid_dump(criu: Criu, notebook: Notebook, tmp_path: Path, after: float) -> None:
    """It may have its own code in the kernel at that moment: the kernel keeps running, or is declared lost."""
    notebook.run(_STATE)
    notebook.run("import os; ballast = os.urandom(100_000_000)")
    criu.first("dump", f"me=$$; (sleep {after}; kill -9 $me) &")
    cell = Asked(notebook, "%gpuckpt save here")
    wait_until(lambda: cell.is_answered() or not notebook.manager.is_alive())
    criu.honest()
    if not notebook.manager.is_alive():
        assert not names()
        assert_nothing_left(tmp_path)
        return
    assert_runs_on(notebook)
    assert_works(notebook)


@pytest.mark.parametrize("stage", ["pre-restore", "post-restore", "pre-resume"])
@pytest.mark.parametrize("how", ["", " --in-place"])
def test_criu_is_killed_at_a_stage_of_a_restore(criu: Criu, notebook: Notebook, stage: str, how: str) -> None:
    notebook.run(_STATE)
    notebook.run("%gpuckpt save here")
    criu.kill_at("restore", stage)
    answer = notebook.fails(f"%gpuckpt restore here{how}")
    assert answer.ename == "RestoreFailed"
    assert "was killed by signal 9" in answer.text
    criu.honest()
    if how:
        assert notebook.value("'x' in globals()") == "False"
    else:
        assert_runs_on(notebook)
    notebook.run("%gpuckpt restore here")
    assert_runs_on(notebook)
    assert_works(notebook)


@pytest.mark.shared_kernel(False)
@pytest.mark.parametrize("command", ["dump", "restore"])
def test_a_criu_that_does_not_end_is_ended(
    criu: Criu, notebook: Notebook, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    notebook.run(_STATE)
    notebook.run("%gpuckpt save here")
    # The next keeper has little patience, but not for what criu really does.
    monkeypatch.setenv("GPUCKPT_CRIU_TIMEOUT", "1")
    notebook.kill_keeper()
    with criu.held_at(command, "start"):
        answer = notebook.fails("%gpuckpt save never" if command == "dump" else "%gpuckpt restore here")
        assert "did not finish within 1 s" in answer.text
    assert names() == {"here"}
    monkeypatch.delenv("GPUCKPT_CRIU_TIMEOUT")
    notebook.kill_keeper()
    notebook.run("%gpuckpt restore here")
    assert_runs_on(notebook)
    assert_works(notebook)


def test_a_kernel_that_a_criu_holds_which_no_signal_ends_is_waited_for(criu: Criu, notebook: Notebook) -> None:
    """What it had on GPUs can be given back to it only then; until then it is said what stands in the way."""
    notebook.run(_STATE)
    said: list[str] = []
    with contextlib.ExitStack() as hanging:
        with criu.held_at("dump", "start") as until_held:
            saving = Requested(notebook, "save", {"name": "never"}, said.append)
            until_held()
            hanging.enter_context(held_by_this_thread(status(notebook)["pid"]))
        wait_until(lambda: f"`kill -9 {os.getpid()}`" in said[-1], what="nobody was told who holds the kernel")
        assert "criu" in said[-1]
        assert "is stopped" in said[-1]
        assert status(notebook)["stage"] == said[-1]
    failed = saving.outcome()
    assert type(failed).__name__ == "SaveFailed"
    assert "keeps running" in str(failed)
    assert not names()
    assert_runs_on(notebook)
    assert_works(notebook)


def test_the_next_keeper_waits_for_it_too(criu: Criu, notebook: Notebook) -> None:
    """It says so, others may wait for their turn or give up, and the kernel is as it was when it is let go."""
    notebook.run(_STATE)
    waiting: list[str] = []
    with contextlib.ExitStack() as hanging:
        with criu.held_at("dump", "start") as until_held:
            saving = Requested(notebook, "save", {"name": "never"})
            until_held()
            hanging.enter_context(held_by_this_thread(status(notebook)["pid"]))
            kill_keeper(notebook)
        assert type(saving.outcome()).__name__ == "KeeperGone"
        wait_until(lambda: f"`kill -9 {os.getpid()}`" in status(notebook)["stage"], what="nobody says who holds it")
        assert status(notebook)["state"] == "saving"
        later = Requested(notebook, "save", {"name": "later"}, waiting.append)
        wait_until(lambda: waiting == ["waiting for its turn"])
    assert later.outcome()["name"] == "later"
    assert names() == {"later"}
    assert_runs_on(notebook)
    assert_works(notebook)


def test_a_failed_restore_tells_the_cells_behind_it_that_they_do_not_run(criu: Criu, notebook: Notebook) -> None:
    notebook.run("x = 1")
    notebook.run("%gpuckpt save here")
    criu.first("restore", "exit 7")
    cells = [Asked(notebook, code) for code in ("%gpuckpt restore here --in-place", "x = 'ran'", "x = 'ran too'")]
    answers = [cell.answer() for cell in cells]
    assert answers[0]["ename"] == "RestoreFailed"
    assert "The snapshot is as it was" in answers[0]["evalue"]
    assert [answer["status"] for answer in answers[1:]] == ["aborted", "aborted"]
    assert notebook.value("'x' in globals()") == "False"
    criu.honest()
    notebook.run("%gpuckpt restore here")
    assert notebook.value("x") == "1"


def test_a_criu_that_is_gone_when_it_is_needed(criu: Criu, notebook: Notebook) -> None:
    """The running kernel is not touched for a restore that cannot begin."""
    notebook.run("x = 1")
    notebook.run("%gpuckpt save here")
    notebook.run("x = 2")
    away = criu.program.rename(criu.program.with_name("away"))
    for line in ("save other", "restore here"):
        answer = notebook.fails(f"%gpuckpt {line}")
        assert answer.ename == "Unavailable"
        assert str(criu.program) in answer.text
    away.rename(criu.program)
    assert notebook.value("x") == "2"
    assert_works(notebook)


@pytest.mark.shared_kernel(False)
def test_the_fresh_kernel_fails_too(criu: Criu, notebook: Notebook, tmp_path: Path) -> None:
    """Without a kernel to answer with, the kernel is declared lost, and nothing of it is left."""
    notebook.run("%gpuckpt save here")
    launch = notebook.folder / "launch.json"
    content = json.loads(launch.read_text())
    content["argv"] = ["/nonexistent/python"]
    # What a keeper starts fresh is what it read at its own start.
    launch.write_text(json.dumps(content))
    kill_keeper(notebook)
    criu.first("restore", "exit 7")
    lost = Requested(notebook, "restore", {"name": "here", "in_place": True}).outcome()
    assert type(lost).__name__ == "KernelLost"
    assert "The snapshot is as it was" in str(lost)
    wait_until(lambda: not notebook.manager.is_alive())
    assert names() == {"here"}
    notebook.close()
    assert_nothing_left(tmp_path)
