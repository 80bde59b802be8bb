"""`hibernate`: a kernel goes to the disk, or all of them before a machine goes down."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from .. import settings
from ..client import jobs, keepers
from ..client.jobs import job_of
from ..client.preemption import Outcome, hibernate_all, write_report
from ..kernel import show
from ..kernel.tables import Listing, Marked
from ..kernel.words import Usage
from ..operations.requests import Hibernate
from ..operations.results import KernelStatus
from ..store import Store
from . import output
from .kernels import operate

__all__ = ["hibernate"]


def hibernate(args: argparse.Namespace) -> int:
    """Hibernate a kernel, or all of them."""
    if args.all == bool(args.kernel) or (args.deadline is not None and not args.all):
        raise Usage(
            "That cannot be hibernated.",
            "Name either a kernel or --all; --deadline needs --all.",
            "Usage: jupyter gpuckpt hibernate KERNEL, or: jupyter gpuckpt hibernate --all [--deadline SECONDS]",
        )
    if args.all:
        return _hibernate_all(args)
    # Nobody would wake a job in its place: it ends, and is restored.
    how = {"end": True} if jobs.named(args.kernel) is not None else {}
    found = operate(args.kernel, Hibernate, how)
    output.result(args.json, found, show.Hibernated(found).text())
    return output.DONE


def _hibernate_all(args: argparse.Namespace) -> int:
    outcomes = hibernate_all(keepers.folders(), args.deadline, _how)
    if settings.remote():
        from ..snapshots.at_remote import send_all  # which takes a while to import

        send_all(Store(settings.store_dir()), [outcome.name for outcome in outcomes if outcome.saved])
    report, told = None, ""
    try:
        report = str(write_report(outcomes, args.deadline))
    except OSError as e:  # the table says the same
        told = f"None was written: {e}"
    document = {"kernels": [asdict(outcome) for outcome in outcomes], "report": report}
    head = ["kernel", "notebook", "computed", "saved as", "took", "why not"]
    listing = Listing(
        head,
        [_row(one) for one in outcomes],
        "No kernels are running.",
        [f"\nReport: {report or told}"],
        elastic=("notebook", "why not"),
        spare=("took",),
    )
    output.result(args.json, document, listing)
    return output.DONE if all(outcome.saved for outcome in outcomes) else output.FAILED


def _how(status: KernelStatus) -> Hibernate:
    """Say how a kernel is hibernated: where nobody holds it, nobody would wake it in its place."""
    return Hibernate(at_once=True) if status.attended else Hibernate(end=True)


def _row(outcome: Outcome) -> list[str]:
    took = show.duration(outcome.seconds)
    computed = show.duration(outcome.computed)
    who = f"job {job}" if (job := job_of(outcome.kernel_id)) else outcome.kernel_id[:8]
    why = " ".join(outcome.why.splitlines())
    return [who, outcome.notebook, computed, outcome.name or Marked("not saved", "bad"), took, why]
