"""`run`: a command in the foreground that goes on where it was, as batch systems start, stop and start it again."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any

from .. import settings
from ..client import jobs, keepers
from ..client.listing import STATUS_TIMEOUT
from ..client.protocol import new_operation_id
from ..client.record import KernelFolder
from ..errors import Cancelled, GpuckptError, KeeperGone, NoSuchKernel
from ..kernel import show
from ..kernel.words import Usage
from ..linux.processes import start_time
from ..machine.capability import why_unavailable
from ..operations.requests import Cancel, Hibernate, Restore, Save, Signal
from ..snapshots import going_on
from ..store import Manifest, Progress, Store, name_of
from ..subject import of_a_job
from . import output, slurm
from .jobs import following, how_it_ended, launch_here

if TYPE_CHECKING:
    from ..snapshots.at_remote import AtRemote

__all__ = ["run"]

_PASSED_ON = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
"""What reaches the program as if this command were not there, unless the job is saved at it."""
_ENDING = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM}
_SAVED_BY_ITS_KEEPER = 600.0  # how long a job whose `run` was killed may take to be saved, in seconds
_KILLED_BY_SLURM = 60.0  # how long Slurm may take to end a job that it has requeued, in seconds
_LOOK = 0.1  # seconds
_ELSEWHERE = 1  # with this status it ends where another machine has the job
_TO_END = 5.0  # how long before it is killed a program that is not saved is told to end, in seconds
_TO_END_PART = 0.3  # the same as a part of the time that there is, where that is short


@of_a_job()
def run(args: argparse.Namespace) -> int:
    """Start a command, or go on with it where it was saved; return its exit status, or one that says it is not over."""
    if args.json:
        raise Usage(
            "That is not a command of jupyter gpuckpt.",
            "--json prints one document, and `run` what the program writes.",
            "Leave out --json.",
        )
    if not args.words:
        raise Usage(
            "There is no command to run.",
            "It must come after two dashes.",
            "Usage: jupyter gpuckpt run NAME -- COMMAND [ARGUMENT ...]",
        )
    with _Signals(args.on_signal) as signals:
        folder = _begin(args, signals)
        with _Saver(folder, args.name, args.every) as saver:
            for piece in following(folder, only_new=True):
                if _is_elsewhere(folder):
                    break
                output.pass_on(piece)
                while signals.came:
                    _obey(*signals.came.popleft(), folder, signals, saver)
        if _is_elsewhere(folder):
            output.note(
                f"Job {args.name} ends here: it was started again on another machine, or its record was removed."
            )
            return _ELSEWHERE
        status = _settle(args, folder, signals)
        return status if status is not None else _leave(args, signals)


class _Signals:
    """Takes down which signals come while it is entered: none of them ends this process."""

    def __init__(self, stop_at: Collection[int]) -> None:
        self.stop_at = stop_at
        self.came: deque[tuple[int, float]] = deque()
        """Those that are not obeyed yet, each with its time."""
        self.stopped_by: int | None = None
        """The last one at which the job was to be saved and ended."""
        self._before: dict[int, Any] = {}

    @property
    def taken(self) -> list[int]:
        """Their numbers: the job gets none of them but from here, also where they are sent to every process."""
        return sorted(map(int, {*self.stop_at, *_PASSED_ON}))

    def __enter__(self) -> _Signals:
        for number in self.taken:
            self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, _: FrameType | None) -> None:
        self.came.append((number, time.time()))


# -- its begin


def _begin(args: argparse.Namespace, signals: _Signals) -> KernelFolder:
    """Start the job, or bring up what it is to go on with."""
    going_on.check(args.name)
    pid = os.getpid()
    launch = replace(launch_here(args.name, args.words), runner=(pid, start_time(pid) or 0), shielded=signals.taken)
    unavailable = why_unavailable()
    if unavailable is not None:
        raise unavailable
    slurm.warn_of_deaf_script()
    _wait_for_end(jobs.folder_of(args.name), signals)
    _fetch(args.name)
    manifest = going_on.find(_store(), args.name)
    if manifest is None:
        return jobs.start(launch, replace=True)
    began = time.monotonic()
    folder = jobs.bring_up(launch, Restore(key=manifest.name), replace=True)
    output.note(
        f"Job {args.name} goes on as {name_of(manifest.name)} has it, saved {show.moment(manifest.created)} "
        f"(restored in {show.duration(time.monotonic() - began)})."
    )
    return folder


def _fetch(name: str) -> None:
    """Fetch what the job is to go on with from the remote, if the settings name one.

    Raises
    ------
    GpuckptError : it cannot be told what is there, or not be fetched: the job would begin anew, or from older state.
    """
    if not settings.remote():
        return
    at = _at_remote()
    fetched, faults = at.fetch(lambda manifest: going_on.is_of(name, manifest))
    for manifest in fetched:
        output.note(f"Fetched {name_of(manifest.name)} ({show.size(manifest.size)}) from {at.shown}.")
    if faults:
        raise faults[0]


def _at_remote() -> AtRemote:
    from ..snapshots.at_remote import AtRemote  # which takes a while to import

    return AtRemote(_store())


def _send(name: str, snapshot: Manifest | None, progress: Progress | None = None) -> None:
    """Have the remote hold the snapshot that a job goes on with, and no other of it; None: the job is over."""
    if not settings.remote():
        return
    at = _at_remote()
    if snapshot is not None:
        at.send(snapshot.name, progress)
    left = "" if snapshot is None else snapshot.id
    at.remove(lambda manifest: going_on.is_of(name, manifest) and manifest.id != left)


def _send_or_say(name: str, snapshot: Manifest | None) -> None:
    try:
        _send(name, snapshot)
    except GpuckptError as e:
        failed = GpuckptError(
            f"What job {name} goes on with is not at the remote as it should be; it is in the store of this machine.",
            f"{e.what} {e.why}",
            "Where the next machine has the same store, nothing is lost.",
        )
        output.failure(False, failed)


def _is_elsewhere(folder: KernelFolder) -> bool:
    """Tell whether a job is another machine's now, which took this one for dead; it may be about to start it."""
    try:
        return folder.launch().runner != (os.getpid(), start_time(os.getpid()))
    except FileNotFoundError:
        return True


def _wait_for_end(folder: KernelFolder, signals: _Signals) -> None:
    """Wait for the end of a job whose `run` was killed, which its keeper saves; one of a lost machine is forgotten."""
    try:
        launch = folder.launch()
    except FileNotFoundError:
        return
    if not folder.is_here() and not folder.has_ended() and slurm.has_left(launch.env):
        folder.remove()
        return
    if launch.runner is None or start_time(launch.runner[0]) == launch.runner[1]:
        return  # it runs in somebody's foreground, or nobody's
    deadline = time.monotonic() + _SAVED_BY_ITS_KEEPER
    while not signals.came and time.monotonic() < deadline and folder.is_here():
        if folder.has_ended() and not folder.has_keeper():
            return
        with contextlib.suppress(GpuckptError):
            jobs.find(launch.job)
            keepers.connect(folder).close()  # its keeper may have been killed, too
        time.sleep(_LOOK)


def _store() -> Store:
    return Store(settings.store_dir())


# -- while it runs


class _Saver:
    """Saves the job every so many seconds while it is entered; only the newest of these snapshots is kept."""

    def __init__(self, folder: KernelFolder, job: str, every: float | None) -> None:
        self._folder, self._job, self._every = folder, job, every
        self._saving, self._over, self._wanted = threading.Lock(), threading.Event(), threading.Event()
        self._operation = new_operation_id()
        self._thread = None if every is None else threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _Saver:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._every):
            with self._saving:
                try:
                    self._save()
                except (Cancelled, KeeperGone, NoSuchKernel):
                    pass  # the job has ended, or is about to
                except GpuckptError as e:
                    output.failure(False, e)

    def _save(self) -> None:
        self._operation = new_operation_id()
        name = going_on.name_while_running(self._job)
        with keepers.connect(self._folder) as keeper:
            saved = keeper.ask(Save(name=name, replace=True, operation=self._operation), timeout=None)
        store = _store()
        going_on.remove_all_but(store, self._job, saved.id)
        _send(self._job, store.get(saved.name), self._go_on)

    def _go_on(self, *_: object) -> None:
        if self._wanted.is_set() or self._over.is_set():
            raise Cancelled("The snapshot was not sent.", "The job is to be saved for good, or has ended.", "")

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Have nothing saved within; what is being saved is given up."""
        self._wanted.set()
        while not self._saving.acquire(timeout=_LOOK):
            with contextlib.suppress(GpuckptError), keepers.connect(self._folder) as keeper:
                keeper.ask(Cancel(operation=self._operation, kind="save"), timeout=STATUS_TIMEOUT)
        try:
            yield
        finally:
            self._wanted.clear()
            self._saving.release()


class _Deadline:
    """Breaks off what is asked of a keeper while it is entered, before Slurm kills the job."""

    def __init__(self, folder: KernelFolder, operation: str, signalled: float) -> None:
        self.missed: slurm.Kill | None = None
        """What it was broken off for."""
        self._folder, self._operation, self._signalled = folder, operation, signalled
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True) if slurm.is_job() else None

    def __enter__(self) -> _Deadline:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            kill = slurm.next_kill(self._signalled)
        except GpuckptError as e:
            output.failure(False, e)
            return
        if kill is None:
            return
        left = kill.at - self._signalled
        latest = kill.at - min(_TO_END, left * _TO_END_PART)
        if self._over.wait(max(0.0, latest - time.time())):
            return
        self.missed = kill
        while not self._over.wait(_LOOK):
            with contextlib.suppress(GpuckptError), keepers.connect(self._folder) as keeper:
                keeper.ask(Cancel(operation=self._operation, kind="hibernate"), timeout=STATUS_TIMEOUT)


def _obey(number: int, signalled: float, folder: KernelFolder, signals: _Signals, saver: _Saver) -> None:
    """Do what a signal asks for; the program gets it where that is not to save the job, or cannot be done."""
    if number in signals.stop_at:
        if folder.has_ended():
            return  # it is saved
        signals.stopped_by = number
        with saver.held():
            if _hibernate(folder, signalled) or number not in _ENDING:
                return
    with contextlib.suppress(GpuckptError), keepers.connect(folder) as keeper:
        keeper.ask(Signal(signum=number), timeout=STATUS_TIMEOUT)


def _hibernate(folder: KernelFolder, signalled: float) -> bool:
    """Save the job and end it; return whether it has ended, and say why where it could not be saved in time."""
    operation = new_operation_id()
    with _Deadline(folder, operation, signalled) as deadline:
        try:
            with keepers.connect(folder) as keeper:
                keeper.ask(Hibernate(end=True, operation=operation), timeout=None)
        except GpuckptError as e:
            if not folder.has_ended():
                output.failure(False, e if deadline.missed is None else _too_late(folder, deadline.missed))
                return False
    return True


def _too_late(folder: KernelFolder, kill: slurm.Kill) -> GpuckptError:
    return GpuckptError(
        f"The job {folder.launch().job} could not be saved in time; it keeps running.",
        f"Slurm kills it in {max(0.0, kill.at - time.time()):.0f} s: {kill.why}.",
        "Have Slurm send its signal earlier (`#SBATCH --signal=B:USR1@SECONDS`), save it while it runs (`--every`), or "
        "ask an administrator for a longer KillWait or GraceTime.",
    )


# -- its end


def _settle(args: argparse.Namespace, folder: KernelFolder, signals: _Signals) -> int | None:
    """See to what the job goes on with another time; return its exit status, or None where it is not over."""
    store, name = _store(), args.name
    ended = folder.state().ended
    if ended is not None and ended.snapshot is not None:
        manifest = store.get(ended.snapshot)
        going_on.remove_all_but(store, name, manifest.id)
        output.note(
            f"Job {name} is hibernated as {name_of(manifest.name)} ({show.size(manifest.size)}): "
            "the same command goes on with it."
        )
        _send_or_say(name, manifest)
        return None
    status = ended.status if ended is not None else None
    if signals.stopped_by is not None or status in (None, -signal.SIGKILL):  # not by itself
        manifest_left = going_on.find(store, name)
        if manifest_left is not None:
            output.note(
                f"Job {name} {how_it_ended(status)}. The same command goes on as {name_of(manifest_left.name)} has it, "
                f"saved {show.moment(manifest_left.created)}."
            )
            if signals.stopped_by is not None:
                return None
    else:
        if status == 0:
            going_on.remove_all_but(store, name)
        elif aside := going_on.set_aside(store, name):
            output.note(
                f"Job {name} {how_it_ended(status)}: the same command starts it afresh. Its last snapshot is kept as "
                f"{name_of(aside)}; `jupyter gpuckpt restore {name} {name_of(aside)}` restores it."
            )
        _send_or_say(name, None)
    if status is None:
        status = -signal.SIGKILL
    return status if status >= 0 else 128 - status


def _leave(args: argparse.Namespace, signals: _Signals) -> int:
    """Have a job that is not over started again, where that is for this command to do; return the exit status."""
    number = signals.stopped_by or signal.SIGTERM  # another command may have hibernated it
    if isinstance(args.requeue, int):
        return args.requeue
    requeued = slurm.requeue() if args.requeue == "auto" and slurm.is_job() else "no"
    if requeued != "no":
        output.note(f"Slurm job {os.environ['SLURM_JOB_ID']} is requeued.")
    if requeued == "now":
        # What comes after this command in a script is for when the job is over.
        deadline = time.monotonic() + _KILLED_BY_SLURM
        while not any(came == signal.SIGTERM for came, _ in signals.came) and time.monotonic() < deadline:
            time.sleep(_LOOK)
    return 128 + number
