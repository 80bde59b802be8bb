"""What users try against each other and against root, by the broker; the numbers are those of docs/security.md."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from notebooks import wait_until
from people import GID, UIDS, Machine, Person

from jupyter_gpuckpt.broker import service
from jupyter_gpuckpt.broker.protocol import PROOF
from jupyter_gpuckpt.broker.register import Register
from jupyter_gpuckpt.client.broker_connection import _proof
from jupyter_gpuckpt.freeze.criu_program import CriuProgram

pytestmark = pytest.mark.criu

ASK = """
import json, os, socket
from jupyter_gpuckpt.client.broker_connection import _proof
def ask(message, descriptors=(), connection=None):
    with connection or socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
        s.settimeout(60)
        if connection is None:
            s.connect(os.environ["GPUCKPT_BROKER"])
        raw = message if isinstance(message, bytes) else json.dumps(message).encode()
        try:
            socket.send_fds(s, [raw], list(descriptors))
            said = json.loads(s.recv(65536) or b'{"hung": "up"}')
            if "prove" not in said:
                return said
            s.send(json.dumps({"proof": _proof(said["prove"])}).encode())
            return json.loads(s.recv(65536) or b'{"hung": "up"}')
        except ConnectionError:
            return {"hung": "up"}
"""


def asks(person: Person, message: str) -> dict[str, object]:
    answer: dict[str, object] = person.does(ASK, f"ask({message})")
    return answer


@pytest.fixture(scope="module")
def saved(alice: Person) -> str:
    """Images of a process of Alice's."""
    alice.does("import small_trees")
    return str(alice.does("small_trees.run(small_trees.dumped())"))


def sleeper_of(alice: Person) -> int:
    return int(alice.does("import json", "json.loads((notebook.folder / 'state.json').read_text())['sleeper'][0]"))


# -- across users


def test_another_user_cannot_have_a_kernel_dumped(alice: Person, bob: Person) -> None:
    said = asks(bob, f"{{'do': 'hold', 'pid': {sleeper_of(alice)}}}")
    assert said["error"]["kind"] == "KernelLost"  # type: ignore[index]
    assert "dump" not in said
    assert asks(alice, f"{{'do': 'hold', 'pid': {sleeper_of(alice)}}}") == {"done": True}


def test_another_user_finds_no_snapshot_kernel_or_name(alice: Person, bob: Person) -> None:
    alice.runs("x = 1")
    alice.runs("%gpuckpt save geheim --replace")
    folders = alice.does("import os", "[os.environ[n] for n in ('GPUCKPT_STORE', 'JUPYTER_RUNTIME_DIR')]")
    keeper = alice.does("str(notebook.folder / 'keeper.sock')")
    attempt = """
import pathlib, socket
def tried(what):
    try: what()
    except PermissionError: return "denied"
    return "done"
"""
    for path in (folders[0], folders[1] + "/gpuckpt"):
        assert bob.does(attempt, f"tried(lambda: list(pathlib.Path({path!r}).iterdir()))") == "denied"
    assert bob.does(attempt, f"tried(lambda: socket.socket(socket.AF_UNIX).connect({keeper!r}))") == "denied"
    told = bob.does(
        "import subprocess",
        "[subprocess.run(['jupyter', 'gpuckpt', *w], capture_output=True, text=True).stdout"
        " for w in (['list'], ['kernels'])]",
    )
    assert "geheim" not in "".join(told)
    assert alice.does("notebook.manager.provisioner.kernel_id")[:8] not in "".join(told)


def test_a_uid_that_is_claimed_is_not_heard(alice: Person, bob: Person) -> None:
    uid = UIDS["alice"]
    for message in (
        f"{{'do': 'hold', 'pid': {sleeper_of(alice)}, 'uid': {uid}}}",
        f"{{'do': 'criu', 'uid': {uid}, 'gid': 0}}",
        "{'do': 'criu', 'path': '/tmp/x'}",
        "{'do': 'next_pid', 'after': '1; id'}",
        "{'do': 'dump', 'pid': 1, 'seconds': 60, 'options': ['--action-script', '/tmp/x']}",
        "{'do': '../../bin/sh'}",
    ):
        assert asks(bob, message)["error"]["kind"] == "Refused", message  # type: ignore[index]
    # SCM_CREDENTIALS, which root alone may forge, is no way either: the sender's own are not asked for.
    forged = "__import__('socket').SOL_SOCKET, 2, __import__('struct').pack('iII', os.getpid(), " + f"{uid}, {uid})"
    said = bob.does(
        ASK,
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)",
        "s.connect(os.environ['GPUCKPT_BROKER'])",
        f"""
try:
    s.sendmsg([b'{{"do": "criu"}}'], [({forged})])
    said = "sent"
except PermissionError:
    said = "denied"
""",
        "said",
    )
    assert said == "denied"


def test_who_is_not_of_the_group_cannot_connect(person: Callable[..., Person], machine: Machine) -> None:
    carol = person("carol")
    assert carol.does("import os", "os.access(os.environ['GPUCKPT_BROKER'], os.W_OK)") is False
    about = machine.socket.lstat()
    assert (stat.S_IMODE(about.st_mode), about.st_uid, about.st_gid) == (0o660, 0, GID)


# -- processes with other rights


@pytest.mark.parametrize(
    ("wrapper", "why"),
    [
        (["setpriv", "--inh-caps=+net_raw", "--ambient-caps=+net_raw", "--"], "other rights"),
        (["unshare", "--user", "--"], "user namespace"),
        (["unshare", "--user", "--map-root-user", "--mount", "--"], "other rights"),
    ],
    ids=["capability", "user namespace", "mount namespace"],
)
def test_a_process_with_other_rights_or_in_other_namespaces_is_not_served(
    machine: Machine, wrapper: list[str], why: str
) -> None:
    # The capability is kept over the change of user by another setpriv, before that.
    script = f"{ASK}\nprint(json.dumps(ask({{'do': 'criu'}})))"
    ids = [f"--reuid={UIDS['bob']}", f"--regid={UIDS['bob']}", f"--groups={GID}"]
    keeping = ["--inh-caps=+net_raw", "--ambient-caps=+net_raw"] if wrapper[0] == "setpriv" else []
    inner = wrapper if wrapper[0] != "setpriv" else []
    done = machine.as_root(
        *("setpriv", *ids, *keeping, "--", *inner, sys.executable, "-c", script),
        environment=machine.environment_of("bob"),
    )
    if "unshare failed" in done.stderr:
        pytest.skip(f"no user namespaces for users here: {done.stderr}")
    assert why in json.loads(done.stdout)["error"]["why"], done


def test_a_process_under_seccomp_cannot_leave_it_by_the_broker(person: Callable[..., Person]) -> None:
    bob = person("bob")
    assert "version" in str(asks(bob, "{'do': 'criu'}"))
    said = bob.does(
        ASK,
        """
import ctypes, struct
libc = ctypes.CDLL(None)
allow = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0x7fff0000))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 1, ctypes.addressof(allow)))
libc.prctl(38, 1, 0, 0, 0)
assert libc.prctl(22, 2, program, 0, 0) == 0
""",
        "ask({'do': 'criu'})",
    )
    assert "seccomp" in said["error"]["why"]


LANDLOCKED = """
import ctypes, struct, threading
libc = ctypes.CDLL(None, use_errno=True)
def landlocked(request, descriptors):
    # Of its thread alone: that one may read nothing.
    told = []
    def ask_so():
        rules = libc.syscall(444, struct.pack("Q", 1 << 2), 8, 0)
        libc.prctl(38, 1, 0, 0, 0)
        assert libc.syscall(446, rules, 0) == 0, os.strerror(ctypes.get_errno())
        try:
            open("/etc/passwd")
        except PermissionError:
            told.append(ask(request, descriptors))
    thread = threading.Thread(target=ask_so)
    thread.start()
    thread.join()
    return told[0]
folder, listener = os.open(os.environ["HOME"], os.O_RDONLY), socket.socket(socket.AF_UNIX)
listener.bind(os.environ["HOME"] + "/landlocked.sock")
"""


def test_a_process_under_landlock_cannot_leave_it_by_the_broker(alice: Person) -> None:
    """Nothing tells others of Landlock; but who is confined by it cannot look into what is not."""
    if ctypes.CDLL(None).syscall(444, None, 0, 1) < 1:
        pytest.skip("this system has no Landlock")
    alice.does(ASK, LANDLOCKED)
    hold = f"{{'do': 'hold', 'pid': {sleeper_of(alice)}}}"
    for request, brought in (("{'do': 'start'}", "(folder, listener.fileno())"), (hold, "()")):
        said = alice.does(f"landlocked({request}, {brought})")
        assert "Landlock" in said.get("error", {}).get("why", ""), said
    assert alice.does("landlocked({'do': 'criu'}, ())")["done"]  # that starts nothing
    assert asks(alice, hold) == {"done": True}


def test_who_is_not_confined_is_not_taken_for_that_by_a_process_that_is_just_beginning() -> None:
    become = f"import os; print(flush=True); input(); os.execve('/bin/cat', ['cat'], {{{PROOF!r}: 'secret'}})"
    words = [sys.executable, "-I", "-S", "-c", become]
    with (
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={}) as process,
        ThreadPoolExecutor(1) as threads,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()  # it has no environment by now
        proof = threads.submit(_proof, process.pid)
        with pytest.raises(NotYet):
            proof.result(0.2)
        process.stdin.write(b"go\n")
        process.stdin.flush()
        assert proof.result(60) == "secret"
        process.stdin.close()


WITH_A_KEY = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
assert libc.syscall(250, 1, None) > 0
assert libc.syscall(248, b"user", b"of-root", b"geheim", 6, -3) > 0
os.execv(sys.argv[1], sys.argv[1:])
"""

SEARCH = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print(libc.syscall(250, 10, -3, b"user", b"of-root", 0), ctypes.get_errno())
"""


def test_the_keys_of_root_s_session_are_not_passed_on() -> None:
    """Whoever possesses a session's keyring can read what is in it, whatever their uid is."""
    if platform.machine() != "x86_64" or ctypes.CDLL(None).syscall(250, 0, -3, 1) < 0:
        pytest.skip("no keys here, or they are called otherwise")
    with_a_key = Machine.or_skip(wrapper=[sys.executable, "-c", WITH_A_KEY])
    try:
        alice = with_a_key.person("alice")
        alice.starts_kernel()
        not_there = "-1 126"  # ENOKEY
        assert alice.runs(SEARCH) == not_there
        alice.runs("%gpuckpt save here")
        alice.runs("%gpuckpt restore here")
        assert alice.runs(SEARCH) == not_there
    finally:
        with_a_key.close()


def test_root_and_what_asks_for_it_are_not_served(machine: Machine) -> None:
    done = machine.as_root(
        sys.executable,
        "-c",
        f"{ASK}\nprint(json.dumps(ask({{'do': 'criu'}})))",
        environment=machine.environment_of("bob"),
    )
    assert "root" in json.loads(done.stdout)["error"]["why"]


def test_a_process_of_roots_among_the_kernels_is_not_dumped(alice: Person, machine: Machine) -> None:
    alice.runs("x = 2")
    sleeper = sleeper_of(alice)
    # Its parent ends, so that it becomes process 1's: the sleeper's.
    inside = ["nsenter", f"--target={sleeper}", "--mount", "--pid", "sh", "-c", "sleep 1000 >/dev/null 2>&1 &"]
    subprocess.run(inside, cwd="/", check=True)
    try:
        machine.wait_for_process(sleeper, "sleep")
        assert "left behind" in alice.fails("%gpuckpt save with-root")  # that is the keeper
        said = alice.does(
            f"""
import pathlib
from jupyter_gpuckpt.errors import GpuckptError
from jupyter_gpuckpt.client.broker_connection import Deputy
folder = pathlib.Path.home() / "images"
folder.mkdir(exist_ok=True)
deputy = Deputy()
deputy.hold({sleeper})
try:
    said = deputy.dump(10000, folder, folder, 60, lambda pid: None)
except GpuckptError as e:
    said = e.why
deputy.close()
""",
            "said",
        )
        assert "other rights" in said
    finally:
        for pid in machine.processes_of(sleeper, "sleep"):
            os.kill(pid, 9)
    assert alice.runs("print(x)") == "2"


def test_a_set_user_id_program_gives_a_kernel_nothing(alice: Person, machine: Machine) -> None:
    program = machine.folder / "id"
    program.write_bytes(Path("/usr/bin/id").read_bytes())
    program.chmod(0o4755)
    shown = "import subprocess; print(subprocess.run([{!r}, '-u'], capture_output=True, text=True).stdout)"
    assert alice.runs(shown.format(str(program))).strip() == str(alice.uid)
    alice.runs("%gpuckpt save plain --replace")
    alice.runs("%gpuckpt restore plain")
    assert alice.runs(shown.format(str(program))).strip() == str(alice.uid)


def test_only_sleepers_that_the_broker_started_are_entered(alice: Person) -> None:
    own, pid_1 = alice.does("import os", "os.getpid()"), 1
    for pid in (own, pid_1, 4_000_000):
        assert asks(alice, f"{{'do': 'hold', 'pid': {pid}}}")["error"]["kind"] == "KernelLost"  # type: ignore[index]
    # One that looks like a sleeper, in namespaces of the user's own making.
    fake = alice.does(
        "import subprocess",
        "process = subprocess.Popen(['unshare', '--user', '--map-root-user', '--pid', '--mount', '--fork', "
        "'--kill-child', 'sleep', '1000'])",
        "process.pid",
    )
    assert asks(alice, f"{{'do': 'hold', 'pid': {fake}}}")["error"]["kind"] == "KernelLost"  # type: ignore[index]
    alice.does("process.kill()", "process.wait()")


def test_a_sleeper_that_enters_other_namespaces_is_not_followed_there(alice: Person) -> None:
    """It is its user's process: in a mount namespace that it made, root would open files of their choice."""
    alice.does("import small_trees")
    found = alice.does(
        """
import asyncio, os, subprocess, sys
from jupyter_gpuckpt.errors import GpuckptError
from jupyter_gpuckpt.client.broker_connection import Deputy

async def attempt():
    space = await small_trees.sleeping("moved")
    before = os.readlink(f"/proc/{space.pid}/ns/mnt")
    # As a debugger would make it: ptrace puts a call of unshare(CLONE_NEWUSER | CLONE_NEWNS) into it.
    code = f"import sys; sys.path[:0] = {sys.path!r}; import small_trees; small_trees.make_unshare({space.pid})"
    subprocess.run([sys.executable, "-c", code], check=True)
    moved = os.readlink(f"/proc/{space.pid}/ns/mnt") != before
    other = Deputy()
    try:
        other.hold(space.pid)
        said = "held"
    except GpuckptError as e:
        said = type(e).__name__
    other.close()
    # The deputy that started it does its work in the namespaces that it made.
    space.deputy.next_pid(5000)
    await space.kill()
    return moved, said
found = asyncio.run(attempt())
""",
        "found",
    )
    assert found == [True, "KernelLost"]


# -- images


EDITS = {
    "uid 0": "small_trees.edit_core(lambda c: setattr(c, 'uid', 0))",
    "effective uid 0": "small_trees.edit_core(lambda c: setattr(c, 'euid', 0))",
    "file system uid 0": "small_trees.edit_core(lambda c: setattr(c, 'fsuid', 0))",
    "gid 0": "small_trees.edit_core(lambda c: setattr(c, 'sgid', 0))",
    "group 0": "small_trees.edit_core(lambda c: c.groups.append(0))",
    "effective capabilities": "small_trees.edit_core(lambda c: c.cap_eff.__setitem__(0, 1 << 21))",
    "permitted capabilities": "small_trees.edit_core(lambda c: c.cap_prm.__setitem__(1, 1 << 8))",
    "inheritable capabilities": "small_trees.edit_core(lambda c: c.cap_inh.__setitem__(1, 1 << 8))",
    "ambient capabilities": "small_trees.edit_core(lambda c: c.cap_amb.__setitem__(1, 1 << 8))",
    "no no_new_privs": "small_trees.edit_core(lambda c: setattr(c, 'no_new_privs', 0))",
    "no_new_privs left out": "small_trees.edit_core(lambda c: c.ClearField('no_new_privs'))",
    "securebits": "small_trees.edit_core(lambda c: setattr(c, 'secbits', 1))",
    "security label": "small_trees.edit_core(lambda c: c.MergeFromString(b'\\x7a\\x01x'))",
    "credentials left out": "small_trees.edit_core(lambda c: c.Clear())",
    "credentials twice": "small_trees.append_to_core(b'\\x2a\\x04\\x52\\x02\\x08\\x00')",
    "a capability appended": "small_trees.append_to_core(b'\\x2a\\x08\\x52\\x06\\x58\\x80\\x80\\x80\\x01\\x00')",
    "another form of images": "small_trees.in_the_old_form(lambda c: c.cap_prm.__setitem__(1, 1 << 8))",
    "an image of 50 MB": "small_trees.append_to_core(b'\\xc2\\x3e\\x80\\x80\\x80\\x19' + bytes(50 << 20))",
    "a million fields": "small_trees.append_to_core(b'\\x98\\x06\\x00' * (1 << 20))",
    "a cut image": "lambda f: (f / 'core-10000.img').write_bytes((f / 'core-10000.img').read_bytes()[:-5])",
    "an empty image": "lambda f: (f / 'core-10000.img').write_bytes(b'')",
    "security policies": "lambda f: (f / 'apparmor.img').write_bytes(b'x')",
    "a FIFO": "lambda f: ((f / 'core-10000.img').unlink(), os.mkfifo(f / 'core-10000.img'))",
    "another FIFO": "lambda f: os.mkfifo(f / 'core-9.img')",
    "a folder": "lambda f: (f / 'core-9.img').mkdir()",
    "a link to root's": "lambda f: ((f / 'files.img').unlink(), (f / 'files.img').symlink_to('/etc/shadow'))",
    "a socket": "lambda f: __import__('socket').socket(1).bind(str(f / 'x.img'))",
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_images_that_ask_for_more_are_refused_before_criu_reads_them(alice: Person, saved: str, edit: str) -> None:
    alice.does("import os, small_trees")
    for check in (True, False):
        found = alice.does(f"small_trees.run(small_trees.restored({saved!r}, {edit}, {check}))")
        assert found.get("kind") == "Refused", found
        assert found["pids"] == []


def test_images_that_ask_for_nothing_more_come_back_with_the_same_rights(alice: Person, saved: str) -> None:
    found = alice.does("import small_trees", f"small_trees.run(small_trees.restored({saved!r}))")
    assert found["status"] == 0, found["log"]
    uid = UIDS["alice"]
    ids = " ".join([str(uid)] * 4)
    none = "0" * 16
    assert found["rights"] == [
        {"Uid": ids, "Gid": ids, "Groups": str(GID), "NoNewPrivs": "1"}
        | dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapAmb"), none)
    ]
    assert found["mounts"] == 0


def test_images_that_change_while_they_are_looked_at_have_no_effect(alice: Person, saved: str) -> None:
    """A thread swaps the core image for one with capabilities, and back, as fast as it can."""
    outcomes = alice.does(
        "import os, pathlib, shutil, threading, small_trees",
        f"""
def swapping(folder, stop):
    good, evil = (folder / "core-10000.img").read_bytes(), None
    small_trees.edit_core(lambda c: (c.cap_eff.__setitem__(1, 256), c.cap_prm.__setitem__(1, 256)))(folder)
    evil = (folder / "core-10000.img").read_bytes()
    while not stop.is_set():
        for content in (good, evil):
            (folder / "swap").write_bytes(content)
            (folder / "swap").rename(folder / "core-10000.img")
            (folder / "core-10000.img").write_bytes(content)

outcomes = []
for _ in range(12):
    stop = threading.Event()
    threads = []
    def begin(folder):
        threads.append(threading.Thread(target=swapping, args=(folder, stop)))
        threads[0].start()
    found = small_trees.run(small_trees.restored({saved!r}, begin))
    stop.set()
    threads[0].join()
    outcomes.append(found)
""",
        "outcomes",
    )
    for found in outcomes:
        if found.get("status") == 0:
            assert [{one[f"Cap{kind}"] for kind in ("Prm", "Eff", "Inh", "Amb")} for one in found["rights"]] == [
                {"0" * 16}
            ], found
        else:
            assert found.get("kind") in (None, "Refused"), found


def test_a_restore_opens_no_file_that_its_user_may_not_open(alice: Person, saved: str, machine: Machine) -> None:
    """criu opens what the images name: with the rights of the user."""
    secret = machine.folder / "secret"
    secret.write_text("of root's")
    secret.chmod(0o600)
    edit = f"""
def name_secret(folder):
    from jupyter_gpuckpt.freeze import images
    raw = (folder / "files.img").read_bytes()
    out, done = bytearray(raw[:8]), False
    for e in images._entries(raw, "file"):
        if e.HasField("reg") and images._path(e.reg).endswith("kernel.log"):
            e.reg.name, e.reg.flags, e.reg.size, done = {str(secret)!r}.encode(), 0, 9, True
        out += images._packed(e)
    assert done
    (folder / "files.img").write_bytes(bytes(out))
"""
    alice.does("import small_trees", edit)
    found = alice.does(f"small_trees.run(small_trees.restored({saved!r}, name_secret))")
    assert found["status"] != 0
    assert "Permission denied" in found["log"]


# -- the environment


def test_settings_and_programs_of_the_users_do_not_reach_criu(person: Callable[..., Person], machine: Machine) -> None:
    bob = person("bob")
    home = machine.folder / "bob"
    trace, hostile = home / "was-here", home / "hostile"
    script = f"#!/bin/sh\ntouch {trace}\nexit 1\n"
    options = f"action-script {hostile}/script\nlog-file {trace}\nghost-limit 1\n"
    bob.does(
        "import os, pathlib",
        f"""
hostile = pathlib.Path({str(hostile)!r})
hostile.mkdir()
for name in ("script", "sh", "tar", "cp", "ip", "criu", "python3", "iptables-restore"):
    (hostile / name).write_text({script!r})
    (hostile / name).chmod(0o755)
(pathlib.Path.home() / ".criu").mkdir()
for path in (pathlib.Path.home() / ".criu" / "default.conf", hostile / "criu.conf"):
    path.write_text({options!r})
for name, value in {{
    "CRIU_CONFIG_FILE": str(hostile / "criu.conf"), "CRIU_LIBS_DIR": str(hostile),
    "GPUCKPT_CRIU": str(hostile / "criu"),
    "LD_LIBRARY_PATH": str(hostile), "TAR_OPTIONS": f"--to-command={{hostile}}/script", "ENV": str(hostile / "script"),
    "XDG_RUNTIME_DIR": str(hostile), "BASH_ENV": str(hostile / "script"),
}}.items():
    os.environ[name] = value
os.environ["PATH"] += ":" + str(hostile)
""",
    )
    bob.starts_kernel()
    bob.runs("x = 41")
    bob.runs("%gpuckpt save here")
    bob.runs("x = 1")
    bob.runs("%gpuckpt restore here")
    assert bob.runs("print(x)") == "41"
    assert not trace.exists()


def test_a_criu_that_users_can_change_is_not_used(machine: Machine) -> None:
    theirs = machine.folder / "bob" / "criu"
    theirs.write_text("#!/bin/sh\necho Version: 4.2.1\n")
    theirs.chmod(0o755)
    done = machine.as_root(
        *(sys.executable, "-I", "-m", "jupyter_gpuckpt.broker", "gpuckpt-test"),
        environment={
            **machine.environment,
            "GPUCKPT_CRIU": str(theirs),
            "GPUCKPT_BROKER": str(machine.folder / "b" / "s"),
        },
    )
    assert done.returncode == 1
    assert "can be changed by users other than root" in done.stderr


# -- bad clients


def test_malformed_requests_are_refused_and_the_broker_goes_on(bob: Person) -> None:
    """Whatever is said, the answer is a refusal or a hang-up, and never a verb that is done."""
    words = st.sampled_from(
        ["start", "hold", "dump", "restore", "check", "next_pid", "", "criu\0", "ｈｏｌｄ", "x" * 5000]
    )
    values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20), st.lists, max_leaves=5
    )
    requests = st.dictionaries(st.sampled_from(["pid", "seconds", "after", "path", "uid", "do"]), values, max_size=4)
    messages = st.binary(max_size=300) | st.builds(
        lambda verb, rest: json.dumps({**rest, "do": verb}).encode(), words, requests
    )
    said: list[bytes] = []

    @settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(messages, st.integers(0, 5))
    def collect(message: bytes, descriptors: int) -> None:
        said.append(message or b"\0")
        counts.append(descriptors)

    counts: list[int] = []
    collect()
    pairs = [(list(message), count) for message, count in zip(said, counts, strict=True)]
    bob.does(ASK, "import time", f"pairs = {pairs!r}")
    answers = bob.does(
        """
answers = []
null = [os.open("/", os.O_RDONLY) for _ in range(5)]
for message, count in pairs:
    answers.append(ask(bytes(message), null[:count]))
    time.sleep(0.02)  # below the limit of connections
""",
        "answers",
    )
    assert len(answers) == len(said)
    for message, answer in zip(said, answers, strict=True):
        assert set(answer) <= {"error", "hung"}, (message, answer)
        if "error" in answer:
            assert answer["error"]["kind"] in ("Refused", "KernelLost"), (message, answer)
    assert "version" in str(asks(bob, "{'do': 'criu'}"))


def test_a_user_who_floods_the_broker_does_not_keep_others_from_it(
    alice: Person, person: Callable[..., Person]
) -> None:
    """Hundreds of connections, some silent, some that send without reading."""
    bob = person("bob")
    bob.does(
        ASK,
        """
import threading
stop, held = threading.Event(), []
def flood():
    while not stop.is_set():
        s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            s.settimeout(1)
            s.connect(os.environ["GPUCKPT_BROKER"])
            s.send(b'{"do": "criu"}')
            s.send(b"[" * 60000)
            held.append(s)
        except OSError:
            s.close()
        if len(held) > 300:
            held.pop(0).close()
threads = [threading.Thread(target=flood) for _ in range(2)]
for thread in threads: thread.start()
""",
    )
    try:
        alice.runs("x = 43")
        assert "Saved flooded" in alice.runs("%gpuckpt save flooded --replace")
        alice.runs("x = 1")
        alice.runs("%gpuckpt restore flooded")
        assert alice.runs("print(x)") == "43"
    finally:
        bob.does("stop.set()", "[thread.join() for thread in threads]", "[s.close() for s in held]")


FLOOD_LOG = """
import contextlib, time
def until_served():
    # Who has just asked too many requests is hung up on for a while.
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s, contextlib.suppress(OSError):
            s.connect(os.environ["GPUCKPT_BROKER"])
            s.send(b'{"do": "criu"}')
            if s.recv(65536):
                return
        time.sleep(0.5)
def flood():
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
        s.connect(os.environ["GPUCKPT_BROKER"])
        began = time.monotonic()
        for _ in range(35):
            s.send(b'{"do": "nothing of the kind"}')
            s.recv(65536)
        took = time.monotonic() - began
    began = time.monotonic()
    while time.monotonic() - began < 1.5:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
            s.connect(os.environ["GPUCKPT_BROKER"])
    return took
"""


def test_a_user_cannot_fill_the_broker_s_log_at_will(bob: Person, machine: Machine) -> None:
    bob.does(ASK, FLOOD_LOG, "until_served()")
    before = machine.settled(lambda: machine.log.read_text().count("too many requests"))
    assert bob.does("flood()") > 2.0  # ten requests a second
    assert machine.settled(lambda: machine.log.read_text().count("too many requests")) - before <= 4


def test_a_user_has_so_many_deputies_and_no_more(tmp_path: Path) -> None:
    with socket.socket() as listener:
        program = CriuProgram((), (4, 2, 1), "", "system")
        broker = service._Broker(listener, program, Register(tmp_path), with_containers=True)
        broker._deputies.update(dict.fromkeys(range(1, 257), (1000, 1)))
        assert not broker._may_have_one_more((1000, 1))
        assert [broker._may_have_one_more((1001, 1)) for _ in range(1000)].count(True) < 1000  # nor so many at once
        assert broker._may_have_one_more((1002, 1))
        assert broker._may_have_one_more((1000, 2))  # in another container


def test_a_namespace_of_ones_own_making_is_no_container_with_deputies_of_its_own(tmp_path: Path) -> None:
    connecting = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect(sys.argv[1]); input()"
    )
    found = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        for namespaces in ([], ["--pid", "--fork"], ["--user", "--pid", "--fork"], ["--user", "--pid", "--fork"]):
            argv = [*(["unshare", *namespaces] if namespaces else []), sys.executable, "-c", connecting]
            with subprocess.Popen([*argv, str(tmp_path / "s")], stdin=subprocess.PIPE) as client:
                with listener.accept()[0] as connection:
                    found.append(service._user_at(connection))
                client.communicate(b"\n")
    plain, contained, *own = found
    assert plain == (0, Path("/proc/self/ns/pid").stat().st_ino)
    assert contained not in (plain, (0, 0))
    assert {number for _, number in own} == {0}


# -- what others see


@pytest.fixture
def open_machine() -> Iterator[Machine]:
    machine = Machine.or_skip(umask=0)
    yield machine
    machine.close()


def test_no_byte_of_a_users_is_readable_to_others_even_with_umask_000(open_machine: Machine) -> None:
    alice, carol = open_machine.person("alice"), open_machine.person("carol")
    stop = open_machine.folder / "carol" / "stop"
    carol.does(
        f"""
import os, threading
seen, stop = set(), threading.Event()
def look():
    while not stop.is_set():
        for where, folders, files in os.walk({str(open_machine.folder)!r}):
            for name in files:
                path = os.path.join(where, name)
                try:
                    os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
                except OSError:
                    continue
                seen.add(path)
looking = threading.Thread(target=look)
looking.start()
""",
    )
    alice.starts_kernel()
    alice.runs("secret = 'x' * 1000")
    for _ in range(3):
        alice.runs("%gpuckpt save here --replace")
        alice.runs("%gpuckpt restore here")
    seen = carol.does("stop.set()", "looking.join()", "sorted(seen)")
    of_the_test = {str(open_machine.folder / name) for name in ("passwd", "group", "broker.log", "ready")}
    # Jupyter's and IPython's own files have the umask that their user chose.
    ours = [path for path in seen if not re.search(r"/(ipython|\.ipython|\.cache)/", path)]
    assert set(ours) - of_the_test == set(), stop


def test_the_broker_logs_no_secret_and_no_name(alice: Person, machine: Machine) -> None:
    secret = "geheim-" + os.urandom(8).hex()
    alice.runs(f"import os; os.environ['TOKEN'] = {secret!r}")
    alice.runs(f"%gpuckpt save {secret}")
    alice.runs(f"%gpuckpt restore {secret}")
    key = alice.does("notebook.client.session.key.decode()")
    asks(alice, f"{{'do': {secret!r}}}"[:60])
    log = machine.log.read_text()
    for text in (secret, key, str(machine.folder / "alice")):
        assert text not in log
    assert [path.name for path in (machine.folder / "run").iterdir() if path.name not in ("images", "sleepers")] == [
        "broker.sock"
    ]
    assert stat.S_IMODE((machine.folder / "run" / "sleepers").stat().st_mode) == 0o700


def test_a_listener_that_is_not_roots_is_not_taken_for_the_broker(bob: Person) -> None:
    """Whoever listens would be given the folders of the kernel."""
    said = bob.does(
        "import os, socket",
        """
fake = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
path = os.path.expanduser("~/fake.sock")
fake.bind(path)
fake.listen()
before, os.environ["GPUCKPT_BROKER"] = os.environ["GPUCKPT_BROKER"], path
from jupyter_gpuckpt.machine.capability import why_unavailable
said = str(why_unavailable())
os.environ["GPUCKPT_BROKER"] = before
fake.close()
""",
        "said",
    )
    assert "not root's" in said


def test_nothing_is_left_of_many_saves_and_restores(alice: Person, machine: Machine) -> None:
    """No process, mount, descriptor or note of a sleeper: also of restores that fail."""

    def left() -> tuple[int, ...]:
        run = machine.folder / "run"
        mounts = machine.as_root("cat", "/proc/self/mountinfo").stdout.count("\n")
        return (
            mounts,
            len(list((run / "sleepers").iterdir())),
            len(list((run / "images").iterdir())),
            machine.children(),
        )

    alice.runs("x = 5")
    alice.runs("%gpuckpt save again --replace")
    alice.runs("%gpuckpt restore again")
    before = machine.settled(left)
    for _ in range(4):
        alice.runs("%gpuckpt save again --replace")
        alice.runs("%gpuckpt restore again")
    wait_until(lambda: all(now <= then for now, then in zip(left(), before, strict=True)), what=f"more than {before}")


def test_a_connection_is_for_one_sleeper_alone(alice: Person) -> None:
    said = alice.does(
        ASK,
        "import pathlib",
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)",
        "s.connect(os.environ['GPUCKPT_BROKER'])",
        f"s.send(json.dumps({{'do': 'hold', 'pid': {sleeper_of(alice)}}}).encode())",
        "s.send(json.dumps({'proof': _proof(json.loads(s.recv(65536))['prove'])}).encode())",
        "first = json.loads(s.recv(65536))",
        f"s.send(json.dumps({{'do': 'hold', 'pid': {sleeper_of(alice)}}}).encode())",
        "second = json.loads(s.recv(65536))",
        "s.close()",
        "[first, second]",
    )
    assert said[0] == {"done": True}
    assert said[1]["error"]["kind"] == "Refused"


def test_the_socket_is_of_packets(machine: Machine) -> None:
    """A message is whole or not there: nobody can send half of one and wait."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream, pytest.raises(OSError, match="wrong type"):
        stream.connect(str(machine.socket))


PLANT = """
import json, os, pathlib
def plant(runtime, trace):
    # A kernel that was lost in the middle of a restore: whoever finds it starts a fresh one by the argv of its launch.
    folder = pathlib.Path(runtime, "gpuckpt", "planted")
    folder.mkdir(parents=True)
    (folder / "run-1").mkdir()
    launch = {"kernel_id": "planted", "argv": ["/usr/bin/touch", trace], "env": {}, "cwd": "/", "umask": 0,
              "connection_file": "", "agent": False}
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    state = {"run": "run-1", "operation": {"kind": "restore"}, "boot": boot, "protocol": 1}
    for name, content in {"launch.json": launch, "state.json": state}.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "keeper.lock").touch()
    for path in (pathlib.Path(runtime), *pathlib.Path(runtime).rglob("*")):
        path.chmod(0o777)
"""


@pytest.mark.parametrize("words", [["kernels"], ["ps"], ["stop", "planted"]], ids=" ".join)
def test_a_runtime_folder_that_somebody_planted_is_not_used(
    machine: Machine, bob: Person, alice: Person, words: list[str]
) -> None:
    """What stands in it would be run in the name of whoever lists kernels."""
    name = "-".join(words)
    runtime, trace = machine.folder / "bob" / f"runtime-{name}", machine.folder / "alice" / f"ran-{name}"
    bob.does(PLANT, f"runtime = {str(runtime)!r}", f"plant(runtime, {str(trace)!r})")
    told = alice.does(
        "import os, subprocess",
        f"environment = {{**os.environ, 'JUPYTER_RUNTIME_DIR': {str(runtime)!r}}}",
        f"done = subprocess.run(['jupyter', 'gpuckpt', *{words!r}], env=environment, capture_output=True, text=True)",
        "[done.returncode, done.stderr]",
    )
    assert told[0] == 1
    assert f"belongs to uid {UIDS['bob']}" in told[1]
    assert bob.does("pathlib.Path(runtime, 'gpuckpt', 'planted', 'keeper.log').exists()") is False
    assert not trace.exists()


CONFINED = """
import ctypes, json, os, pathlib, socket, struct, threading
from jupyter_gpuckpt.errors import Refused
from jupyter_gpuckpt.client.protocol import KeeperClient
from jupyter_gpuckpt.linux.unix_sockets import short_path
def confined(work):
    # By Landlock, of its thread alone: that one may read no file.
    told = []
    def confine_and_work():
        libc = ctypes.CDLL(None, use_errno=True)
        rules = libc.syscall(444, struct.pack("Q", 1 << 2), 8, 0)
        libc.prctl(38, 1, 0, 0, 0)
        assert libc.syscall(446, rules, 0) == 0, os.strerror(ctypes.get_errno())
        try:
            open("/etc/passwd")
        except PermissionError:
            told.append(work())
    thread = threading.Thread(target=confine_and_work)
    thread.start()
    thread.join()
    return told[0]
def say(path, *messages):
    with socket.socket(socket.AF_UNIX) as s, short_path(pathlib.Path(path)) as short:
        s.settimeout(60)
        s.connect(short)
        try:
            s.sendall(b"".join(json.dumps(message).encode() + b"\\n" for message in messages))
            return s.recv(65536).decode()
        except ConnectionError:
            return ""
def spawns(folder, secret, to):
    program = {"argv": ["/bin/cp", secret, to], "env": {}, "cwd": "/", "stdout": "/dev/null"}
    return say(next(pathlib.Path(folder).glob("run-*.sock")), {"spawn": program, "tag": 1})
def asks(folder, *claim):
    return say(pathlib.Path(folder, "keeper.sock"), *claim, {"id": 1, "op": "status"})
def our_client_asks(folder):
    try:
        with KeeperClient(pathlib.Path(folder, "keeper.sock")) as keeper:
            return keeper.request("status")["state"]
    except Refused as e:
        return e.why
"""


@pytest.fixture
def attempts(alice: Person) -> tuple[str, str, Path]:
    """What Alice does to have a sleeper and a keeper of hers serve her, and the file that the sleeper would make."""
    secret, to = alice.home / "secret", alice.home / "to-outside"
    alice.runs("x = 6")
    alice.does(CONFINED, "folder = str(notebook.folder)", f"pathlib.Path({str(secret)!r}).write_text('not confined')")
    return f"spawns({alice.does('folder')!r}, {str(secret)!r}, {str(to)!r})", f"asks({alice.does('folder')!r})", to


def test_a_process_under_landlock_is_not_served_by_sleepers_and_keepers(
    alice: Person, attempts: tuple[str, str, Path]
) -> None:
    """What they start, and what they do for whoever asks, is not confined."""
    if ctypes.CDLL(None).syscall(444, None, 0, 1) < 1:
        pytest.skip("this system has no Landlock")
    spawning, asking, to = attempts
    for _ in range(2):  # the second ones came up in a restore
        for attempt in (spawning, asking, asking.replace(")", ", {'proof': ''})")):
            assert alice.does(f"confined(lambda: {attempt})") == "", attempt
        assert "Landlock" in alice.does("confined(lambda: our_client_asks(folder))")
        alice.runs("%gpuckpt save unconfined --replace")
        alice.runs("%gpuckpt restore unconfined")
    assert alice.does("our_client_asks(folder)") in ("running", "restoring")  # it may still be tidying up
    assert not to.exists()


def test_a_process_in_a_user_namespace_is_not_served_by_sleepers_and_keepers(
    alice: Person, attempts: tuple[str, str, Path]
) -> None:
    """There one has the same uid; and what of the rest of the machine is seen, whoever made it has chosen."""
    spawning, asking, to = attempts
    alice.does(
        f"""
import subprocess, sys
def in_a_user_namespace(attempt):
    argv = ["unshare", "--user", "--map-current-user", "--", sys.executable, "-c"]
    done = subprocess.run([*argv, {CONFINED!r} + f"print({{attempt}}, end='')"], capture_output=True, text=True)
    return done.stdout + done.stderr
""",
    )
    if "unshare failed" in (said := alice.does(f"in_a_user_namespace({asking!r})")):
        pytest.skip(f"no user namespaces for users here: {said}")
    assert said == ""
    assert alice.does(f"in_a_user_namespace({spawning!r})") == ""
    assert "may not look into" in alice.does("in_a_user_namespace(f'our_client_asks({folder!r})')")
    assert not to.exists()
