"""What is known of parked memory, in a save as in a restore, and what is done with that of all processes at once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ...client.in_progress import ParkedMemory
from ...errors import DriverError, KernelLost
from ...freeze import parking_channel
from ...freeze.parking import Parked

__all__ = ["bring_imports_back", "noted_parked", "or_lost", "parked_in", "parked_of", "place_of", "together"]

log = logging.getLogger("gpuckpt.keeper")

T = TypeVar("T")
R = TypeVar("R")


def place_of(gpu: str, here: Iterable[str]) -> str:
    """Return the UUID of the GPU here (UUIDs, in order) that what was on a GPU comes to, where it is not mapped."""
    uuids = list(here)
    # Not here and not mapped: a single GPU's state, which the driver puts on the first.
    return gpu if gpu in uuids else uuids[0]


def parked_in(described: Mapping[str, Any]) -> list[Parked]:
    """Return what a snapshot (its manifest's ``cuda``) says is parked, of each process; older ones have one alone."""
    said = described.get("parked") or []
    return [
        Parked(int(one["pid"]), int(one["thread"]), tuple((str(gpu), int(size)) for gpu, size in one["places"]))
        for one in ([said] if isinstance(said, Mapping) else said)
        if one["thread"]
    ]


def noted_parked(parked: Parked, holder: int | None) -> ParkedMemory:
    """Return parked memory as the record has it."""
    return ParkedMemory(parked.pid, parked.thread, parked.places, holder)


def parked_of(noted: ParkedMemory | None) -> Parked | None:
    """Return the parked memory that the record has; None where the process had not given it up yet."""
    return Parked(noted.pid, noted.thread, noted.places) if noted is not None and noted.thread else None


async def together(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Do something with each of these at once, in threads; when all are done, raise what the first one raised."""
    done = await asyncio.gather(*(asyncio.to_thread(function, item) for item in items), return_exceptions=True)
    for one in done:
        if isinstance(one, BaseException):
            raise one
    return [one for one in done if not isinstance(one, BaseException)]


def bring_imports_back(run_dir: Path, pids: Iterable[int]) -> None:
    """Have processes open again what they had open of each other's GPU memory (CUDA IPC) before they were frozen.

    One by one, since each asks others for it. Of one that does not have all of it again the log tells: it fails as it
    would if the owner had ended.
    """
    for pid in pids:
        if not parking_channel.bring_imports_back(run_dir, pid):
            log.error("process %d does not have all of the GPU memory again that it had of other processes", pid)


@contextlib.contextmanager
def or_lost() -> Iterator[None]:
    """Tell of parked memory that cannot be given back as what it is: the loss of the kernel."""
    try:
        yield
    except DriverError as e:
        raise KernelLost(
            "The {kernel}'s GPU memory could not be restored.",
            f"{e.what} {e.why}",
            "{Restart}, and restore a snapshot.",
            **e.data,
        ) from e
