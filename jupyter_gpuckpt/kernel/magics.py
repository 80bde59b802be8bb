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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .. import settings
from ..errors import GpuckptError, StoreError, Unavailable
from ..operations.description import Offered, given
from ..operations.requests import (
    Auto,
    AutoSleep,
    Awake,
    Diff,
    Fork,
    Keep,
    Left,
    List,
    Move,
    Note,
    Pin,
    Remove,
    Rename,
    Restoring,
    Show,
    Status,
    Tag,
)
from ..operations.results import Progress, Restored, Saved, Snapshots, Taking
from ..spelling import in_a_cell
from . import chosen, show
from .agent import Agent
from .histories import Histories
from .hooks import generation_id
from .magic_parser import help_of, help_of_all, parser_of_lines
from .requests import Afterwards
from .stopping import end_cell
from .tables import Blocks, Listing, printable
from .words import Usage

_IN_A_TERMINAL = frozenset(
    {
        "broker",
        "check",
        "completion",
        "doctor",
        "exec",
        "export",
        "forget",
        "gc",
        "import",
        "kernels",
        "logs",
        "ps",
        "pull",
        "push",
        "recipe",
        "recipient",
        "remote",
        "repair",
        "run",
        "setup",
        "sign",
        "stop",
        "trust",
        "version",
    }
)
_SNAPSHOTS = ("NAME", "A", "B")
"""What stands for the name of a snapshot in the help."""
_PROGRESS_AFTER = 1.0  # seconds


def _given(args: argparse.Namespace) -> dict[str, object]:
    """Return what a line asks for, as the request has it."""
    return given(args.kind, Offered.CELL, args)


def _of_store(folder: str | None, **said: object) -> dict[str, object]:
    """Return what a request says of snapshots; where a folder was given, as said of those in the store there."""
    return {"store": {"folder": folder, **said}} if folder else said


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
            text = printable(str(e))
            e._render_traceback_ = lambda *_, text=text: text.splitlines()  # type: ignore[attr-defined]
            raise

    def _run(self, line: str) -> Any:
        try:
            words = shlex.split(line)
        except ValueError as e:
            raise Usage("That line cannot be read.", f"{e}.", "Add the missing quote, or escaped character.") from None
        parser, commands = parser_of_lines()
        if words[:1] == ["help"] and words[1:] and not words[1].startswith("-"):
            words = [words[1], "--help"]
        if not words or words[0] in ("help", "-h", "--help"):
            print(help_of_all())
            return None
        if words[0] in _IN_A_TERMINAL:
            then = f"Run `!jupyter gpuckpt {words[0]} …` in a cell, or the same without the `!` in a terminal."
            if words[0] in ("exec", "run"):  # what a kernel starts would end with it
                then = f"Run `jupyter gpuckpt {words[0]} …` in a terminal."
            raise Usage(
                f"%gpuckpt has no {words[0]}: it is a terminal command.",
                "It is not about this kernel alone.",
                then,
            )
        if words[0] in commands.choices and words[-1] in ("-h", "--help"):
            print(help_of(words[0]))
            return None
        args = parser.parse(words, commands)
        do: Callable[[argparse.Namespace], Any] = getattr(self, f"_{args.command}")
        return do(args)

    def _keeper(self) -> Agent:
        if self._agent is not None:
            return self._agent
        reason = os.environ.get(settings.ENV_UNAVAILABLE)
        if reason:
            error = GpuckptError.from_dict(json.loads(reason)).spelled(in_a_cell)
            # It was looked at when this kernel started, and is not looked at again.
            error.then = f"{error.then} Then restart this kernel.".strip()
            raise error
        raise Unavailable(
            "This kernel can be neither saved nor restored.",
            "It was not started by gpuckpt.",
            'Choose the kernel "Python 3 (gpuckpt)" for this notebook, or start it with `--kernel python3-gpuckpt`.',
        )

    def _save(self, args: argparse.Namespace) -> show.Saved:
        agent = self._keeper()
        patience = None if args.wait else settings.save_patience()
        request = {**_given(args), "patience": patience, **_of_store(args.to, name=args.name)}
        with self._progress(agent, args.kind.progress_of(args.name)) as progress:
            writing = _Writing(progress)
            done = agent.keeper.save(request, progress.take, None if args.wait else writing.take)
            saved = show.Saved(done.taken, done) if isinstance(done, Taking) else show.Saved(done)
            progress.finish(saved)
        _end_if_restored_to_stop(self._shell, done)
        if not saved.written:
            writing.begin(saved)
        return saved

    def _restore(self, args: argparse.Namespace) -> None:
        # A keeper of an older version, which knows no `from`, must not take this for a restore of the latest.
        names = _of_store(args.store, **{"name": args.name or args.of_any, "from": args.of_any})
        verb = args.kind.progress_of(args.of_any or args.name or "the latest snapshot")
        self._go_to(args.kind, {**_given(args), **names}, verb)

    def _go_to(self, kind: type[Restoring], request: Mapping[str, object], verb: str) -> None:
        """Have the kernel given up for another one, which goes on from here: it completes the display, and the cell.

        It may be saved before. One that has come back from there has done what was asked for, and ends the cell.
        """
        agent = self._keeper()
        with self._progress(agent, verb) as progress:
            asked = agent.cells.describe(progress.display_id())
            agent.keeper.take(kind, Restored, {**request, **asked}, progress.take)
            progress.clear()
        end_cell(self._shell, said="")

    def _fork(self, args: argparse.Namespace) -> show.Forked:
        agent = self._keeper()
        with self._progress(agent, args.kind.progress_of()) as progress:
            done = agent.keeper.take(Fork, Restored, _given(args), progress.take)
            forked = show.Forked(done)
            progress.finish(forked)
        _end_if_restored_to_stop(self._shell, done)
        return forked

    def _move(self, args: argparse.Namespace) -> None:
        agent = self._keeper()
        with self._progress(agent, args.kind.progress_of()) as progress:
            progress.finish(show.Moved(agent.keeper.request(Move, _given(args), progress.take)))

    def _sleep(self, args: argparse.Namespace) -> None:
        agent = self._keeper()
        # The display is completed when the kernel sleeps: that is after this cell.
        verb = args.kind.progress_of("when this cell has ended")
        progress = _Progress(verb, self._shell, agent.cells.shows_updates())
        agent.sleeping.wish(agent.cells.describe(progress.display_id()), args.command)

    _hibernate = _sleep

    def _wake(self, args: argparse.Namespace) -> None:
        agent = self._keeper()
        with self._progress(agent, args.kind.progress_of()) as progress:
            progress.finish(show.Awake(agent.sleeping.wake(progress.take)))

    def _awake(self, args: argparse.Namespace) -> None:
        self._keeper().keeper.request(Awake, {"on": args.on == "on"})
        kept = "stays awake until `%gpuckpt awake off`" if args.on == "on" else "may be put to sleep"
        print(f"This kernel {kept}.")

    def _autosleep(self, args: argparse.Namespace) -> None:
        print(show.auto_sleep(self._keeper().keeper.request(AutoSleep, {"after": args.after}).sleep_after))

    def _auto(self, args: argparse.Namespace) -> None:
        print(show.auto_saving(self._keeper().keeper.request(Auto, _given(args))))

    def _undo(self, args: argparse.Namespace) -> None:
        self._go_to(args.kind, _given(args), args.kind.progress_of())

    _redo = _undo

    def _list(self, args: argparse.Namespace) -> Listing:
        return chosen.shown(*self._snapshots(args.store), args, in_a_cell)

    def _show(self, args: argparse.Namespace) -> Listing:
        return show.snapshot(self._keeper().keeper.request(Show, _of_store(args.store, name=args.name)))

    def _log(self, args: argparse.Namespace) -> Histories:
        found, here = self._snapshots(args.store)
        snapshots, older = chosen.newest(found.snapshots, args.last)
        return Histories(snapshots, here, older, [str(fault["what"]) for fault in found.faults])

    def _snapshots(self, folder: str | None) -> tuple[Snapshots, Mapping[str, Sequence[str]]]:
        """Return all snapshots, and the one that this kernel is based on, as `show.snapshots` has it."""
        agent = self._keeper()
        parent = agent.keeper.request(Status).parent
        return agent.keeper.request(List, _of_store(folder)), {parent.id: []} if parent is not None else {}

    def _diff(self, args: argparse.Namespace) -> Blocks:
        return show.comparison(self._keeper().keeper.request(Diff, _of_store(args.store, old=args.old, new=args.new)))

    def _mv(self, args: argparse.Namespace) -> None:
        self._rename(args.store, args.name, args.new)

    def _rename(self, folder: str | None, name: str, new: str) -> None:
        self._keeper().keeper.request(Rename, _of_store(folder, name=name, new=new))
        print(f"{name} is now {new}.")

    def _note(self, args: argparse.Namespace) -> None:
        request = _of_store(args.store, name=args.name, message=" ".join(args.message))
        noted = self._keeper().keeper.request(Note, request)
        print(printable(f"{args.name}: {noted.message or 'no note'}"))

    def _pin(self, args: argparse.Namespace) -> None:
        self._keeper().keeper.request(Pin, _of_store(args.store, name=args.name, pinned=True))
        print(f"Pinned {args.name}.")

    def _unpin(self, args: argparse.Namespace) -> None:
        self._keeper().keeper.request(Pin, _of_store(args.store, name=args.name, pinned=False))
        print(f"Unpinned {args.name}.")

    def _tag(self, args: argparse.Namespace) -> None:
        request = _of_store(args.store, name=args.name, tags=args.tags, remove=args.remove)
        labels = self._keeper().keeper.request(Tag, request)
        print(f"{args.name}: {' '.join(labels.tags) or 'no tags'}")

    def _rm(self, args: argparse.Namespace) -> None:
        agent = self._keeper()
        failures = []
        for name in args.names:
            try:
                freed = agent.keeper.request(Remove, _of_store(args.store, name=name)).freed
            except StoreError as e:
                failures.append(e)
            else:
                print(f"Removed {name}: {show.size(freed)} freed.")
        for failure in failures[1:]:
            print(failure, file=sys.stderr)
        if failures:
            raise failures[0]

    def _keep(self, args: argparse.Namespace) -> None:
        if args.renamed:
            self._rename(args.store, *chosen.renamed_as(args.renamed, in_a_cell))
            return
        rule = _of_store(args.store, last=args.last, under=args.under, dry_run=args.dry_run)
        done = self._keeper().keeper.request(Keep, rule)
        if not done.removed:
            print("Nothing has to be removed.")
            return
        what, then = ("Would remove", "would be freed") if args.dry_run else ("Removed", "freed")
        print(f"{what} {', '.join(done.removed)}: {show.size(done.freed)} {then}.")

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

    def _status(self, _: argparse.Namespace) -> Listing:
        left = self._keeper().keeper.request(Left)
        return show.status(self._keeper().keeper.request(Status), generation_id(), map(show.still_running, left))

    def complete(self, event: Any) -> list[str]:
        """Complete commands, snapshot names and options; the event has the line so far."""
        typed = event.text_until_cursor.partition("%gpuckpt")[2]
        if not typed[:1].isspace():
            return []
        before = typed.split()
        word = "" if typed[-1].isspace() else before.pop()
        # IPython's words end at a colon, too, and it asks for what stands in place of the last of them.
        given = len(word) - len(event.symbol)
        return [one[given:] for one in self._continuations(before) if one.startswith(word)]

    def _continuations(self, before: list[str]) -> list[str]:
        """Return what may follow these words of a line."""
        commands = parser_of_lines()[1].choices
        if not before or before[0] not in commands:
            return [] if before else sorted(commands)
        parser = commands[before[0]]
        if any(before[-1] in action.option_strings and action.nargs != 0 for action in parser._actions):
            return []  # something that is not known here; IPython completes the paths of folders
        by_place = [action for action in parser._actions if not action.option_strings]
        found = [choice for action in by_place for choice in action.choices or ()]
        found += [option for option in parser.options if option not in before]
        if before[0] == "autosleep":
            found.append("off")
        names_one = before[0] != "save" and any(action.metavar in _SNAPSHOTS for action in by_place)
        if names_one and self._agent is not None:
            with contextlib.suppress(GpuckptError):
                found += [show.label_of(s) for s in self._agent.keeper.request(List).snapshots]
        return found

    @contextlib.contextmanager
    def _progress(self, agent: Agent, verb: str) -> Iterator[_Progress]:
        progress = _Progress(verb, self._shell, agent.cells.shows_updates())
        try:
            yield progress
        except BaseException:
            progress.clear()
            raise


class _Progress:
    """A line in the cell that says how far an operation is, shown from the first second on; its result replaces it.

    `updates` is whether the client shows what replaces a line. Where it does not, the result is a line of its own.
    """

    def __init__(self, verb: str, shell: Any, updates: bool) -> None:
        self._verb, self._shell, self.updates = verb, shell, updates
        self._began = time.monotonic()
        self._handle: Any = None

    def take(self, progress: Progress) -> None:
        """Show what the keeper reports."""
        if progress.quiet:
            return  # it might be on its way when the kernel is taken, and be sent once more by each that is restored
        soon = time.monotonic() - self._began < _PROGRESS_AFTER
        if self._handle is None and soon and not progress.cancelling:
            return
        self._display({"text/plain": show.progress_text(self._verb, progress)})

    def display_id(self) -> str | None:
        """Show the line from now on; return the id of the display that the result is to replace, if it can."""
        self._display({"text/plain": f"{self._verb} …"})
        return str(self._handle.display_id) if self.updates else None

    def finish(self, result: show.Saved | show.Forked | show.Moved | show.Awake) -> None:
        """Show the result in place of the progress; a restored kernel leaves what its cell showed when it was saved.

        The cell that asked for the restore says what came of that.
        """
        result.already_shown_in = self._shell.execution_count
        if not result.restored:
            self.show(result)

    def clear(self) -> None:
        """Leave nothing of it: an error will be shown."""
        if self._handle is not None:
            self._display({"text/plain": ""})

    def show(self, result: show.Saved | show.Forked | show.Moved | show.Awake) -> None:
        """Show a result, or what has become of it since."""
        if not self.updates:
            self._handle = None
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
        self._early: Afterwards | None = None

    def begin(self, saved: show.Saved) -> None:
        """Follow it from now on."""
        with self._lock:
            self._saved = saved
            if self._early is not None:
                self._note(saved, self._early)

    def take(self, news: Afterwards) -> None:
        """Take in what the keeper says of it (called by the agent, in a thread of its own)."""
        with self._lock:
            if self._saved is not None:
                self._note(self._saved, news)
            else:
                self._early = news  # the latest says it all

    def _note(self, saved: show.Saved, news: Afterwards) -> None:
        match news:
            case GpuckptError():
                saved.fail(news)
                print(f"{saved.name} was NOT saved. {saved.error}", file=sys.stderr)
            case Progress():
                saved.progress = news
                if not self._progress.updates:
                    return  # a line for every part of it would be too many
            case Saved():
                saved.complete(news)
        self._progress.show(saved)


def _end_if_restored_to_stop(shell: Any, done: object) -> None:
    """End the cell in a kernel that was restored from what it took, where that was asked for."""
    if isinstance(done, Restored) and done.stop_here:
        end_cell(shell)
