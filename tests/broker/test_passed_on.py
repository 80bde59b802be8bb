"""What the broker was started with stays with it: descriptors, terminal, session and login are passed on to nobody."""

from __future__ import annotations

import errno
import os
import select
import sys
import tty
from collections.abc import Iterator
from pathlib import Path

import pytest
from people import Machine, Person

pytestmark = pytest.mark.criu

_ADMIN = 4711
"""Whose login the broker is started from."""

FROM_A_LOGIN = """
import contextlib, os, sys
terminal, secret, folder, login, *argv = sys.argv[1:]
with contextlib.suppress(FileNotFoundError), open("/proc/self/loginuid", "w") as f:
    f.write(login)
os.setsid()
os.dup2(os.open(terminal, os.O_RDWR), 0)  # it is the session's from now on
os.dup2(os.open(secret, os.O_RDWR), 7)
os.dup2(os.open(folder, os.O_RDONLY), 150)
os.execv(argv[0], argv)
"""
"""As a careless administrator's shell would start it."""

ATTACK = """
import contextlib, ctypes, json, os, select, socket, subprocess, sys
from jupyter_gpuckpt.client.broker_connection import _proof

def login_of(pid):
    with contextlib.suppress(FileNotFoundError):
        return open(f"/proc/{pid}/loginuid").read(), int(open(f"/proc/{pid}/sessionid").read())

def opened(pid):
    return [os.readlink(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd")]

def taken(pid):
    \"\"\"Take every descriptor of a process, and write into it; return what each is.\"\"\"
    libc, found = ctypes.CDLL(None), []
    pidfd = os.pidfd_open(pid)
    for number in range(1024):
        got = libc.syscall(438, pidfd, number, 0)
        if got >= 0:
            found.append(os.readlink(f"/proc/self/fd/{got}"))
            with contextlib.suppress(OSError):
                if select.select([], [got], [], 0)[1]:
                    os.write(got, b"forged\\n")
            os.close(got)
    os.close(pidfd)
    return found

TYPE = '''
import sys
sys.path[:0] = {path!r}
from jupyter_gpuckpt.freeze import ptrace
tracer = ptrace.Tracer()
tracer.seize({pid})
call = tracer.next_call()
unused = call.stack & ~4095
with open("/proc/{pid}/mem", "r+b", buffering=0) as memory:
    memory.seek(unused)
    memory.write(b"/dev/tty\\\\0")
terminal = tracer.insert(call, 2, unused, 2)
print(tracer.insert(call, 16, terminal, 0x5412, unused) if terminal >= 0 else terminal)
tracer.go_on(call)
'''

def typed(pid):
    \"\"\"Have a process push a key into its terminal; return what the system says.\"\"\"
    code = TYPE.format(path=sys.path, pid=pid)
    return int(subprocess.run([sys.executable, "-c", code], check=True, stdout=-1, text=True).stdout)

def attack_the_proof(request, descriptors):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
        s.settimeout(60)
        s.connect(os.environ["GPUCKPT_BROKER"])
        socket.send_fds(s, [json.dumps(request).encode()], descriptors)
        pid = json.loads(s.recv(65536))["prove"]
        proof = _proof(pid)  # it is the other program by now
        session, terminal = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[3:5]
        found = {"own session": int(session) == pid, "terminal": int(terminal), "login": login_of(pid)}
        found |= {"descriptors": taken(pid), "typed": typed(pid)}
        s.send(json.dumps({"proof": proof}).encode())
        s.recv(65536)
        return found
"""

KEEP = """
HOLDER = '''
import sys, time
sys.path[:0] = {path!r}
from jupyter_gpuckpt.freeze import ptrace
ptrace.Tracer().seize({pid})
print(flush=True)
time.sleep(1000)
'''

def keep_the_proof(request):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
        s.settimeout(60)
        s.connect(os.environ["GPUCKPT_BROKER"])
        s.send(json.dumps(request).encode())
        pid = json.loads(s.recv(65536))["prove"]
        proof = _proof(pid)
        code = HOLDER.format(path=sys.path, pid=pid)
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as holder:
            try:
                holder.stdout.readline()
                s.send(json.dumps({"proof": proof}).encode())
                return json.loads(s.recv(65536))
            finally:
                holder.kill()
"""


class Administrator:
    """Who started the broker: what is theirs."""

    def __init__(self, folder: Path) -> None:
        self._keyboard, self.terminal = os.openpty()
        tty.setraw(self.terminal)
        self.secret, self.folder = folder / "secret", folder / "of-root"
        self.secret.write_text("of root's")
        self.secret.chmod(0o600)
        self.folder.mkdir(mode=0o700)
        self.opened = {str(self.secret), str(self.folder), os.ttyname(self.terminal)}
        self.wrapper = [sys.executable, "-c", FROM_A_LOGIN, os.ttyname(self.terminal)]
        self.wrapper += [str(self.secret), str(self.folder), str(_ADMIN)]

    def close(self) -> None:
        os.close(self._keyboard)
        os.close(self.terminal)


@pytest.fixture(scope="module")
def administrator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Administrator]:
    administrator = Administrator(tmp_path_factory.mktemp("administrator"))
    yield administrator
    administrator.close()


@pytest.fixture(scope="module")
def machine(administrator: Administrator) -> Iterator[Machine]:
    machine = Machine.or_skip(wrapper=administrator.wrapper)
    yield machine
    machine.close()


def sleeper_of(person: Person) -> int:
    state = "json.loads((notebook.folder / 'state.json').read_text())"
    return int(person.does("import json", f"{state}['sleeper'][0]"))


def kernel_of(person: Person) -> int:
    return int(person.does("from keeper_faults import status", "status(notebook)['pid']"))


def what_the_broker_has(machine: Machine) -> set[str]:
    folder = Path(f"/proc/{machine.broker_pid}/fd")
    return {str(path.readlink()) for path in folder.iterdir()} - {os.devnull}


def test_a_proof_process_has_no_terminal_and_no_log_of_root_s(
    alice: Person, machine: Machine, administrator: Administrator
) -> None:
    """It is its user's, who can trace it, and so have it do whatever it may."""
    alice.does(ATTACK)
    found = alice.does(f"attack_the_proof({{'do': 'hold', 'pid': {sleeper_of(alice)}}}, ())")
    assert found["own session"]
    assert (found["terminal"], found["typed"]) == (0, -errno.ENXIO)
    assert not select.select([administrator.terminal], [], [], 0)[0], "keys that nobody has pressed"
    assert "forged" not in machine.log.read_text() + administrator.secret.read_text()
    assert not set(found["descriptors"]) & (what_the_broker_has(machine) | administrator.opened)
    check_login(found["login"], alice, machine)


def test_a_proof_process_that_its_user_keeps_does_not_keep_a_deputy(alice: Person) -> None:
    """Who traces a process is told first that it has ended: its parent would wait until the tracer has heard that."""
    alice.does(ATTACK, KEEP)
    assert alice.does(f"keep_the_proof({{'do': 'hold', 'pid': {sleeper_of(alice)}}})") == {"done": True}


def test_no_descriptor_of_root_s_reaches_a_user(alice: Person, machine: Machine, administrator: Administrator) -> None:
    assert not what_the_broker_has(machine) & administrator.opened
    alice.does(ATTACK)

    def check() -> None:
        for pid in (sleeper_of(alice), kernel_of(alice)):
            assert not set(alice.does(f"opened({pid})")) & (what_the_broker_has(machine) | administrator.opened)

    check()
    alice.runs("%gpuckpt save here")
    alice.runs("%gpuckpt restore here")
    check()


def check_login(found: tuple[str, int] | None, person: Person, machine: Machine) -> None:
    """Audit records name whom they are about, in a session that is not root's."""
    if found is not None:
        assert int(found[0]) == person.uid
        assert found[1] != int(Path(f"/proc/{machine.broker_pid}/sessionid").read_text())


CHOOSE_LOGIN = """
try:
    with open("/proc/self/loginuid", "w") as f:
        f.write("0")
except PermissionError as e:
    print("denied")
print(open("/proc/self/loginuid").read())
"""


def test_a_kernel_has_its_user_s_login_and_cannot_choose_another(alice: Person, machine: Machine) -> None:
    if not Path("/proc/self/loginuid").exists():
        pytest.skip("no audit here")
    alice.does(ATTACK)
    for cell in ("", "%gpuckpt save there", "%gpuckpt restore there"):
        alice.runs(cell)
        assert alice.runs(CHOOSE_LOGIN).split() == ["denied", str(alice.uid)]
        check_login(alice.does(f"login_of({kernel_of(alice)})"), alice, machine)


def test_a_broker_starts_with_standard_input_closed() -> None:
    """What is opened first would otherwise take its place, and be taken away where nothing is to be read."""
    closed = Machine.or_skip(wrapper=["sh", "-c", 'exec "$@" 0<&-', "sh"])
    try:
        found = closed.person("alice").does("import small_trees", "small_trees.run(small_trees.dumped())")
        assert found.endswith("criu")
    finally:
        closed.close()
