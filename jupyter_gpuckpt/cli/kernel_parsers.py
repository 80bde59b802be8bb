"""The commands about kernels and jobs: where each stands, and what is said of them in a terminal alone."""

from __future__ import annotations

import argparse
import signal

from ..operations.requests import Auto, AutoSleep, Awake, Fork, Hibernate, Move, Redo, Restore, Save, Sleep, Undo, Wake
from ..operations.values import duration
from .adding import KERNEL, Group

__all__ = ["add_job_commands", "add_kernel_commands", "add_memory_commands"]


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
    group.add_request(Save, "kernels.save")
    restoring = group.add_request(Restore, "kernels.restore")
    restoring.add_argument(
        "--as", metavar="NEW", dest="new_job", default="", help="of a job: bring it up as a new job of that name"
    )
    group.add_request(Auto, "kernels.auto")
    group.add_request(Undo, "kernels.step")
    group.add_request(Redo, "kernels.step")
    group.add_request(Fork, "kernels.operation")
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
    group.add_request(Sleep, "kernels.operation")
    hibernating = group.add_request(Hibernate, "hibernating.hibernate", needs_kernel=False)
    hibernating.add_argument("--all", action="store_true", help="all kernels")
    hibernating.add_argument(
        "--deadline", metavar="SECONDS", type=_positive, help="with --all: what is not saved by then is not saved"
    )
    group.add_request(Wake, "kernels.operation")
    group.add_request(Awake, "kernels.awake")
    group.add_request(AutoSleep, "kernels.autosleep")
    group.add_request(Move, "kernels.operation")


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
    running = group.add(
        "run",
        "batch.run",
        "run a command that goes on where it was when it is started again",
        "Run a command as a job in the foreground, for batch systems: its output and exit status are this command's.\n"
        "Told to end by a signal, it is hibernated; the same command, here or on another machine, goes on with it.\n"
        "In a job of Slurm, that is requeued. Two dashes stand before the command.",
    )
    running.usage = (
        "%(prog)s [-h] [--json] [--on-signal SIGNALS] [--requeue WHEN] [--every TIME] [--debug] "
        "NAME -- COMMAND [ARGUMENT ...]"
    )
    running.add_argument("name", metavar="NAME", help="the job's name: letters, digits, and . _ -, at most 60")
    running.add_argument(
        "--on-signal",
        metavar="SIGNALS",
        type=_signals,
        default="USR1,TERM",
        help="the signals at which it is hibernated; default USR1,TERM. The program gets all others",
    )
    running.add_argument(
        "--requeue",
        metavar="WHEN",
        type=_requeue,
        default="auto",
        help="once it is hibernated: auto (default) requeues the job of Slurm, and ends with 128 and the signal's "
        "number; exit:N only ends, with status N; off only ends",
    )
    running.add_argument(
        "--every",
        metavar="TIME",
        type=duration,
        help="also save it each time that it has run for so long: 15m, 1h; only the newest of these is kept",
    )
    running.set_defaults(words=[])
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


def _signals(text: str) -> list[int]:
    """Return the numbers of the signals that a text such as ``USR1,TERM`` names."""
    return [_signal(word.strip()) for word in text.split(",")]


def _signal(word: str) -> int:
    try:
        found = signal.Signals["SIG" + word.upper().removeprefix("SIG")]
    except KeyError:
        raise argparse.ArgumentTypeError(f"{word!r} is not the name of a signal such as USR1") from None
    if found in (signal.SIGKILL, signal.SIGSTOP):
        raise argparse.ArgumentTypeError(f"{word} cannot be waited for")
    return found


def _requeue(text: str) -> str | int:
    """Return the exit status that a text names, or the word that it is."""
    number = text.removeprefix("exit:")
    if text in ("auto", "off"):
        return text
    if number == text or not number.isdecimal() or int(number) > 255:
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor off nor exit:N, N being 0 to 255")
    return int(number)


def _positive(text: str) -> float:
    """Return the number of seconds that a text means."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 10**9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return number
