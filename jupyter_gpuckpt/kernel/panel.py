"""``%gpuckpt panel``: the snapshots and what can be done with them, in a cell, wherever widgets are shown.

It speaks to the kernel alone, which asks its keeper: no server and no extension of the front end has a part in it.
Whatever takes long is done in a thread, so that no cell has to end for it, and none waits for it.

A restored kernel takes over the panels that are shown, also where the snapshot is older than they are.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import anywidget
import comm
import traitlets
from ipykernel.kernelbase import Kernel

from ..checked import to_json
from ..errors import Cancelled, GpuckptError
from ..operations.requests import Cancel, List, Pin, Remove, Rename, Request, Restore, Save, Status
from ..operations.results import KernelStatus, Labelled, Progress, Restored
from . import show
from .agent import Agent
from .background import in_background

__all__ = ["Panel", "panel_of", "resume"]

_LOOK_EVERY = 3.0  # how often the keeper is asked while somebody sees the panel, in seconds
_MOST = 100  # how many snapshots are shown; `%gpuckpt list` has them all
_TOLD = ("name", "notebook", "id", "message", "created", "size", "gpu_memory", "pinned", "tags", "job", "label")
_HERE = Path(__file__).parent


class Panel(anywidget.AnyWidget):
    """One panel, made in the kernel.

    Attributes
    ----------
    state : what is to be seen, as JSON types: ``kernel``, ``own`` and ``others`` (snapshots, newest first), ``older``
        (how many more there are), ``operation`` (what is under way: a ``text`` and a ``percent``), ``note`` and
        ``error`` (what came of the last one), and ``answered`` (the number of the last message that was heard).
    """

    _esm = (_HERE / "panel.js").read_text("utf-8")
    _css = (_HERE / "panel.css").read_text("utf-8")
    state = traitlets.Dict().tag(sync=True)

    def __init__(self, agent: Agent, **kwargs: Any) -> None:
        self._agent = agent
        self._changing = threading.Lock()
        self._acting = threading.Lock()
        self._operation, self._cancelling = "", False
        self._times_back = 0
        self._look_failed = False
        self._views: set[str] = set()
        self._seen = threading.Event()
        super().__init__(**kwargs)
        self.on_msg(self._take)
        agent.panels[self.model_id] = self
        self.look()
        in_background(self._watch, "gpuckpt-panel")

    def __repr__(self) -> str:
        return "This panel ended with its kernel; %gpuckpt panel shows it again."

    def look(self) -> None:
        """Ask the keeper how things are, and show it."""
        at = self._times_back
        try:
            status = self._agent.keeper.request(Status)
            found = self._agent.keeper.request(List).snapshots
        except GpuckptError as e:
            self._look_failed = self._show_of(at, error=e.as_dict())
            return
        if self._look_failed:
            self._look_failed = False
            self._show(error=None)
        own = [s for s in found if _is_of(s, status)]
        others = [s for s in found if not _is_of(s, status)]
        self._show_of(
            at,
            kernel={
                "state": status.state,
                "memory": status.memory,
                "parent": to_json(status.parent),
                "unsaved": to_json(status.unsaved),
                "freed": status.gpu.freed,
            },
            own=[_told(s) for s in own[:_MOST]],
            others=[_told(s) for s in others[: max(0, _MOST - len(own))]],
            older=max(0, len(found) - _MOST),
        )

    def welcome_back(self, name: str) -> None:
        """Show all of it again, in a kernel that was just put back to a snapshot; in a copy, without a name."""
        with self._changing:
            self._times_back += 1
            self.state = {**self.state, "operation": None, "error": None, "note": _restored(name) if name else ""}
        self.send_state()
        self.look()

    def _show(self, **changed: Any) -> None:
        self._show_of(self._times_back, **changed)

    def _show_of(self, times_back: int, **changed: Any) -> bool:
        """Show what began after the kernel was put back so many times, unless it was again since; tell whether."""
        with self._changing:
            if times_back != self._times_back:
                return False
            # A new dictionary: only that is noticed as a change.
            self.state = {**self.state, **changed}
            return True

    def _watch(self) -> None:
        while self.comm is not None:
            self._seen.wait()
            time.sleep(_LOOK_EVERY)
            if not self._acting.locked():
                self.look()

    # -- what the user does there

    def _take(self, _: Any, content: Any, __: Any) -> None:
        if isinstance(content, dict):
            # Not from the subshell that this is called in: ipykernel would go on sending it all, also once it is gone.
            in_background(lambda: self._heed(content), "gpuckpt-panel")

    def _heed(self, content: Mapping[str, Any]) -> None:
        self._show(answered=content.get("number"))
        asked = content.get("do")
        if asked == "cancel" and self._operation:
            self._cancelling = True
            self._cancel()
        elif asked == "look":
            self.look()
        elif asked == "see":
            self._see(str(content.get("view")), bool(content.get("seen")))
        elif asked in _VERBS:
            args = content.get("args")
            self._act(asked, args if isinstance(args, dict) else {})

    def _cancel(self) -> None:
        with contextlib.suppress(GpuckptError):
            self._agent.keeper.request(Cancel, {"operation": self._operation})

    def _see(self, view: str, seen: bool) -> None:
        if seen:
            self._views.add(view)
            self._seen.set()
            self.look()
        else:
            self._views.discard(view)
            if not self._views:
                self._seen.clear()

    def _act(self, asked: str, args: Mapping[str, Any]) -> None:
        if not self._acting.acquire(blocking=False):
            return
        name = str(args.get("name", ""))
        at = self._times_back
        stage = ""

        def progress(far: Progress) -> None:
            nonlocal stage
            if self._cancelling and far.stage != stage:
                self._cancel()  # the stage before may have been one that cannot be left
            stage = far.stage
            percent = 100 * far.done // far.total if far.total else None
            text = show.progress_text(f"{_VERBS[asked]} {name}", replace(far, cancelling=self._cancelling))
            self._show_of(at, operation={"text": text, "percent": percent})

        try:
            self._cancelling = False
            self._show_of(at, operation={"text": f"{_VERBS[asked]} {name} …", "percent": None}, note="", error=None)
            self._operation = uuid.uuid4().hex
            result = self._agent.keeper.take(_KINDS[asked], Restored, {**args, "operation": self._operation}, progress)
            self._show_of(at, note=_NOTES[asked](args, result))
        except Cancelled:
            self._show_of(at, note="Cancelled; the kernel is as it was.")
        except GpuckptError as e:
            self._show_of(at, error=e.as_dict())
        finally:
            self._acting.release()
            self._show(operation=None)
        self.look()


_VERBS = {"save": "Saving", "restore": "Restoring", "mv": "Renaming", "pin": "Pinning", "rm": "Removing"}
_KINDS: Mapping[str, type[Request[Any]]] = {one.op: one for one in (Save, Restore, Rename, Pin, Remove)}
_NOTES: Mapping[str, Callable[[Mapping[str, Any], Any], str]] = {
    "save": lambda _, result: _restored(show.label_of(result)) if result.restored else show.Saved(result).text(),
    "restore": lambda _, result: _restored(show.label_of(result)),
    "mv": lambda args, _: f"{args['name']} is now {args['new']}.",
    "pin": lambda args, _: f"{args['name']} is {'pinned' if args['pinned'] else 'no longer pinned'}.",
    "rm": lambda args, result: f"Removed {args['name']}: {show.size(result.freed)} freed.",
}


def _restored(name: str) -> str:
    return f"Restored {name}."


def _is_of(snapshot: Labelled, status: KernelStatus) -> bool:
    is_notebooks = bool(status.notebook) and snapshot.notebook == status.notebook
    return is_notebooks or snapshot.kernel_id == status.kernel_id


def _told(snapshot: Labelled) -> dict[str, object]:
    return {name: value for name, value in to_json(snapshot).items() if name in _TOLD}


def panel_of(agent: Agent) -> Panel:
    """Return the panel of this kernel; one can be shown in several places."""
    panel: Panel
    for panel in list(agent.panels.values()):
        if panel.comm is not None:
            return panel
        del agent.panels[panel.model_id]
    return Panel(agent)


def resume(agent: Agent, shown: Iterable[str], name: str) -> None:
    """Have the panels of the kernel before this one, by their ids, go on in this one, which was put back to `name`."""
    for model_id in shown:
        if model_id not in agent.panels:
            channel: Any = comm.create_comm(target_name="jupyter.widget", comm_id=model_id, primary=False)
            # One that has not been opened from here has no kernel, and would send nothing.
            channel.kernel = Kernel.instance()
            comm.get_comm_manager().register_comm(channel)
            Panel(agent, comm=channel)
    for panel in list(agent.panels.values()):
        panel.welcome_back(name)
