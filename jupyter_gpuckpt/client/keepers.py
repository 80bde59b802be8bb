"""Finding keepers, starting them, and giving a kernel whose keeper died a new one."""

from __future__ import annotations

import contextlib
import json
import marshal
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from .. import __version__, settings
from ..errors import Elsewhere, GpuckptError, KeeperGone, NoSuchKernel, OtherVersion
from ..linux import spawning
from ..linux.processes import descendants, start_time
from ..linux.readiness import readable
from ..operations.choices import Choices
from . import broker_connection
from .kernel_start import kernel_program, new_run_folder, start_by_deputy
from .protocol import OLDEST_PROTOCOL, PROTOCOL, KeeperClient
from .record import FORMAT, LOG, SOCKET, Head, KernelFolder, Launch

_READY_TIMEOUT = 60.0
_RESTORED_TIMEOUT = 86400.0  # each step of a restore has its own limit, by what it moves; this is for a keeper's hang
_DEATH_TIMEOUT = 30.0
_CONNECT_POLL = 0.02


def start_keeper(
    launch: Launch, order: object = None, how: str = "copy", choices: Choices | None = None
) -> tuple[subprocess.Popen[bytes], KernelFolder]:
    """Start a keeper, and by it the kernel; what is left of an earlier kernel of that id is ended.

    With an `order` the kernel comes up as the copy that `keeper.operations.fork` ordered; or, where `how` is
    ``resume``, from the snapshot that the order, a request to restore one, names. The `choices` are those that were
    made for the kernel before.

    Raises
    ------
    GpuckptError : the kernel could not be started; nothing is left behind.
    """
    end(KernelFolder(settings.kernels_dir() / launch.kernel_id))
    folder, lock = KernelFolder.create(launch, choices)
    try:
        if order is None:
            return _start_kernel(folder, lock), folder
        folder.write_order(order)
        return run_keeper(folder, lock, how), folder
    except BaseException:
        end(folder)
        raise
    finally:
        os.close(lock)


def _refuse_other_version(folder: KernelFolder) -> None:
    """Refuse to talk to a keeper, or to take over from one, that would misunderstand this version.

    Raises
    ------
    OtherVersion : with both versions.
    """
    head = folder.head()
    if head.protocol in range(OLDEST_PROTOCOL, PROTOCOL + 1) or head.keeper is None:
        return
    newer = head.protocol > PROTOCOL
    then = _use_its_version(head)
    if not newer:
        then = (
            f"{{Restart}}; or end its keeper (`kill -9 {head.keeper[0]}`) while nothing is being saved: the "
            "{kernel} runs on, and gets one of this version."
        )
    raise _other_version(
        head,
        f"It is of jupyter_gpuckpt {head.version or 'before 0.1'} (protocol {head.protocol}), which is "
        f"{'newer' if newer else 'older'} than this, {__version__} (protocol {PROTOCOL}).",
        then,
    )


def _refuse_newer_record(folder: KernelFolder) -> None:
    """Refuse to take over from a keeper whose record this version does not understand.

    Raises
    ------
    OtherVersion : with both versions.
    """
    head = folder.head()
    if head.protocol > PROTOCOL:
        _refuse_other_version(folder)
    why = f"it has format {head.format}, and this version knows format {FORMAT}" if head.format > FORMAT else ""
    try:
        folder.state()
    except ValueError as e:
        why = why or str(e)
    if why:
        of = head.version or "before 0.1"
        raise _other_version(
            head,
            f"It left a record that this version, {__version__}, does not understand. It was of jupyter_gpuckpt {of}; "
            f"{why}.",
            _use_its_version(head),
        )


def _use_its_version(head: Head) -> str:
    return f"Use jupyter_gpuckpt {head.version or 'of a newer version'} for it, or restart the kernel."


def _other_version(head: Head, why: str, then: str) -> OtherVersion:
    what = "The {kernel}'s keeper is of another version; the {kernel} keeps running."
    return OtherVersion(what, why, then, keeper=head.version, here=__version__)


def take_over(folder: KernelFolder) -> None:
    """Give a kernel whose keeper died a new one, unless somebody else is doing so.

    Raises
    ------
    NoSuchKernel : the kernel is gone; so is its folder.
    OtherVersion : the keeper was of a newer version.
    KeeperGone : it got none, and is as it was: that can be tried again.
    """
    try:
        lock = folder.lock()
    except FileNotFoundError:
        raise _no_such_kernel() from None
    except OSError as e:
        raise without_keeper(str(e)) from e
    if lock is None:
        return
    try:
        if not folder.can_be_kept():
            _bury(folder)
            raise _no_such_kernel()
        _refuse_newer_record(folder)
        # The process started here ends at once, and leaves the keeper to the machine's process 1: who takes a kernel
        # over may be a short command.
        run_keeper(folder, lock, "take-over").wait()
    except FileNotFoundError:
        raise _no_such_kernel() from None
    except OSError as e:
        raise without_keeper(str(e)) from e
    finally:
        os.close(lock)


def end(folder: KernelFolder) -> None:
    """End a kernel by force, with its keeper and all of its processes, and its folder but for what `leave` leaves.

    For when the keeper is gone or does not answer; one that does is asked to ``close``.
    """
    with contextlib.suppress(OSError, ValueError):
        keeper = folder.head().keeper
        if keeper is not None and start_time(keeper[0]) == keeper[1]:
            _kill(keeper[0])
    sleepers = folder.sleepers()
    with contextlib.suppress(OSError, ValueError):
        noted = folder.head().sleeper
        if noted is not None and folder.has_sleeper():
            sleepers = [*sleepers, noted[0]]  # its socket may be gone
    for sleeper in set(sleepers):
        _kill(sleeper)
    folder.leave(-signal.SIGKILL if sleepers else None)


def _bury(folder: KernelFolder) -> None:
    """Remove what is left of a kernel that died with its keeper."""
    with contextlib.suppress(OSError, ValueError):
        launch = folder.launch()
        if launch.copy_of:
            # It was written for the fork. A server that holds the copy writes its own where it needs one.
            Path(launch.connection_file).unlink(missing_ok=True)
    end(folder)


def _kill(pid: int) -> None:
    """Kill a process and wait for its end; it may be somebody else's child."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        readable(fd, seconds=_DEATH_TIMEOUT)
    except ProcessLookupError:
        pass
    finally:
        os.close(fd)


def without_keeper(why: str) -> KeeperGone:
    """Return what to say where a kernel whose keeper died did not get a new one."""
    return KeeperGone(
        "No new keeper could be started for the {kernel}; it keeps running without one.",
        why,
        "Correct that, and run `{gpuckpt kernels}`: it tries again each time.",
    )


def _no_such_kernel() -> NoSuchKernel:
    return NoSuchKernel(
        "The {kernel} is gone.",
        "Neither its keeper nor its processes are running.",
        "Start a new one; `gpuckpt restore @` restores a snapshot into it.",
    )


def _start_kernel(folder: KernelFolder, lock: int) -> subprocess.Popen[bytes]:
    """Start a kernel, and then its keeper, which the kernel does not wait for."""
    program = kernel_program(folder.launch())
    try:
        run_dir = new_run_folder(folder.path, program.env)
        started = start_by_deputy(folder.path, run_dir, program) if broker_connection.is_needed() else None
    except OSError as e:
        raise GpuckptError("The {kernel} could not be started.", str(e), "Run `gpuckpt doctor`.") from e
    if started is not None:
        return run_keeper(folder, lock, "hold", run_dir.name, *map(str, started))
    starter = [sys.executable, "-I", "-S", "-B", spawning.STARTER, str(folder.path), str(run_dir)]
    told = marshal.dumps({"kernel": vars(program), "keeper": dict(os.environ)})
    return _run(folder, lock, starter, (), _READY_TIMEOUT, told)


def run_keeper(folder: KernelFolder, lock: int, how: str, *started: str) -> subprocess.Popen[bytes]:
    """Start the keeper of this folder, hand the folder's lock to it, and wait until it holds the kernel.

    `how` and `started` are as `keeper.process.keep` takes them.

    Raises
    ------
    GpuckptError : it does not hold it.
    """
    timeout = _RESTORED_TIMEOUT if how in ("copy", "restore", "resume") else _READY_TIMEOUT
    program = [sys.executable, "-m", "jupyter_gpuckpt.keeper", str(folder.path)]
    return _run(folder, lock, program, (how, *started), timeout)


def _run(
    folder: KernelFolder,
    lock: int,
    program: Sequence[str],
    arguments: Sequence[str],
    timeout: float,
    told: bytes | None = None,
) -> subprocess.Popen[bytes]:
    """Run a program that is or becomes the keeper, and wait until it holds the kernel.

    Between `program` and `arguments` it is given the descriptors of the folder's lock, and of what it says by that it
    holds the kernel. Where it is `told` something by its standard input, it gets no environment.
    """
    read, write = os.pipe()
    log = os.open(folder.path / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        process = subprocess.Popen(
            [*program, str(lock), str(write), *arguments],
            env=None if told is None else {},
            stdin=subprocess.DEVNULL if told is None else subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=[lock, write],
            start_new_session=True,
            cwd="/",
        )
    except BaseException:
        os.close(read)
        raise
    finally:
        os.close(write)
        os.close(log)
    if told is not None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:  # it ended: what it says of it comes below
            process.stdin.write(told)
    with open(read, "rb") as pipe:
        said = pipe.read().decode() if readable(pipe.fileno(), seconds=timeout) else ""
    if said == "ready":
        return process
    process.kill()
    process.wait()
    if said:
        raise GpuckptError.from_dict(json.loads(said))
    words = ""
    if (folder.path / LOG).exists():
        words = (folder.path / LOG).read_text("utf-8", "replace").strip()
    raise KeeperGone(
        "The {kernel}'s keeper did not start.",
        words.splitlines()[-1] if words else f"It did not answer within {timeout:.0f} s.",
        "Run `gpuckpt doctor`.",
    )


def connect(folder: KernelFolder, timeout: float = 10.0) -> KeeperClient:
    """Connect to the keeper of a kernel, after giving it a new one if the old one died.

    Raises
    ------
    NoSuchKernel : the kernel is gone.
    KeeperGone : its keeper does not answer.
    OtherVersion : its keeper is of a version that this one cannot talk to.
    Elsewhere : it is another machine's.
    """
    refuse_elsewhere(folder)
    deadline = time.monotonic() + timeout
    while True:
        if not folder.has_keeper():
            take_over(folder)
        try:
            keeper = KeeperClient(folder.path / SOCKET, timeout)
        except KeeperGone:
            # A keeper has its lock a moment before it listens.
            if time.monotonic() > deadline:
                raise
            time.sleep(_CONNECT_POLL)
            continue
        try:
            _refuse_other_version(folder)
        except FileNotFoundError:
            pass  # it is ending
        except BaseException:
            keeper.close()
            raise
        return keeper


def refuse_elsewhere(folder: KernelFolder) -> None:
    """Refuse what would be done with a kernel or job that another machine has: its keeper cannot be reached from here.

    Raises
    ------
    Elsewhere : on which machine that can be done.
    """
    if folder.is_here() or folder.has_ended():
        return
    host, launch = folder.head().host.name, folder.launch()
    what = f"The job {launch.job}" if launch.job else f"Kernel {launch.kernel_id}"
    raise Elsewhere(
        f"{what} runs on another machine, {host}; nothing was touched.",
        f"This is {platform.node()}, and both machines use {folder.path.parent}.",
        f"Run the command on {host}. If that machine is gone for good, remove {folder.path}.",
        host=host,
    )


def folders() -> Iterator[KernelFolder]:
    """Yield the folder of every kernel and job of this machine that still lives; what dead kernels left is removed."""
    for folder in KernelFolder.all():
        try:
            if folder.has_keeper() or folder.can_be_kept():
                yield folder
                continue
            if folder.has_ended():
                continue
            lock = folder.lock()
        except FileNotFoundError:  # it has ended meanwhile
            continue
        if lock is not None:
            _bury(folder)
            os.close(lock)


def find(text: str) -> KernelFolder:
    """Return the folder of the kernel, or of the job that runs, that the user means.

    `text` is its id or the beginning of it, its notebook's path or name (with or without the suffix), the path or
    name of its connection file, a job's name, or the pid of one of its processes or of its keeper.

    Raises
    ------
    NoSuchKernel : none or several fit.
    Elsewhere : it is another machine's.
    """
    launches = []
    for folder in folders():
        with contextlib.suppress(FileNotFoundError):
            launches.append((folder, folder.launch()))
    # What names one kernel in full comes before what fits by a part of its names.
    for fits in (_is_named, _fits):
        found = [(folder, launch) for folder, launch in launches if fits(text, folder, launch)]
        if len(found) == 1:
            return found[0][0]
        if found:
            break
    ids = [launch.kernel_id for _, launch in found]
    for folder in KernelFolder.elsewhere() if not ids else ():
        with contextlib.suppress(OSError, ValueError):
            if text and (_is_named(text, folder, folder.launch()) or folder.launch().kernel_id.startswith(text)):
                refuse_elsewhere(folder)
    raise NoSuchKernel(
        f"{'Several kernels match' if found else 'No kernel matches'} {text!r}.",
        f"These do: {', '.join(ids)}." if ids else f"Kernels running: {len(launches)}, none with that name.",
        '`gpuckpt kernels` lists them; a kernel that was not started as "Python 3 (gpuckpt)" is not listed. '
        "`gpuckpt ps` lists jobs.",
        kernels=ids,
    )


def _is_named(text: str, _: KernelFolder, launch: Launch) -> bool:
    return bool(text) and text in (launch.kernel_id, launch.notebook, launch.connection_file, launch.job)


def _fits(text: str, folder: KernelFolder, launch: Launch) -> bool:
    if not text:
        return False
    names = (Path(launch.notebook).name, Path(launch.notebook).stem, Path(launch.connection_file).name)
    return (
        (not launch.job and launch.kernel_id.startswith(text))
        or text in names
        or _same_end(text, launch.notebook)
        or (text.isdecimal() and int(text) in _pids(folder))
    )


def _same_end(path: str, other: str) -> bool:
    """Tell whether one path is the end of the other: servers name notebooks from a folder of theirs."""
    pairs = list(zip(reversed(Path(path).parts), reversed(Path(other).parts), strict=False))
    return bool(pairs) and all(mine == theirs for mine, theirs in pairs)


def _pids(folder: KernelFolder) -> list[int]:
    head = folder.head()
    keeper, sleeper = head.keeper, head.sleeper
    return [*(pid for pid, _ in filter(None, (keeper, sleeper))), *(descendants(sleeper[0]) if sleeper else [])]
