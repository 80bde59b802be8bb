"""Who has a job reads of a job: neither of kernels and cells, nor of commands for notebooks."""

from __future__ import annotations

import ast
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Ran, run
from job_programs import Job, program
from notebooks import wait_until

import jupyter_gpuckpt
from jupyter_gpuckpt.errors import SaveFailed
from jupyter_gpuckpt.subject import WORDS, of_a_job, said

TALKING = """
import socket, sys, time
s = socket.socket(socket.AF_UNIX)
s.connect(sys.argv[1])
data = open(sys.argv[2])
print("ready", flush=True)
while True: time.sleep(0.05)
"""


def assert_speaks_of_a_job(ran: Ran, *words: str) -> None:
    assert ran.status != 0
    told = ran.out + ran.err
    assert not re.search(r"\b[Kk]ernels?\b|notebook|%gpuckpt|\bcell\b", told.replace("Linux kernel", "")), told
    for word in words:
        assert word in told


@pytest.mark.criu
def test_errors_of_jobs_speak_of_jobs(tmp_path: Path) -> None:
    source, data = program(tmp_path, TALKING), tmp_path / "data"
    data.write_text("as it was")
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(str(tmp_path / "socket"))
        stranger.listen()
        talking = Job("talking")
        talking.start(sys.executable, source, str(tmp_path / "socket"), str(data))
        talking.wait_for(1)
        assert_speaks_of_a_job(run("save", "talking", "never"), "The job", "keeps running")
        connection, _ = stranger.accept()
        connection.close()
    assert_speaks_of_a_job(run("fork", "talking"))
    assert_speaks_of_a_job(run("sleep", "talking"))
    assert_speaks_of_a_job(run("restore", "talking"), "no snapshot")
    assert_speaks_of_a_job(run("auto", "talking", "on"), "--every 10m")
    assert_speaks_of_a_job(run("undo", "talking"), "restore talking SNAPSHOT")
    assert_speaks_of_a_job(run("redo", "talking"), "restore talking SNAPSHOT")
    assert run("save", "talking", "once").status == 0
    assert_speaks_of_a_job(run("forget", "talking"))
    data.unlink()
    talking.kill()
    wait_until(lambda: talking.told()["state"] == "ended")
    assert_speaks_of_a_job(run("restore", "talking", "once"), str(data))
    assert_speaks_of_a_job(run("save", "talking", "twice"))


def test_a_text_has_the_word_for_what_it_is_about() -> None:
    text = "The {kernel} was not saved. {Restart}; `{gpuckpt kernels}` lists it. {other} Kernel 0a1b2c3d."
    assert said(text) == (
        "The kernel was not saved. Restart the kernel; `gpuckpt kernels` lists it. {other} Kernel 0a1b2c3d."
    )
    with of_a_job():
        error = SaveFailed(text, "criu says: Error (criu/kerndat.c:7): Kernel doesn't support this")
        assert said(text) == "The job was not saved. Stop the job; `gpuckpt ps` lists it. {other} Kernel 0a1b2c3d."
    assert (error.what, error.why.partition("): ")[2]) == (
        "The job was not saved. Stop the job; `gpuckpt ps` lists it. {other} Kernel 0a1b2c3d.",
        "Kernel doesn't support this",
    )


_FLOORS = ("client", "freeze", "keeper", "snapshots")
_OF_BOTH = {
    *("keeper/operations/save.py", "keeper/operations/take.py", "keeper/operations/takeover.py"),
    *("keeper/operations/prepared_restore.py", "keeper/operations/progress.py", "keeper/operations/hibernate.py"),
    *("keeper/one_at_a_time.py", "keeper/lost_names.py", "freeze/cuda.py", "freeze/criu_errors.py"),
}
"""What is done with kernels and jobs alike."""


def test_texts_that_a_job_s_user_may_read_have_the_word_in_braces() -> None:
    root = Path(jupyter_gpuckpt.__file__).parent
    for path in (one for floor in _FLOORS for one in (root / floor).rglob("*.py")):
        for text in _texts(path):
            assert set(re.findall(r"\{([A-Z]?[a-z]+(?: [a-z]+)?)\}", text)) <= WORDS.keys(), f"{path}: {text}"
            if str(path.relative_to(root)) in _OF_BOTH:
                assert not re.search(r"\b[Tt]he kernel\b|(?<!{)\b[Rr]estart\b", text), f"{path}: {text}"


def _texts(path: Path) -> Iterator[str]:
    """Yield the texts in a module, but for those of its log and its docstrings."""
    tree = ast.parse(path.read_text())
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("log."):
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        nodes += [one for one in ast.iter_child_nodes(node) if not _is_docstring(one)]


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
