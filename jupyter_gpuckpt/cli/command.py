"""The command `jupyter gpuckpt`: from the words on the command line to an exit status."""

from __future__ import annotations

import argparse
import functools
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence

from .. import __version__
from ..errors import Cancelled, GpuckptError
from ..kernel.chosen import add_options
from ..kernel.words import Commands, Parser, duration, folder, gpus, number
from ..spelling import in_a_terminal
from . import output
from .removal import add_removal_options
from .store_parsers import add_store_parsers
from .transfer_parsers import add_transfer_parsers

_ABOUT = """\
Save a live notebook kernel (its variables, threads, open files and GPU memory) under
a name, and put it back later. In a notebook, `%gpuckpt help` says how to do the same.

A kernel can be saved when it was started as "Python 3 (gpuckpt)" (--kernel python3-gpuckpt)
on a machine where `jupyter gpuckpt doctor` finds no problem.
"""

_EXAMPLES = """\
examples:
  jupyter gpuckpt kernels                        which kernels are running
  jupyter gpuckpt save train.ipynb epoch-3       save the kernel of that notebook; it runs on
  jupyter gpuckpt list                           what has been saved
  jupyter gpuckpt restore train.ipynb epoch-3    put the notebook's kernel back
  jupyter gpuckpt fork train.ipynb -n 2          two copies of the notebook's kernel, beside it
  jupyter gpuckpt exec train -- python train.py  a job, which can be saved as a kernel can

KERNEL is a kernel's id or the beginning of it, its notebook's name or path, its connection
file, a job's name, or a pid.
"""

_STATUSES = """\
exit status:
    0  done
    1  it failed or was refused; the message says why and what to do
    2  the command line is wrong
    3  there is no kernel or no snapshot of that name
    4  this machine or this kernel can be neither saved nor restored
  130  interrupted (Ctrl-C)

With --json a command prints one JSON document; an error is {"error": {"kind", "what", "why", "then", "data"}}.
"""

_OF_A_STORE = (
    *("check", "diff", "export", "gc", "keep", "list", "log", "mv", "note", "pin", "push", "repair", "restore", "rm"),
    *("show", "tag", "unpin"),
)
"""What can be done with the snapshots of a folder that something was saved --to."""
_KERNEL = "the kernel: its id or the beginning of it, its notebook, its connection file, or its pid; or a job's name"
_Run = Callable[[argparse.Namespace], int]


# Each command's module is imported when it runs: most need only the store, and nothing should wait for the others.


def _list(args: argparse.Namespace) -> int:
    from .snapshots import list_snapshots

    return list_snapshots(args)


def _show(args: argparse.Namespace) -> int:
    from .snapshots import show_snapshot

    return show_snapshot(args)


def _rm(args: argparse.Namespace) -> int:
    from .snapshots import remove_snapshots

    return remove_snapshots(args)


def _kernels(args: argparse.Namespace) -> int:
    from .kernels import list_kernels

    return list_kernels(args)


def _exec(args: argparse.Namespace) -> int:
    from .jobs import exec_

    return exec_(args)


def _ps(args: argparse.Namespace) -> int:
    from .jobs import list_jobs

    return list_jobs(args)


def _logs(args: argparse.Namespace) -> int:
    from .jobs import logs

    return logs(args)


def _forget(args: argparse.Namespace) -> int:
    from .jobs import forget

    return forget(args)


def _save(args: argparse.Namespace) -> int:
    from .kernels import save

    return save(args)


def _restore(args: argparse.Namespace) -> int:
    from .kernels import restore

    return restore(args)


def _fork(args: argparse.Namespace) -> int:
    from .kernels import fork

    return fork(args)


def _move(args: argparse.Namespace) -> int:
    from .kernels import move

    return move(args)


def _sleep(args: argparse.Namespace) -> int:
    from .kernels import sleep

    return sleep(args)


def _hibernate(args: argparse.Namespace) -> int:
    from .hibernating import hibernate

    return hibernate(args)


def _wake(args: argparse.Namespace) -> int:
    from .kernels import wake

    return wake(args)


def _awake(args: argparse.Namespace) -> int:
    from .kernels import awake

    return awake(args)


def _autosleep(args: argparse.Namespace) -> int:
    from .kernels import autosleep

    return autosleep(args)


def _stop(args: argparse.Namespace) -> int:
    from .kernels import stop

    return stop(args)


def _doctor(args: argparse.Namespace) -> int:
    from .machine import doctor

    return doctor(args)


def _setup(args: argparse.Namespace) -> int:
    from .machine import setup

    return setup(args)


def _broker(args: argparse.Namespace) -> int:
    from .broker import broker

    return broker(args)


def _positive(text: str) -> float:
    """Return the number of seconds that a text means."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 10**9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return number


_GPU = "the GPU to use, by its number in nvidia-smi; several (1,0) for a kernel that uses several"


def _parser() -> tuple[Parser, Commands]:
    parser = Parser(
        prog="jupyter gpuckpt",
        description=_ABOUT,
        epilog=f"{_EXAMPLES}\n{_STATUSES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"jupyter_gpuckpt {__version__}")
    parser.add_argument("--debug", action="store_true", help="print the traceback of an error, too")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def command(name: str, run: _Run, summary: str, description: str = "") -> argparse.ArgumentParser:
        added = commands.add_parser(
            name,
            help=summary,
            description=description or f"{summary[0].upper()}{summary[1:]}.",
            epilog=_STATUSES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.add_argument("--json", action="store_true", help="print the result as JSON")
        added.set_defaults(run=run)
        return added

    add_options(command("list", _list, "list the snapshots, newest first"))
    one = command("show", _show, "show all about one snapshot")
    one.add_argument("name", metavar="NAME", help="the snapshot")
    saving = command(
        "save",
        _save,
        "save a running kernel under a name; it runs on",
        "Save a running kernel under a name. It is paused for a moment, also in the middle of a cell, and runs on.",
    )
    saving.add_argument("kernel", metavar="KERNEL", help=_KERNEL)
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
    restoring = command(
        "restore",
        _restore,
        "put a running kernel back to a snapshot",
        "Put a running kernel back to a snapshot. Its present state is discarded; its notebook stays connected.",
    )
    restoring.add_argument("kernel", metavar="KERNEL", help=_KERNEL)
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
    forking = command(
        "fork",
        _fork,
        "make copies of a running kernel beside it",
        "Make copies of a running kernel, as it is now or as it was saved; it runs on. Each is a kernel of its\n"
        "own, with its own connection file. Where a Jupyter server holds the kernel, it holds the copies, too.",
    )
    forking.add_argument("kernel", metavar="KERNEL", help=_KERNEL)
    forking.add_argument("--snapshot", metavar="NAME", default="", help="copy this snapshot, not the kernel as it is")
    forking.add_argument("-n", "--count", metavar="COUNT", type=number, default=1, help="how many copies, 64 at most")
    forking.add_argument("--save", metavar="NAME", default="", help="also save the kernel under this name")
    forking.add_argument("--reseed", action="store_true", help="reseed the random number generators of the copies")
    forking.add_argument("--gpu", metavar="N", type=gpus, default=[], help=_GPU)
    moving = command(
        "move",
        _move,
        "move what a running kernel has on the GPU to another",
        "Move what a running kernel has in GPU memory to another GPU of the same model. The kernel goes on there.",
    )
    moving.add_argument("kernel", metavar="KERNEL", help=_KERNEL)
    moving.add_argument("--gpu", metavar="N", type=gpus, required=True, help=_GPU)
    sleeping = command(
        "sleep",
        _sleep,
        "free the GPU memory of an idle kernel, which stays as it is",
        "Put an idle kernel to sleep: what it has in GPU memory goes to host memory, and the GPU is free for others.\n"
        "A cell that is run wakes it by itself.",
    )
    sleeping.add_argument("kernel", metavar="KERNEL", help=_KERNEL)
    hibernating = command(
        "hibernate",
        _hibernate,
        "write a kernel to the disk, which then takes neither GPU nor host memory",
        "Write a kernel to the disk and end its processes. Its notebook stays open, and a cell that is run wakes it.\n"
        "With --all every kernel, those first that have computed most since they were last saved: for a machine that\n"
        "goes down. What was saved and what was not is written to a file.",
    )
    hibernating.add_argument("kernel", metavar="KERNEL", nargs="?", help=_KERNEL)
    hibernating.add_argument("--all", action="store_true", help="all kernels")
    hibernating.add_argument(
        "--deadline", metavar="SECONDS", type=_positive, help="with --all: what is not saved by then is not saved"
    )
    waking = command("wake", _wake, "wake a kernel that sleeps or is hibernated")
    waking.add_argument("kernel", metavar="KERNEL", help=_KERNEL)
    keeping = command("awake", _awake, "keep a kernel from being put to sleep by others, or no longer")
    keeping.add_argument("kernel", metavar="KERNEL", help=_KERNEL)
    keeping.add_argument("state", choices=["on", "off"], help="on: it stays awake; off: it may sleep")
    timing = command("autosleep", _autosleep, "have a kernel go to sleep by itself when it has been idle for a time")
    timing.add_argument("kernel", metavar="KERNEL", help=_KERNEL)
    timing.add_argument("after", metavar="TIME", type=duration, help="for how long: 45s, 30m, 2h, or off")
    removing = command("rm", _rm, "remove snapshots")
    removing.add_argument("names", metavar="NAME", nargs="+", help="a snapshot")
    add_removal_options(removing)
    add_store_parsers(command)
    add_transfer_parsers(command)
    command(
        "kernels",
        _kernels,
        "list the running kernels that can be saved",
        "List the running kernels that can be saved, also those whose Jupyter server has crashed, and how to go on\n"
        "with those.",
    )
    stopping = command("stop", _stop, "end a kernel or a job, for example a kernel whose server has crashed")
    stopping.add_argument("kernel", metavar="KERNEL", help=_KERNEL)
    stopping.add_argument(
        "--force",
        action="store_true",
        help="also while a Jupyter server holds it, or its keeper does not answer; a job is killed at once",
    )
    starting = command(
        "exec",
        _exec,
        "start a command as a job, which can be saved and restored",
        "Start a command as a job. It runs on when this terminal is closed; what it writes is kept (`logs`), and\n"
        "it can be saved and restored as a kernel can. Two dashes stand before the command.",
    )
    starting.usage = "%(prog)s [-h] [--json] [--replace] [--debug] NAME -- COMMAND [ARGUMENT ...]"
    starting.add_argument("name", metavar="NAME", help="the job's name: letters, digits, and . _ -, at most 100")
    starting.add_argument("--replace", action="store_true", help="forget a job of that name that has ended")
    starting.set_defaults(words=[])
    command("ps", _ps, "list the jobs, also those that have ended, and how they ended")
    logging = command("logs", _logs, "print what a job has written")
    logging.add_argument("name", metavar="NAME", help="the job")
    logging.add_argument("--follow", action="store_true", help="go on with what it writes, until it has ended")
    forgetting = command("forget", _forget, "remove what is kept of jobs that have ended: output and exit status")
    forgetting.add_argument("names", metavar="NAME", nargs="+", help="a job")
    judging = command(
        "doctor",
        _doctor,
        "say whether kernels can be saved and restored on this machine, and what is missing",
        "Check everything that a save and a restore need. The exit status is 0 only when they would work, else 4.",
    )
    judging.add_argument("--quick", action="store_true", help="do not save and restore a small process for a trial")
    command(
        "setup",
        _setup,
        "install CRIU for this project alone, where the machine has none that works",
        "Look for a CRIU that works, and where there is none, install one into a folder of its own\n"
        "(GPUCKPT_CRIU_PREFIX). Nothing else of the system changes.",
    )
    serving = command(
        "broker",
        _broker,
        "serve users without root: with root, on a machine that several people share",
        "Do for users without root what takes root in a save and a restore. `install` makes it a service of the\n"
        "machine's (systemd), `uninstall` takes that away, and `run` serves in the foreground.",
    )
    serving.add_argument("action", metavar="run|install|uninstall", choices=("run", "install", "uninstall"))
    serving.add_argument("--group", metavar="GROUP", default="gpuckpt", help="whose members are served")
    for name in _OF_A_STORE:
        commands.choices[name].add_argument(
            "--store", metavar="FOLDER", type=folder, help="in this folder, in place of the usual store"
        )
    for added in commands.choices.values():
        added.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="with an error's traceback")
    return parser, commands


def main(words: Sequence[str] | None = None) -> int:
    """Do what the command line says, and return the exit status."""
    words, behind = _parted(sys.argv[1:] if words is None else words)
    try:
        status = _obey(words, behind)
        output.finish()
        return status
    except BrokenPipeError:
        return output.FAILED
    except (Exception, KeyboardInterrupt) as e:  # noqa: BLE001 - nobody should meet a traceback who did not ask for it
        if "--debug" in words:
            traceback.print_exc()
        error = _as_told(e)
        output.failure("--json" in words, error)
        return output.exit_status(error)


def _parted(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return our own words, and those of the command that `exec` starts, which stand behind two dashes."""
    if "--" not in words or next(word for word in words if not word.startswith("-") or word == "--") != "exec":
        return words, []
    at = list(words).index("--")
    return words[:at], words[at + 1 :]


def _obey(words: Sequence[str], behind: Sequence[str]) -> int:
    parser, commands = _parser()
    try:
        args = parser.parse(words, commands)
    # After --help and --version, which until Python 3.11 raise also where nobody reads them; an error is a `Usage`.
    except (SystemExit, BrokenPipeError):
        return output.DONE
    if args.command is None:
        output.note(parser.format_help())
        return output.USAGE
    if behind:
        args.words = list(behind)
    if getattr(args, "store", None):
        os.environ["GPUCKPT_STORE"] = args.store  # for this command, and a job that it brings up
    run: _Run = args.run
    try:
        return run(args)
    except GpuckptError as e:
        named = shlex.quote(getattr(args, "kernel", None) or "KERNEL")
        e.spelled(functools.partial(in_a_terminal, kernel=named))
        raise


def _as_told(error: BaseException) -> GpuckptError:
    """Return an exception as what happened, why, and what to do."""
    if isinstance(error, GpuckptError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return Cancelled(
            "The command was interrupted.",
            "It got SIGINT (Ctrl-C).",
            "Where a save or restore was under way it may still be: `jupyter gpuckpt kernels` tells. What was sent or "
            "fetched is not sent or fetched again.",
        )
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        return GpuckptError(
            f"{error.filename} is not there.", "There is no file or folder of that name.", "Check the path."
        )
    if isinstance(error, OSError):
        where = f": {error.filename}" if error.filename is not None else ""
        return GpuckptError(
            "The system refused something that the command needs.",
            f"{error.strerror or error}{where}",
            "Check that the file or folder is yours and the disk has room. Snapshots lie in GPUCKPT_STORE, "
            "what belongs to running kernels in JUPYTER_RUNTIME_DIR.",
        )
    return GpuckptError(
        "The command failed with an unexpected error.",
        f"{type(error).__name__}: {error}",
        "Please report it to the project, with what the same command prints when --debug is added.",
    )
