"""Machines that share a user's home: none touches what another one runs. Another machine is one in namespaces here."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from command_line import COMMAND, Ran, run
from job_programs import Job, program
from notebooks import PATIENCE

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.client.record import KernelFolder, Launch, State
from jupyter_gpuckpt.linux.host import Host

pytestmark = pytest.mark.criu

_NAME = "node7"
_COUNTING = """
import itertools, time
for n in itertools.count():
    print(n, flush=True)
    time.sleep(0.05)
"""
_BOOT = "/proc/sys/kernel/random/boot_id"


class OtherMachine:
    """One with a name, processes and a boot of its own, and the same files; a container has the machine's boot."""

    def __init__(self, folder: Path, is_container: bool) -> None:
        self._boot = folder / "boot_id"
        self._boot.write_text(Path(_BOOT).read_text() if is_container else f"{uuid.uuid4()}\n")

    def run(self, *words: str) -> Ran:
        """Run `jupyter gpuckpt` there."""
        setup = f'mount --bind {self._boot} {_BOOT} && hostname {_NAME} && exec "$@"'
        namespaces = ["unshare", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
        command = [*namespaces, "sh", "-c", setup, "sh", *COMMAND, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert "Traceback" not in done.stderr
        return Ran(done.returncode, done.stdout, done.stderr)


@pytest.fixture(params=["machine", "container"])
def other(tmp_path: Path, request: pytest.FixtureRequest) -> OtherMachine:
    return OtherMachine(tmp_path, request.param == "container")


def test_a_job_of_another_machine_is_seen_and_left_alone(other: OtherMachine, tmp_path: Path) -> None:
    counter, here = Job("counter"), platform.node()
    counter.start(sys.executable, program(tmp_path, _COUNTING))
    counter.wait_for(3)
    seen = other.run("ps", "--json").json
    assert (seen["jobs"], [(one["job"], one["host"]) for one in seen["elsewhere"]]) == ([], [("counter", here)])
    assert f"Job counter runs on {here}: run commands about it there." in other.run("ps").out
    for words in (["save", "counter", "stolen"], ["stop", "counter", "--force"], ["forget", "counter"]):
        refused = other.run(*words)
        assert refused.status != 0, words
        assert f"The job counter runs on another machine, {here}; nothing was touched." in refused.err
    taken = other.run("exec", "counter", "--replace", "--", "true")
    assert taken.status != 0
    assert f"It runs on another machine, {here}." in taken.err
    counter.save("own")
    before = len(counter.lines())
    counter.wait_for(before + 3)
    counter.kill()
    # Of one that has ended, every machine has all that there is.
    assert [(job["job"], job["state"]) for job in other.run("ps", "--json").json["jobs"]] == [("counter", "ended")]
    assert other.run("logs", "counter").out == counter.output()
    assert other.run("forget", "counter").status == 0
    assert run("ps", "--json").json["jobs"] == []


def test_a_kernel_of_another_machine_whose_locks_are_not_seen_here_is_left_alone() -> None:
    """Not every network file system has locks for all machines."""
    launch = Launch("0a1b2c3d-there", ["true"], {}, "/", 0o077, "/nowhere.json", agent=True, notebook="/n/train.ipynb")
    folder, lock = KernelFolder.create(launch)
    os.close(lock)
    state = State(keeper=(7, 7), sleeper=(8, 8))
    folder.write_state(state)
    state.host = Host("node7", "other", "another-boot")
    folder._write("state.json", {"keeper": [7, 7], "sleeper": [8, 8], "boot": "another-boot", "host": vars(state.host)})
    listed = run("kernels")
    assert "Kernel 0a1b2c3d (train.ipynb) runs on node7: run commands about it there." in listed.out
    assert run("kernels", "--json").json["kernels"] == []
    refused = run("save", "0a1b2c3d", "stolen")
    assert "runs on another machine, node7; nothing was touched." in refused.err
    assert str(folder.path) in refused.err
    assert sorted(path.name for path in folder.path.iterdir()) == ["keeper.lock", "launch.json", "state.json"]
    assert folder.path.parent == settings.kernels_dir()


def test_what_this_machine_left_before_it_was_started_again_is_removed() -> None:
    launch = Launch("0a1b2c3d-dead", ["true"], {}, "/", 0o077, "/nowhere.json", agent=True)
    folder, lock = KernelFolder.create(launch)
    os.close(lock)
    this = Host.this()
    folder._write("state.json", {"keeper": [7, 7], "boot": "before", "host": {**vars(this), "boot": "before"}})
    assert run("kernels", "--json").json == {"kernels": [], "elsewhere": [], "faults": []}
    assert not folder.path.exists()
