"""``%gpuckpt``: what people type."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from .. import settings
from ..errors import GpuckptError, StoreError, Unavailable
from . import show
from .agent import Agent
from .hooks import generation_id

HELP = """%gpuckpt save NAME [-m MESSAGE] [--replace]   save this kernel under a name; it runs on
%gpuckpt restore [NAME]                       put this kernel back (without a name: to the latest)
%gpuckpt list                                 the snapshots there are
%gpuckpt show NAME                            all about one of them
%gpuckpt rm NAME [NAME ...]                   remove snapshots
%gpuckpt panel                                all of that with buttons, in the cell
%gpuckpt status                               this kernel, and the snapshot that it came from
%gpuckpt help                                 this text

`r = %gpuckpt save x` returns twice, like fork: r.restored is False now, and True after a restore of x.
Functions of your own around a save: jupyter_gpuckpt.before_save(fn), jupyter_gpuckpt.after_restore(fn)."""

_SUBCOMMANDS = ("help", "list", "panel", "restore", "rm", "save", "show", "status")
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
    commands.add_parser("restore").add_argument("name", nargs="?", default="")
    commands.add_parser("show").add_argument("name")
    commands.add_parser("rm").add_argument("names", nargs="+")
    for plain in ("list", "panel", "status", "help"):
        commands.add_parser(plain)
    return parser


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
        request = {"name": args.name, "message": args.message, "replace": args.replace}
        with self._progress(f"Saving {args.name}") as progress:
            saved = show.Saved(agent.request("save", request, progress.take))
            progress.finish(saved)
        return saved

    def _restore(self, args: argparse.Namespace) -> NoReturn:
        agent = self._keeper()
        with self._progress(f"Restoring {args.name or 'the latest snapshot'}") as progress:
            # The restored kernel goes on from here: it completes the display, and the cell.
            asked = agent.cells.describe(progress.display_id())
            agent.request("restore", {"name": args.name, **asked}, progress.take)
        raise GpuckptError("The restore gave no answer.", "", "Look at `%gpuckpt status`.")

    def _list(self, _: argparse.Namespace) -> show.Listing:
        return show.snapshots(self._keeper().request("list"))

    def _show(self, args: argparse.Namespace) -> show.Listing:
        return show.snapshot(self._keeper().request("show", {"name": args.name}))

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
        if before[0] in ("restore", "show", "rm") and self._agent is not None:
            with contextlib.suppress(GpuckptError):
                return [s["name"] for s in self._agent.request("list")["snapshots"]]
        if before[0] == "save":
            return ["--message", "--replace"]
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

    def finish(self, result: show.Saved) -> None:
        """Show the result in place of the progress."""
        result.already_shown_in = self._shell.execution_count
        self._display(result.mime())

    def clear(self) -> None:
        """Leave nothing of it: an error will be shown."""
        if self._handle is not None:
            self._display({"text/plain": ""})

    def _display(self, data: dict[str, str]) -> None:
        from IPython.display import DisplayHandle

        if self._handle is None:
            self._handle = DisplayHandle()
            self._handle.display(data, raw=True)
        else:
            self._handle.update(data, raw=True)


def register(shell: Any, agent: Agent | None = None) -> None:
    """Offer ``%gpuckpt`` and its completion in an IPython shell."""
    if agent is None and "gpuckpt" in shell.magics_manager.magics["line"]:
        return
    magic = Gpuckpt(shell, agent)
    shell.register_magic_function(magic, magic_kind="line", magic_name="gpuckpt")
    shell.set_hook("complete_command", magic.complete, str_key="%gpuckpt")
