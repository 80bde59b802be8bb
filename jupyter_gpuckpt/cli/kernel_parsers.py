"""The commands about kernels and jobs: their words."""

from __future__ import annotations

import argparse

from ..kernel.words import duration, folder, gpus, number
from .adding import KERNEL, Group

__all__ = ["add_job_commands", "add_kernel_commands", "add_memory_commands"]

_GPU = "the GPU to use, by its number in nvidia-smi; several (1,0) for a kernel that uses several"


def add_kernel_commands(group: Group) -> None:
    """Add what is done with kernels, and as well with jobs."""
    group.add(
        "kernels",
        "kernels.list_kernels",
        "list the running kernels that can be saved",
        "List the running kernels that can be saved, also those whose Jupyter server has crashed, and how to go on\n"
        "with those.",
    )
    showing = group.add(
        "status",
        "status.status",
        "say how a kernel is, or without one what there is",
        "Say all about a running kernel or job; without one, which kernels and jobs run, and what the store holds.",
    )
    showing.add_argument("kernel", metavar="KERNEL", nargs="?", default="", help=KERNEL)
    saving = group.add(
        "save",
        "kernels.save",
        "save a running kernel under a name; it runs on",
        "Save a running kernel under a name. It is paused for a moment, also in the middle of a cell, and runs on.",
    )
    saving.add_argument("kernel", metavar="KERNEL", help=KERNEL)
    saving.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        default="",
        help="the snapshot's name: letters, digits, and . _ -, at most 100; a job's own where nothing is said",
    )
    saving.add_argument("-m", "--message", metavar="MESSAGE", default="", help="a note that listings show")
    saving.add_argument("--replace", action="store_true", help="replace a snapshot of that name")
    saving.add_argument(
        "--with-files",
        action="store_true",
        help="keep the files that it needs, Python and its packages, in the snapshot: for machines without them",
    )
    saving.add_argument(
        "--to",
        metavar="FOLDER",
        type=folder,
        help="into a folder on another disk; `--store FOLDER` is how the snapshot is found there",
    )
    restoring = group.add(
        "restore",
        "kernels.restore",
        "put a running kernel back to a snapshot",
        "Put a running kernel back to a snapshot. Its present state is discarded; its notebook stays connected.",
    )
    restoring.add_argument("kernel", metavar="KERNEL", help=KERNEL)
    which = restoring.add_mutually_exclusive_group()
    which.add_argument(
        "name", metavar="NAME", nargs="?", default="", help="the snapshot; without it the latest of this notebook"
    )
    which.add_argument(
        "--from",
        dest="of_any",
        metavar="NOTEBOOK:NAME",
        default="",
        help="a snapshot of another notebook, by that one's name or as much of its path as it takes",
    )
    restoring.add_argument("--gpu", metavar="N", type=gpus, default=[], help=_GPU)
    restoring.add_argument(
        "--lazy",
        action="store_true",
        help="answer before all of its GPU memory is loaded; what needs that waits",
    )
    restoring.add_argument(
        "--in-place",
        action="store_true",
        help="discard the running kernel before the snapshot is up: memory need not have room for both",
    )
    restoring.add_argument(
        "--stop-here", action="store_true", help="do not run the rest of the cell that the snapshot was taken in"
    )
    restoring.add_argument(
        "--as", metavar="NEW", dest="new_job", default="", help="of a job: bring it up as a new job of that name"
    )
    restoring.add_argument(
        "--other-ports", action="store_true", help="of a job: use other ports where its own are taken"
    )
    forking = group.add(
        "fork",
        "kernels.fork",
        "make copies of a running kernel beside it",
        "Make copies of a running kernel, as it is now or as it was saved; it runs on. Each is a kernel of its\n"
        "own, with its own connection file. Where a Jupyter server holds the kernel, it holds the copies, too.",
    )
    forking.add_argument("kernel", metavar="KERNEL", help=KERNEL)
    forking.add_argument("--snapshot", metavar="NAME", default="", help="copy this snapshot, not the kernel as it is")
    forking.add_argument("-n", "--count", metavar="COUNT", type=number, default=1, help="how many copies, 64 at most")
    forking.add_argument("--save", metavar="NEW", default="", help="also save the kernel under this name")
    forking.add_argument("--reseed", action="store_true", help="reseed the random number generators of the copies")
    forking.add_argument("--gpu", metavar="N", type=gpus, default=[], help=_GPU)
    stopping = group.add(
        "stop",
        "kernels.stop",
        "end a kernel or a job",
        "End a kernel or a job, for example a kernel whose server has crashed.",
    )
    stopping.add_argument("kernel", metavar="KERNEL", help=KERNEL)
    stopping.add_argument(
        "--force",
        action="store_true",
        help="also while a Jupyter server holds it, or its keeper does not answer; a job is killed at once",
    )


def add_memory_commands(group: Group) -> None:
    """Add what moves kernels between GPUs, host memory and the disk."""
    sleeping = group.add(
        "sleep",
        "kernels.sleep",
        "free the GPU memory of an idle kernel, which stays as it is",
        "Put an idle kernel to sleep: what it has in GPU memory goes to host memory, and the GPU is free for others.\n"
        "A cell that is run wakes it by itself.",
    )
    sleeping.add_argument("kernel", metavar="KERNEL", help=KERNEL)
    hibernating = group.add(
        "hibernate",
        "hibernating.hibernate",
        "write a kernel to the disk, and free all of its memory",
        "Write a kernel to the disk and end its processes, which then take neither GPU nor host memory.\n"
        "Its notebook stays open, and a cell that is run wakes it.\n"
        "With --all every kernel, those first that have computed most since they were last saved: for a machine that\n"
        "goes down. What was saved and what was not is written to a file.",
    )
    hibernating.add_argument("kernel", metavar="KERNEL", nargs="?", help=KERNEL)
    hibernating.add_argument("--all", action="store_true", help="all kernels")
    hibernating.add_argument(
        "--deadline", metavar="SECONDS", type=_positive, help="with --all: what is not saved by then is not saved"
    )
    waking = group.add("wake", "kernels.wake", "wake a kernel that sleeps or is hibernated")
    waking.add_argument("kernel", metavar="KERNEL", help=KERNEL)
    keeping = group.add("awake", "kernels.awake", "keep a kernel from being put to sleep by others, or no longer")
    keeping.add_argument("kernel", metavar="KERNEL", help=KERNEL)
    keeping.add_argument("state", choices=["on", "off"], help="on: it stays awake; off: it may sleep")
    timing = group.add("autosleep", "kernels.autosleep", "have a kernel sleep when it has been idle for a time")
    timing.add_argument("kernel", metavar="KERNEL", help=KERNEL)
    timing.add_argument("after", metavar="TIME", type=duration, help="for how long: 45s, 30m, 2h, or off")
    moving = group.add(
        "move",
        "kernels.move",
        "move what a running kernel has on the GPU to another",
        "Move what a running kernel has in GPU memory to another GPU of the same model. The kernel goes on there.",
    )
    moving.add_argument("kernel", metavar="KERNEL", help=KERNEL)
    moving.add_argument("--gpu", metavar="N", type=gpus, required=True, help=_GPU)


def add_job_commands(group: Group) -> None:
    """Add what is done with jobs alone."""
    starting = group.add(
        "exec",
        "jobs.exec_",
        "start a command as a job, which can be saved and restored",
        "Start a command as a job. It runs on when this terminal is closed; what it writes is kept (`logs`), and\n"
        "it can be saved and restored as a kernel can. Two dashes stand before the command.",
    )
    starting.usage = "%(prog)s [-h] [--json] [--replace] [--debug] NAME -- COMMAND [ARGUMENT ...]"
    starting.add_argument("name", metavar="NAME", help="the job's name: letters, digits, and . _ -, at most 100")
    starting.add_argument("--replace", action="store_true", help="forget a job of that name that has ended")
    starting.set_defaults(words=[])
    group.add("ps", "jobs.list_jobs", "list the jobs, also those that have ended, and how they ended")
    logging = group.add("logs", "jobs.logs", "print what a job has written")
    logging.add_argument("name", metavar="JOB", help="the job")
    logging.add_argument("--follow", action="store_true", help="go on with what it writes, until it has ended")
    forgetting = group.add(
        "forget",
        "jobs.forget",
        "remove what is kept of jobs that have ended",
        "Remove what is kept of jobs that have ended: output and exit status.",
    )
    forgetting.add_argument("names", metavar="JOB", nargs="+", help="a job")


def _positive(text: str) -> float:
    """Return the number of seconds that a text means."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 10**9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return number
