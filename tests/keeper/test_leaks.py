"""Nothing grows with the number of saves and restores, and nothing is left by a shutdown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from copies import forking
from keeper_faults import assert_no_litter, assert_nothing_left, processes_of
from leaks import assert_no_growth, assert_no_more, clients_of, look, memory, mounts
from notebooks import Notebook, wait_until


def cycle(notebook: Notebook, times: int) -> None:
    for _ in range(times):
        notebook.run("n += 1")
        notebook.run("%gpuckpt save here --replace")
        notebook.run("%gpuckpt restore here")


def assert_flat(notebook: Notebook, folder: Path, times: int) -> None:
    notebook.run("n = 0")
    clients = clients_of(notebook)
    cycle(notebook, 8)  # what is set up once is there by then
    before, held = look(notebook, folder, clients), memory(notebook)
    cycle(notebook, times)
    assert_no_more(notebook, folder, clients, before)
    assert_no_litter()
    assert notebook.value("n") == str(8 + times)
    assert_no_growth(notebook, held, 12e6)
    notebook.close()
    assert_nothing_left(folder)


def test_twelve_cycles_leave_nothing(notebook: Notebook, tmp_path: Path) -> None:
    """`make soak` does a thousand, and holds the memory to far less."""
    assert_flat(notebook, tmp_path, 12)


def test_what_a_save_had_read_is_given_back(notebook: Notebook) -> None:
    """A keeper has it for the next save, until that costs too much: a kernel that rests takes no memory for it."""
    notebook.run("n = 0")
    cycle(notebook, 1)
    held = memory(notebook)
    cycle(notebook, 4)
    assert_no_growth(notebook, held, 6e6)


def test_one_snapshot_is_restored_often(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run("x = 1")
    clients = clients_of(notebook)
    notebook.run("%gpuckpt save here")
    for _ in range(3):
        notebook.run("%gpuckpt restore here")
    before = look(notebook, tmp_path, clients)
    for _ in range(5):
        notebook.run("%gpuckpt restore here")
    assert_no_more(notebook, tmp_path, clients, before)
    assert notebook.value("x") == "1"


def test_forks_leave_nothing(notebook: Notebook, tmp_path: Path) -> None:
    """Five of them; `GPUCKPT_TEST_FORKS=200` makes it as many, which takes minutes."""

    def fork_and_end() -> None:
        with forking() as fork:
            (copy,) = fork(notebook)
            assert copy.value("x") == "1"

    notebook.run("x = 1")
    clients = clients_of(notebook)
    for _ in range(3):  # what is set up once is there by then
        fork_and_end()
    wait_until(lambda: len(processes_of(tmp_path)) == 3, what="a copy is left")  # keeper, sleeper, kernel
    living = processes_of(tmp_path)
    before, held = look(notebook, tmp_path, clients), memory(notebook)
    runtime = sorted(path.name for path in (tmp_path / "runtime").rglob("*"))
    for _ in range(int(os.environ.get("GPUCKPT_TEST_FORKS", "5"))):
        fork_and_end()
    wait_until(lambda: processes_of(tmp_path) == living)
    assert_no_more(notebook, tmp_path, clients, before)
    assert sorted(path.name for path in (tmp_path / "runtime").rglob("*")) == runtime
    assert_no_growth(notebook, held, 8e6)
    notebook.close()
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("now", [True, False])
def test_a_shutdown_leaves_no_child_of_the_kernel(notebook: Notebook, tmp_path: Path, now: bool) -> None:
    notebook.run("import subprocess; subprocess.Popen('sleep 1000 & setsid sleep 1000 & wait', shell=True)")
    notebook.run("%gpuckpt save here")
    notebook.run("%gpuckpt restore here")
    assert len(processes_of(tmp_path)) >= 5
    before = mounts("self", tmp_path)
    notebook.manager.shutdown_kernel(now=now)
    assert_nothing_left(tmp_path)
    assert not set(mounts("self", tmp_path)) - set(before)
