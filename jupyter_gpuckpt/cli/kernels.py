"""Commands that talk to the keepers of running kernels: listing, ending, and the operations that are described."""

from __future__ import annotations

import argparse
import contextlib
import functools
import shlex
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from ..checked import to_json
from ..client import jobs, keepers
from ..client.listing import (
    STATUS_TIMEOUT,
    OfAnotherMachine,
    of_other_machines,
    running_kernels,
    with_snapshots,
)
from ..client.protocol import new_operation_id
from ..client.record import KernelFolder
from ..errors import GpuckptError, KeeperGone, OtherVersion, Refused
from ..kernel import show
from ..kernel.tables import Listing, Marked
from ..kernel.words import Usage
from ..operations.description import Offered, given
from ..operations.requests import (
    Auto,
    AutoSleep,
    Awake,
    Cancel,
    Close,
    Request,
    Restore,
    Save,
    Status,
)
from ..operations.results import KernelStatus, ListedKernel, Progress, Restored
from ..snapshots.other_stores import of_store
from ..snapshots.summary import is_of
from ..spelling import in_a_terminal
from ..store import Manifest
from ..subject import of_a_job
from . import output
from .jobs import how_it_ended, of_another_machine, restore_as, restore_ended, stop_job

R = TypeVar("R")

_CANCEL_TIMEOUT = 10.0
_CLOSE_TIMEOUT = 150.0
_SHORT = 8
"""How much of a kernel's id is enough to name it, for people."""


# -- kernels


def list_kernels(args: argparse.Namespace) -> int:
    """List the kernels that keepers hold; one whose keeper died gets a new one."""
    kernels, manifests, faults = with_snapshots(running_kernels)
    elsewhere = [one for one in of_other_machines() if not one.job]
    told = [output.told(fault) for fault in faults]
    document = {"kernels": with_names(kernels, manifests), "elsewhere": elsewhere, "faults": told}
    output.result(args.json, document, table(kernels, faults, elsewhere))
    return output.DONE


def with_names(kernels: Sequence[ListedKernel], manifests: Sequence[Manifest]) -> list[Mapping[str, object]]:
    """Return kernels as JSON, each with the names of its snapshots."""
    return [
        {**to_json(kernel), "snapshots": [m.name for m in manifests if is_of(m, kernel.kernel_id, kernel.notebook)]}
        for kernel in kernels
    ]


def table(
    kernels: Sequence[ListedKernel], faults: Sequence[GpuckptError], elsewhere: Sequence[OfAnotherMachine] = ()
) -> Listing:
    """Return the kernels as a table, and below it how to go on with those that no server holds."""
    head = ["kernel", "notebook", "state", "pid", "memory", "on GPU", "freed", "in host", "based on"]
    rows = [
        [
            kernel.kernel_id[:_SHORT],
            Path(kernel.notebook).name,
            _state(kernel.state if kernel.attended else f"{kernel.state}, unattended"),
            str(kernel.pid or ""),
            _memory_text(kernel),
            _gpu_text(kernel.gpu_memory),
            _gpu_text(kernel.gpu.freed),
            _gpu_text(kernel.gpu.host_memory),
            show.based_on(kernel),
        ]
        for kernel in kernels
    ]
    notes = [how_to_go_on(kernel) for kernel in kernels if not kernel.attended and kernel.state != "ended"]
    empty = "No kernels that can be saved are running. Start one: jupyter console --kernel python3-gpuckpt"
    told = [*notes, *map(of_another_machine, elsewhere), *map(str, faults)]
    spare = ("in host", "freed", "memory", "pid")
    return Listing(head, rows, empty, told, elastic=("notebook", "state", "based on"), spare=spare)


def _state(state: str) -> Marked:
    return Marked(state, "good" if state == "running" else "quiet" if state in ("sleeping", "hibernated") else "busy")


def _memory_text(kernel: ListedKernel) -> str:
    hibernated = kernel.hibernated
    return show.size(kernel.memory) if hibernated is None else f"{show.size(hibernated.size)} on disk"


def _gpu_text(count: int | None) -> str:
    if count is None:
        return "unknown"
    return show.size(count) if count else ""


def how_to_go_on(kernel: KernelStatus) -> str:
    """Say what can be done with a kernel that no server holds."""
    file = shlex.quote(kernel.connection_file)
    short = kernel.kernel_id[:_SHORT]
    return (
        f"\nNo server holds kernel {short}. It keeps running.\nConnect to it:  jupyter console --existing {file}\n"
        f"End it:         jupyter gpuckpt stop {short}"
    )


# -- save and restore


def save(args: argparse.Namespace) -> int:
    """Save a kernel, or a job, under a name."""
    name = args.name or (args.kernel if jobs.named(args.kernel) is not None else "")
    if not name:
        raise Usage(
            "The snapshot needs a name.",
            "Only a job's snapshot can be saved without one: it is named after the job.",
            "Usage: jupyter gpuckpt save KERNEL NAME",
        )
    request = of_store(args.to, {**given(Save, Offered.TERMINAL, args), "name": name}, "name")
    found = operate(args.kernel, Save, request, name)
    output.result(args.json, found, show.Saved(found).text())
    return output.DONE


def restore(args: argparse.Namespace) -> int:
    """Put a kernel back to a snapshot."""
    which = args.of_any or args.name or "the latest snapshot"
    job = jobs.named(args.kernel)
    if args.new_job:
        with output.Progress(Restore.progress_of(which)):
            found = restore_as(args)
    elif job is not None and job.has_ended():
        with output.Progress(Restore.progress_of(which)):
            found = restore_ended(args, job)
    else:
        # The name, too, for a keeper of an older version, which knows no `from`.
        request = {**given(Restore, Offered.TERMINAL, args), "name": args.name or args.of_any}
        request = of_store(args.store, request, "name", "from")
        found = operate(args.kernel, Restore, request, which)
    return _show_restored(args, found)


def step(args: argparse.Namespace) -> int:
    """Undo or redo."""
    return _show_restored(args, operate(args.kernel, args.kind, given(args.kind, Offered.TERMINAL, args)))


def _show_restored(args: argparse.Namespace, found: Restored) -> int:
    spell = functools.partial(in_a_terminal, kernel=shlex.quote(args.kernel))
    output.result(args.json, found, show.Restored(found, time.time() - (found.seconds or 0.0), [], spell).text())
    return output.DONE


def auto(args: argparse.Namespace) -> int:
    """Say whether a kernel is saved by itself, or set it."""
    found = operate(args.kernel, Auto, given(Auto, Offered.TERMINAL, args))
    output.result(args.json, found, show.auto_saving(found))
    return output.DONE


def operation(args: argparse.Namespace) -> int:
    """Do with a kernel what is described, and show what came of it."""
    found = operate(args.kernel, args.kind, given(args.kind, Offered.TERMINAL, args))
    output.result(args.json, found, show.RESULTS[args.kind.op](found).text())
    return output.DONE


def find(text: str) -> KernelFolder:
    """Return the folder of the kernel, or of the job that runs, that the user means."""
    job = jobs.named(text)
    if job is not None and job.has_ended():
        ended = job.state().ended
        snapshot = ended.snapshot if ended is not None else None
        how = how_it_ended(ended.status if ended is not None else None, snapshot)
        raise Refused(
            f"The job {text} does not run.",
            f"It {'is' if snapshot else 'has'} {how}.",
            f"`jupyter gpuckpt restore {text}{'' if snapshot else ' SNAPSHOT'}` restores it.",
        )
    return job or keepers.find(text)


def operate(kernel: str, kind: type[Request[R]], request: Mapping[str, object], what: str = "") -> R:
    """Have a kernel's keeper do something long: with progress, and Ctrl-C cancels it.

    There is no time limit: moving a large GPU state is silent for minutes. A keeper that dies hangs up.
    """
    folder = find(kernel)
    named = Cancel(operation=new_operation_id(), kind=kind.op)
    with (
        of_a_job(jobs.is_job(folder)),
        keepers.connect(folder) as keeper,
        output.Progress(kind.progress_of(what)) as progress,
        _Cancelling(folder, named, progress) as cancelling,
    ):

        def take(report: Progress) -> None:
            progress.take(report)
            cancelling.ask_again()

        request = {**request, "operation": named.operation}
        return keeper.ask_with(kind, request, timeout=None, progress=take)


class _Cancelling:
    """While it is entered, Ctrl-C asks the keeper to cancel what is `named`, and the answer is still waited for.

    Some stages cannot be left; the keeper is then asked again at each later one. A second Ctrl-C stops the waiting.
    """

    def __init__(self, folder: KernelFolder, named: Cancel, progress: output.Progress) -> None:
        self._folder, self._named, self._progress = folder, named, progress
        self._wanted = self._accepted = False
        self._before: Any = None

    def __enter__(self) -> _Cancelling:
        self._before = signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def ask_again(self) -> None:
        """Ask the keeper to cancel, if that is wanted and it has not agreed yet."""
        if not self._wanted or self._accepted:
            return
        # The connection of the request is in use: its answer is being waited for.
        with contextlib.suppress(GpuckptError), keepers.connect(self._folder) as keeper:
            self._accepted = bool(keeper.ask(self._named, timeout=_CANCEL_TIMEOUT))

    def _on_interrupt(self, _: int, __: FrameType | None) -> None:
        if self._wanted:
            raise KeyboardInterrupt
        self._wanted = True
        self._progress.cancel()
        self.ask_again()


def awake(args: argparse.Namespace) -> int:
    """Say whether a kernel may be put to sleep by others than the user."""
    found = operate(args.kernel, Awake, {"on": args.on == "on"})
    output.result(args.json, found, "It stays awake." if found.pinned else "It may be put to sleep.")
    return output.DONE


def autosleep(args: argparse.Namespace) -> int:
    """Set after what time a kernel goes to sleep by itself."""
    found = operate(args.kernel, AutoSleep, {"after": args.after})
    output.result(args.json, found, show.auto_sleep(found.sleep_after))
    return output.DONE


# -- stop


def stop(args: argparse.Namespace) -> int:
    """End a kernel, all of its processes, and its keeper."""
    folder = jobs.named(args.kernel) or keepers.find(args.kernel)
    if jobs.is_job(folder):
        return stop_job(args, folder)
    launch = folder.launch()
    try:
        attended = _close(folder, args.force)
    except (KeeperGone, OtherVersion):
        if not args.force:
            raise
        keepers.end(folder)
        attended = True  # for all that is known
    if not attended:
        # Whoever made it would have removed it, and is gone.
        Path(launch.connection_file).unlink(missing_ok=True)
    document = {"kernel_id": launch.kernel_id, "stopped": True}
    output.result(args.json, document, f"Stopped kernel {launch.kernel_id}.")
    return output.DONE


def _close(folder: KernelFolder, force: bool) -> bool:
    """Have a keeper end its kernel and itself; return whether a server held the kernel."""
    with keepers.connect(folder) as keeper:
        status = keeper.ask(Status(), timeout=STATUS_TIMEOUT)
        if status.attended and not force:
            raise Refused(
                f"Kernel {status.kernel_id} was not stopped.",
                "A Jupyter server or another program holds it, and would treat its end as a crash.",
                "Shut it down there, or add --force.",
                kernel_id=status.kernel_id,
            )
        keeper.ask(Close(), timeout=_CLOSE_TIMEOUT)
    return status.attended
