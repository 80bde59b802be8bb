"""How many namespaces each user may have is the system's to say: what the broker makes counts to whom it is for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from notebooks import wait_until
from people import Machine

pytestmark = pytest.mark.criu

IN_A_USER_NAMESPACE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
pid, (asked, ask) = os.getpid(), os.pipe()
if (mapping := os.fork()) == 0:
    os.read(asked, 1)
    for name in ("uid_map", "gid_map"):
        with open(f"/proc/{pid}/{name}", "w") as f:
            f.write("0 0 70000")
    os._exit(0)
assert libc.unshare(0x10020000) == 0, os.strerror(ctypes.get_errno())
os.write(ask, b"!")
assert os.waitpid(mapping, 0)[1] == 0
assert libc.mount(b"none", b"/", None, 0x44000, None) == 0, os.strerror(ctypes.get_errno())
os.execv(sys.argv[1], sys.argv[1:])
"""


class LimitedMachine(Machine):
    """A machine in a user namespace of its own, in which all ids are as outside: its limits are its own, too."""

    def _begin(self, opening_ways: Sequence[str]) -> subprocess.Popen[bytes]:
        ready = self.folder / "ready"
        hold = ["/bin/sh", "-c", f"touch {ready}; exec sleep infinity"]
        holder = subprocess.Popen([sys.executable, "-I", "-c", IN_A_USER_NAMESPACE, *opening_ways, *hold], cwd="/")
        wait_until(lambda: holder.poll() is not None or ready.exists())
        self.entering = ["nsenter", "--user", "--mount", f"--target={holder.pid}"]
        return holder

    def limit(self, kind: str, most: int) -> None:
        """Set how many namespaces of a kind a user may have, root included."""
        done = self.as_root("sh", "-c", f"echo {most} > /proc/sys/user/max_{kind}_namespaces")
        assert done.returncode == 0, done.stderr


@pytest.fixture
def limited() -> Iterator[LimitedMachine]:
    machine = LimitedMachine.or_skip()
    yield machine
    machine.close()


MANY = """
import asyncio, small_trees
from jupyter_gpuckpt.errors import GpuckptError
async def begun(most):
    spaces = []
    try:
        while len(spaces) < most:
            spaces.append(await small_trees.sleeping(f"sleeper-{len(spaces)}"))
        why = ""
    except GpuckptError as e:
        why = e.why
    held.append(spaces)
    return len(spaces), why
async def end():
    for spaces in held:
        for space in spaces:
            space.kill_now()
held = []
"""


@pytest.mark.parametrize("kind", ["pid", "mnt"])
def test_namespaces_count_to_the_user_whom_they_are_for(limited: LimitedMachine, kind: str) -> None:
    """Whoever had as many as there may be would keep all others, and the machine's own services, from having any."""
    limited.limit(kind, 2)
    alice, bob = limited.person("alice"), limited.person("bob")
    for person in (bob, alice):
        person.does(MANY)
    try:
        for person in (bob, alice):
            count, why = person.does("asyncio.run(begun(3))")
            assert count == 2
            assert f"max_{kind}_namespaces" in why
        assert limited.as_root("unshare", "--pid", "--mount", "--fork", "true").returncode == 0
    finally:
        for person in (alice, bob):
            person.does("asyncio.run(end())")


LOGGED_IN = 'echo 100000 > /proc/self/loginuid; exec "$@"'
"""As somebody who has no id in the user namespace."""


class ContainerOfAnother(LimitedMachine):
    """One that was started from a login which is not to be seen in it, as that of a container without root."""

    def _begin(self, opening_ways: Sequence[str]) -> subprocess.Popen[bytes]:
        holder = super()._begin(opening_ways)
        self.entering = ["sh", "-c", LOGGED_IN, "sh", *self.entering]
        return holder


def test_a_login_that_cannot_be_seen_or_changed_is_left_as_it_is() -> None:
    if not Path("/proc/self/loginuid").exists():
        pytest.skip("no audit here")
    if Path("/proc/self/loginuid").read_text() != str(2**32 - 1):
        pytest.skip("the tests run in a login")
    container = ContainerOfAnother.or_skip()
    try:
        alice = container.person("alice")
        assert alice.does("open('/proc/self/loginuid').read()") == str(2**32 - 1)
        assert alice.does(MANY, "asyncio.run(begun(1))") == [1, ""]
        alice.does("asyncio.run(end())")
    finally:
        container.close()
