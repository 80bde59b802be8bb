"""Operations that are interrupted, shut down in the middle, asked for twice, or held up by a stopped keeper."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from keeper_faults import (
    Asked,
    Criu,
    Requested,
    assert_no_litter,
    assert_nothing_left,
    assert_works,
    interrupt_twice,
    keeper_pid,
    names,
    status,
    until_stage,
)
from notebooks import PATIENCE, Notebook, StartKernel, wait_until

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.keeper.operations import criu_run
from jupyter_gpuckpt.linux import processes

pytestmark = pytest.mark.shared_kernel

_SLOW_HOOK = """
import os, time, jupyter_gpuckpt
def slow(reached, go):
    @jupyter_gpuckpt.before_save
    def before():
        open(reached, "w").close()
        while not os.path.exists(go):
            time.sleep(0.01)
"""


@pytest.mark.shared_kernel(False)
def test_an_interrupt_while_the_hooks_run_cancels_a_save(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run(_SLOW_HOOK)
    reached, go = tmp_path / "reached", tmp_path / "go"
    notebook.run(f"x = 1; slow({str(reached)!r}, {str(go)!r})")
    cell = Asked(notebook, "%gpuckpt save never")
    wait_until(reached.exists)
    while notebook.client.iopub_channel.msg_ready():
        notebook.client.get_iopub_msg()
    notebook.manager.interrupt_kernel()
    shown = notebook.client.get_iopub_msg(timeout=PATIENCE)["content"]["data"]["text/plain"]
    assert shown == "Saving never: cancelling…"  # at once, whatever it was doing
    assert cell.answer()["ename"] == "Cancelled"  # it does not wait for the hook
    go.touch()
    assert not names()
    assert notebook.value("x") == "1"
    assert_works(notebook)


def test_an_interrupt_while_criu_dumps_comes_too_late_or_cancels(criu: Criu, notebook: Notebook) -> None:
    notebook.run("x = 1")
    with criu.held_at("dump", "post-dump") as reached:
        cell = Asked(notebook, "%gpuckpt save here")
        reached()
        notebook.manager.interrupt_kernel()
    answer = cell.answer()
    assert (answer["status"], names()) in (("ok", {"here"}), ("error", set()))
    assert answer.get("ename", "Cancelled") == "Cancelled"
    assert_works(notebook)


_MANY_FILES = "many_files = [os.eventfd(0) for _ in range(800)]"
"""With these criu talks for long enough with its code in the process to be seen doing so on a busy machine."""
_FAMILY = """
import os, signal, subprocess, sys, threading, time
x, ticks = 1, []
def tick():
    while True:
        ticks.append(1); time.sleep(0.01)
threading.Thread(target=tick, daemon=True).start()
# Without children of their own: criu gives up where one ends at the moment that its parent is looked into.
ticking = [sys.executable, "-I", "-S", "-c", "import time\\nwhile True: time.sleep(0.01)"]
running, still = (subprocess.Popen(ticking) for _ in range(2))
still.send_signal(signal.SIGSTOP)
os.waitid(os.P_PID, still.pid, os.WSTOPPED | os.WNOWAIT)
ballast = os.urandom(50_000_000)
"""


def assert_family_is_as_it_was(notebook: Notebook) -> None:
    """The kernel's thread and its child go on; the child that the user has stopped does not."""
    kernel, running, still = map(int, notebook.value("os.getpid(), running.pid, still.pid").split())
    outer = {processes.inner_pid(pid): pid for pid in processes.descendants(status(notebook)["pid"])}
    assert kernel not in outer
    before, done = int(notebook.value("len(ticks)")), processes.work_done(outer[running])
    wait_until(lambda: int(notebook.value("len(ticks)")) > before)
    wait_until(lambda: processes.work_done(outer[running]) > done)
    assert processes.stopped(outer.values()) == [outer[still]]
    assert processes.held(outer.values()) == []


@pytest.mark.shared_kernel(False)
@pytest.mark.parametrize("operation", ["save", "fork", "hibernate"])
def test_what_hangs_in_criu_is_cancelled_and_the_kernel_goes_on(criu: Criu, notebook: Notebook, operation: str) -> None:
    notebook.run(_FAMILY)
    kernel = status(notebook)["pid"]
    notebook.run(_MANY_FILES)
    criu.hang_in_mid_dump()
    asked = Requested(notebook, operation, {"name": "never"} if operation == "save" else {})
    wait_until(lambda: criu.hangs(kernel))
    with notebook.keeper as keeper:
        assert keeper.request("cancel", {"kind": operation})
    assert type(asked.outcome()).__name__ == "Cancelled"
    criu.honest()
    assert_family_is_as_it_was(notebook)
    assert not names()
    assert_works(notebook)
    assert_family_is_as_it_was(notebook)


def test_a_save_that_hangs_in_criu_ends_by_itself(
    criu: Criu, start: StartKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUCKPT_CRIU_TIMEOUT", "3")
    notebook = start()
    notebook.run(_FAMILY)
    notebook.run(_MANY_FILES)
    criu.hang_in_mid_dump()
    answer = notebook.fails("%gpuckpt save never")
    assert "criu did not finish within 3 s" in answer.text
    assert "keeps running" in answer.text
    assert_family_is_as_it_was(notebook)
    # A keeper that dies with a criu that hangs leaves it to the next one. It has time enough to come to that.
    monkeypatch.delenv("GPUCKPT_CRIU_TIMEOUT")
    notebook.kill_keeper()
    asked = Requested(notebook, "save", {"name": "never"})
    kernel = status(notebook)["pid"]
    wait_until(lambda: criu.hangs(kernel))
    notebook.kill_keeper()
    asked.outcome()
    assert_family_is_as_it_was(notebook)
    criu.honest()
    assert not names()


def test_how_long_criu_may_take_follows_what_it_moves() -> None:
    assert settings.criu_timeout(100_000_000) == 65
    assert settings.criu_timeout(200 * 10**9) == 10_060


def test_an_interrupt_while_the_snapshot_is_written_cancels_it(notebook: Notebook) -> None:
    notebook.run("import os; x = os.urandom(200_000_000)")
    cell = Asked(notebook, "%gpuckpt save never")
    until_stage(notebook, "writing", cell)
    notebook.manager.interrupt_kernel()
    answer = cell.answer()
    assert answer.get("ename", "Cancelled") == "Cancelled"
    assert names() == (set() if answer["status"] == "error" else {"never"})
    notebook.run("x = None")
    assert_works(notebook)


def test_an_interrupt_while_a_snapshot_is_verified_leaves_the_kernel_alone(notebook: Notebook) -> None:
    notebook.run("import os; x = os.urandom(300_000_000)")
    notebook.run("%gpuckpt save here")
    for _ in range(5):
        notebook.run("x = 2")
        cell = Asked(notebook, "%gpuckpt restore here")
        until_stage(notebook, "verifying", cell)
        notebook.manager.interrupt_kernel()
        if (answer := cell.answer())["status"] == "error":
            break
        assert notebook.value("len(x)") == "300000000"  # it came too late
    assert answer["ename"] == "Cancelled"
    assert notebook.value("x") == "2"
    assert_works(notebook)


@pytest.mark.parametrize("stage", ["start", "pre-restore", "post-resume"])
def test_a_restore_is_cancelled_while_criu_restores(criu: Criu, notebook: Notebook, stage: str) -> None:
    notebook.run("x = 1")
    notebook.run("%gpuckpt save here")
    notebook.run("x = 2; agent = get_ipython().kernel.agent; from jupyter_gpuckpt.operations.requests import Restore")
    with criu.held_at("restore", stage) as reached:
        cell = Asked(
            notebook, "agent.keeper.request(Restore, dict(name='here', operation='this', **agent.cells.describe()))"
        )
        reached()
        with notebook.keeper as keeper:
            assert not keeper.request("cancel", {"kind": "restore"}), "only who asked for it cancels it"
            assert keeper.request("cancel", {"operation": "this"})
    assert cell.answer()["ename"] == "Cancelled"
    assert notebook.value("x") == "2"
    notebook.run("%gpuckpt restore here")
    assert notebook.value("x") == "1"
    assert_works(notebook)


@pytest.mark.parametrize("stage", ["start", "pre-restore", "post-resume"])
def test_an_interrupt_while_criu_restores_in_place_comes_too_late(criu: Criu, notebook: Notebook, stage: str) -> None:
    notebook.run("x = 1")
    notebook.run("%gpuckpt save here")
    notebook.run("x = 2")
    with criu.held_at("restore", stage) as reached:
        cell = Asked(notebook, "%gpuckpt restore here --in-place")
        reached()
        notebook.manager.interrupt_kernel()
    assert cell.answer()["status"] in ("ok", "error")
    assert notebook.value("x") == "1"
    assert_works(notebook)


def test_a_second_operation_is_told_that_the_kernel_is_busy(criu: Criu, notebook: Notebook) -> None:
    with criu.held_at("dump", "start") as reached:
        cell = Asked(notebook, "%gpuckpt save first")
        reached()
        for op, name in (("save", "second"), ("restore", "first")):
            busy = Requested(notebook, op, {"name": name}).outcome()
            assert type(busy).__name__ == "Busy"
            assert "a save of 'first'" in str(busy)
    assert cell.answer()["status"] == "ok"
    assert names() == {"first"}


_STAGES = [("dump", "start"), ("dump", "post-dump"), ("restore", "start"), ("restore", "pre-resume")]


@pytest.mark.shared_kernel(False)
@pytest.mark.parametrize(("command", "stage"), _STAGES)
def test_a_shutdown_in_the_middle_leaves_nothing(
    criu: Criu, notebook: Notebook, tmp_path: Path, command: str, stage: str
) -> None:
    notebook.run("%gpuckpt save here")
    with criu.held_at(command, stage) as reached:
        Asked(notebook, "%gpuckpt save never" if command == "dump" else "%gpuckpt restore here")
        reached()
        notebook.manager.shutdown_kernel(now=True)
        assert_nothing_left(tmp_path)
    assert names() == {"here"}
    assert_no_litter()


@pytest.mark.parametrize(("command", "stage"), _STAGES[1:3])
def test_a_restart_in_the_middle_gives_a_fresh_kernel(criu: Criu, notebook: Notebook, command: str, stage: str) -> None:
    notebook.run("x = 1")
    notebook.run("%gpuckpt save here")
    with criu.held_at(command, stage) as reached:
        Asked(notebook, "%gpuckpt save never" if command == "dump" else "%gpuckpt restore here")
        reached()
        notebook.manager.restart_kernel(now=True)
    notebook.wait_for_ready()
    assert notebook.value("'x' in globals()") == "False"
    notebook.run("%gpuckpt restore here")
    assert notebook.value("x") == "1"
    assert_works(notebook)


@pytest.mark.shared_kernel(False)
def test_a_shutdown_while_a_snapshot_is_written_leaves_nothing(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run("import os; x = os.urandom(200_000_000)")
    cell = Asked(notebook, "%gpuckpt save never")
    until_stage(notebook, "writing", cell)
    notebook.manager.shutdown_kernel(now=True)
    assert_nothing_left(tmp_path)
    assert names() <= {"never"}
    assert_no_litter()


@pytest.mark.shared_kernel(False)
def test_the_kernel_is_killed_in_the_middle_of_a_save(criu: Criu, notebook: Notebook) -> None:
    """Its end is told, and the request is answered."""
    with criu.held_at("dump", "start") as reached:
        asked = Requested(notebook, "save", {"name": "never"})
        reached()
        with notebook.keeper as keeper:
            os.kill(keeper.request("status")["pid"], signal.SIGKILL)
        wait_until(lambda: not notebook.manager.is_alive())
    assert type(asked.outcome()).__name__ in ("KernelLost", "SaveFailed", "KeeperGone")
    assert not names()


def test_a_stopped_keeper_is_waited_for_in_words_and_goes_on(notebook: Notebook) -> None:
    notebook.run("x = 1")
    stopped = keeper_pid(notebook)
    os.kill(stopped, signal.SIGSTOP)
    try:
        cell = Asked(notebook, "%gpuckpt save here")

        def says_so() -> bool:
            message = notebook.client.get_iopub_msg(timeout=60)
            return "the keeper is silent" in str(message["content"].get("data", ""))

        wait_until(says_so)
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert cell.answer()["status"] == "ok"
    assert names() == {"here"}
    assert_works(notebook)


def test_a_cell_that_waits_for_a_stopped_keeper_can_be_interrupted(notebook: Notebook) -> None:
    stopped = keeper_pid(notebook)
    with notebook.keeper as keeper:
        kernel = keeper.request("status")["pid"]
    os.kill(stopped, signal.SIGSTOP)
    try:
        cell = Asked(notebook, "%gpuckpt save never")
        interrupt_twice(notebook, kernel, "save")
        assert cell.answer()["ename"] == "GpuckptError"
        assert notebook.value("'alive'") == "alive"
    finally:
        os.kill(stopped, signal.SIGCONT)

    def idle() -> bool:
        # The keeper still finds the request that was given up, and does it: nobody could cancel it meanwhile.
        with notebook.keeper as keeper:
            return bool(keeper.request("status")["state"] == "running")

    wait_until(idle)
    assert_works(notebook)


@pytest.mark.shared_kernel(False)
def test_a_kernel_whose_keeper_is_stopped_can_be_shut_down(notebook: Notebook, tmp_path: Path) -> None:
    os.kill(keeper_pid(notebook), signal.SIGSTOP)
    notebook.manager.shutdown_kernel(now=True)
    assert_nothing_left(tmp_path)


def test_cells_that_come_while_their_kernel_is_about_to_be_restored_are_executed_by_the_restored_one(
    criu: Criu, notebook: Notebook
) -> None:
    notebook.run("x = 1")
    notebook.run("%gpuckpt save here")
    notebook.run("x = 2")
    subshell = new_subshell(notebook)
    os.utime(criu.program)  # it is asked for its version again
    with criu.held_at("none", "start") as reached:
        requests = [notebook.client.execute("%gpuckpt restore here")]
        reached()
        requests += [notebook.client.execute("x += 1") for _ in range(200)]
        until_read(notebook, subshell)
    replies = [notebook.client.get_shell_msg(timeout=60) for _ in requests]
    assert [reply["parent_header"]["msg_id"] for reply in replies] == requests
    assert {reply["content"]["status"] for reply in replies} == {"ok"}
    assert notebook.value("x") == "201"


def test_two_interrupts_in_a_row_are_one_and_the_cell_is_answered(criu: Criu, notebook: Notebook) -> None:
    """Also where the kernel's clients are on their way to the one that was to take its place."""
    notebook.run("x = 1")
    notebook.run("%gpuckpt save here")
    notebook.run("x = 2")
    kernel = status(notebook)["pid"]
    with criu.held_at("restore", "post-resume") as reached:
        cell = Asked(notebook, "%gpuckpt restore here")
        reached()
        for _ in range(2):
            os.kill(kernel, signal.SIGINT)  # a manager would send it by the keeper, and be told that it was sent
            time.sleep(0.02)
    assert cell.answer()["ename"] == "Cancelled"
    assert notebook.value("x") == "2"
    assert_works(notebook)


def new_subshell(notebook: Notebook) -> str | None:
    """Have the kernel make a thread that answers while a cell runs; None with ipykernel 6, which knows none."""
    client = notebook.client
    if "kernel subshells" not in client.kernel_info(reply=True, timeout=60)["content"].get("supported_features", []):
        return None
    client.control_channel.send(client.session.msg("create_subshell_request"))
    subshell: str = client.get_control_msg(timeout=60)["content"]["subshell_id"]
    return subshell


def until_read(notebook: Notebook, subshell: str | None) -> None:
    """Wait until the kernel has read all requests that were sent to it."""
    if subshell is not None:
        request = notebook.client.session.msg("kernel_info_request")
        request["header"]["subshell_id"] = subshell
        notebook.client.shell_channel.send(request)
        answer = notebook.client.get_shell_msg(timeout=60)
        assert answer["parent_header"]["msg_id"] == request["header"]["msg_id"]


_LOOKS_WHEN_CONTINUED = """
import os, signal, subprocess
child = subprocess.Popen(["sleep", "1000"])
def look(*_):
    print(open(f"/proc/{child.pid}/stat").read().rpartition(")")[2].split()[0], flush=True)
    child.kill()
    os._exit(0)  # an exception could come where nobody hears of it
signal.signal(signal.SIGCONT, look)
print(child.pid, flush=True)
while True:
    signal.pause()
"""


async def unheard(_: str) -> None:
    """Be told what is waited for."""


def test_no_process_that_is_continued_sees_a_child_that_stands_still() -> None:
    processor = {min(os.sched_getaffinity(0))}
    with subprocess.Popen([sys.executable, "-c", _LOOKS_WHEN_CONTINUED], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        for pid in (parent.pid, child):
            os.sched_setaffinity(pid, processor)
            os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: processes.stopped([parent.pid, child]) == [parent.pid, child])

        def continued() -> None:
            # On one processor, whoever is continued runs before this thread does its next step.
            os.sched_setaffinity(0, processor)
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            asyncio.run(criu_run.let_run(parent.pid, [], unheard))

        thread = threading.Thread(target=continued)
        thread.start()
        assert parent.stdout.readline().strip() in ("R", "S")
        thread.join()
