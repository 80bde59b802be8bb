"""`status`: how a kernel or a job is, or what there is in all: kernels, jobs and the store."""

from __future__ import annotations

import argparse

from .. import settings
from ..client import keepers
from ..client.jobs import is_job
from ..client.listing import STATUS_TIMEOUT, all_jobs, running_kernels, with_snapshots
from ..errors import GpuckptError
from ..freeze.cuda_calls import CudaWorker
from ..kernel import show
from ..kernel.tables import Blocks
from ..operations.requests import Status
from ..operations.results import EndedJob, ListedKernel, RunningJob
from ..store import Store
from . import jobs, kernels, output


def status(args: argparse.Namespace) -> int:
    """Say how a kernel or job is; without one, what there is."""
    return _of_one(args) if args.kernel else _of_all(args)


def _of_one(args: argparse.Namespace) -> int:
    folder = kernels.find(args.kernel)
    with keepers.connect(folder) as keeper:
        found = keeper.ask(Status(), timeout=STATUS_TIMEOUT)
    alone = not found.attended and not is_job(folder)
    shown = show.status(found, "", [kernels.how_to_go_on(found)] * alone)
    output.result(args.json, found, shown)
    return output.DONE


def _of_all(args: argparse.Namespace) -> int:
    def both(worker: CudaWorker) -> tuple[list[ListedKernel | EndedJob], list[GpuckptError]]:
        found, faults = running_kernels(worker)
        more, of_jobs = all_jobs(worker)
        return [*found, *more], [*faults, *of_jobs]

    found, manifests, faults = with_snapshots(both)
    started = [one for one in found if isinstance(one, RunningJob | EndedJob)]
    held = [one for one in found if isinstance(one, ListedKernel) and not one.job]
    store = Store(settings.store_dir())
    room = {"snapshots": len(manifests), "used": store.used(), "free": store.free(), "quota": settings.store_quota()}
    document = {
        "kernels": kernels.with_names(held, manifests),
        "jobs": jobs.with_names(started, manifests),
        "store": {"folder": str(store.root), **room},
        "faults": [output.told(fault) for fault in faults],
    }
    count = len(manifests)
    of_quota = "" if room["quota"] is None else f" of {show.size(room['quota'])}"
    shown = Blocks(
        [
            kernels.table(held, []),
            *([jobs.table(started, manifests, [])] if started else []),
            f"{count} {'snapshot' if count == 1 else 'snapshots'} in {store.root}: "
            f"{show.size(store.used())}{of_quota} used, {show.size(store.free())} free on its disk.",
            *map(str, faults),
        ]
    )
    output.result(args.json, document, shown)
    return output.DONE
