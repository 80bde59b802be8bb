"""`exec`, `ps`, `logs` and `forget`: commands for jobs; and what `restore` and `stop` do with them."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from .. import settings
from ..checked import to_json
from ..client import jobs, keepers
from ..client.listing import STATUS_TIMEOUT, OfAnotherMachine, all_jobs, of_other_machines, with_snapshots
from ..client.record import KERNEL_LOG, OUTPUT, KernelFolder, Launch
from ..errors import GpuckptError, KeeperGone, NoSuchSnapshot, OtherVersion, Refused
from ..kernel import show
from ..kernel.tables import Listing, Marked
from ..kernel.words import Usage
from ..machine.capability import why_unavailable
from ..operations.requests import Attach, Restore, Signal, Status
from ..operations.results import EndedJob, Restored, RunningJob
from ..snapshots.naming import find
from ..snapshots.summary import summary
from ..store import Manifest, Store
from ..subject import of_a_job
from . import output

_GRACE = 10.0
"""How long a job has to end once it has been asked to (SIGTERM), in seconds."""
_END_TIMEOUT = 150.0
_LOOK = 0.1  # how often `logs --follow` looks for more, in seconds
_PIECE = 1 << 20


# -- exec


@of_a_job()
def exec_(args: argparse.Namespace) -> int:
    """Start a command as a job, and leave it."""
    if not args.words:
        raise Usage(
            "There is no command to start.",
            "It must come after two dashes.",
            "Usage: jupyter gpuckpt exec NAME -- COMMAND [ARGUMENT ...]",
        )
    launch = launch_here(args.name, args.words)
    _refuse_where_none_can_be()
    folder = jobs.start(launch, replace=args.replace)
    pid = None
    with contextlib.suppress(GpuckptError), keepers.connect(folder) as keeper:  # it may have ended already
        pid = keeper.ask(Status(), timeout=STATUS_TIMEOUT).pid
    document = {"job": args.name, "kernel_id": launch.kernel_id, "pid": pid, "command": launch.argv}
    text = (
        f"Started job {args.name}{f', process {pid}' if pid else ''}.\n"
        f"What it writes:  jupyter gpuckpt logs {args.name}\n"
        f"Save it:         jupyter gpuckpt save {args.name} SNAPSHOT"
    )
    output.result(args.json, document, text)
    return output.DONE


def launch_here(name: str, words: list[str]) -> Launch:
    """Return how a job is started from here.

    Raises
    ------
    Refused : it cannot be.
    BadName : the text cannot be a job's name.
    """
    if settings.ENV_RUN_DIR in os.environ:
        raise Refused(
            "The job was not started.",
            "This command runs inside a notebook or job, and the new job would end with it.",
            "Start it from a terminal.",
        )
    program = shutil.which(words[0])
    if program is None:
        raise Refused(
            "The job was not started.",
            f"There is no program {words[0]!r} in PATH, or it cannot be executed.",
            "Give its path; start a shell command line with `sh -c 'LINE'`.",
        )
    umask = os.umask(0o077)
    os.umask(umask)
    return jobs.launch_of(name, [str(Path(program).absolute()), *words[1:]], os.environ, str(Path.cwd()), umask)


# -- ps


@of_a_job()
def list_jobs(args: argparse.Namespace) -> int:
    """List the jobs, also those that have ended; one whose keeper died gets a new one."""
    found, manifests, faults = with_snapshots(all_jobs)
    elsewhere = [one for one in of_other_machines() if one.job]
    told = [output.told(fault) for fault in faults]
    document = {"jobs": with_names(found, manifests), "elsewhere": elsewhere, "faults": told}
    output.result(args.json, document, table(found, manifests, faults, elsewhere))
    return output.DONE


def of_another_machine(one: OfAnotherMachine) -> str:
    """Say of a kernel or job which other machine has it."""
    what = f"Job {one.job}" if one.job else f"Kernel {one.kernel_id[:8]} ({Path(one.notebook).name or 'no notebook'})"
    return f"{what} runs on {one.host}: run commands about it there."


def with_names(found: Sequence[RunningJob | EndedJob], manifests: Sequence[Manifest]) -> list[Mapping[str, object]]:
    """Return jobs as JSON, each with the names of its snapshots."""
    return [{**to_json(job), "snapshots": _names(job, manifests)} for job in found]


def _names(job: RunningJob | EndedJob, manifests: Sequence[Manifest]) -> list[str]:
    return [m.name for m in manifests if m.kernel.get("kernel_id") == job.kernel_id]


def table(
    found: Sequence[RunningJob | EndedJob],
    manifests: Sequence[Manifest],
    faults: Sequence[GpuckptError],
    elsewhere: Sequence[OfAnotherMachine] = (),
) -> Listing:
    """Return the jobs as a table."""
    head = ["job", "pid", "memory", "GPU memory", "state", "started", "based on", "snapshots", "command"]
    rows = [
        [
            job.job,
            str(job.pid or ""),
            show.size(job.memory) if job.memory else "",
            show.size(job.gpu_memory) if job.gpu_memory else "" if job.gpu_memory == 0 else "unknown",
            _state(job),
            show.moment(job.started) if job.started else "",
            job.parent.name if job.parent is not None else "",
            str(len(_names(job, manifests))),
            shlex.join(job.command),
        ]
        for job in found
    ]
    empty = "There are no jobs. Start one: jupyter gpuckpt exec NAME -- COMMAND"
    spare = ("snapshots", "GPU memory", "memory", "pid", "started")
    told = [*map(of_another_machine, elsewhere), *map(str, faults)]
    return Listing(head, rows, empty, told, elastic=("state", "based on", "command"), spare=spare)


def _state(job: RunningJob | EndedJob) -> Marked:
    if isinstance(job, RunningJob):
        return Marked(job.state, "good" if job.state == "running" else "busy")
    well = job.exit_status == 0 or job.hibernated_as
    return Marked(how_it_ended(job.exit_status, job.hibernated_as), "quiet" if well else "bad")


def how_it_ended(status: int | None, snapshot: str | None = None) -> str:
    """Return in words how a job ended; `status` is its exit code, -N for signal N, None where nobody saw it.

    `snapshot` is the one that it was hibernated as, if it was.
    """
    if snapshot:
        return f"hibernated as {snapshot}"
    if status is None:
        return "ended, unseen"
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"ended by signal {-status}"


# -- logs


@of_a_job()
def logs(args: argparse.Namespace) -> int:
    """Print what a job has written; with --follow also what it goes on to write, until it has ended."""
    if args.json and args.follow:
        raise Usage(
            "That is not a command of jupyter gpuckpt.",
            "--json prints one document, and --follow never ends.",
            "Leave out one of them.",
        )
    folder = jobs.find(args.name)
    if args.json:
        content = b"".join(_written(folder)).decode("utf-8", "replace")
        output.result(True, {"job": args.name, "output": content}, "")
        return output.DONE
    for piece in following(folder) if args.follow else _written(folder):
        output.pass_on(piece)
    return output.DONE


def _written(folder: KernelFolder) -> Iterator[bytes]:
    """Yield what a job has written so far."""
    file = _open(folder)
    if file is not None:
        with file:
            yield from _rest(file)


def _open(folder: KernelFolder) -> IO[bytes] | None:
    """Open what a job has written, wherever that is; None while there is nothing."""
    state = folder.state()
    for path in (folder.path / state.run / KERNEL_LOG, folder.path / OUTPUT) if state.run else (folder.path / OUTPUT,):
        with contextlib.suppress(FileNotFoundError):
            return path.open("rb")
    return None


def _rest(file: IO[bytes]) -> Iterator[bytes]:
    while piece := file.read(_PIECE):
        yield piece


def following(folder: KernelFolder, *, only_new: bool = False) -> Iterator[bytes]:
    """Yield what a job has written and goes on to write, until it has ended or is forgotten.

    After a restore it goes on with what the restored job writes, and not with what its snapshot had shown already;
    with `only_new`, so it begins. Nothing is yielded, too, each time that there is nothing more for now.
    """
    file, came_up = None, "" if only_new else None
    try:
        while True:
            state = folder.state()
            if file is None or state.started != came_up:
                if file is not None:
                    yield from _rest(file)
                    file.close()
                    output.note(f"-- restored: {state.parent.name if state.parent else ''}")
                file = _open(folder)
                if file is not None and came_up is not None:
                    file.seek(state.output)
                came_up = state.started if file is not None else came_up
            over = state.ended is not None and not folder.has_keeper()
            if file is not None:
                yield from _rest(file)
            if over:
                return
            if not folder.has_keeper():
                jobs.find(folder.launch().job)  # it may have died with its keeper
                with contextlib.suppress(GpuckptError):
                    keepers.connect(folder).close()  # only another can tell how one ends that has none
            yield b""
            time.sleep(_LOOK)
    except FileNotFoundError:
        return
    finally:
        if file is not None:
            file.close()


# -- restore


@of_a_job()
def restore_ended(args: argparse.Namespace, folder: KernelFolder) -> Restored:
    """Bring a job that has ended back; return what there is to say of it."""
    _refuse_where_none_can_be()
    manifest = _snapshot(args.of_any or args.name, folder.launch().job)
    began = time.monotonic()
    jobs.bring_back(folder, _order(args, manifest))
    return _account(folder, manifest, began)


@of_a_job()
def restore_as(args: argparse.Namespace) -> Restored:
    """Bring a snapshot of a job up as a new job; return what there is to say of it."""
    _refuse_where_none_can_be()
    manifest = _snapshot(args.of_any or args.name, args.kernel)
    # It is not started here: what stands for its command is for people.
    launch = jobs.launch_of(args.new_job, [str(manifest.kernel.get("program", ""))], os.environ, "/", 0o077)
    began = time.monotonic()
    folder = jobs.bring_up(launch, _order(args, manifest))
    return _account(folder, manifest, began)


def _refuse_where_none_can_be() -> None:
    """Refuse to bring a job up on a machine that can hold none."""
    unavailable = why_unavailable()
    if unavailable is not None:
        raise unavailable


def _snapshot(name: str, job: str) -> Manifest:
    """Return the snapshot of this name, or without one the latest of a job."""
    store = Store(settings.store_dir())
    if name:
        return store.get(find(store, name))
    for manifest in store.list():
        if manifest.kernel.get("job") == job:
            return manifest
    raise NoSuchSnapshot(
        f"There is no snapshot of a job {job!r}.", "", f"`jupyter gpuckpt save {job} NAME` saves it while it runs."
    )


def _order(args: argparse.Namespace, manifest: Manifest) -> Restore:
    return Restore(key=manifest.name, gpus=args.gpus, other_ports=args.other_ports, lazy=args.lazy)


def _account(folder: KernelFolder, manifest: Manifest, began: float) -> Restored:
    seconds, notes = time.monotonic() - began, list[str]()
    with contextlib.suppress(GpuckptError), keepers.connect(folder) as keeper:  # it may have ended already
        notes = keeper.ask(Status(), timeout=STATUS_TIMEOUT).notes
    return Restored(**vars(summary(manifest)), warnings=notes, given_up=None, seconds=seconds)


# -- stop and forget


@of_a_job()
def stop_job(args: argparse.Namespace, folder: KernelFolder) -> int:
    """End a job: it is asked to (SIGTERM), and killed when it has not in time; with --force it is killed at once."""
    name = folder.launch().job
    if folder.has_ended():
        ended = folder.state().ended
        assert ended is not None
        raise Refused(
            f"The job {name} was not stopped.",
            f"It is over: {how_it_ended(ended.status, ended.snapshot)}.",
            f"`jupyter gpuckpt forget {name}` removes its record and output.",
        )
    try:
        _end(folder, at_once=args.force)
    except (KeeperGone, OtherVersion):
        if not args.force:
            raise
        keepers.end(folder)
    ended = folder.state().ended
    status = ended.status if ended is not None else None
    document = {"job": name, "stopped": True, "exit_status": status}
    output.result(args.json, document, f"Stopped job {name}: it {how_it_ended(status)}.")
    return output.DONE


def _end(folder: KernelFolder, *, at_once: bool) -> None:
    """End a job that runs, and wait until its keeper is gone."""
    with keepers.connect(folder) as keeper:
        keeper.ask(Attach(), timeout=STATUS_TIMEOUT)
        keeper.ask(Signal(signum=signal.SIGKILL if at_once else signal.SIGTERM), timeout=STATUS_TIMEOUT)
        began = time.monotonic()
        killed = at_once
        with contextlib.suppress(KeeperGone):
            while keeper.exit_status is None:
                keeper.listen()
                time.sleep(0.02)
                if not killed and time.monotonic() - began > _GRACE:
                    keeper.ask(Signal(signum=signal.SIGKILL), timeout=STATUS_TIMEOUT)
                    killed = True
                if time.monotonic() - began > _END_TIMEOUT:
                    raise Refused(
                        f"The job {folder.launch().job} does not end.",
                        f"It was killed {_END_TIMEOUT:.0f} s ago, and hangs inside the system or the GPU driver.",
                        "Look at `dmesg`.",
                    )
    deadline = time.monotonic() + _GRACE
    while folder.has_keeper() and time.monotonic() < deadline:
        time.sleep(0.02)


def forget(args: argparse.Namespace) -> int:
    """Remove what is kept of jobs that have ended, and say of the others why not."""
    forgotten = []
    errors: list[GpuckptError] = []
    for name in dict.fromkeys(args.names):
        try:
            jobs.forget(jobs.find(name))
            forgotten.append(name)
        except GpuckptError as e:
            errors.append(e)
    text = "\n".join(f"Forgot job {name}." for name in forgotten)
    output.result(args.json, {"forgotten": forgotten, "errors": [output.told(e) for e in errors]}, text)
    if not args.json:
        for error in errors:
            output.failure(False, error)
    return output.exit_status(errors[0]) if errors else output.DONE
