"""Jobs of users without root, by the broker: started, saved, restored and ended by them, and reached by nobody else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from job_programs import COUNTER, ask, free_port
from notebooks import wait_until
from people import Machine, Person

from jupyter_gpuckpt.broker.rights import CAP_CHECKPOINT_RESTORE

pytestmark = pytest.mark.criu

SHELL = """
import subprocess
from command_line import COMMAND
def shell(*words, **more):
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=100, **more)
    return [done.returncode, done.stdout, done.stderr]
"""


def run(person: Person, *words: str) -> tuple[int, str, str]:
    """Run a command of ours as this user."""
    status, out, err = person.does(SHELL, f"shell(*{list(words)!r})")
    return status, out, err


def done(person: Person, *words: str) -> str:
    status, out, err = run(person, *words)
    assert (status, err) == (0, ""), (words, out, err)
    return out


def jobs(person: Person) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(done(person, "ps", "--json"))["jobs"]
    return found


@pytest.fixture(scope="module")
def alice(machine: Machine) -> Person:
    return machine.person("alice")


@pytest.fixture(scope="module")
def counter(alice: Person) -> Iterator[int]:
    """A job of Alice's that counts what arrives at a port; its snapshot ``at-101`` was made after the first."""
    port = free_port("udp")
    program = str(alice.home / "counter.py")
    alice.does(f"open({program!r}, 'w').write({COUNTER!r})")
    done(alice, "exec", "counter", "--", "/usr/bin/env", "python3", program, "udp", str(port), "1")
    wait_until(lambda: "ready" in done(alice, "logs", "counter"))
    assert ask("udp", port) == "101"
    done(alice, "save", "counter", "at-101")
    yield port
    run(alice, "stop", "counter", "--force")


def test_a_job_counts_on_over_itself_after_its_end_and_as_a_new_one(alice: Person, counter: int) -> None:
    assert ask("udp", counter) == "102"
    assert "Restored at-101" in done(alice, "restore", "counter", "at-101")
    assert ask("udp", counter) == "102"
    done(alice, "stop", "counter", "--force")
    assert jobs(alice)[0]["exit_status"] == -9
    assert "Restored at-101" in done(alice, "restore", "counter")
    assert [ask("udp", counter), ask("udp", counter)] == ["102", "103"]
    assert done(alice, "logs", "counter").splitlines() == ["ready", "101", "102", "103"]
    second = json.loads(done(alice, "restore", "counter", "at-101", "--as", "second", "--other-ports", "--json"))
    other = int(second["warnings"][0].split()[4])
    assert ask("udp", other) == "102"
    assert "Stopped" in done(alice, "stop", "second")
    assert "Forgot" in done(alice, "forget", "second")
    assert [job["job"] for job in jobs(alice)] == ["counter"]


def test_a_job_has_its_users_rights_and_no_more_before_and_after_a_restore(
    alice: Person, counter: int, machine: Machine
) -> None:
    def rights(name: str) -> dict[str, str]:
        pid = next(job["pid"] for job in jobs(alice) if job["job"] == name)
        lines = alice.does(f"open('/proc/{pid}/status').read().splitlines()")
        wanted = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapAmb", "CapBnd", "NoNewPrivs")
        return {
            key: " ".join(value.split()) for key, _, value in (line.partition(":") for line in lines) if key in wanted
        }

    done(alice, "exec", "fresh", "--", "/bin/sleep", "1000")
    fresh = rights("fresh")
    done(alice, "stop", "fresh")
    done(alice, "forget", "fresh")
    assert fresh["Uid"] == " ".join([str(alice.uid)] * 4)
    assert fresh["NoNewPrivs"] == "1"
    assert {int(fresh[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb", "CapBnd")} == {0}
    done(alice, "restore", "counter", "at-101")
    restored = rights("counter")
    # criu had this one, and cannot take it out of the set that bounds what is never gained.
    assert int(restored.pop("CapBnd"), 16) & ~(1 << CAP_CHECKPOINT_RESTORE) == int(fresh.pop("CapBnd"), 16)
    assert restored == fresh


def test_another_user_neither_sees_nor_reaches_a_job(
    alice: Person, bob: Person, counter: int, machine: Machine
) -> None:
    assert jobs(bob) == []
    for words in (["save", "counter"], ["stop", "counter"], ["logs", "counter"], ["restore", "counter", "at-101"]):
        status, out, err = run(bob, *words)
        assert status != 0, words
        assert "Traceback" not in err
        assert "ready" not in out
    # Nor by saying that Alice's folders are Bob's.
    hers = f"{{**__import__('os').environ, 'JUPYTER_RUNTIME_DIR': '{alice.home}/runtime', 'GPUCKPT_STORE': "
    hers += f"'{alice.home}/store'}}"
    assert "counter" not in bob.does(SHELL, f"shell('ps', env={hers})")[1]
    for words in (["stop", "counter", "--force"], ["save", "counter"], ["list"], ["forget", "counter"]):
        status, out, err = bob.does(SHELL, f"shell(*{words!r}, env={hers})")
        assert status != 0, (words, out)
        assert "ermission denied" in err or "not yours" in err or "belongs to" in err, (words, err)
        assert "at-101" not in out
    # A job of the same name is another job.
    done(bob, "exec", "counter", "--", "/bin/sleep", "1000")
    assert "Saved at-101" in done(bob, "save", "counter", "at-101")
    assert "sleep" in jobs(bob)[0]["command"][0]
    done(bob, "stop", "counter", "--force")
    assert ask("udp", counter).isdecimal()
    assert jobs(alice)[0]["state"] == "running"


def test_jobs_that_have_ended_leave_no_process_of_root_s(alice: Person, counter: int, machine: Machine) -> None:
    before = machine.settled(machine.children)
    done(alice, "exec", "short", "--", "/bin/sleep", "1000")
    assert machine.children() > before
    done(alice, "stop", "short")
    wait_until(lambda: machine.children() <= before, what="processes are left")


def test_who_is_not_served_is_told_so_before_anything_is_started(person: Callable[..., Person]) -> None:
    carol = person("carol")
    status, out, err = run(carol, "exec", "train", "--", "/bin/sleep", "1000")
    assert (status, out) == (4, "")
    assert "Permission denied" in err
    assert jobs(carol) == []
