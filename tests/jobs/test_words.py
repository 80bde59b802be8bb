"""Who has a job reads of a job: neither of kernels and cells, nor of commands for notebooks."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path

import pytest
from command_line import Ran, run
from job_programs import Job, program
from notebooks import wait_until

from jupyter_gpuckpt.cli.job_words import about_a_job, told_of_a_job
from jupyter_gpuckpt.errors import SaveFailed

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
    assert run("save", "talking", "once").status == 0
    assert_speaks_of_a_job(run("forget", "talking"))
    data.unlink()
    talking.kill()
    wait_until(lambda: talking.told()["state"] == "ended")
    assert_speaks_of_a_job(run("restore", "talking", "once"), str(data))
    assert_speaks_of_a_job(run("save", "talking", "twice"))


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("The kernel's keeper does not answer.", "The job's keeper does not answer."),
        ("Kernels cannot be saved on this machine.", "Jobs cannot be saved on this machine."),
        ("held by a.ipynb (kernel 0a1b2c3d)", "held by a.ipynb (kernel 0a1b2c3d)"),
        ("/home/kernel/x, kernel.log, my-kernel", "/home/kernel/x, kernel.log, my-kernel"),
        ("This Linux kernel lacks it; kernel features", "This Linux kernel lacks it; kernel features"),
        ("It was saved from a notebook's kernel.", "It was saved from a notebook's kernel."),
    ],
)
def test_only_what_is_a_kernel_of_ours_is_called_a_job(written: str, told: str) -> None:
    assert told_of_a_job(written) == told


def test_what_criu_says_is_quoted_as_it_is() -> None:
    """It speaks of the system's kernel."""
    words = "Error (criu/kerndat.c:7): Kernel doesn't support this"
    with pytest.raises(SaveFailed) as caught, about_a_job():
        raise SaveFailed("The kernel goes on.", f"criu says: {words}", "Update the kernel's keeper.", criu_error=words)
    error = caught.value
    assert (error.what, error.why) == ("The job goes on.", f"criu says: {words}")
    assert error.then == "Update the job's keeper."
