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
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from .. import settings
from ..checked import from_json, to_json
from ..errors import GpuckptError, RestoreFailed
from ..operations import results
from ..operations.requests import Request, Restore, Save, answer_of
from ..operations.results import Progress, Taking
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
    show,
    variables,
)
from .builtin_hooks import Housekeeping
from .cells import Asked, Cells, introduced, wait_for_peers
from .channel import Channel
from .child_output import ChildOutput
from .executed import Executed
from .requests import Answered, News, Requests, broken_off, news_of
from .sleeping import Sleeping

log = logging.getLogger("gpuckpt.agent")

R = TypeVar("R")
T = TypeVar("T")
Afterwards = Progress | results.Saved | GpuckptError
"""What is heard of a save once the cell has gone on."""

_PREPARED_FOR = frozenset({"save", "fork", "move"})
"""What a cell asks for that the kernel is prepared for: the cell does nothing else meanwhile."""
_TAKEN_FOR = frozenset({"save", "fork"})
"""What a cell asks for whose end a restored kernel tells it: what was restored was taken for that."""
_MENDING = 20.0  # how long a restored kernel waits for the debugger to be mended, in seconds
_CHANNELS = ("shell", "iopub", "stdin", "control", "hb")


class Agent:
    """One a kernel; started by `start`.

    Attributes
    ----------
    cells : the requests that the kernel executes.
    executed : the cells that it has executed.
    sleeping : whether it sleeps.
    panels : the panels of `%gpuckpt panel`, by the ids that front ends know them by.
    """

    def __init__(self, run_dir: Path, kernel: Any) -> None:
        self.cells = Cells(kernel)
        self.executed = Executed()
        self.panels: dict[str, Any] = {}
        self._kernel = kernel
        self._run_dir = run_dir
        self._pid = os.getpid()
        self._housekeeping = Housekeeping(kernel.shell)
        self._child_output = ChildOutput(getattr(kernel, "iopub_thread", None))
        self.sleeping = Sleeping(self, run_dir, self._housekeeping)
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._channel = Channel(run_dir)
        self._requests = Requests(self._channel, run_dir, self._calls.put)
        self._saving = False
        self._clients: dict[str, int] = {}
        self._token = ""
        self._run_id = self._run_of_requests = self._current_run_id()
        self._knows_who_it_is = threading.Condition()
        self._heard = threading.Event()
        self._heard.set()
        self._mended = threading.Event()
        self._mended.set()

    def start(self) -> None:
        """Say hello to the keeper and listen to it from now on."""
        devices.drop_in_children()
        _own_folder_of_multiprocessing()
        self.in_background(self._listen, "gpuckpt-agent")
        self.in_background(self._do_calls, "gpuckpt-hooks")
        self._channel.send({"hello": {"pid": self._pid}})

    def in_background(self, work: Callable[[], None], name: str = "gpuckpt") -> None:
        """Do something in a thread of its own."""
        thread: Any = threading.Thread(target=work, name=name, daemon=True)
        thread.pydev_do_not_trace = thread.is_pydev_daemon_thread = True  # the debugger must not stop it
        thread.start()

    # -- what the kernel asks of the keeper

    @contextlib.contextmanager
    def execute(self, ident: list[bytes], message: dict[str, Any]) -> Iterator[None]:
        """Count a cell as being executed; the keeper hears when it begins and has ended."""
        used = not message["content"].get("silent")
        try:
            with self.cells.run(ident, message):
                self.executed.count += used
                self._tell_busy(True, used)
                yield
        finally:
            self._tell_busy(self.cells.are_running(), used)
            self.sleeping.cell_ended()

    def tell_ending(self) -> None:
        """Have the keeper know that this kernel ends in its sleep, where its end could wait for the GPU for ever."""
        with contextlib.suppress(GpuckptError):
            self._requests.send("ending", {})

    def _tell_busy(self, busy: bool, used: bool) -> None:
        # Where nobody reads, the cell does not wait.
        with self._channel.sending:
            about = {"busy": busy, "used": used, **self._about_cells()}
            self._channel.send_if_room({**about, "asked": self.cells.describe()}, about)

    def _about_cells(self) -> dict[str, Any]:
        """Say how many cells have begun, and which one runs."""
        begins = self.cells.beginning()
        cell = None if begins is None else {"number": self.executed.latest, "begins": begins}
        return {"cells": self.executed.count, "cell": cell}

    def request(
        self,
        kind: type[Request[R]],
        args: Mapping[str, object] | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> R:
        """Ask the keeper for something and wait for its answer.

        An interrupt asks the keeper to cancel, and the keeper's answer is waited for. Another one, a second later or
        more, or a keeper that has fallen silent, ends the waiting; what was asked for may then still be done.

        Raises
        ------
        GpuckptError : whatever the keeper answered, or that it has not answered an interrupt; KeeperGone if it died.
        """
        return answer_of(kind, self._result(kind.op, args, progress))

    def take(
        self,
        kind: type[Request[R]],
        told: type[T],
        args: Mapping[str, object] | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> R | T:
        """Ask as `request` for what takes the kernel: one that comes back from what was taken is `told` that."""
        return answer_of(kind, self._result(kind.op, args, progress), told)

    def save(
        self,
        args: Mapping[str, object],
        progress: Callable[[Progress], None],
        afterwards: Callable[[Afterwards], None] | None,
    ) -> results.Saved | results.Restored | Taking:
        """Ask as `request` for a save.

        With `afterwards`, what was taken is returned when that is safe in memory and not soon on the disk: `afterwards`
        is then called, in another thread, with each later progress, and with the result or the error.
        """

        def hear(news: News) -> None:
            assert afterwards is not None
            afterwards(answer_of(Save, news.result) if isinstance(news, Answered) else news)

        found = self._ask(Save.op, args, progress, None if afterwards is None else hear)
        return found if isinstance(found, Taking) else answer_of(Save, found.result, results.Restored)

    def _result(
        self, op: str, args: Mapping[str, object] | None, progress: Callable[[Progress], None] | None
    ) -> object:
        found = self._ask(op, args, progress, None)
        assert isinstance(found, Answered)  # nothing is to be heard later
        return found.result

    def _ask(
        self,
        op: str,
        args: Mapping[str, object] | None,
        progress: Callable[[Progress], None] | None,
        hear: Callable[[News], None] | None,
    ) -> Answered | Taking:
        clients = self._clients_now() if op == Restore.op else {}

        def failed() -> None:
            # A restore that failed late has sent them away to the other kernel; they come back.
            wait_for_peers(clients, encrypted=rebinding.is_encrypted(self._kernel.parent))

        return self._requests.ask(op, args or {}, progress, hear, failed)

    def _clients_now(self) -> dict[int, int]:
        """Return how many clients there are at the ports where a cell is answered, and asks."""
        app = self._kernel.parent
        there = introduced(encrypted=rebinding.is_encrypted(app))
        return {port: there.get(port, 0) for port in (app.shell_port, app.iopub_port, app.stdin_port)}

    # -- what the keeper asks of the kernel

    def _listen(self) -> None:
        for message in self._channel.messages():
            try:
                self._take(message)
            except Exception:
                log.exception("a message of the keeper's could not be handled")

    def _take(self, message: dict[str, Any]) -> None:
        if "for" in message:
            self._requests.hear(message["for"], news_of(message))
            return
        if message["call"] == "new_keeper":
            self._new_keeper(message["id"])
        elif message["call"] in ("about", "asleep", "executed", "identity", "interrupted", "not_woken"):
            self._call(message)
        else:
            self._calls.put(partial(self._call, message))

    def _do_calls(self) -> None:
        """Run hooks and what waits for clients: a hook that hangs must not keep answers from the cell that waits."""
        while True:
            try:
                self._calls.get()()
            except Exception:
                log.exception("a call of the keeper's could not be answered")

    def _call(self, message: dict[str, Any]) -> None:
        calls: dict[str, Callable[..., Any]] = {
            "about": self._about,
            "before_save": self._before_save,
            # In a thread of its own: it may be away for long, where the kernel sleeps or is restored.
            "park": lambda: self.in_background(partial(parking.park, self._run_dir), "gpuckpt-parking"),
            "before_sleep": self.sleeping.before_sleep,
            "asleep": self.sleeping.asleep,
            "not_woken": self.sleeping.not_woken,
            "after_sleep": self._after_sleep,
            "after_save": self._after_save,
            "executed": self.executed.as_dict,
            "identity": self._identity,
            "interrupted": self._interrupted,
            "resumed": self._resumed,
            "woken": self._woken,
            "answer": self._answer,
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

    def _new_keeper(self, number: int) -> None:
        """The keeper died and another holds the kernel now: nothing that was asked of the old one will be answered."""
        self._calls.put(self._after_broken_save)
        # The new keeper passes over every request that comes before the reply: these, and no others, end here.
        with self._channel.sending:
            self._requests.end_all((), None, _broken_off)
            about = {**self._about_cells(), "asked": self.cells.describe()}
            self._channel.send({"reply": number, "result": {"busy": self.cells.are_running(), **about}})

    def _after_broken_save(self) -> None:
        if self._saving:
            self._after_save(broken_off("save", "Save again.").as_dict())

    def _before_save(self) -> dict[str, Any]:
        debugger.refuse_stopped(self._kernel)
        self._saving = True
        self.cells.save_begins()
        hooks.run_before()
        import ipykernel

        if self.sleeping.is_asleep:
            about_gpu = self._housekeeping.before_save_asleep()
        else:
            about_gpu = {**self._housekeeping.before_save(busy=self._is_busy()), "parkable": parking.parkable()}
        cpu_time.note()
        return {
            **about_gpu,
            "execution_count": self._kernel.execution_count,
            "cells": self.executed.count,
            "python": platform.python_version(),
            "ipykernel": ipykernel.__version__,
            "protocol": settings.AGENT_PROTOCOL,
            "waits_for_gpu": parking.has_gate() and not about_gpu.get("peers"),
            "environment": environment.describe(),
            "temporary": renewal.temporary_folders(),
            **variables.describe(self._kernel.shell),
            "own_ports": [self._child_output.port],
            "waited": {},
            "rebinds": rebinding.can_rebind(self._kernel),
        }

    def _is_busy(self) -> bool:
        return self.cells.are_running() and not self._waits_to_be_taken()

    def _waits_to_be_taken(self) -> bool:
        return self._requests.awaited(_PREPARED_FOR)

    def _after_save(self, error: dict[str, Any] | None) -> dict[str, Any]:
        """The freeze is over in the kernel that was saved, or it did not come to one."""
        waited = self.cells.save_ended(self._waits_to_be_taken())
        self._saving = False
        if self.sleeping.is_asleep:
            faults = self._housekeeping.after_save_asleep(restored=False)
        else:
            faults = self._housekeeping.after(restored=False)
        failure = GpuckptError.from_dict(error).spelled(in_a_cell) if error else None
        for fault in [*faults, *hooks.run_after(hooks.Resumed(restored=False, error=failure))]:
            print(fault, file=sys.stderr)
        return {"waited": waited}

    def _after_sleep(self) -> None:
        for fault in self.sleeping.after_sleep():
            print(fault, file=sys.stderr)

    def _identity(
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
        cpu_time.go_on(self._kernel.shell.user_ns)
        if waited is not None:
            self.cells.forget(waited)
        if hold:
            # Nobody hears yet what a cell prints that runs on.
            self._heard.clear()
            self._kernel.iopub_thread.schedule(self.until_heard)
            self._kernel.hold(True)
        self.sleeping.restored(asleep)
        self._clients = peers
        self._child_output.moved({int(was): port for was, port in ports.items()})
        kernel, app = self._kernel, self._kernel.parent
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

    def _interrupted(self) -> Asked:
        self.cells.announce("restoring")
        return {
            **self.cells.describe(),
            "queued": self.cells.queued(),
            "panels": list(self.panels),
            "from_outside": True,
        }

    def _resumed(self, asked: Asked, result: object, asked_at: float) -> dict[str, Any]:
        """This kernel was just restored: run the hooks, and answer the cell that asked for it."""
        restored = from_json(results.Restored, result)
        self._saving = False
        self._tell_busy(self.cells.are_running(), True)
        self.executed.restored = show.label_of(restored)
        if asked.get("cell") and not asked.get("from_outside"):
            # A cell that goes on from the save answers under its own number.
            count = self.executed.latest if self.cells.are_running() else self._kernel.execution_count
            self.executed.note(asked["cell"].get("id", ""), count)
        self._mended.wait(_MENDING)
        renewal.renew()
        housekeeping = self._housekeeping
        faults = (housekeeping.after_save_asleep if self.sleeping.is_asleep else housekeeping.after)(restored=True)
        copy = restored.copy
        if copy is not None:
            renewal.become_copy(self._kernel)
            if copy.reseed:
                faults += renewal.reseed(self._kernel.shell.user_ns)
        faults += hooks.run_after(hooks.Resumed(restored=True))
        if asked.get("cell") or asked.get("queued"):
            self._wait_for_clients()
        notes = show.not_executed_again(0 if copy is not None else self.cells.forgotten(asked))
        account = show.Restored(restored, asked_at, [*notes, *faults])
        if asked.get("cell"):
            self._answer_restored(asked, account)
        else:
            self.cells.refuse_queued(asked)
        waits = self._requests.awaited_by_cell(_TAKEN_FOR)
        if restored.stop_here and self.cells.are_running() and not waits:
            os.kill(self._pid, signal.SIGINT)  # it was saved from outside, in its middle
        self._requests.end_all(_TAKEN_FOR, result, _overtaken)
        # Not before the answer: clients may be long in coming back, and widgets take a moment to import.
        name = "" if copy is not None else show.label_of(restored)
        self._calls.put(partial(self._be_seen, asked.get("panels", []), name))
        return {"faults": faults, "notes": notes}

    def _be_seen(self, panels: list[str], name: str) -> None:
        self._be_heard("restored")
        if self.sleeping.is_asleep:
            self.cells.announce("waking")
        if panels or self.panels:
            from . import panel

            panel.resume(self, panels, name)

    def _about(self) -> dict[str, Any]:
        """Say what clients may ask of the kernel while it is hibernated."""
        kernel = self._kernel
        comms = {comm_id: {"target_name": comm.target_name} for comm_id, comm in kernel.comm_manager.comms.items()}
        return {
            "kernel_info": {"status": "ok", **kernel.kernel_info},
            "comms": comms,
            "executed": self.executed.as_dict(),
        }

    def _woken(self, token: str, requests: list[list[str]]) -> dict[str, Any]:
        """This kernel was hibernated: go on, and execute what came meanwhile; once, however often it is told."""
        faults: list[str] = []
        if token == self._token:
            return {"faults": faults}
        self._token = token
        self._saving = False
        self.cells.save_ended(waits=False)
        self._tell_busy(self.cells.are_running(), True)
        try:
            self._mended.wait(_MENDING)
            renewal.renew()
            faults = self._housekeeping.after(restored=True) + hooks.run_after(hooks.Resumed(restored=True))
            if self.cells.are_running() or requests:
                self._wait_for_clients()
            if self.cells.are_running():
                self._kernel.ask_again()
        finally:
            self._heard.set()
            self.cells.take_queued({"queued": filter(None, requests)})
            self._kernel.io_loop.add_callback(self._kernel.hold, False)
        self._requests.end_all(("hibernate",), to_json(results.WokenLater()), _overtaken)
        self._calls.put(partial(self._be_heard, "awake"))
        return {"faults": faults}

    def until_heard(self) -> None:
        """Wait in a kernel that wakes until clients hear it; where nobody tells that they do, not for ever.

        A cell may end before the agent has read that this is another run: so it is looked for here as well.
        """
        with self._knows_who_it_is:
            self._knows_who_it_is.wait_for(lambda: self._run_id == self._current_run_id(), settings.hook_timeout())
        self._heard.wait(settings.hook_timeout())

    def until_known(self) -> None:
        """Wait in a kernel that was just restored until it is known which requests waited at its save."""
        with self._knows_who_it_is:
            self._knows_who_it_is.wait_for(
                lambda: self._run_of_requests == self._current_run_id(), settings.hook_timeout()
            )

    def _current_run_id(self) -> str:
        """Return which run the run folder is of; nothing where its keeper is of an older version."""
        try:
            return (self._run_dir / settings.RUN_ID).read_text()
        except OSError:
            return ""

    def _be_heard(self, what: str) -> None:
        self._wait_for_clients()
        self.cells.announce(what)

    def request_came(self) -> None:
        """Wait, before the first request after a restore, for clients to hear what comes of it (called by the kernel).

        A client subscribes again only when it looks at its outputs. One that was not looking during the restore does so
        now, after its request: what the kernel says before that is lost to it.
        """
        if self._clients:
            self._wait_for_clients()
            self._clients = {}

    def _wait_for_clients(self) -> None:
        """Wait for as many connections as the channels (named as in a connection file) had before the restore."""
        app = self._kernel.parent
        expected = {getattr(app, channel): count for channel, count in self._clients.items()}
        if wait_for_peers(expected, encrypted=rebinding.is_encrypted(app)):
            self._clients = {}

    def _answer_restored(self, asked: Asked, account: show.Restored) -> None:
        self.cells.show(asked, account.mime())
        if self.cells.adopt(asked):
            self._tell_busy(True, True)  # it is another one now
            self.cells.take_queued(asked)
        elif asked.get("from_outside"):
            # The cell that ran did not ask: it ends as it would by a restart.
            error = RestoreFailed(
                f"This cell ended: the kernel was restored to {account.name!r} from outside.",
                "A restore was asked for from the command line or by another client.",
                "The kernel is at the snapshot; run the cells that come after it.",
            )
            self.cells.answer(asked, show.error_content(error))
            self.cells.refuse_queued(asked)
        else:
            self.cells.answer(asked)
            self.cells.take_queued(asked)

    def _answer(self, asked: Asked, peers: dict[str, int], error: dict[str, Any]) -> None:
        """This kernel is fresh, in place of one whose restore failed: say so to the cell that asked."""
        self._clients = peers
        self._wait_for_clients()
        self.cells.answer(asked, show.error_content(GpuckptError.from_dict(error).spelled(in_a_cell)))
        self.cells.refuse_queued(asked)


def _broken_off(op: str) -> GpuckptError:
    return broken_off(op, "It has a new one: try again.")


def _overtaken(op: str) -> GpuckptError:
    return GpuckptError(
        f"The {op} was superseded by a restore.", "The kernel was restored to a snapshot.", "Try again."
    )


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
    agent = Agent(Path(os.environ[settings.ENV_RUN_DIR]), kernel)
    with contextlib.suppress(GpuckptError):
        agent.start()
    return agent
