"""The clock of the day jumps, by a day back and by ten years ahead: nothing hangs, and no newest snapshot is lost.

`shifted_clock.c` shifts it for a keeper and its job alone.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from command_line import run
from job_programs import Job, ask, free_port, program
from keeper_faults import Asked, Criu
from notebooks import Notebook, wait_until

from jupyter_gpuckpt.store import Store

_DAY = 24 * 3600
_COUNTER = """
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("127.0.0.1", int(sys.argv[1])))
n = 100
print("ready", flush=True)
while True:
    _, asker = s.recvfrom(100)
    n += 1
    s.sendto(str(n).encode(), asker)
"""

_WAITS = """
import ctypes, queue, threading, time
libc, semaphore = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(64)
libc.sem_init(semaphore, 0, 0)
waits, errors, go = 0, set(), True
def wait():
    global waits
    while go:
        until = time.time() + 0.5
        libc.sem_timedwait(semaphore, (ctypes.c_long * 2)(int(until), int(until % 1 * 1e9)))
        errors.add(ctypes.get_errno())
        waits += 1
threading.Thread(target=wait, daemon=True).start()
def get():
    for _ in range(10):
        try: queue.SimpleQueue().get(timeout=0.5)  # before Python 3.13 it never ends after EINTR if its time is over
        except queue.Empty: pass
    ended.set()
ended = threading.Event()
threading.Thread(target=get, daemon=True).start()
"""


@pytest.fixture
def clock(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A file that says by how many seconds the clock is off, and the environment of those for whom it is."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here")
    library = tmp_path / "shifted_clock.so"
    source = Path(__file__).with_name("shifted_clock.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    shift = tmp_path / "shift"
    shift.write_text("0")
    return shift, {"LD_PRELOAD": str(library), "SHIFTED_CLOCK": str(shift), "GPUCKPT_KEEP_LAST": "1"}


def _names() -> set[str]:
    return {snapshot["name"] for snapshot in run("list", "--json").json["snapshots"]}


def _created(name: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(Store(Path(os.environ["GPUCKPT_STORE"])).get(name).created).timestamp()


def test_saves_and_restores_go_on_whatever_the_clock_says(tmp_path: Path, clock: tuple[Path, dict[str, str]]) -> None:
    shift, environment = clock
    python, port = shutil.which("python3") or "python3", free_port("udp")
    job = Job("job")
    job.start(python, program(tmp_path, _COUNTER), str(port), **environment)
    job.wait_for(1)
    job.save("first")
    assert ask("udp", port) == "101"
    shift.write_text(str(-_DAY))
    job.save("second")
    assert _created("second") < time.time() - _DAY / 2, "the clock was not shifted"
    assert ask("udp", port) == "102"
    # One is kept of it: the last, though the clock said of the first that it was newer.
    assert _names() == {"second"}
    job.save("third")
    assert _names() == {"third"}
    job.restore("third")
    assert ask("udp", port) == "103"
    shift.write_text(str(3650 * _DAY))
    job.save("fourth")
    assert _created("fourth") > time.time() + 3000 * _DAY
    job.restore("fourth")
    assert ask("udp", port) == "104"
    shift.write_text("0")
    job.save("fifth")
    assert _names() == {"fifth"}
    assert run("gc", "--json").status == 0
    assert run("check", "--json").status == 0
    job.kill()
    job.restore("fifth")
    assert ask("udp", port) == "105"


def test_what_was_to_be_deleted_does_not_wait_for_a_clock_that_was_set_back(tmp_path: Path) -> None:
    job = Job("job")
    job.start("sleep", "100")
    job.save("here")
    store = Path(os.environ["GPUCKPT_STORE"])
    assert run("rm", "here").status == 0
    pack = store / "packs" / ("0" * 32 + "-000001")
    pack.write_bytes(b"nobody needs it")
    # As it was written down when the clock was a year ahead.
    (store / "condemned.json").write_text(json.dumps({pack.name: {"since": time.time() + 365 * _DAY, "sessions": []}}))
    assert run("gc", "--json").status == 0
    assert not pack.exists()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="waits are begun again on x86-64")
def test_a_wait_with_a_time_limit_ends_with_it_and_not_with_a_dump(criu: Criu, notebook: Notebook) -> None:
    """A dump interrupts each wait, and may outlast its limit; few programs expect EINTR without a signal."""
    notebook.run(_WAITS)
    waits = notebook.value("waits")
    with criu.held_at("dump", "pre-dump") as reached:
        cell = Asked(notebook, "%gpuckpt save here")
        reached()
        time.sleep(1.5)
    assert cell.answer()["status"] == "ok"
    wait_until(lambda: int(notebook.value("waits")) > int(waits) + 2)
    assert notebook.value("errors") == "{110}"
    notebook.run("%gpuckpt restore here --discard")
    waits = notebook.value("waits")
    wait_until(lambda: int(notebook.value("waits")) > int(waits) + 2)
    assert notebook.value("errors") == "{110}"
    assert notebook.value("ended.wait(150)") == "True"
