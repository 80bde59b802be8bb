"""How a kernel that was restored, copied or woken becomes itself again.

It learns whose kernel it is now (`Reconnection.identity`) before it takes a request, runs the hooks, waits for its
clients, and answers the cell that asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import settings
from ..checked import from_json, to_json
from ..errors import GpuckptError, RestoreFailed
from ..operations import results
from ..spelling import in_a_cell
from . import cpu_time, debugger, hooks, new_environment, rebinding, renewal, show, start_times, widgets
from .cells import Asked
from .clients import COMING_BACK, until_all_is_sent, wait_for_peers

if TYPE_CHECKING:
    from .agent import Agent

__all__ = ["Reconnection"]

_TAKEN_FOR = frozenset({"save", "fork", "restore", "undo", "redo"})
"""What a cell asks for whose end a restored kernel tells it: what was restored was taken for that."""
_MENDING = 20.0  # how long a restored kernel waits for the debugger to be mended, in seconds
_TAKING = 5.0  # how long clients may take to take what was said before a hibernation, in seconds
_LOOK = 0.005  # seconds between two looks at whether all is done that comes before a request
_LOOKING = 2.0  # how long one that has asked for something may take to look at what comes of it, in seconds
_CHANNELS = ("shell", "iopub", "stdin", "control", "hb")


class Reconnection:
    """That of one kernel; in one that was not restored yet, nothing is waited for."""

    def __init__(self, agent: Agent, run_dir: Path) -> None:
        self._agent, self._run_dir = agent, run_dir
        self._clients: dict[str, int] = {}
        self._waited_in_vain = False
        self._token = ""
        self._environment = new_environment.NewEnvironment()
        self._run_id = self._run_of_requests = self._current_run_id()
        self._run_told = self._run_ready = self._run_back = self._run_id
        self._knows_who_it_is = threading.Condition()
        self._comes_back = threading.Lock()
        self._heard = threading.Event()
        self._heard.set()
        self._mended = threading.Event()
        self._mended.set()
        self._sign_as_this_kernel(agent.kernel.session)

    def _sign_as_this_kernel(self, session: Any) -> None:
        """Have no message signed with the key of the kernel that was saved: clients of this one would reject it.

        Threads that print, and the one that greets subscribers, may be sooner than the agent.
        """
        sign = session.sign

        def sign_when_known(message: list[bytes]) -> bytes:
            self.until_known()
            signature: bytes = sign(message)
            return signature

        session.sign = sign_when_known

    def identity(
        self,
        connection: dict[str, Any],
        connection_file: str,
        kernel_id: str,
        peers: dict[str, int],
        ports: dict[str, int],
        hold: bool = False,
        asleep: bool = False,
        waited: dict[str, bool] | None = None,
    ) -> None:
        """Become the kernel of this connection: its key, its ports (by what they were), its clients.

        With `hold`, nothing that comes is executed until the kernel is `woken`. With `asleep`, what this kernel had on
        GPUs comes later. `waited` are the requests that waited at the save, and that another kernel has answered.
        """
        cpu_time.go_on(self._agent.kernel.shell.user_ns)
        start_times.go_on()
        self._environment = new_environment.bring_up_to_date()
        self._agent.cells.come_back()
        if waited is not None:
            self._agent.cells.forget(waited)
        if not hold:
            self._heard.set()  # it may be one that was hibernated
        else:
            # Nobody hears yet what a cell prints that runs on.
            self._heard.clear()
            self._agent.kernel.iopub_thread.schedule(self.until_heard)
            self._agent.kernel.hold(True)
        self._agent.sleeping.restored(asleep)
        self._clients, self._waited_in_vain = peers, False
        self._agent.child_output.moved({int(was): port for was, port in ports.items()})
        kernel, app = self._agent.kernel, self._agent.kernel.parent
        kernel.session.key = str(connection["key"]).encode()
        if app is not None:
            app.connection_file = connection_file
            ports = {f"{channel}_port": connection[f"{channel}_port"] for channel in _CHANNELS}
            for name, port in ports.items():
                setattr(app, name, port)
            kernel.record_ports(ports)
        # The shell channel's thread waits for this before it takes a request, and has to bind it again.
        with self._knows_who_it_is:
            self._run_of_requests = self._current_run_id()
            self._knows_who_it_is.notify_all()
        if app is not None:
            if not rebinding.is_at(app, connection):
                rebinding.rebind(kernel, connection)
            # Before the first request that comes: the control thread reads them.
            self._mended.clear()
            kernel.control_thread.io_loop.add_callback(debugger.mend, kernel, self._mended)
        with self._knows_who_it_is:
            self._run_id = self._current_run_id()
            self._knows_who_it_is.notify_all()

    def is_coming_back(self) -> bool:
        """Tell whether this kernel is of a snapshot, and has not gone on from there: it was not told, or runs hooks."""
        return not self._is_this(self._run_back)

    def resumed(self, asked: Asked, result: object, asked_at: float) -> dict[str, Any]:
        """This kernel was just restored: run the hooks, and answer the cell that asked; once, however often told."""
        with self._comes_back:
            return self._resumed(asked, result, asked_at)

    def _resumed(self, asked: Asked, result: object, asked_at: float) -> dict[str, Any]:
        run = self._current_run_id()
        if run == self._run_told:
            return {"faults": [], "notes": []}
        self._run_told = run
        agent = self._agent
        restored = from_json(results.Restored, result)
        agent.saving = False
        agent.tell_busy(agent.cells.are_running(), True)
        agent.executed.restored = show.label_of(restored)
        if asked.get("cell") and not asked.get("from_outside"):
            # A cell that goes on from the save answers under its own number.
            count = agent.executed.latest if agent.cells.saved() is not None else agent.kernel.execution_count
            agent.executed.note(asked["cell"].get("id", ""), count)
        self._mended.wait(_MENDING)
        renewal.renew()
        housekeeping = agent.housekeeping
        faults = (housekeeping.after_save_asleep if agent.sleeping.is_asleep else housekeeping.after)(restored=True)
        copy = restored.copy
        if copy is not None:
            renewal.become_copy(agent.kernel)
            if copy.reseed:
                faults += renewal.reseed(agent.kernel.shell.user_ns)
        faults += self._agent.run_hooks_after(hooks.restored_with(self._environment))
        self._run_ready = run
        if asked.get("cell") or asked.get("owed") or asked.get("queued"):
            self._wait_for_clients()
        notes = show.not_executed_again(0 if copy is not None else agent.cells.forgotten(asked))
        notes += show.brought_up_to_date(self._environment.changed)
        account = show.Restored(restored, asked_at, [*notes, *faults])
        agent.cells.answer_owed(asked, show.error_content(_ended_by(account.name)))
        if asked.get("cell"):
            self._answer_restored(asked, account, stops=restored.stop_here)
        else:
            agent.cells.refuse_queued(asked)
        waits = agent.keeper.awaited_by_cell(_TAKEN_FOR)
        if restored.stop_here and not waits:
            agent.kernel.stop_cell(agent.cells.saved())  # where it was saved from outside, in its middle
        self._run_back = run
        agent.keeper.end_all(_TAKEN_FOR, result, _overtaken)
        # Not before the answer: clients may be long in coming back, and widgets take a moment to import.
        name = "" if copy is not None else show.label_of(restored)
        agent.later(partial(self._be_seen, asked.get("panels", []), name))
        return {"faults": faults, "notes": notes}

    def _be_seen(self, panels: list[str], name: str) -> None:
        self._be_heard("restored")
        if self._agent.sleeping.is_asleep:
            self._agent.cells.announce("waking")
        if panels or self._agent.panels:
            from . import panel

            panel.resume(self._agent, panels, name)
        widgets.send_states(self._agent.kernel)

    def woken(self, token: str, requests: list[list[str]]) -> dict[str, Any]:
        """This kernel was hibernated: go on, and execute what came meanwhile; once, however often it is told."""
        with self._comes_back:
            return self._woken(token, requests)

    def _woken(self, token: str, requests: list[list[str]]) -> dict[str, Any]:
        faults: list[str] = []
        if token == self._token:
            return {"faults": faults}
        self._token = token
        self._agent.saving = False
        self._agent.cells.save_ended()
        self._agent.tell_busy(self._agent.cells.are_running(), True)
        try:
            self._mended.wait(_MENDING)
            renewal.renew()
            faults = self._agent.housekeeping.after(restored=True)
            faults += self._agent.run_hooks_after(hooks.restored_with(self._environment))
            if self._agent.cells.are_running() or requests:
                self._wait_for_clients()
            if self._agent.cells.are_running():
                self._agent.kernel.ask_again()
        finally:
            self._run_ready = self._current_run_id()
            self._heard.set()
            self._agent.cells.take_queued({"queued": filter(None, requests)})
            self._agent.kernel.in_main_loop(self._agent.kernel.hold, False)
        self._run_back = self._current_run_id()
        self._agent.keeper.end_all(("hibernate",), to_json(results.WokenLater()), _overtaken)
        self._agent.later(partial(self._be_heard, "awake"))
        return {"faults": faults}

    def stop_sending(self) -> None:
        """Send nothing from now on, until the kernel goes on or is `woken`; return when what was said is on its way.

        It is about to be hibernated: its clients are disconnected, and what had not reached them would be lost.
        """
        self._heard.clear()
        self._agent.leaving.until_said(self.until_heard)
        app = self._agent.kernel.parent
        until_all_is_sent([getattr(app, f"{channel}_port") for channel in _CHANNELS], _TAKING)

    def is_heard(self) -> bool:
        """Tell whether clients hear this kernel.

        A cell may end before the agent has read that this is another run: so it is looked for here as well.
        """
        return self._is_this(self._run_id) and self._heard.is_set()

    def until_heard(self) -> bool:
        """Wait until clients hear this kernel; where nobody tells that they do, not for ever: return whether they do.

        A kernel that was hibernated meanwhile waits anew.
        """
        run = None
        while (now := self._current_run_id()) != run:
            run = now
            with self._knows_who_it_is:
                self._knows_who_it_is.wait_for(lambda: self._is_this(self._run_id), settings.hook_timeout())
            if self._heard.wait(settings.hook_timeout()):
                return True
        return False

    def until_known(self) -> None:
        """Wait in a kernel that was just restored until it knows its key, and which requests waited at its save."""
        with self._knows_who_it_is:
            self._knows_who_it_is.wait_for(lambda: self._is_this(self._run_of_requests), settings.hook_timeout())

    async def until_ready(self) -> None:
        """Wait in a kernel that was restored until its hooks were run: no cell is to come before; but not for ever."""
        deadline = time.monotonic() + settings.hook_timeout()
        while not self._is_this(self._run_ready) and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK)
        if time.monotonic() >= deadline:
            self._run_ready = self._current_run_id()  # the next one need not wait as well

    def _is_this(self, run: str) -> bool:
        """Tell whether the run folder is of this run; one that does not say, since it was removed, counts as so."""
        return self._current_run_id() in (run, "")

    def _current_run_id(self) -> str:
        """Return which run the run folder is of; nothing where that is not there."""
        try:
            return (self._run_dir / settings.RUN_ID).read_text()
        except OSError:
            return ""

    def _be_heard(self, what: str) -> None:
        self._wait_for_clients()
        self._agent.cells.announce(what)

    def save_ended(self) -> None:
        """This kernel goes on: have its next request wait for clients that were cut off for a hibernation."""
        self._look_who_was_cut_off()
        (self._run_dir / settings.CUT_OFF).unlink(missing_ok=True)
        if not self._heard.is_set():
            self._wait_for_clients()
            self._heard.set()

    def _look_who_was_cut_off(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._clients = from_json(dict[str, int], json.loads((self._run_dir / settings.CUT_OFF).read_text()))
            self._waited_in_vain = False

    def expect(self, clients: Mapping[int, int]) -> None:
        """Have the next requests wait for so many clients, by local port: they were disconnected."""
        app = self._agent.kernel.parent
        channels = ("shell_port", "iopub_port", "stdin_port")
        self._clients = {channel: clients.get(getattr(app, channel), 0) for channel in channels}
        self._waited_in_vain = False

    def request_came(self, is_heard: Callable[[], bool]) -> None:
        """Wait, before the first request after a restore, for clients to hear what comes of it (called by the kernel).

        A client subscribes again only when it looks at its outputs. One that was not looking during the restore does so
        now, after its request: what the kernel says before that is lost to it. Where nobody looks at those of the first
        request, the first one that `is_heard` is waited for as well; but not for ever: a client may have gone.
        """
        if self._agent.saving:
            self._look_who_was_cut_off()  # it runs on, and was not told so yet
        if not self._clients:
            return
        run, heard = self._run_of_requests, is_heard()
        if heard or not self._waited_in_vain:
            self._waited_in_vain = True
            self._wait_for_clients(_LOOKING)
        if heard and self._run_of_requests == run and not self._agent.leaving.is_under_way():
            self._clients = {}

    def _wait_for_clients(self, seconds: float = COMING_BACK) -> None:
        """Wait for as many connections as the channels (named as in a connection file) had before the restore.

        A snapshot may be of a kernel that waits here: a restored one goes on from there, and has other clients.
        """
        run, app = self._run_of_requests, self._agent.kernel.parent
        expected = {getattr(app, channel): count for channel, count in self._clients.items()}

        def in_vain() -> bool:
            return self._agent.leaving.is_under_way() or self._run_of_requests != run

        if wait_for_peers(expected, encrypted=rebinding.is_encrypted(app), connecting=seconds, unless=in_vain):
            self._clients = {}

    def _answer_restored(self, asked: Asked, account: show.Restored, *, stops: bool) -> None:
        """Answer the cell that asked, or was ended; `stops` is whether one that was saved in its middle stops there."""
        self._agent.cells.show(asked, account.mime())
        was_ended = bool(asked.get("from_outside"))
        if not (was_ended and stops) and self._agent.cells.adopt(asked):
            self._agent.tell_busy(True, True)  # it is another one now
            self._agent.cells.take_queued(asked)
        elif was_ended:
            self._agent.cells.answer(asked, show.error_content(_ended_by(account.name)))
            self._agent.cells.refuse_queued(asked)
        else:
            self._agent.cells.answer(asked)
            self._agent.cells.take_queued(asked)

    def answer(self, asked: Asked, peers: dict[str, int], error: dict[str, Any]) -> None:
        """This kernel is fresh, in place of one whose restore failed: say so to the cell that asked."""
        self._clients, self._waited_in_vain = peers, False
        self._wait_for_clients()
        content = show.error_content(GpuckptError.from_dict(error).spelled(in_a_cell))
        self._agent.cells.answer(asked, content)
        self._agent.cells.answer_owed(asked, content)
        self._agent.cells.refuse_queued(asked)


def _ended_by(name: str) -> RestoreFailed:
    """Return what a cell ends with that did not ask for the restore: as it would by a restart."""
    return RestoreFailed(
        f"This cell ended: the kernel was restored to {name!r} from outside.",
        "A restore or an undo was asked for in JupyterLab, on the command line or by another client.",
        "The kernel is at the snapshot; run the cells that come after it.",
    )


def _overtaken(op: str) -> GpuckptError:
    return GpuckptError(
        f"The {op} was superseded by a restore.", "The kernel was restored to a snapshot.", "Try again."
    )
