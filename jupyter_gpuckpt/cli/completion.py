"""Completion in a shell: what may follow the words so far, and the script by which a shell asks.

The shell starts this program for a Tab (by argcomplete, as Jupyter does), so nothing is imported that takes long.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterable, Mapping
from importlib.resources import files
from typing import Any, TypeAlias

from .. import settings
from ..errors import GpuckptError
from . import output
from .parsers import Program, program

__all__ = ["complete", "prepared", "script"]

_Completer: TypeAlias = Callable[..., Iterable[str] | Mapping[str, str]]
"""Returns what may stand for a word, with a description of each where there is one (zsh and fish show it)."""


def complete() -> None:
    """Tell the shell that asks, by the environment, what may follow; this process ends with it."""
    import argcomplete

    argcomplete.autocomplete(prepared(), always_complete_options=False)


def prepared() -> argparse.ArgumentParser:
    """Return the parser, each of whose arguments knows what may stand for it."""
    here = program()
    for name, parser in here.commands.choices.items():
        for action in parser._actions:
            if not action.choices:
                action.completer = _completer(name, action, here)
    return here.parser


def _completer(command: str, action: argparse.Action, here: Program) -> _Completer:
    from argcomplete.completers import DirectoriesCompleter, FilesCompleter

    directories: _Completer = DirectoriesCompleter()
    of_files: _Completer = FilesCompleter()
    by_metavar: dict[str, _Completer] = {
        "COMMAND": lambda **_: here.commands.choices,
        "FILE": of_files,
        "FOLDER": directories,
        "JOB": _jobs,
        "KERNEL": _kernels,
        "KEY": of_files,
        "NOTEBOOK": _notebooks,
        "NOTEBOOK:NAME": _snapshots,
        "RECIPE": _recipes,
        "TAG": _tags,
        "URL": lambda prefix, **_: [*_remotes(), *directories(prefix)],
        **dict.fromkeys(("A", "B", "NAME"), _snapshots),
    }
    new_or_elsewhere = command in ("exec", "run", "save", "pull") or action.dest == "remove"
    found = by_metavar.get(str(action.metavar), _nothing)
    return _nothing if found is _snapshots and new_or_elsewhere else found


def _nothing(**_: Any) -> Iterable[str]:
    return ()


def _snapshots(parsed_args: argparse.Namespace, **_: Any) -> Mapping[str, str]:
    """Return the names of snapshots, and their notes; after a kernel its own, those typed already left out."""
    from ..kernel.tables import printable
    from ..snapshots.summary import listing
    from ..spelling import in_a_terminal
    from ..store import Store

    with contextlib.suppress(GpuckptError, OSError):
        found = listing(Store(getattr(parsed_args, "store", None) or settings.store_dir()), in_a_terminal).snapshots
        given = getattr(parsed_args, "names", None) or ()
        return {one.label: printable(one.message) for one in found if one.label not in given}
    return {}


def _tags(parsed_args: argparse.Namespace, **_: Any) -> Iterable[str]:
    from ..store import Store

    with contextlib.suppress(GpuckptError, OSError):
        labels = Store(getattr(parsed_args, "store", None) or settings.store_dir()).all_labels().values()
        return {tag for one in labels for tag in one.tags}
    return ()


def _notebooks(parsed_args: argparse.Namespace, **_: Any) -> Iterable[str]:
    from ..snapshots.summary import notebooks
    from ..store import Store

    with contextlib.suppress(GpuckptError, OSError):
        return notebooks(Store(getattr(parsed_args, "store", None) or settings.store_dir()).scan()[0])
    return ()


def _kernels(**_: Any) -> Mapping[str, str]:
    """Return the running kernels by their notebooks, or ids where that is no name, and the jobs."""
    from ..client.record import KernelFolder

    named: dict[str, list[str]] = {}
    others: dict[str, str] = {}
    with contextlib.suppress(GpuckptError):
        for folder in KernelFolder.all():
            with contextlib.suppress(OSError, ValueError):  # it has ended meanwhile
                launch = folder.launch()
                if launch.job:
                    others[launch.job] = "job"
                elif folder.has_keeper() and launch.notebook:
                    named.setdefault(launch.notebook.rpartition("/")[2], []).append(launch.kernel_id)
                elif folder.has_keeper():
                    others[launch.kernel_id] = launch.name
    for notebook, ids in named.items():
        others.update({notebook: "notebook"} if len(ids) == 1 else dict.fromkeys(ids, notebook))
    return others


def _jobs(parsed_args: argparse.Namespace, **_: Any) -> Iterable[str]:
    given = getattr(parsed_args, "names", None) or ()
    return [name for name, kind in _kernels().items() if kind == "job" and name not in given]


def _remotes() -> Iterable[str]:
    from ..store.transfer.known_remotes import KnownRemotes

    with contextlib.suppress(GpuckptError, OSError):
        return KnownRemotes(settings.keys_dir()).addresses()
    return ()


def _recipes(**_: Any) -> Mapping[str, str]:
    from .recipes import summaries

    return summaries()


def script(args: argparse.Namespace) -> int:
    """Print what a shell reads to complete our commands."""
    text = (files(__package__) / "shells" / f"completion.{args.shell}").read_text()
    output.result(args.json, {"shell": args.shell, "script": text}, text.rstrip("\n"))
    return output.DONE
