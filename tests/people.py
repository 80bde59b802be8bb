"""A machine with several users and a broker, for tests: a mount namespace in which they are, and processes of theirs.

Nothing of the real machine changes: users and their group stand in an /etc/passwd and /etc/group of the namespace's
own, and folders on the way to the Python that the tests run under are opened to all in it alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from notebooks import PATIENCE, wait_until

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.linux.processes import descendants

GROUP, GID = "gpuckpt-test", 61_800
_FIRST_UID = 61_801
_TESTS = Path(__file__).parent
NAMES = ("alice", "bob", "carol")
"""Alice and Bob are of the broker's group, Carol is not."""
UIDS = {name: uid for uid, name in enumerate(NAMES, _FIRST_UID)}

_PASSED_ON = ("PYTHONPATH", "JUPYTER_PATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")
"""Where packages and libraries are that are not installed, and which GPUs there are to be seen."""

OPEN_WAYS = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def mount(source, target, kind, flags, data=None):
    if libc.mount(source.encode(), target.encode(), kind.encode(), flags, data) != 0:
        raise OSError(ctypes.get_errno(), f"mount {source} on {target}")
etc, argv = sys.argv[1], sys.argv[sys.argv.index("--") + 1:]
wanted = sys.argv[2:sys.argv.index("--")]
closed = {}
for path in wanted:
    parts = [os.path.join("/", *path.split("/")[1:n]) for n in range(2, path.count("/") + 1)]
    top = next((part for part in parts if not os.stat(part).st_mode & 0o1), None)
    if top is not None:
        closed.setdefault(top, {})[path] = os.open(path, os.O_PATH)
for top, paths in closed.items():
    mount("ways", top, "tmpfs", 0, b"mode=0755")
    for path, fd in paths.items():
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            os.makedirs(path, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            open(path, "w").close()
        mount(f"/proc/self/fd/{fd}", path, "", 0x1000)
for name in ("passwd", "group"):
    mount(f"{etc}/{name}", f"/etc/{name}", "", 0x1000)
os.execv(argv[0], argv)
"""

_BROKER_OF_FOLDERS = """
import runpy, sys
sys.path += sys.argv.pop(1).split(":")
runpy.run_module("jupyter_gpuckpt.broker", run_name="__main__", alter_sys=True)
"""

_ACTIVATE = """
import os, socket, sys
path, gid, *argv = sys.argv[1:]
os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(path)
os.chown(path, 0, int(gid))
os.chmod(path, 0o660)
listener.listen()
held = os.dup(listener.fileno())
os.dup2(held, 3)
os.execve(argv[0], argv, {**os.environ, "LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"})
"""

_PERSON = """
import contextlib, io, json, sys, traceback
sys.path[:0] = {paths!r}
told = open(int(sys.argv[1]), "w")
names = {{}}
for line in sys.stdin:
    try:
        *statements, last = json.loads(line)
        for statement in statements:
            exec(statement, names)
        try:
            value = compile(last, "<told>", "eval")
        except SyntaxError:
            exec(last, names)
            value = "None"
        answer = {{"value": eval(value, names)}}
    except BaseException:
        answer = {{"error": traceback.format_exc()}}
    print(json.dumps(answer, default=str), file=told, flush=True)
"""


class Person:
    """A process of a user's, or of root's, which runs Python as it is told to."""

    def __init__(
        self,
        machine: Machine,
        name: str,
        *,
        before: Sequence[str] = (),
        confined: Sequence[str] = (),
        wrapper: Sequence[str] = (),
        groups: Sequence[int] = (),
        rights: Sequence[str] = (),
    ) -> None:
        """Start it by `before` and `confined`, programs that are run as root, and `wrapper`, run as the user.

        What is `confined` is so on this machine, on which a user has just logged in; `rights` are options of setpriv.
        """
        self.name, self.uid = name, UIDS.get(name, 0)
        self.home = machine.folder / name
        self.home.mkdir(exist_ok=True)
        self.environment = machine.environment_of(name)
        read, write = os.pipe()
        script = _PERSON.format(paths=[str(_TESTS), str(_TESTS / "broker")])
        listed = [*machine.groups_of(name), *groups]
        ids = [f"--reuid={self.uid}", f"--regid={self.uid}"]
        ids.append(f"--groups={','.join(map(str, listed))}" if listed else "--clear-groups")
        python = [sys.executable, "-c"]
        self._process = subprocess.Popen(
            [
                *before,
                *machine.logging_in(self.uid),
                *confined,
                "setpriv",
                *ids,
                *rights,
                "--",
                *wrapper,
                *python,
                script,
                str(write),
            ],
            cwd="/",
            env=self.environment,
            stdin=subprocess.PIPE,
            pass_fds=[write],
            text=True,
            umask=machine.umask,
        )
        os.close(write)
        self._told = os.fdopen(read)

    def does(self, *code: str) -> Any:
        """Execute statements; return the value of the last one, if it is an expression. Names last."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([*code[:-1], code[-1]]) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._told.readline() or '{"error": "the process ended"}')
        if "error" in answer:
            raise AssertionError(f"{self.name}: {answer['error']}")
        return answer["value"]

    def starts_kernel(self) -> None:
        """Start a kernel of ours, called ``notebook`` from then on."""
        self.does(
            "from jupyter_client import KernelManager",
            "from notebooks import Notebook, wait_for_ready",
            "manager = KernelManager(kernel_name='python3-gpuckpt')",
            "manager.start_kernel()",
            "client = manager.client()",
            "client.start_channels()",
            "notebook = Notebook(manager, client)",
            "wait_for_ready(client)",
        )

    def runs(self, cell: str) -> str:
        """Execute a cell in the kernel; return what it showed."""
        return str(self.does(f"notebook.run({cell!r}).text"))

    def fails(self, cell: str) -> str:
        """Execute a cell that must fail; return what it showed."""
        return str(self.does(f"notebook.fails({cell!r}).text"))

    def close(self) -> None:
        if self._told.closed:
            return
        try:
            self.does(
                "from jupyter_gpuckpt.client import keepers",
                "notebook.close() if 'notebook' in globals() else None",
                "[keepers.connect(folder).request('close') for folder in keepers.folders()]",  # copies
            )
        finally:
            self._process.kill()
            self._process.communicate()
            self._told.close()


class Machine:
    """The namespace, its broker and its people."""

    def __init__(
        self,
        *,
        wrapper: Sequence[str] = (),
        furnishing: Sequence[str] = (),
        umask: int = 0o022,
        activated: bool = False,
        namespaces: Sequence[str] = ("--mount",),
        options: Sequence[str] = (),
    ) -> None:
        """Make it; `furnishing` is run in its namespaces before anything else, `wrapper` runs the broker.

        `options` are the broker's.
        """
        self.umask, self._namespaces = umask, namespaces
        self.folder = Path(tempfile.mkdtemp(prefix="gpuckpt-broker-"))
        self.folder.chmod(0o755)
        self.log = self.folder / "broker.log"
        self.socket = self.folder / "run" / "broker.sock"
        for name, uid in UIDS.items():
            (self.folder / name).mkdir(mode=0o755)
            os.chown(self.folder / name, uid, uid)
        self._people: list[Person] = []
        self._write_users()
        ways = {sys.base_prefix, sys.prefix, str(Path(sys.executable).parent), str(_TESTS.parent)}
        ways |= {str(settings.criu_prefix()), os.path.realpath(sys.base_prefix)}
        ways |= {path for path in sys.path if Path(path).is_dir()}
        if named := settings.named_criu():
            ways.add(named)
        self.ways = sorted(ways)
        self.environment = {
            "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
            "GPUCKPT_BROKER": str(self.socket),
            "GPUCKPT_CRIU_PREFIX": str(settings.criu_prefix()),
            **({"GPUCKPT_CRIU": named} if named else {}),
        }
        self.entering: list[str] = []
        self._holder = self._begin(
            [sys.executable, "-I", "-c", OPEN_WAYS, str(self.folder), *self.ways, "--", *furnishing]
        )
        activating = [sys.executable, "-I", "-c", _ACTIVATE, str(self.socket), str(GID)] if activated else []
        self._argv = [*self.entering, *activating, *wrapper, *self._broker_argv(GROUP), *options]
        self._start()

    def _begin(self, opening_ways: Sequence[str]) -> subprocess.Popen[bytes]:
        """Make the namespaces, which are held by a process that does nothing."""
        ready = self.folder / "ready"
        hold = ["/bin/sh", "-c", f"touch {ready}; exec sleep infinity"]
        unsharing = ["unshare", *self._namespaces, "--propagation", "private"]
        holder = subprocess.Popen([*unsharing, *opening_ways, *hold], cwd="/")
        wait_until(lambda: holder.poll() is not None or ready.exists())
        self.entering = ["nsenter", *self._namespaces, f"--target={holder.pid}"]
        return holder

    @classmethod
    def or_skip(cls, **kwargs: Any) -> Machine:
        """Make one, or skip the test where that cannot be: without root, or in a checkout that others can change."""
        if os.geteuid() != 0:
            pytest.skip("starting a broker, and processes of several users, takes root")
        machine = cls(**kwargs)
        if not (why := machine.why_not):
            return machine
        machine.close()
        if "can be changed by users other than root" in why:
            pytest.skip(f"no broker starts from here: {why}")
        raise AssertionError(why)

    @staticmethod
    def _broker_argv(group: str) -> list[str]:
        """Return how the broker is started; it ignores PYTHONPATH, and is told here where that is all that there is."""
        alone = [sys.executable, "-I", "-c", "import jupyter_gpuckpt"]
        if subprocess.run(alone, cwd="/", stderr=subprocess.DEVNULL, check=False).returncode == 0:
            return [sys.executable, "-I", "-m", "jupyter_gpuckpt.broker", group]
        return [sys.executable, "-I", "-c", _BROKER_OF_FOLDERS, os.environ.get("PYTHONPATH", ""), group]

    def _start(self) -> None:
        with self.log.open("w") as log:
            self._broker = subprocess.Popen(
                self._argv, cwd="/", env=self.environment, stdout=log, stderr=log, umask=self.umask
            )
        wait_until(lambda: self._broker.poll() is not None or "listens" in self.log.read_text())

    def restart(self) -> None:
        """End the broker, and start another."""
        self.stop()
        self.start_again()

    def stop(self) -> None:
        """Tell the broker to end."""
        self._broker.terminate()

    def has_stopped(self, seconds: float) -> bool:
        """Tell whether the broker ends within so many seconds."""
        try:
            return self._broker.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            return False

    def start_again(self) -> None:
        """Start another broker, when this one has ended."""
        assert self.has_stopped(30)
        self._start()

    def second_broker(self, group: str) -> subprocess.CompletedProcess[str]:
        """Start another broker at the same socket; return when it has ended."""
        return self.as_root(*self._broker_argv(group), environment=self.environment)

    def _write_users(self) -> None:
        users = [f"{name}:x:{uid}:{uid}::{self.folder / name}:/bin/sh" for name, uid in UIDS.items()]
        groups = [f"{name}:x:{uid}:" for name, uid in UIDS.items()]
        (self.folder / "passwd").write_text("\n".join([Path("/etc/passwd").read_text().strip(), *users, ""]))
        (self.folder / "group").write_text(
            "\n".join([Path("/etc/group").read_text().strip(), f"{GROUP}:x:{GID}:alice,bob", *groups, ""])
        )

    def environment_of(self, name: str) -> dict[str, str]:
        home = self.folder / name
        return {
            **(self.environment if name == "root" else {}),
            "HOME": str(home),
            "USER": name,
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "GPUCKPT_BROKER": str(self.socket),
            "GPUCKPT_SAVE_WAIT": "600",
            "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
            "GPUCKPT_STORE": str(home / "store"),
            "GPUCKPT_KEYS": str(home / "keys"),
            "GPUCKPT_LOGS": str(home / "logs"),
            "IPYTHONDIR": str(home / "ipython"),
            **{name: os.environ[name] for name in _PASSED_ON if name in os.environ},
        }

    @property
    def why_not(self) -> str:
        """Why there is no broker; empty where there is one."""
        return "" if self._broker.poll() is None else self.log.read_text()

    def groups_of(self, name: str) -> list[int]:
        """Return the supplementary groups of a user."""
        return [] if name == "carol" else [GID]

    def logging_in(self, uid: int) -> list[str]:
        """Return what starts a program of root's on this machine, from which a user's can be started."""
        return self.entering

    def person(self, name: str, **kwargs: Any) -> Person:
        person = Person(self, name, **kwargs)
        self._people.append(person)
        return person

    def as_root(self, *argv: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.entering, *argv],
            env=environment,
            cwd="/",
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )

    def wait_for_process(self, sleeper: int, name: str) -> None:
        """Wait until a program of this name runs in a sleeper's namespace."""
        wait_until(lambda: self.processes_of(sleeper, name))

    @staticmethod
    def processes_of(sleeper: int, name: str) -> list[int]:
        """Return the pids of the programs of this name in a sleeper's namespace that root has put there."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                same = (path / "ns/pid").readlink() == Path(f"/proc/{sleeper}/ns/pid").readlink()
                if same and (path / "comm").read_text().strip() == name and path.stat().st_uid == 0:
                    found.append(int(path.name))
        return found

    @property
    def broker_pid(self) -> int:
        return self._broker.pid

    def children(self) -> int:
        """Return how many processes the broker has: deputies, and what they leave to it."""
        return len(descendants(self._broker.pid))

    @staticmethod
    def settled(look: Callable[[], Any]) -> Any:
        """Return what there is once nothing ends any more: twice the same, a while apart."""
        seen = [look()]

        def same() -> bool:
            time.sleep(0.3)
            seen.append(look())
            return bool(seen[-1] == seen[-2])

        wait_until(same)
        return seen[-1]

    def close(self) -> None:
        for person in self._people:
            with contextlib.suppress(AssertionError, OSError):
                person.close()
        for process in (self._broker, self._holder):
            process.terminate()
            process.wait(60)
        shutil.rmtree(self.folder)
