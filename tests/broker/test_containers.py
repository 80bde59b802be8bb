"""Clients in containers without rights: served as others are, and neither they nor their image get anything by that.

The attacks are those of docs/security.md. The containers are made here, as runtimes make them: namespaces of root's, a
root folder of their own, and a first process that has no rights, and can have none.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from notebooks import wait_until
from people import Machine, Person
from test_mount_namespaces import ASK, sleeper_of

from jupyter_gpuckpt import installed, settings
from jupyter_gpuckpt.broker import containers
from jupyter_gpuckpt.linux import processes

pytestmark = pytest.mark.criu

_NAMESPACES = ("--mount", "--pid", "--net", "--ipc", "--uts", "--cgroup")
_UNSHARE = ("unshare", *_NAMESPACES, "--fork", "--kill-child", "--propagation", "private", "sh", "-ec")
_NO_RIGHTS = ("--bounding-set=-all", "--inh-caps=-all", "--no-new-privs")
_IMAGE = """
root="$HOME/root"
mkdir -p "$root"
mount -t tmpfs -o mode=755 root "$root"
cd "$root"
for one in /*; do
    if [ -L "$one" ]; then cp -P "$one" .
    elif [ "$one" != /proc ] && [ "$one" != /etc ] && [ -d "$one" ]; then mkdir ".$one"; mount --rbind "$one" ".$one"
    fi
done
mkdir proc old
cp -a /etc .
mount -t proc proc proc
mount -t tmpfs -o mode=1777 shm dev/shm
mount --bind /dev/null proc/keys
mount -t tmpfs -o ro none proc/tty
date +box%N > proc/sys/kernel/hostname
mount --bind proc/sys proc/sys
mount -o remount,ro,bind proc/sys
"""
_BEGIN = """
/sbin/pivot_root . old
umount -l old
cd /
python3 -I -c 'import fcntl, socket, struct
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sH14x", b"lo", 1))' # SIOCSIFFLAGS, IFF_UP
exec "$@"
"""
_FILTERED = """
import ctypes, os, sys
from jupyter_gpuckpt.linux import seccomp
seccomp.install([seccomp.step(seccomp.RETURN, seccomp.ALLOW)])
os.execv(sys.argv[1], sys.argv[1:])
"""
"""What puts itself under a filter that allows everything, and becomes another program."""


def in_container(more: str = "") -> list[str]:
    """Return what runs a program as process 1 of a container, whose image a script changes (in its root folder)."""
    return [*_UNSHARE, _IMAGE + more + _BEGIN, "sh"]


def filtered(times: int = 1) -> list[str]:
    """Return what runs a program under so many filters of system calls."""
    return [sys.executable, "-c", _FILTERED] * times


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    """A machine whose broker serves containers."""
    machine = Machine.or_skip(options=["--containers"])
    yield machine
    machine.close()


@pytest.fixture
def person(machine: Machine, person: Callable[..., Person]) -> Callable[..., Person]:
    """Make people for one test, who have nothing of another one's containers."""
    for folder in machine.folder.glob("*/[rs]*"):
        if folder.name in ("runtime", "store"):
            shutil.rmtree(folder)
    return person


@pytest.fixture
def contained(person: Callable[..., Person]) -> Person:
    """Alice in a container, with a kernel there."""
    alice = person("alice", confined=in_container(), rights=_NO_RIGHTS, wrapper=filtered())
    alice.starts_kernel()
    return alice


def of_kernel(person: Person, expression: str) -> str:
    return person.runs(f"print({expression})").strip()


def is_saved_and_restored(person: Person) -> None:
    """Start a kernel, save it, and restore it."""
    person.starts_kernel()
    person.runs("x = 1")
    person.runs("%gpuckpt save here")
    person.runs("x = 2")
    person.runs("%gpuckpt restore here")
    assert of_kernel(person, "x") == "1"


_PLACE = "{k: os.readlink(f'/proc/self/ns/{k}') for k in ('net', 'ipc', 'uts', 'cgroup', 'user')}"
_STATE = "[l.split() for l in open('/proc/self/status') if l.startswith(('Cap', 'NoNew', 'Seccomp', 'Uid'))]"


def test_a_kernel_in_a_container_is_saved_and_restored_in_it(machine: Machine, contained: Person) -> None:
    contained.runs("import os, socket, subprocess; x = 1; child = subprocess.Popen(['sleep', '1000'])")
    contained.runs("a, b = socket.socketpair(); a.send(b'unread')")
    contained.runs("%gpuckpt save here")
    contained.runs("x = 2; b.recv(100); child.kill()")
    assert "Restored here" in contained.runs("%gpuckpt restore here")
    assert of_kernel(contained, "x, b.recv(100), child.poll()") == "1 b'unread' None"
    # It is where its user is, and has what that one has.
    assert of_kernel(contained, _PLACE) == str(contained.does("import os", _PLACE))
    state = dict(
        one for one in json.loads(of_kernel(contained, f"__import__('json').dumps({_STATE})")) if len(one) == 2
    )
    assert state == {
        **dict.fromkeys(("CapInh:", "CapPrm:", "CapEff:", "CapAmb:"), "0" * 16),
        "CapBnd:": f"{1 << 40:016x}",  # what criu had, which nothing can gain
        "NoNewPrivs:": "1",
        "Seccomp:": "2",
        "Seccomp_filters:": "1",
    }
    assert (
        of_kernel(contained, "open('/proc/self/cgroup').read()")
        == contained.does("open('/proc/self/cgroup').read()").strip()
    )
    # Another broker's deputies serve it, too.
    machine.restart()
    wait_until(lambda: "Restored here" in contained.runs("%gpuckpt restore here"))
    assert of_kernel(contained, "x") == "1"
    # Nothing is left of it on the machine.
    assert "gpuckpt-images" not in Path("/proc/self/mountinfo").read_text()


_WITHOUT_CRIU = """
mount -t tmpfs none .{prefix}
mkdir freeze
cp -a .{freeze}/*.py .{freeze}/*.sh freeze
mount --bind freeze .{freeze}
"""


@pytest.mark.parametrize("filters", [0, 1])
def test_a_container_needs_no_criu_of_its_own(person: Callable[..., Person], filters: int) -> None:
    """Nor our library in it; it may have a filter of system calls, or none."""
    image = _WITHOUT_CRIU.format(prefix=settings.criu_prefix(), freeze=installed.CRIU_SOCKETS_LIBRARY.parent)
    alice = person("alice", confined=in_container(image), rights=_NO_RIGHTS, wrapper=filtered(filters))
    assert alice.does("import os", f"os.listdir({str(settings.criu_prefix())!r})") == []
    assert not alice.does(f"os.path.exists({str(installed.CRIU_SOCKETS_LIBRARY)!r})")
    is_saved_and_restored(alice)


def test_what_the_runtime_hides_stays_hidden(contained: Person) -> None:
    """Attack 50: a sleeper has a /proc of its own, in which a runtime has hidden nothing."""
    seen = "(open('/proc/self/status').read(5), os.listdir('/proc/tty'), os.access('/proc/keys', os.R_OK))"
    contained.runs("import os")
    assert of_kernel(contained, seen) == "('Name:', [], False)"
    assert "Read-only" in contained.fails("os.open('/proc/sys/kernel/ns_last_pid', os.O_WRONLY)")


def test_nobody_moves_what_leads_to_the_images(contained: Person) -> None:
    """Attack 51: from outside of a sleeper's mounts, what something is mounted over can be moved away."""
    within = f"/proc/{sleeper_of(contained)}/root"
    contained.does("import os", _MOVE)
    images = Path(containers.IMAGES_AT)
    for path in (images, *images.parents[:-1]):
        assert contained.does(f"os.path.isdir({within + str(path)!r})")
        assert contained.does(f"moves({within + str(path)!r})") in ("EPERM", "EACCES", "EBUSY", "ENOENT")
        assert contained.does(f"os.path.isdir({within + str(path)!r})")
    assert contained.does(f"moves('{within}/dev/shm/gpuckpt-vram')") == "moved"  # a mount, and the user's own


_MOVE = """
import errno
def moves(path):
    try:
        os.rename(path, path + ".moved")
    except OSError as e:
        return errno.errorcode[e.errno]
    return "moved"
"""

_SPY = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
__attribute__((constructor)) static void tell(void)
{
	char status[8192] = "", said[200], *found;
	int file = open("/proc/self/status", O_RDONLY), log = open("/spied", O_WRONLY | O_APPEND);
	if (file < 0 || log < 0 || read(file, status, sizeof status - 1) < 0)
		return;
	found = strstr(status, "CapPrm:");
	dprintf(log, "%d %d %.16s\\n", (int)getuid(), (int)geteuid(), found == NULL ? "unknown" : found + 8);
	close(file);
	close(log);
}
"""


@pytest.fixture(scope="module")
def spy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that writes down as whom it is loaded."""
    folder = tmp_path_factory.mktemp("spy")
    (folder / "spy.c").write_text(_SPY)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "spy.so", folder / "spy.c"], check=True)
    return folder / "spy.so"


def test_an_image_runs_nothing_as_root(person: Callable[..., Person], spy: Path) -> None:
    """Attack 52: an image has a library loaded into every program that is started in the container."""
    hostile = f"cp {spy} ./spy.so; echo /spy.so > etc/ld.so.preload; touch spied; chmod 666 spied"
    alice = person("alice", confined=in_container(hostile), rights=_NO_RIGHTS, wrapper=filtered())
    alice.does("open('/spied', 'w').close()")  # until here, this test itself was root in it
    is_saved_and_restored(alice)
    spied = {tuple(line.split()) for line in alice.does("open('/spied').read()").splitlines()}
    nothing, of_criu = "0" * 16, f"{1 << 40:016x}"
    assert {(uid, euid) for uid, euid, _ in spied} == {(str(alice.uid), str(alice.uid))}
    # criu itself is the user, with its one capability.
    assert {rights for *_, rights in spied} <= {nothing, of_criu}


def test_root_imports_nothing_in_a_container(contained: Person) -> None:
    """Attack 53: an image has modules where the broker's Python looks for those that it has not imported yet."""
    container = containers.of(outer_pid_of(contained), [])
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            warnings.simplefilter("ignore")
            container.enter(but=["mnt"])
            import tabnanny  # noqa: F401 - a module that nobody has imported
        except BaseException as e:
            os.write(write, f"{type(e).__name__}: {e}".encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as said:
        assert said.read() == "ModuleNotFoundError: No module named 'tabnanny'"
    for descriptor in container.namespaces.values():
        os.close(descriptor)


def outer_pid_of(person: Person) -> int:
    """Return the pid of a person in a container as this process knows it."""
    own = person.does("import os", "os.readlink('/proc/self/ns/pid')")
    return next(pid for pid in pids() if _is_first_in(pid, own))


def pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _is_first_in(pid: int, namespace: str) -> bool:
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink()) == namespace and processes.namespace_pids(pid)[-1] == 1
    except OSError:
        return False


def test_sleepers_of_other_containers_and_of_the_machine_are_not_held(
    contained: Person, person: Callable[..., Person]
) -> None:
    """Attack 54: somebody of the same uid, in another container or on the machine, names a sleeper by its pid."""
    outside, other = person("alice"), person("alice", confined=in_container(), rights=_NO_RIGHTS, wrapper=filtered())
    outside.starts_kernel()
    inner = sleeper_of(contained)
    assert contained.does(ASK, f"ask({{'do': 'hold', 'pid': {inner}}})") == {"proof was here": True, "done": True}
    for one, pid in ((other, inner), (outside, inner), (contained, sleeper_of(outside)), (other, sleeper_of(outside))):
        assert "The kernel is gone" in str(one.does(ASK, f"ask({{'do': 'hold', 'pid': {pid}}})"))
    its = next(pid for pid in pids() if _is(pid, contained, inner))
    assert "The kernel is gone" in str(outside.does(ASK, f"ask({{'do': 'hold', 'pid': {its}}})"))


def _is(pid: int, person: Person, inner: int) -> bool:
    """Tell whether a process is the one that a person in a container knows by a pid."""
    try:
        return processes.namespace_pids(pid)[1:2] == [inner] and processes.status(pid)["Uid"].split()[0] == str(
            person.uid
        )
    except OSError:
        return False


_ANOTHER_ROOT = """
mkdir another
for one in *; do
    if [ -L "$one" ]; then cp -P "$one" another
    elif [ "$one" != another ] && [ "$one" != old ]; then mkdir -p "another/$one"; mount --rbind "$one" "another/$one"
    fi
done
"""

_REFUSED = {
    "bounds that allow something": (
        {"rights": ["--no-new-privs", "--inh-caps=-all"]},
        "with capabilities, or with bounds",
    ),
    "no_new_privs is missing": ({"rights": ["--bounding-set=-all", "--inh-caps=-all"]}, "without `no_new_privs`"),
    "two filters": ({"wrapper": filtered(2)}, "with a filter of system calls of its own"),
    "its own user namespace": ({"wrapper": ["unshare", "--user", "--map-current-user"]}, "in another user namespace"),
    "a chroot": (
        {"confined": [*in_container(_ANOTHER_ROOT), "/usr/sbin/chroot", "/another"]},
        "has changed its root folder",
    ),
    "a /dev/shm of the image": (
        {"confined": in_container("umount -l dev; mount -t tmpfs -o mode=755 dev dev; mkdir -m 1777 dev/shm; ")},
        "without a /proc and a /dev/shm",
    ),
}


@pytest.mark.parametrize("why", _REFUSED)
def test_who_is_not_served(machine: Machine, person: Callable[..., Person], why: str) -> None:
    """Attack 55: a container, or a process in it, that has or could come to have rights, or is confined further."""
    options, said = _REFUSED[why]
    asking = person("alice", **{"confined": in_container(), "rights": _NO_RIGHTS, **options})
    answer = str(asking.does(ASK, "ask({'do': 'criu'})"))
    assert "The broker does not serve this process" in answer
    assert said in answer
