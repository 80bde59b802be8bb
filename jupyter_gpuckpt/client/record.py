"""What a keeper writes down about its kernel, so that the next keeper, the command line and the server find it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import settings
from ..checked import from_json, to_json
from ..linux.host import Host
from ..linux.lock_files import KEEPER_LOCK, is_locked
from ..linux.private_folders import why_not_private
from ..linux.processes import start_time
from ..linux.unix_sockets import listener_pid
from ..operations.choices import AutoSave, Choices
from ..operations.results import ResumedFrom
from ..quick_dataclass import dataclass
from .in_progress import InProgress, RestoreInProgress
from .sleep_record import Hibernated, Sleep, UnconfirmedWake

if TYPE_CHECKING:
    from ..store import Store

FORMAT = 2
"""The number of how a record is to be read: raised when an older keeper would misunderstand what another one left.
1 knows no moves: they were written down as saves, to be undone as one."""

LAUNCH, STATE, SOCKET, LOG = "launch.json", "state.json", "keeper.sock", "keeper.log"
OUTPUT = "output"
"""What a job that has ended had written."""
KERNEL_LOG = "kernel.log"
"""In the run folder, and in a snapshot: the kernel's standard output."""
QUOTED = "  | "
"""How each line begins that a keeper's log quotes of what the kernel wrote, which may be anything."""
_ORDER = "order.json"
_SLEEPERS = "run-*.sock"
"""The sockets of sleepers: each stands beside its run folder."""

_LOOK = 0.5  # how long to try for a lock that others hold for an instant, to see whether it is free, in seconds


@dataclass
class Launch:
    """How the kernel is started, here and whenever it must be started again.

    `agent` says whether the command starts our agent in the kernel; `connection_file` is the manager's.
    """

    kernel_id: str
    argv: list[str]
    env: dict[str, str]
    cwd: str
    umask: int
    connection_file: str
    agent: bool
    name: str = ""
    """The kernelspec's name."""
    notebook: str = ""
    """What the server calls the notebook (JPY_SESSION_NAME): usually its path; empty when unknown. It changes when the
    notebook is renamed, and when another one is given the kernel."""
    copy_of: str = ""
    """The id of the kernel that this one was forked from; empty where it was started."""
    sleep_after: float | None = None
    """After how many idle seconds it goes to sleep by itself; None for never. The user can change it for `State`."""
    job: str = ""
    """The job's name, where it is a command of its own and no kernel: no agent, no connection file."""
    runner: tuple[int, int] | None = None
    """The pid and start time of the `run` that has a job in the foreground, and is not outlived by it."""
    shielded: list[int] = field(default_factory=list)
    """The signals at which it does not end when they come from outside: whoever holds it saves it then."""

    @property
    def title(self) -> str:
        """What others who have the store are told of who saves a snapshot, or has a hibernated kernel."""
        return self.notebook or self.job or f"Kernel {self.kernel_id}"


@dataclass(frozen=True)
class Parent:
    """The snapshot that the kernel last came from or went to."""

    name: str
    id: str


@dataclass(frozen=True)
class Saved:
    """When the kernel was last as a snapshot has it."""

    at: str
    cells: int | None
    """How many had begun by then, but for one that went on; None where that is not known."""


@dataclass(frozen=True)
class Ended:
    """How a job has ended."""

    status: int | None
    """Its exit code, -N for signal N; None where nobody saw it."""
    at: str
    snapshot: str | None = None
    """The name of the one that it is in, where it was hibernated."""


@dataclass
class Head:
    """What the record of any version says, later ones included."""

    keeper: tuple[int, int] | None = None
    """The keeper's pid and start time."""
    sleeper: tuple[int, int] | None = None
    version: str = ""
    """The package's version that the keeper is of."""
    protocol: int = 0
    """How one talks to it (`client.protocol`)."""
    format: int = 1
    """How the rest of the record is to be read (`FORMAT`)."""
    boot: str = ""
    """Which boot of the machine this is of (proc(5), random/boot_id): pids mean nothing in the next."""
    host: Host = field(default_factory=Host)
    """The machine that the kernel runs on, or ended on."""


@dataclass
class State(Head):
    """Where the kernel is now. Pids are the machine's, but for `kernel_pid`, which is the namespace's."""

    run: str = ""
    """The name of the run folder in use."""
    kernel_pid: int = 0
    started: str = ""
    parent: Parent | None = None
    resumed: ResumedFrom | None = None
    """None where the kernel was not hibernated before."""
    saved: Saved | None = None
    """None where it was neither saved nor restored since it was started."""
    own_files: bool = False
    """Whether it came from a snapshot's own files: some of those that it uses stand in its sleeper alone."""
    sleep_after: float | None = None
    """After how many idle seconds the kernel goes to sleep by itself; None for never."""
    auto: AutoSave | None = None
    """None where the kernel is not saved by itself."""
    undone: list[str] = field(default_factory=list)
    """The ids of the snapshots that it was put back from, to ones that they came from, the last one last."""
    sleep: Sleep | None = None
    """None while the kernel is awake."""
    client: tuple[int, int] | None = None
    """The pid and start time of the program that the kernel ends with, unless `end_after` is None."""
    end_after: float | None = None
    """How many seconds after that one's end the kernel ends, if nobody uses it then; None for never."""
    step: tuple[int, int] | None = None
    """The pid and start time of the process that the batch job ends with which the kernel is of; None for no job."""
    awake: bool = False
    """Whether nobody but the user may put it to sleep."""
    operation: InProgress | None = None
    """The operation under way, for whoever has to clean up after this keeper."""
    worked: float = 0.0
    """How many seconds of processor time the kernel had used when it was last saved or restored, or had started."""
    hibernated: Hibernated | None = None
    """None while there is a kernel."""
    untold: UnconfirmedWake | None = None
    """None where the kernel was not woken, or has answered."""
    shared_files: dict[str, int] = field(default_factory=dict)
    """What `SavedProcesses` says of it in the snapshot that the kernel came from."""
    output: int = 0
    """How many bytes of the output were there already when this process came up: those of the snapshot."""
    ended: Ended | None = None
    """None for a job that has not ended, and for kernels."""

    @property
    def parent_id(self) -> str | None:
        """The id of the snapshot that the kernel last came from or went to."""
        return self.parent.id if self.parent is not None else None

    def choices(self, launch: Launch) -> Choices:
        """Return what was chosen for the kernel that was started so."""
        set_to = _auto_setting(launch)
        return Choices(
            auto=None if self.auto == set_to else self.auto,
            auto_off=self.auto is None and set_to is not None,
            sleep_after=None if self.sleep_after == launch.sleep_after else self.sleep_after or 0.0,
            awake=self.awake,
        )

    def choose(self, choices: Choices) -> None:
        """Have what was chosen before; for the rest the settings hold."""
        if choices.auto is not None or choices.auto_off:
            self.auto = choices.auto
        if choices.sleep_after is not None:
            self.sleep_after = choices.sleep_after or None
        self.awake = choices.awake


def _auto_setting(launch: Launch) -> AutoSave | None:
    when = None if launch.job else settings.auto()
    return None if when is None else AutoSave(when.after, every=when.every)


def now() -> str:
    """Return the time as the manifests write it."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="microseconds")


class KernelFolder:
    """The folder of one kernel: ``gpuckpt/KERNEL_ID`` in Jupyter's runtime folder, 0700."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, launch: Launch, choices: Choices | None = None) -> tuple[KernelFolder, int]:
        """Make the folder of a kernel that is about to start, and return it with its lock, held.

        The `choices` are those that were made for it before.

        Who lists kernels removes the folders of dead ones: this one is held before it can be seen.
        """
        settings.kernels_dir().mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = cls(settings.kernels_dir() / launch.kernel_id)  # looked at again: somebody may have been faster
        folder.path.mkdir(mode=0o700)
        lock = folder.lock()
        assert lock is not None
        state = State(sleep_after=launch.sleep_after, auto=_auto_setting(launch))
        if choices is not None:
            state.choose(choices)
        folder.write_state(state)
        folder._write(LAUNCH, dataclasses.asdict(launch))
        return folder, lock

    @classmethod
    def all(cls) -> Iterator[KernelFolder]:
        """Yield the folder of every kernel and job of this user, but for those that other machines have.

        Of a job that has ended every machine has all that there is.

        Raises
        ------
        Refused : somebody else could have put them there.
        """
        return (folder for folder in cls._of_every_machine() if folder.is_here() or folder.has_ended())

    @classmethod
    def elsewhere(cls) -> Iterator[KernelFolder]:
        """Yield the folder of every kernel and job that another machine has. Raises as `all`."""
        return (folder for folder in cls._of_every_machine() if not (folder.is_here() or folder.has_ended()))

    @classmethod
    def _of_every_machine(cls) -> Iterator[KernelFolder]:
        root = settings.kernels_dir()
        with contextlib.suppress(OSError):
            for path in sorted(root.iterdir()):
                if (path / LAUNCH).exists() and not why_not_private(path):
                    yield cls(path)

    def is_here(self) -> bool:
        """Tell whether it is this machine's: nothing may be done with another one's."""
        with contextlib.suppress(OSError, ValueError):  # it is being made, or removed
            return self.head().host.is_this()
        return True

    def launch(self) -> Launch:
        """Return how the kernel is started."""
        return from_json(Launch, json.loads((self.path / LAUNCH).read_text()))

    def head(self) -> Head:
        """Return who keeps the kernel: that can be read whatever version wrote it."""
        return from_json(Head, json.loads((self.path / STATE).read_text()))

    def state(self) -> State:
        """Return where the kernel is now.

        Raises
        ------
        ValueError : a version wrote it that this one does not understand.
        """
        return from_json(State, json.loads((self.path / STATE).read_text()))

    def write_state(self, state: State) -> None:
        """Replace the state in one step."""
        state.host, state.format = Host.this(), FORMAT
        state.boot = state.host.boot
        self._write(STATE, to_json(state))

    def write_launch(self, launch: Launch) -> None:
        """Replace the launch in one step."""
        self._write(LAUNCH, to_json(launch))

    def write_order(self, order: object) -> None:
        """Say what this folder's keeper shall bring up: a dataclass, or JSON."""
        self._write(_ORDER, to_json(order))

    def take_order(self) -> Any:
        """Return what `write_order` said, as JSON; it is carried out once."""
        path = self.path / _ORDER
        order = json.loads(path.read_text())
        path.unlink()
        return order

    def _write(self, name: str, content: object) -> None:
        fresh = self.path / f".{name}"
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(fd, "w") as f:
            json.dump(content, f)
        fresh.replace(self.path / name)

    def lock(self) -> int | None:
        """Take the lock that says a keeper lives and return it, open; None when a keeper has it.

        It is passed on to the keeper, and held for as long as any process has it open.
        """
        fd = os.open(self.path / KEEPER_LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        deadline = time.monotonic() + _LOOK
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return fd
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(fd)
                    return None
                time.sleep(0.01)

    def has_keeper(self) -> bool:
        """Tell whether a keeper lives: it holds a lock for as long as it does."""
        return is_locked(self.path / KEEPER_LOCK)

    def sleepers(self) -> list[int]:
        """Return the pid of every sleeper of this kernel that lives; there are two in the middle of a restore."""
        pids = (listener_pid(path) for path in sorted(self.path.glob(_SLEEPERS)))
        return [pid for pid in pids if pid]

    def has_sleeper(self) -> bool:
        """Tell whether the sleeper lives, and so the kernel may."""
        sleeper = self.head().sleeper
        return sleeper is not None and start_time(sleeper[0]) == sleeper[1]

    def has_kernel(self) -> bool:
        """Tell whether there is a kernel: one that may run, or one that is hibernated."""
        state = self.state()
        return (state.hibernated is not None and state.boot == Host.this().boot) or self.has_sleeper()

    def can_be_kept(self) -> bool:
        """Tell whether a new keeper has anything to do here: a kernel that lives or is hibernated, or a restore.

        Where the record cannot be read that is left to a version that can.
        """
        try:
            state = self.state()
        except ValueError:
            return True
        in_restore = isinstance(state.operation, RestoreInProgress) and state.boot == Host.this().boot
        return in_restore or self.has_kernel()

    def has_ended(self) -> bool:
        """Tell whether it is that of a job that has ended."""
        with contextlib.suppress(ValueError):  # a later version's
            return self.state().ended is not None
        return False

    def is_hibernated(self) -> bool:
        """Tell whether there is no kernel but its snapshot."""
        with contextlib.suppress(ValueError):
            return self.state().hibernated is not None
        return False

    def remove(self) -> None:
        """Delete the folder and all in it."""
        shutil.rmtree(self.path, ignore_errors=True)

    def leave(self, status: int | None = None) -> None:
        """Delete what nobody needs once the kernel has ended: all of it, but for a job's output and how it ended.

        `status` is its exit code, -N for signal N; None where nobody saw it, or where it is written down already.
        """
        try:
            launch, state = self.launch(), self.state()
        except (OSError, ValueError):
            launch = None
        if launch is None or not launch.job:
            self.remove()
            return
        state.ended = state.ended or Ended(status, now())
        state.keeper = state.sleeper = state.operation = None
        with contextlib.suppress(OSError):
            self.write_state(state)
            self.write_launch(dataclasses.replace(launch, env={}))  # it is only needed to start, and holds secrets
            if state.run:
                with contextlib.suppress(FileNotFoundError):
                    (self.path / state.run / KERNEL_LOG).replace(self.path / OUTPUT)
            for path in self.path.iterdir():
                if path.name not in (LAUNCH, STATE, OUTPUT, LOG, KEEPER_LOCK):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


@dataclass
class Operation:
    """An operation under way: what, on which snapshot, and how far."""

    kind: str
    name: str
    id: str = ""
    """The id that the client gave it, so that it can be cancelled; empty if there is none."""
    store: Store | None = None
    """The store that its snapshot is in, where that is not the kernel's own."""
    unasked: bool = False
    """Whether nobody knows of it who asks for something else: that waits for it."""
    stage: str = "checking"
    cancellable: bool = True
    answering: bool = False
    """Set when all is done but the answer: whoever has it may ask for the next operation."""
    writing: bool = False
    """Set when the kernel has been taken and runs again, and what was taken is being stored: others may wait for it."""
    cancelling: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it is to be cancelled, where `cancellable` says that it can be."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the kernel is not needed for it any more: it has ended, or is `writing`."""

    def let_kernel_go(self) -> None:
        """Note that all of the kernel has been taken, and is being stored."""
        self.writing = True
        self.settled.set()

    def kind_and_name(self) -> str:
        """Return what it is in words: a sleep or a wake has no name."""
        return f"{self.kind} of {self.name!r}" if self.name else self.kind
