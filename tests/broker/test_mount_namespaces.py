"""Clients in a mount namespace of their own: served where it differs in folders for data, and nowhere that root looks.

The attacks are those of docs/security.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from notebooks import wait_until
from people import GID, UIDS, Machine, Person

import jupyter_gpuckpt
from jupyter_gpuckpt.broker import mounts
from jupyter_gpuckpt.errors import Refused

pytestmark = pytest.mark.criu

_PACKAGE = Path(jupyter_gpuckpt.__file__).parent

ASK = """
import json, os, socket
from jupyter_gpuckpt.client.broker_connection import _proof
def ask(message, descriptors=()):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
        s.settimeout(60)
        s.connect(os.environ["GPUCKPT_BROKER"])
        socket.send_fds(s, [json.dumps(message).encode()], list(descriptors))
        said = json.loads(s.recv(65536) or b'{"hung": "up"}')
        if "prove" not in said:
            return said
        there = os.readlink(f"/proc/{said['prove']}/ns/mnt") == os.readlink("/proc/self/ns/mnt")
        s.send(json.dumps({"proof": _proof(said["prove"])}).encode())
        return {"proof was here": there, **json.loads(s.recv(65536) or b'{"hung": "up"}')}
"""

_IN_NAMESPACE = ("unshare", "--mount", "--propagation", "slave", "sh", "-ec")
PRIVATE_TMP = """
for folder in /var/tmp /dev/shm; do mount -t tmpfs -o mode=1777 private "$folder"; done
exec "$@"
"""
"""As a job of Slurm's with job_container/tmpfs has it, but for /tmp, where the folders of these tests' people lie."""


def confined(script: str) -> list[str]:
    """Return what runs a program in a mount namespace that root has made, and changed by a script."""
    return [*_IN_NAMESPACE, script, "sh"]


@pytest.fixture
def in_own(person: Callable[..., Person]) -> Person:
    """Alice in a namespace with folders for temporary files of its own, and a kernel there."""
    alice = person("alice", confined=confined(PRIVATE_TMP))
    alice.does("open('/var/tmp/hers', 'w').write('of this namespace')")
    alice.starts_kernel()
    return alice


def sleeper_of(person: Person) -> int:
    return int(person.does("import json", "json.loads((notebook.folder / 'state.json').read_text())['sleeper'][0]"))


def test_a_kernel_of_a_namespace_is_saved_and_restored_in_it(machine: Machine, in_own: Person) -> None:
    in_own.runs("x = 1; log = open('/var/tmp/log', 'w'); print(log.write('first'), flush=True); log.flush()")
    in_own.runs("%gpuckpt save here")
    in_own.runs("x = 2")
    assert "Restored here" in in_own.runs("%gpuckpt restore here")
    assert in_own.runs("print(x, open('/var/tmp/hers').read())").strip() == "1 of this namespace"
    in_own.runs("log.write(' second'); log.close()")
    assert in_own.does("open('/var/tmp/log').read()") == "first second"
    assert not Path("/var/tmp/hers").exists()
    # Another broker's deputies serve it, too.
    machine.restart()
    wait_until(lambda: "Restored here" in in_own.runs("%gpuckpt restore here"))
    assert in_own.runs("print(x, open('/var/tmp/hers').read())").strip() == "1 of this namespace"
    # Nor is anything left of it in the namespace.
    assert in_own.does("[line for line in open('/proc/self/mountinfo') if 'gpuckpt-images' in line]") == []


def test_what_is_started_to_be_looked_into_is_in_the_namespace_as_well(in_own: Person) -> None:
    """Its user can make it do anything: outside it would be the way out."""
    said = in_own.does(ASK, f"ask({{'do': 'hold', 'pid': {sleeper_of(in_own)}}})")
    assert said == {"proof was here": True, "done": True}


OVER_PROGRAMS = {
    "libraries": 'mount --bind "$HOME" /usr/lib',
    "libraries by an overlay": 'cd "$HOME/work"; mount -t tmpfs none .; cd "$HOME/work"; mkdir up work; '
    "mount -t overlay -o lowerdir=/usr,upperdir=up,workdir=work none /usr",
    "one file": "mount --bind /usr/bin/true /usr/bin/tar",
    "configuration": 'mount --bind "$HOME/preload" /etc/ld.so.cache',
    "Python": 'mount --bind "$HOME" "$PREFIX"',
    "this package": 'mount --bind "$HOME" "$PACKAGE"',
    "one module": 'mount --bind "$HOME/module.py" "$PACKAGE/errors.py"',
    "a folder above": 'mount -t tmpfs none "$(dirname "$(dirname "$PACKAGE")")"',
    "the broker's folder": 'mount --bind "$HOME/data" "$RUN"',
    "proc": "mount -t tmpfs none /proc",
    "dev": "mount -t tmpfs none /dev",
    "the root folder": 'mount -t tmpfs none "$HOME/root"; cd "$HOME/root"; for one in /*; do '
    'if [ -L "$one" ]; then cp -P "$one" .; elif [ -d "$one" ]; then mkdir ".$one"; mount --rbind "$one" ".$one"; fi; '
    "done; mkdir old; pivot_root . old; umount -l /old",
}


_FROM_INSIDE = """
import ctypes, os, socket, subprocess, sys, time
folder, name, uid, gid, script = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
address = os.open(folder, os.O_PATH)
made, made_it = os.pipe()
holder = os.fork()
if holder == 0:
    assert libc.unshare(0x20000) == 0
    assert libc.mount(b"none", b"/", None, 0x4000 | 0x80000, None) == 0
    os.write(made_it, b"x")
    time.sleep(1000)
os.read(made, 1)
try:
    namespace = os.open(f"/proc/{holder}/ns/mnt", os.O_RDONLY)
    subprocess.run(["nsenter", f"--mount=/proc/{holder}/ns/mnt", "sh", "-ec", script], check=True)
finally:
    os.kill(holder, 9)
assert libc.setns(namespace, 0x20000) == 0, os.strerror(ctypes.get_errno())
os.fchdir(address)
os.setgroups([int(gid)])
os.setresgid(*[int(uid)] * 3)
os.setresuid(*[int(uid)] * 3)
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
    s.connect(name)
    s.send(b'{"do": "criu"}')
    print(s.recv(65536).decode())
"""
"""Ask from a mount namespace that a script has changed: all that this program needs it has loaded before."""


def asked_from_inside(machine: Machine, script: str) -> dict[str, str]:
    """Return the error that Bob is told in a namespace of root's that is changed so; empty where he is served."""
    home = machine.folder / "bob"
    for name in ("module.py", "preload"):
        (home / name).write_text("")
    for name in ("root", "data", "work"):
        (home / name).mkdir(exist_ok=True)
    names = {"HOME": home, "PREFIX": sys.prefix, "PACKAGE": _PACKAGE, "RUN": machine.socket.parent}
    script = "\n".join((*(f"{name}='{value}'" for name, value in names.items()), script))
    where = (str(machine.socket.parent), machine.socket.name)
    done = machine.as_root(
        *(sys.executable, "-c", _FROM_INSIDE, *where, str(UIDS["bob"]), str(GID), script),
        environment={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"},
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, dict[str, str]] = json.loads(done.stdout)
    return said.get("error", {})


@pytest.mark.parametrize("what", OVER_PROGRAMS)
def test_a_namespace_in_which_root_would_find_other_files_is_not_entered(machine: Machine, what: str) -> None:
    """Root has made it, as set-user-id programs do (of Singularity, firejail, bubblewrap) for whoever calls them."""
    why = asked_from_inside(machine, OVER_PROGRAMS[what])["why"]
    assert "lives in another mnt namespace than the broker, where" in why
    assert "is not the machine's own" in why


FOR_DATA = {
    "nothing": "",
    "temporary files": "mount -t tmpfs none /var/tmp; mount -t tmpfs none /dev/shm",
    "a folder of the user's": 'mount --bind "$HOME/data" "$HOME/work"',
    "programs that are read-only": "mount --bind /usr /usr; mount -o remount,bind,ro /usr",
}


@pytest.mark.parametrize("what", FOR_DATA)
def test_a_namespace_that_differs_in_folders_for_data_is_served(machine: Machine, what: str) -> None:
    assert asked_from_inside(machine, FOR_DATA[what]) == {}


def test_a_client_that_has_changed_its_root_folder_in_a_namespace_is_not_served(machine: Machine) -> None:
    """Even where that is the machine's own, mounted once more: with all that is mounted in it, or without."""
    ids = [f"--reuid={UIDS['bob']}", f"--regid={UIDS['bob']}", f"--groups={GID}"]
    for bind in ("--rbind", "--bind"):
        script = f'mount {bind} / /mnt; mount --rbind /proc /mnt/proc; exec /usr/sbin/chroot /mnt "$@"'
        asking = ["setpriv", *ids, "--", sys.executable, "-c", f"{ASK}\nprint(json.dumps(ask({{'do': 'criu'}})))"]
        done = machine.as_root(*confined(script), *asking, environment=machine.environment_of("bob"))
        assert done.returncode == 0, done.stderr
        assert "mnt namespace" in json.loads(done.stdout)["error"]["why"]


def test_a_client_of_one_namespace_is_not_let_into_another_by_a_sleeper(
    machine: Machine, in_own: Person, person: Callable[..., Person]
) -> None:
    """What a namespace hides from a service would be open to it in a kernel that was started elsewhere."""
    outside = person("alice")
    in_other = person("alice", confined=confined(PRIVATE_TMP))
    sleeper = sleeper_of(in_own)
    said = in_other.does(ASK, f"ask({{'do': 'hold', 'pid': {sleeper}}})")
    assert "the kernel in one where /" in said["error"]["why"]
    # Who is in the broker's own is not confined by any.
    assert outside.does(ASK, f"ask({{'do': 'hold', 'pid': {sleeper}}})")["done"] is True
    # Nor does one that was refused hold it all the same.
    also = in_other.does(
        f"""
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
    s.connect(os.environ["GPUCKPT_BROKER"])
    s.send(json.dumps({{"do": "hold", "pid": {sleeper}}}).encode())
    s.send(json.dumps({{"proof": _proof(json.loads(s.recv(65536))["prove"])}}).encode())
    first = json.loads(s.recv(65536))
    s.send(json.dumps({{"do": "next_pid", "after": 5000}}).encode())
    also = first, json.loads(s.recv(65536))
""",
        "also",
    )
    assert [next(iter(answer)) for answer in also] == ["error", "error"]


def test_a_namespace_of_a_users_making_is_not_entered(machine: Machine) -> None:
    """Its user decides what is mounted there, whatever it looks like."""
    ids = [f"--reuid={UIDS['bob']}", f"--regid={UIDS['bob']}", f"--groups={GID}"]
    program = f"{ASK}\nprint(json.dumps(ask({{'do': 'criu'}})))"
    # In the broker's user namespace, but for that of the mounts: nobody can leave the one for the other.
    inner = ["unshare", "--user", "--mount", "--map-current-user", "--", sys.executable, "-c", program]
    done = machine.as_root("setpriv", *ids, "--", *inner, environment=machine.environment_of("bob"))
    if "unshare failed" in done.stderr:
        pytest.skip(f"no user namespaces for users here: {done.stderr}")
    assert "user namespace" in json.loads(done.stdout)["error"]["why"]


def test_who_owns_a_mount_namespace_is_asked_of_the_system(machine: Machine) -> None:
    ready = "echo ready; exec sleep 1000"
    with subprocess.Popen(
        ["unshare", "--user", "--mount", "sh", "-c", ready], stdout=subprocess.PIPE, text=True
    ) as made_by_a_user:
        assert made_by_a_user.stdout is not None
        if made_by_a_user.stdout.readline() != "ready\n":
            pytest.skip("no user namespaces here")
        try:
            with pytest.raises(Refused, match="not made by root"):
                mounts.of(made_by_a_user.pid, ())
        finally:
            made_by_a_user.kill()
