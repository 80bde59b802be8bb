"""``%gpuckpt``: what people type."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from .. import settings
from ..errors import GpuckptError, StoreError, Unavailable
from . import show
from .agent import Agent
from .hooks import generation_id

HELP = """%gpuckpt save NAME [-m MESSAGE] [--replace]   save this kernel under a name; it runs on
    --with-files                              and keep the files that it needs, Python and its packages, with it
    --wait                                    and wait until it is on the disk
%gpuckpt restore [NAME] [--gpu N[,N ...]]     put this kernel back (without a name: to the latest)
    --lazy                                    and answer before all of its GPU memory is back
%gpuckpt fork [NAME] [-n COUNT] [--reseed]    a copy of this kernel beside it (with a name: of that snapshot);
              [--save NAME] [--gpu N[,N ...]]   --reseed: with other random numbers; --save: and save it
%gpuckpt sleep · wake                         give what it has on the GPU up for host memory, and take it back;
                                              a kernel that sleeps wakes by itself when a cell is run
%gpuckpt hibernate                            the same with all of the kernel, which goes to the disk
%gpuckpt awake on · off                       keep this kernel awake whatever others need, or no longer
%gpuckpt autosleep TIME · off                 have it sleep when it has been idle for so long (45s, 30m, 2h)
%gpuckpt move --gpu N[,N ...]                 move what this kernel has on the GPU to another
%gpuckpt list                                 the snapshots there are
%gpuckpt log                                  which of them came from which
%gpuckpt show NAME                            all about one of them
%gpuckpt diff A B                             what changed from one to another
%gpuckpt rm NAME [NAME ...]                   remove snapshots
%gpuckpt mv NAME NEW                          give one another name
%gpuckpt pin NAME · unpin NAME                keep one from being removed or replaced, or no longer
%gpuckpt tag NAME TAG [--remove TAG]          add tags to one, or take them away
%gpuckpt panel                                all of that with buttons, in the cell
%gpuckpt status                               this kernel, and the snapshot that it came from
%gpuckpt help                                 this text

`r = %gpuckpt save x` returns twice, like fork: r.restored is False now, and True after a restore of x.
`f = %gpuckpt fork -n 3` returns in each: f.copy is None here, and 0, 1, 2 in the copies.
Functions of your own around a save: jupyter_gpuckpt.before_save(fn), jupyter_gpuckpt.after_restore(fn)."""

_SUBCOMMANDS = (
    *(
        "autosleep",
        "awake",
        "diff",
        "fork",
        "help",
        "hibernate",
        "list",
        "log",
        "move",
        "mv",
        "panel",
        "pin",
        "restore",
        "rm",
        "save",
        "show",
        "sleep",
        "status",
        "tag",
    ),
    "unpin",
    "wake",
)
_IN_A_TERMINAL = frozenset(
    {"check", "doctor", "export", "gc", "import", "keep", "kernels", "pull", "push", "recipient", "remote", "repair"}
    | {"setup", "sign", "stop", "trust"}
)
_NAME_SNAPSHOTS = ("diff", "fork", "mv", "pin", "restore", "rm", "show", "tag", "unpin")
_PROGRESS_AFTER = 1.0  # seconds


class _Usage(GpuckptError):
    """The line after ``%gpuckpt`` is not one that it knows."""


class _Parser(argparse.ArgumentParser):
    def __init__(self, **kwargs: Any) -> None:
        # Neither prefixes of options, which would change meaning with the next option, nor argparse's own help.
        super().__init__(**kwargs, add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise _Usage("That is not a %gpuckpt command.", f"{message}.", "`%gpuckpt help` lists them all.")


def _parser() -> _Parser:
    parser = _Parser(prog="%gpuckpt")
    commands = parser.add_subparsers(dest="command", parser_class=_Parser)
    save = commands.add_parser("save")
    save.add_argument("name")
    save.add_argument("-m", "--message", default="")
    save.add_argument("--replace", action="store_true")
    save.add_argument("--with-files", action="store_true")
    save.add_argument("--wait", action="store_true")
    restore = commands.add_parser("restore")
    restore.add_argument("name", nargs="?", default="")
    restore.add_argument("--gpu", type=_gpus, default=[])
    restore.add_argument("--lazy", action="store_true")
    fork = commands.add_parser("fork")
    fork.add_argument("name", nargs="?", default="")
    fork.add_argument("-n", "--count", type=int, default=1)
    fork.add_argument("--save", default="")
    fork.add_argument("--reseed", action="store_true")
    fork.add_argument("--gpu", type=_gpus, default=[])
    commands.add_parser("move").add_argument("--gpu", type=_gpus, required=True)
    commands.add_parser("show").add_argument("name")
    commands.add_parser("rm").add_argument("names", nargs="+")
    diff = commands.add_parser("diff")
    diff.add_argument("old")
    diff.add_argument("new")
    move = commands.add_parser("mv")
    move.add_argument("name")
    move.add_argument("new")
    for name in ("pin", "unpin"):
        commands.add_parser(name).add_argument("name")
    tag = commands.add_parser("tag")
    tag.add_argument("name")
    tag.add_argument("tags", nargs="*")
    tag.add_argument("--remove", action="append", default=[])
    commands.add_parser("autosleep").add_argument("after", type=_duration)
    commands.add_parser("awake").add_argument("state", choices=["on", "off"])
    for plain in ("list", "log", "panel", "sleep", "hibernate", "status", "wake", "help"):
        commands.add_parser(plain)
    return parser


def _duration(text: str) -> float | None:
    """Return the seconds that a text such as ``30m`` means; None for ``off``."""
    return settings.parse_duration(text)


_duration.__name__ = "time such as 45s, 30m or 2h"  # argparse names it when it is none


def _gpus(text: str) -> list[int]:
    """Return the numbers of GPUs that a text such as ``1`` or ``1,0`` names."""
    return [int(number) for number in text.split(",")]


_gpus.__name__ = "number of a GPU"  # argparse names it when it is none


class Gpuckpt:
    """The magic of one shell; without an agent it says why there is none and what to do."""

    def __init__(self, shell: Any, agent: Agent | None) -> None:
        self._shell, self._agent = shell, agent

    def __call__(self, line: str) -> Any:
        """Do what the line says.

        Raises
        ------
        GpuckptError : shown in the notebook as its own text, without a traceback.
        """
        try:
            return self._run(line)
        except GpuckptError as e:
            # IPython asks an exception whether it wants to draw itself.
            e._render_traceback_ = lambda *_, text=str(e): text.splitlines()  # type: ignore[attr-defined]
            raise

    def _run(self, line: str) -> Any:
        try:
            words = shlex.split(line)
        except ValueError as e:
            raise _Usage("That line cannot be read.", f"{e}.", "Close the quotation.") from None
        if words and words[0] in _IN_A_TERMINAL:
            raise _Usage(
                f"%gpuckpt has no {words[0]}: it is a command of the terminal's.",
                "It works on what is stored, not on this kernel.",
                f"Run `!jupyter gpuckpt {words[0]} …` in a cell, or the same without the `!` in a terminal.",
            )
        asks_for_help = not words or {"-h", "--help"} & {words[0], words[-1]}
        args = _parser().parse_args(["help"] if asks_for_help else words)
        if args.command in (None, "help"):
            print(HELP)
            return None
        do: Callable[[argparse.Namespace], Any] = getattr(self, f"_{args.command}")
        return do(args)

    def _keeper(self) -> Agent:
        if self._agent is not None:
            return self._agent
        reason = os.environ.get(settings.ENV_UNAVAILABLE)
        if reason:
            raise GpuckptError.from_dict(json.loads(reason))
        raise Unavailable(
            "This kernel can be neither saved nor restored.",
            "It was not started by gpuckpt.",
            'Choose the kernel "Python 3 (gpuckpt)" for this notebook, or start it with `--kernel python3-gpuckpt`.',
        )

    def _save(self, args: argparse.Namespace) -> show.Saved:
        agent = self._keeper()
        request = {
            "name": args.name,
            "message": args.message,
            "replace": args.replace,
            "with_files": args.with_files,
            "patience": None if args.wait else settings.save_patience(),
        }
        with self._progress(f"Saving {args.name}") as progress:
            writing = _Writing(progress)
            saved = show.Saved(agent.request("save", request, progress.take, None if args.wait else writing.take))
            progress.finish(saved)
        if not saved.written:
            writing.begin(saved)
        return saved

    def _restore(self, args: argparse.Namespace) -> NoReturn:
        agent = self._keeper()
        with self._progress(f"Restoring {args.name or 'the latest snapshot'}") as progress:
            # The restored kernel goes on from here: it completes the display, and the cell.
            asked = agent.cells.describe(progress.display_id())
            agent.request("restore", {"name": args.name, "gpus": args.gpu, "lazy": args.lazy, **asked}, progress.take)
        raise GpuckptError("The restore gave no answer.", "", "Look at `%gpuckpt status`.")

    def _fork(self, args: argparse.Namespace) -> show.Forked:
        agent = self._keeper()
        request = {
            "snapshot": args.name,
            "name": args.save,
            "count": args.count,
            "gpus": args.gpu,
            "reseed": args.reseed,
        }
        with self._progress("Forking") as progress:
            forked = show.Forked(agent.request("fork", request, progress.take))
            progress.finish(forked)
        return forked

    def _move(self, args: argparse.Namespace) -> None:
        agent = self._keeper()
        with self._progress("Moving") as progress:
            progress.finish(show.Moved(agent.request("move", {"gpus": args.gpu}, progress.take)))

    def _sleep(self, _: argparse.Namespace) -> None:
        agent = self._keeper()
        # The display is completed when the kernel sleeps: that is after this cell.
        progress = _Progress("Falling asleep when this cell has ended", self._shell)
        agent.sleeping.wish(agent.cells.describe(progress.display_id()))

    def _hibernate(self, _: argparse.Namespace) -> None:
        agent = self._keeper()
        progress = _Progress("Hibernating when this cell has ended", self._shell)
        agent.sleeping.wish(agent.cells.describe(progress.display_id()), "hibernate")

    def _wake(self, _: argparse.Namespace) -> None:
        agent = self._keeper()
        with self._progress("Waking") as progress:
            progress.finish(show.Awake(agent.sleeping.wake(progress.take)))

    def _awake(self, args: argparse.Namespace) -> None:
        self._keeper().request("awake", {"on": args.state == "on"})
        kept = "stays awake until `%gpuckpt awake off`" if args.state == "on" else "may be put to sleep"
        print(f"This kernel {kept}.")

    def _autosleep(self, args: argparse.Namespace) -> None:
        print(show.auto_sleep(self._keeper().request("autosleep", {"after": args.after})))

    def _list(self, _: argparse.Namespace) -> show.Listing:
        return show.snapshots(self._keeper().request("list"))

    def _show(self, args: argparse.Namespace) -> show.Listing:
        return show.snapshot(self._keeper().request("show", {"name": args.name}))

    def _log(self, _: argparse.Namespace) -> show.Tree:
        return show.Tree(self._keeper().request("list"))

    def _diff(self, args: argparse.Namespace) -> show.Tables:
        return show.comparison(self._keeper().request("diff", {"old": args.old, "new": args.new}))

    def _mv(self, args: argparse.Namespace) -> None:
        self._keeper().request("mv", {"name": args.name, "new": args.new})
        print(f"{args.name} is now {args.new}.")

    def _pin(self, args: argparse.Namespace) -> None:
        self._keeper().request("pin", {"name": args.name, "pinned": True})
        print(f"Pinned {args.name}.")

    def _unpin(self, args: argparse.Namespace) -> None:
        self._keeper().request("pin", {"name": args.name, "pinned": False})
        print(f"Unpinned {args.name}.")

    def _tag(self, args: argparse.Namespace) -> None:
        labels = self._keeper().request("tag", {"name": args.name, "tags": args.tags, "remove": args.remove})
        print(f"{args.name}: {' '.join(labels['tags']) or 'no tags'}")

    def _rm(self, args: argparse.Namespace) -> None:
        agent = self._keeper()
        failures = []
        for name in args.names:
            try:
                freed = agent.request("rm", {"name": name})["freed"]
            except StoreError as e:
                failures.append(e)
            else:
                print(f"Removed {name}: {show.size(freed)} freed.")
        for failure in failures[1:]:
            print(failure, file=sys.stderr)
        if failures:
            raise failures[0]

    def _panel(self, _: argparse.Namespace) -> None:
        agent = self._keeper()
        from IPython.display import display

        try:
            from .panel import panel_of
        except ImportError as e:
            raise Unavailable(
                "The panel cannot be shown.",
                f"It needs anywidget in the kernel's environment: {e}.",
                "Run `pip install anywidget` there and in Jupyter's environment, reload the page, and try again. "
                "`%gpuckpt help` lists what works without.",
            ) from None
        display(panel_of(agent))

    def _status(self, _: argparse.Namespace) -> show.Listing:
        s = self._keeper().request("status")
        return show.details(
            [
                ("kernel", s["kernel_id"]),
                ("state", s["state"]),
                ("came from", (s["parent"] or {}).get("name", "a fresh start")),
                ("pid", str(s["pid"])),
                ("processes", str(len(s["pids"]))),
                ("memory", show.size(s["memory"])),
                ("generation", generation_id()),
            ]
        )

    def complete(self, _: Any, event: Any) -> list[str]:
        """Complete subcommands and snapshot names (called by IPython with the line so far)."""
        words = event.line.split()
        before = words[1:] if event.line.endswith(" ") else words[1:-1]
        if not before:
            return list(_SUBCOMMANDS)
        if before[0] in _NAME_SNAPSHOTS and self._agent is not None:
            with contextlib.suppress(GpuckptError):
                names = [s["name"] for s in self._agent.request("list")["snapshots"]]
                return [*names, "--lazy"] if before[0] == "restore" else names
        if before[0] == "save":
            return ["--message", "--replace", "--wait", "--with-files"]
        return []

    @contextlib.contextmanager
    def _progress(self, verb: str) -> Iterator[_Progress]:
        progress = _Progress(verb, self._shell)
        try:
            yield progress
        except BaseException:
            progress.clear()
            raise


class _Progress:
    """A line in the cell that says how far an operation is; shown from the first second on."""

    def __init__(self, verb: str, shell: Any) -> None:
        self._verb, self._shell = verb, shell
        self._began = time.monotonic()
        self._handle: Any = None

    def take(self, progress: dict[str, Any]) -> None:
        """Show what the keeper reports."""
        if self._handle is None and time.monotonic() - self._began < _PROGRESS_AFTER:
            return
        self._display({"text/plain": show.progress_text(self._verb, progress)})

    def display_id(self) -> str:
        """Return the id of the display, shown from now on."""
        self._display({"text/plain": f"{self._verb} …"})
        return str(self._handle.display_id)

    def finish(self, result: show.Saved | show.Forked | show.Moved | show.Awake) -> None:
        """Show the result in place of the progress."""
        result.already_shown_in = self._shell.execution_count
        self._display(result.mime())

    def clear(self) -> None:
        """Leave nothing of it: an error will be shown."""
        if self._handle is not None:
            self._display({"text/plain": ""})

    def show(self, result: show.Saved) -> None:
        """Show what has become of a result that was shown."""
        self._display(result.mime())

    def _display(self, data: dict[str, str]) -> None:
        from IPython.display import DisplayHandle

        if self._handle is None:
            self._handle = DisplayHandle()
            self._handle.display(data, raw=True)
        else:
            self._handle.update(data, raw=True)


class _Writing:
    """Follows a save whose cell has gone on, in the line that the cell shows of it."""

    def __init__(self, progress: _Progress) -> None:
        self._progress = progress
        self._lock = threading.Lock()
        self._saved: show.Saved | None = None
        self._early: dict[str, Any] | None = None

    def begin(self, saved: show.Saved) -> None:
        """Follow it from now on."""
        with self._lock:
            self._saved = saved
            if self._early is not None:
                self._note(saved, self._early)

    def take(self, message: dict[str, Any]) -> None:
        """Take in what the keeper says of it (called by the agent, in a thread of its own)."""
        with self._lock:
            if self._saved is not None:
                self._note(self._saved, message)
            else:
                self._early = message  # the latest says it all

    def _note(self, saved: show.Saved, message: dict[str, Any]) -> None:
        if "error" in message:
            saved.fail(GpuckptError.from_dict(message["error"]))
            print(f"{saved.name} was NOT saved. {saved.error}", file=sys.stderr)
        elif "progress" in message:
            saved.progress = show.progress_text("Being written", message["progress"])
        else:
            saved.complete(message["result"])
        self._progress.show(saved)


def register(shell: Any, agent: Agent | None = None) -> None:
    """Offer ``%gpuckpt`` and its completion in an IPython shell."""
    if agent is None and "gpuckpt" in shell.magics_manager.magics["line"]:
        return
    magic = Gpuckpt(shell, agent)
    shell.register_magic_function(magic, magic_kind="line", magic_name="gpuckpt")
    shell.set_hook("complete_command", magic.complete, str_key="%gpuckpt")
