"""The programs that people run kernels with, each as a user runs it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import nbformat
import pexpect
import pytest
from nbclient import NotebookClient
from notebooks import PATIENCE, SPEC

from jupyter_gpuckpt.client import keepers

BIN = Path(sys.executable).parent
_TUTORIAL = Path(__file__).parent.parent.parent / "examples" / "tutorial.ipynb"
_PROMPT = r"In \[\d+\]: "
CELLS = [
    "n = 1",
    "r = %gpuckpt save first\nprint('back' if r.restored else 'on', n)",
    "n = 2",
    "%gpuckpt restore first",
    "print('n is', n)",
]


@pytest.fixture
def notebook_file(tmp_path: Path) -> Path:
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS],
        metadata={"kernelspec": {"name": SPEC, "display_name": "ours", "language": "python"}},
    )
    path = tmp_path / "notebook.ipynb"
    nbformat.write(notebook, path)
    return path


def assert_executed(path: Path) -> None:
    """The cell that asked for the restore shows the rest of the saved one; the next one sees the old value."""
    notebook = nbformat.read(path, as_version=4)
    # One line may come in two pieces.
    outputs = ["".join(output.get("text", "") for output in cell["outputs"]) for cell in notebook["cells"]]
    assert "on 1\n" in outputs[1]
    assert "back 1\n" in outputs[3]
    assert outputs[4] == "n is 1\n"


def run(*command: str, cwd: Path) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_tutorial_runs_in_nbclient_as_its_page_shows(tmp_path: Path) -> None:
    written = nbformat.read(_TUTORIAL, as_version=4)
    executed = nbformat.read(_TUTORIAL, as_version=4)
    NotebookClient(executed, timeout=PATIENCE, kernel_name=SPEC, resources={"metadata": {"path": tmp_path}}).execute()
    assert [printed(cell) for cell in executed.cells] == [printed(cell) for cell in written.cells]


def printed(cell: nbformat.NotebookNode) -> list[str]:
    """Return what a cell printed, but not the sizes and times that a command told."""
    if cell.source.startswith("%gpuckpt"):
        return []
    return [output.text for output in cell.get("outputs", ()) if output.output_type == "stream"]


_IN_A_POOL = """
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
import nbformat
from nbclient import NotebookClient

def run(code):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    NotebookClient(notebook, timeout=60, kernel_name="python3-gpuckpt").execute()
    return notebook.cells[0].outputs[0]["data"]["text/plain"]

print(run("1 + 1"))
with ProcessPoolExecutor(2, get_context("fork")) as pool:
    print(*pool.map(run, ["1 + 2", "1 + 3", "1 + 4"]))
"""


def test_notebooks_are_run_by_workers_that_were_forked_off(tmp_path: Path) -> None:
    program = tmp_path / "in_a_pool.py"
    program.write_text(_IN_A_POOL)
    with subprocess.Popen(
        [sys.executable, program], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        try:
            said, _ = running.communicate(timeout=2 * PATIENCE)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
    assert said == "2\n3 4 5\n"


def test_jupyter_execute(notebook_file: Path) -> None:
    run(str(BIN / "jupyter-execute"), "--inplace", str(notebook_file), cwd=notebook_file.parent)
    assert_executed(notebook_file)


def test_papermill(notebook_file: Path) -> None:
    executed = notebook_file.with_name("executed.ipynb")
    run(str(BIN / "papermill"), str(notebook_file), str(executed), "--no-progress-bar", cwd=notebook_file.parent)
    assert_executed(executed)


def test_jupyter_console(tmp_path: Path) -> None:
    console = listening_console(tmp_path)
    try:
        for cell, shown in (
            # The console prints, and does not show what replaces a line.
            ("%gpuckpt save first", "Saved first: "),
            ("n = 2", ""),
            ("%gpuckpt restore first", "Restored first, saved "),
            ("print('n', 'is', n)", "n is 1"),
        ):
            console.sendline(cell)
            console.expect_exact(shown)
            console.expect(_PROMPT)
        with keepers.connect(next(keepers.folders())) as keeper:
            keeper.request("sleep")
        console.sendline("n += 1")
        console.expect_exact("Woke in ")
        console.expect(_PROMPT)
        console.sendline("exit")
        console.expect(pexpect.EOF)
    finally:
        leave(console)


def listening_console(folder: Path) -> pexpect.spawn:
    """Start a console that has executed ``n = 1``.

    A console that executes its first cell before its subscription to the outputs has arrived waits for ever, with any
    kernel: it never hears that the kernel is idle.
    """
    for _ in range(5):
        console = pexpect.spawn(
            str(BIN / "jupyter-console"),
            ["--kernel", SPEC, "--simple-prompt"],
            cwd=str(folder),
            env={**os.environ, "TERM": "dumb", "NO_COLOR": "1"},
            encoding="utf-8",
            timeout=60,
        )
        console.expect(_PROMPT)
        console.sendline("n = 1")
        if console.expect([_PROMPT, pexpect.TIMEOUT], timeout=10) == 0:
            return console
        leave(console)
    raise AssertionError("no console ever became idle")


def leave(console: pexpect.spawn) -> None:
    """End a console by force, and the kernel that outlives it."""
    console.close(force=True)
    for folder in keepers.folders():
        keepers.end(folder)
