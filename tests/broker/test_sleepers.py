"""What a user may have done in a sleeper: to what runs there alone, and one thing at a time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from people import Machine, Person

pytestmark = pytest.mark.criu

SLEEPING = """
import asyncio, contextlib, os, signal, subprocess, threading
from pathlib import Path
import small_trees
from notebooks import wait_until
from jupyter_gpuckpt.errors import GpuckptError
from jupyter_gpuckpt.linux import processes
from jupyter_gpuckpt.client.broker_connection import Deputy
from jupyter_gpuckpt.client.kernel_start import FIRST_PID
from jupyter_gpuckpt.linux.spawning import Program

@contextlib.asynccontextmanager
async def sleeping(program):
    space = await small_trees.sleeping("busy")
    try:
        log = "/dev/shm/gpuckpt/kernel.log"
        argv = ["/usr/bin/python3", "-c", program]
        pid = await space.spawn(Program(argv, {"PATH": "/usr/bin:/bin"}, log, after_pid=FIRST_PID - 1))
        second = Deputy()
        second.hold(space.pid)
        yield space, pid, second
        second.close()
    finally:
        await space.kill()

def refused(ask, *arguments):
    try:
        return f"done: {ask(*arguments)}"
    except GpuckptError as e:
        return e.why

def dumping(deputy, pid, name, started=lambda pid: None):
    folder = Path.home() / name
    folder.mkdir(exist_ok=True)
    return deputy.dump(pid, folder, folder, 60, started)
"""

STOPPED_IN_A_DUMP = """
async def attempt():
    ballast = "import os, time; ballast = os.urandom(200 << 20); open('/dev/shm/ready', 'w'); time.sleep(1000)"
    async with sleeping(ballast) as (space, pid, second):
        wait_until(lambda: space.path("/dev/shm/ready").exists())
        outer, criu, said = space.outer(pid), [], {}
        def stop(inner):
            while not (tracer := processes.tracer(outer)):
                pass
            os.kill(tracer, signal.SIGSTOP)
            criu.extend([inner, tracer])
        first = threading.Thread(target=lambda: said.update(first=dumping(space.deputy, pid, "first", stop)))
        first.start()
        wait_until(lambda: criu)
        try:
            said["criu"] = refused(dumping, second, criu[0], "second")
            said["next"] = refused(second.next_pid, 5000)
        finally:
            os.kill(criu[1], signal.SIGCONT)
            first.join()
        said["afterwards"] = dumping(second, pid, "third")
        return said
"""

BESIDE = """
async def attempt():
    program = '''
import subprocess, time
nested = subprocess.Popen(["unshare", "--user", "--map-current-user", "--pid", "--fork", "sleep", "1000"])
while open(f"/proc/{nested.pid}/task/{nested.pid}/children").read() == "":
    time.sleep(0.01)
nested.kill()  # which has rights in a user namespace of its own; what it has started has none
nested.wait()
time.sleep(1000)
'''
    async with sleeping(program) as (space, pid, second):
        wait_until(lambda: [processes.name(one) for one in processes.descendants(space.pid)][1:] == ["sleep"])
        nested = [processes.inner_pid(one) for one in processes.descendants(space.pid)]
        return {"nested": 1 in nested, "sleeper": refused(dumping, second, 1, "sleeper")}
"""


@pytest.fixture(scope="module")
def asleep(machine: Machine) -> Iterator[Person]:
    alice = machine.person("alice")
    alice.does(SLEEPING)
    yield alice
    alice.close()


def test_nothing_is_dumped_but_what_runs_below_the_sleeper(asleep: Person) -> None:
    """Not the sleeper itself, though in a namespace of its own a process of the kernel has the same pid."""
    said = asleep.does(BESIDE, "asyncio.run(attempt())")
    assert said["nested"]
    assert "Process 1 does not run in this kernel" in said["sleeper"]


def test_one_thing_at_a_time_is_done_in_a_sleeper(asleep: Person) -> None:
    """A criu that its user has stopped would be dumped by another one, with its capability, by another deputy."""
    said = asleep.does(STOPPED_IN_A_DUMP, "asyncio.run(attempt())")
    assert said["criu"] == said["next"] == "Another operation on this kernel or job is in progress."
    assert (said["first"], said["afterwards"]) == (0, 0)
