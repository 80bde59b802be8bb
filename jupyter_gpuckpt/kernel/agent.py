"""The agent: a thread in the kernel, waiting at a FIFO, by which kernel and keeper talk.

It is woken only by the keeper. A thread that waits at a FIFO is saved waiting, and restored waiting at the FIFO of the
same path in the new run folder. The messages are described in `keeper/agent_channel.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from .. import settings
from ..errors import GpuckptError
from ..spelling import in_a_cell
from . import (
    cpu_time,
    debugger,
    devices,
    environment,
    hooks,
    parking,
    rebinding,
    renewal,
    start_times,
    variables,
)
from .arrivals import all_is_done
from .background import in_background
from .builtin_hooks import Housekeeping, bytes_on_gpus
from .cells import Asked, Cells
from .channel import Channel
from .child_output import ChildOutput
from .executed import Executed, cell_id
from .leaving import Leaving
from .page_copies import PageCopies
from .reconnection import Reconnection
from .requests import Requests, broken_off, news_of
from .sleeping import Sleeping

log = logging.getLogger("gpuckpt.agent")

_PREPARED_FOR = frozenset({"save", "fork", "move", "restore", "undo", "redo"})
"""What a cell asks for that the kernel is prepared for: the cell does nothing else meanwhile."""
_ENDS_CELL = frozenset({"restore", "undo", "redo"})
"""What ends the cell that asked for it, in a kernel that is restored from what was saved before that."""
_AT_ONCE = frozenset(
    {"asleep", "auto_saved", "executed", "identity", "interrupted", "leaves", "not_saved", "not_woken", "stops_sending"}
)
"""What is done while a hook may hang."""
_NUMBER = re.compile(r"[0-9.,]+")
_WHEN_BACK = frozenset({"resumed", "woken"})
"""What has hooks run, and answers the cell that waits for that."""


class Agent:
    """One a kernel; started by `start`.

    Attributes
    ----------
    kernel : ipykernel's object.
    keeper : what is asked of the keeper.
    cells : the requests that the kernel executes.
    executed : the cells that it has executed.
    sleeping : whether it sleeps.
    leaving : whether another kernel is about to take its place.
    reconnection : how it comes back from a snapshot.
    saving : whether it was prepared for a save that has not ended.
    panels : the panels of `%gpuckpt panel`, by the ids that front ends know them by.
    """

    def __init__(self, run_dir: Path, kernel: Any) -> None:
        self.cells = Cells(kernel)
        self.executed = Executed()
        self.panels: dict[str, Any] = {}
        self.kernel = kernel
        self._run_dir = run_dir
        self._pid = os.getpid()
        self.housekeeping = Housekeeping(kernel.shell)
        self.child_output = ChildOutput(getattr(kernel, "iopub_thread", None))
        self.sleeping = Sleeping(self, run_dir, self.housekeeping)
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._channel = Channel(run_dir)
        self._page_copies = PageCopies()
        self._why_not_saved = self._told_why = ""
        self.saving = False
        self.leaving = Leaving(kernel, self.cells)
        self.reconnection = Reconnection(self, run_dir)
        self.keeper = Requests(self._channel, run_dir, kernel.parent, self.later, self.reconnection.is_coming_back)

    def start(self) -> None:
        """Say hello to the keeper and listen to it from now on."""
        devices.drop_in_children()
        _own_folder_of_multiprocessing()
        in_background(self._listen, "gpuckpt-agent")
        in_background(self._do_calls, "gpuckpt-hooks")
        self._channel.send({"hello": {"pid": self._pid}})

    def later(self, work: Callable[[], None]) -> None:
        """Do something in the thread that hooks are run in."""
        self._calls.put(work)

    # -- what the keeper is told

    @contextlib.contextmanager
    def execute(self, ident: list[bytes], message: dict[str, Any]) -> Iterator[None]:
        """Count a cell as being executed; the keeper hears when it begins and has ended."""
        used, began = not message["content"].get("silent"), time.monotonic()
        try:
            with self.cells.run(ident, message):
                if used and not self.cells.is_line_of_ours():
                    self.executed.begins(cell_id(message))
                self.tell_busy(True, used)
                yield
        finally:
            self.tell_busy(self.cells.are_running(), used, time.monotonic() - began)
            self.sleeping.cell_ended()

    def tell_ending(self) -> None:
        """Have the keeper know that this kernel ends in its sleep, where its end could wait for the GPU for ever."""
        with contextlib.suppress(GpuckptError):
            self.keeper.send("ending", {})

    def tell_busy(self, busy: bool, used: bool, seconds: float | None = None) -> None:
        """Have the keeper know whether a cell runs, whether that is the user's, and how long one ran that has ended."""
        # Where nobody reads, the cell does not wait.
        with self._channel.sending:
            about = {"busy": busy, "used": used, "seconds": seconds, **self._about_cells()}
            self._channel.send_if_room({**about, "asked": self.cells.describe()}, about)

    def _about_cells(self) -> dict[str, Any]:
        """Say how many cells have begun, and which one runs."""
        begins = self.cells.beginning()
        cell = (
            None
            if begins is None or self.cells.is_line_of_ours()
            else {"number": self.executed.latest, "begins": begins}
        )
        return {"cells": self.executed.count, "cell": cell}

    # -- what the keeper asks of the kernel

    def _listen(self) -> None:
        for message in self._channel.messages():
            try:
                self._take(message)
            except Exception:
                log.exception("a message of the keeper's could not be handled")

    def _take(self, message: dict[str, Any]) -> None:
        if "for" in message:
            self.keeper.hear(message["for"], news_of(message))
            return
        if message["call"] == "new_keeper":
            self._new_keeper(message["id"], **message["args"])
        elif message["call"] in _AT_ONCE:
            self._call(message)
        elif message["call"] in _WHEN_BACK:
            # In a thread of its own: a hook that hangs must not keep the answer from the cell that waits.
            in_background(partial(self._do, partial(self._call, message)), "gpuckpt-back")
        else:
            self.later(partial(self._call, message))

    def _do_calls(self) -> None:
        """Run hooks and what else takes its time."""
        while True:
            self._do(self._calls.get())

    def _do(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            log.exception("a call of the keeper's could not be answered")

    def run_hooks_after(self, resumed: hooks.Resumed) -> list[str]:
        """Have the hooks run in their thread, and wait for them as long as they may take; return what went wrong."""
        faults: list[str] = []
        have_run = threading.Event()

        def run() -> None:
            faults.extend(hooks.run_after(resumed))
            have_run.set()

        self.later(run)
        limit = settings.hook_timeout()
        return faults if have_run.wait(limit) else [hooks.late(limit)]

    def _call(self, message: dict[str, Any]) -> None:
        calls: dict[str, Callable[..., Any]] = {
            "about": self._about,
            "bytes_on_gpus": bytes_on_gpus,
            "before_save": self._before_save,
            "begun_since_save": lambda: self.cells.begun_since_save,
            # In a thread of its own: it may be away for long, where the kernel sleeps or is restored.
            "before_sleep": self.sleeping.before_sleep,
            "asleep": self.sleeping.asleep,
            "auto_saved": partial(self.cells.announce, "auto_saved"),
            "not_saved": self._not_saved,
            "not_woken": self.sleeping.not_woken,
            "after_sleep": self._after_sleep,
            "after_save": self._after_save,
            "executed": self.executed.as_dict,
            "identity": self.reconnection.identity,
            "interrupted": self._interrupted,
            "leaves": self.leaving.begin,
            "stays": self._stays,
            "stops_sending": self.reconnection.stop_sending,
            "resumed": self.reconnection.resumed,
            "woken": self.reconnection.woken,
            "answer": self.reconnection.answer,
        }
        do = calls[message["call"]]
        reply: dict[str, Any]
        try:
            reply = {"result": do(**message["args"])}
        except GpuckptError as e:
            reply = {"error": e.as_dict()}
        except Exception as e:
            log.exception("%s failed", message["call"])
            what = f"The kernel's agent failed ({message['call']})."
            reply = {"error": GpuckptError(what, f"{type(e).__name__}: {e}").as_dict()}
        if message["id"]:
            self._channel.send({"reply": message["id"], **reply})

    def _new_keeper(self, number: int, *, comes_back: bool = False) -> None:
        """The keeper died and another holds the kernel now: nothing that was asked of the old one will be answered.

        Where the kernel `comes_back` from a snapshot, it is about to hear what became of that.
        """
        hears_more = comes_back and self.reconnection.is_coming_back()
        if not hears_more:
            self.later(self._after_broken_save)
            self.later(self._stays)
        # The new keeper passes over every request that comes before the reply: these, and no others, end here.
        with self._channel.sending:
            if not hears_more:
                self.keeper.end_all((), None, _broken_off)
            about = {**self._about_cells(), "asked": self.cells.describe()}
            self._channel.send({"reply": number, "result": {"busy": self.cells.are_running(), **about}})

    def _after_broken_save(self) -> None:
        if self.saving:
            self._after_save(broken_off("save", "Save again.").as_dict())

    def _before_save(self, *, automatic: bool = False) -> dict[str, Any]:
        debugger.refuse_stopped(self.kernel)
        self.saving = True
        self.cells.save_begins()
        hooks.run_before()
        import ipykernel

        if self.sleeping.is_asleep:
            about_gpu = self.housekeeping.before_save_asleep()
        else:
            about_gpu = self.housekeeping.before_save(busy=self._is_busy(), automatic=automatic)
        cpu_time.note()
        start_times.note()
        self._page_copies.note()
        return {
            **about_gpu,
            "execution_count": self.kernel.execution_count,
            "cells": self.executed.count,
            "cell": self.executed.last if self._is_after_cell() else "",
            "in_cell": self._goes_on_in_cell(),
            "waits": self.keeper.awaited_by_cell(_PREPARED_FOR),
            "python": platform.python_version(),
            "ipykernel": ipykernel.__version__,
            "protocol": settings.AGENT_PROTOCOL,
            "waits_for_gpu": parking.has_gate(),
            "environment": environment.describe(),
            "temporary": renewal.temporary_folders(),
            **variables.describe(self.kernel.shell),
            "own_ports": [self.child_output.port],
            "waited": {},
            "is_told_more": True,
            "rebinds": rebinding.can_rebind(self.kernel),
        }

    def _goes_on_in_cell(self) -> bool:
        """Tell whether a kernel that is restored from what is taken now has the rest of a cell to run."""
        return not (self._is_after_cell() or self.keeper.awaited_by_cell(_ENDS_CELL))

    def _is_after_cell(self) -> bool:
        """Tell whether no cell has anything left to do: none runs, or the one that does ends with what it asks for."""
        if self._about_cells()["cell"] is None:
            return True
        return self.keeper.awaited_by_cell(_PREPARED_FOR) and self.cells.is_at_its_end()

    def _is_busy(self) -> bool:
        return self.cells.are_running() and not self._waits_to_be_taken()

    def _waits_to_be_taken(self) -> bool:
        return self.keeper.awaited(_PREPARED_FOR)

    def _after_save(self, error: dict[str, Any] | None) -> dict[str, Any]:
        """The freeze is over in the kernel that was saved, or it did not come to one."""
        self.later(self._page_copies.make)
        self.reconnection.save_ended()
        waited, begun = self.cells.save_ended(), self.cells.begun_since_save
        self.saving = False
        if self.sleeping.is_asleep:
            faults = self.housekeeping.after_save_asleep(restored=False)
        else:
            faults = self.housekeeping.after(restored=False)
        failure = GpuckptError.from_dict(error).spelled(in_a_cell) if error else None
        for fault in [*faults, *hooks.run_after(hooks.Resumed(restored=False, error=failure))]:
            print(fault, file=sys.stderr)
        return {"waited": waited, "begun": begun}

    def _after_sleep(self) -> None:
        for fault in self.sleeping.after_sleep():
            print(fault, file=sys.stderr)

    def _not_saved(self, why: str) -> None:
        """Note why the kernel was not saved by itself, or that it was again."""
        self._why_not_saved = why

    def tell_not_saved(self) -> None:
        """Say so in the cell that is about to be executed, once: its user counts on an undo that is not there."""
        why, before = self._why_not_saved, self._told_why
        self._told_why = _NUMBER.sub("", why)  # other numbers alone are no news
        if why and self._told_why != before:
            print(
                f"The kernel could not be saved automatically. {why} `%gpuckpt auto off` ends automatic saves.",
                file=sys.stderr,
            )

    def _stays(self) -> None:
        """No other kernel takes the place of this one after all."""
        if self.leaving.is_under_way():
            self.reconnection.expect(self.leaving.clients)
            self.leaving.stay()

    def _interrupted(self) -> Asked:
        self.cells.announce("restoring")
        self.leaving.have_read()
        return {
            **self.cells.unanswered(),
            "panels": list(self.panels),
            "from_outside": True,
        }

    def _about(self) -> dict[str, Any]:
        """Say what clients may ask of the kernel while it is hibernated, and whether they have asked for more."""
        kernel = self.kernel
        comms = {comm_id: {"target_name": comm.target_name} for comm_id, comm in kernel.comm_manager.comms.items()}
        return {
            "kernel_info": {"status": "ok", **kernel.kernel_info},
            "comms": comms,
            "executed": self.executed.as_dict(),
            "idle": all_is_done(kernel, self.cells),
        }


def _broken_off(op: str) -> GpuckptError:
    return broken_off(op, "It has a new one: try again.")


def is_held() -> bool:
    """Tell whether this process is a kernel that a keeper holds: process 1 has started it.

    What a kernel starts inherits its environment, another kernel as well; who talks to the keeper is only the first.
    """
    run_dir = os.environ.get(settings.ENV_RUN_DIR)
    return bool(run_dir) and os.getppid() == 1 and Path(str(run_dir), "to-kernel").exists()


def _own_folder_of_multiprocessing() -> None:
    """Have multiprocessing bind its sockets in /dev/shm, which is each kernel's own.

    In its folder in /tmp, a copy of the kernel would find the servers (of forkserver, of managers) of the original.
    """
    from multiprocessing import process

    folder = Path(settings.NAMESPACE_SOCKETS_DIR)
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        process.current_process()._config.setdefault("tempdir", str(folder))  # type: ignore[attr-defined]


def start_agent(kernel: Any) -> Agent | None:
    """Start the agent of a kernel that a keeper holds; None in a plain kernel."""
    if not is_held():
        return None
    hooks.leave_to_agent()
    agent = Agent(Path(os.environ[settings.ENV_RUN_DIR]), kernel)
    with contextlib.suppress(GpuckptError):
        agent.start()
    return agent
