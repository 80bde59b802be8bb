"""The keeper's process: it holds one kernel, listens at one socket, and does one operation at a time."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import shutil
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import settings
from ..errors import Busy, GpuckptError, KernelLost
from ..freeze import cuda, processes
from ..lock_files import KEEPER_LOCK
from ..store import Store
from .comparison import compare
from .link import AgentSilent, Link
from .namespace import FIRST_PID, Namespace, run_path
from .needs import Marks
from .operations.fork import arrive, fork
from .operations.move import move
from .operations.parts import CAPTURE, KERNEL_LOG, WORKING_COPY
from .operations.recover import recover
from .operations.restore import restore
from .operations.save import save
from .operations.stages import Stages
from .protocol import LINE_LIMIT, peer_pid, peer_uid, short_path
from .record import SOCKET, KernelFolder, Operation, now
from .summary import details, listing, summary

log = logging.getLogger("gpuckpt.keeper")


_PR_SET_CHILD_SUBREAPER = 36
_ANSWER = 5.0  # how long the kernel may take to answer a question, in seconds
_FAREWELL = 20.0  # how long an ended kernel's keeper waits for the server to take note, in seconds
_PATIENCE = 30.0  # how long a shutdown waits for a broken-off operation to end, in seconds
PULSE = 2.0  # how often a client that waits hears that its request is being worked on, in seconds

_DOING = {"save": "saving", "restore": "restoring", "fork": "forking", "move": "moving"}

Tell = Callable[[dict[str, Any]], Awaitable[None]]


class Keeper:
    """One kernel and everything that may be done to it."""

    def __init__(self, folder: KernelFolder) -> None:
        self.folder = folder
        self.launch = folder.launch()
        self.state = folder.state()
        self.store = Store(settings.store_dir())
        self.worker = cuda.CudaWorker()
        self.marks = Marks()
        self.space: Namespace | None = None
        self.link: Link | None = None
        self.operation: Operation | None = None
        self.exit_status: int | None = None
        self.notes: list[str] = []
        """What there was to say when the kernel came up as a copy of another."""
        self.ending = False
        """Set when the kernel is to end: no other is to be started in its place."""
        self.held = asyncio.Event()
        """Set when the kernel can be asked for something: it was started, or taken over and mended."""
        self.idle = asyncio.Event()
        """Set while no operation is under way."""
        self.idle.set()
        self.closing = asyncio.Event()
        self._spaces: list[Namespace] = []
        self._attached: set[asyncio.StreamWriter] = set()
        self._watch: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._queued: list[Operation] = []
        self._shut_down = False

    # -- the kernel's life

    def new_link(self, run_dir: Path) -> Link:
        """Make the FIFOs of a run folder and listen to them; the agent sees by the lock whether this keeper lives."""
        with contextlib.suppress(FileExistsError):
            (run_dir / KEEPER_LOCK).hardlink_to(self.folder.path / KEEPER_LOCK)
        return Link(run_dir, self._on_agent_request)

    async def new_namespace(self, furnish: Callable[[Path], None] = lambda _: None) -> tuple[Namespace, Link]:
        """Start a sleeper over a new run folder, which `furnish` may put more into.

        Raises
        ------
        GpuckptError, OSError : it could not be started; nothing is left behind.
        """
        links: list[Link] = []

        def prepare(run_dir: Path) -> None:
            links.append(self.new_link(run_dir))
            furnish(run_dir)

        try:
            space = await Namespace.start(self.folder.path, prepare)
        except BaseException:
            for link in links:
                link.close()
            raise
        self._spaces = [s for s in self._spaces if not s.dead.is_set()] + [space]
        if self.ending:
            links[0].close()
            await space.kill()
            raise KernelLost("The kernel was ended.", "It was shut down meanwhile.", "Start it again.")
        return space, links[0]

    def namespace(self) -> Namespace:
        """Return the namespace that the kernel lives in.

        Raises
        ------
        KernelLost : it has ended.
        """
        if self.space is None or self.exit_status is not None:
            raise KernelLost("The kernel has ended.", "", "Restart it; its snapshots are there.")
        return self.space

    async def start_kernel(self) -> None:
        """Start the kernel afresh, in a new sleeper."""
        space, link = await self.new_namespace()
        try:
            pid = await space.spawn(
                self.launch.argv,
                env={**self.launch.env, settings.ENV_RUN_DIR: settings.NAMESPACE_RUN_DIR},
                cwd=self.launch.cwd,
                umask=self.launch.umask,
                stdout=run_path(KERNEL_LOG),
                after_pid=FIRST_PID - 1,
                subreaper=True,
            )
        except BaseException:
            link.close()
            await space.kill()
            raise
        self.state.parent, self.state.own_files = None, False
        self.hold(space, link, pid)

    def hold(self, space: Namespace, link: Link, pid: int) -> None:
        """Take this running kernel as the one to keep; `pid` is its pid in the namespace."""
        self.space, self.link = space, link
        self.state.sleeper = (space.pid, space.start_time or 0)
        self.state.run = space.run_dir.name
        self.state.kernel_pid = pid
        self.state.started = now()
        if self._watch is not None:
            self._watch.cancel()
        self._watch = asyncio.create_task(self._watch_kernel(space, pid))
        self.note_state()

    def let_go(self) -> None:
        """Stop watching the kernel: its end is about to be wanted."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    async def give_up(self) -> None:
        """End the kernel, on the way to another one."""
        self.let_go()
        link, self.link = self.link, None
        if link is not None:
            link.close()
        if self.space is not None:
            await self.space.kill()

    async def _watch_kernel(self, space: Namespace, pid: int) -> None:
        try:
            status = await space.wait(pid)
        except KernelLost:
            status = -signal.SIGKILL
        await self.ended(status)

    async def ended(self, status: int) -> None:
        """Note that the kernel has ended, tell who wants to know, and finish."""
        log.info("the kernel ended with status %d", status)
        self.exit_status = status
        if self.link is not None:
            self.link.close()  # who waits for the agent need not wait any longer
        for writer in list(self._attached):
            await self._tell(writer, {"event": "exited", "status": status})
        if self.space is not None:
            if status != 0:
                self._quote_kernel_log(self.space)
            with contextlib.suppress(GpuckptError):
                await self.space.kill()
        loop = asyncio.get_running_loop()
        loop.call_later(_FAREWELL if self._attached else 0, self.closing.set)

    def _quote_kernel_log(self, space: Namespace) -> None:
        with contextlib.suppress(OSError):
            tail = (space.run_dir / KERNEL_LOG).read_text("utf-8", "replace").splitlines()[-40:]
            if tail:
                log.warning("the kernel's last words:\n%s", "\n".join(tail))

    async def take_over(self) -> None:
        """Hold the kernel that a dead keeper held; `recover` then undoes or finishes what that one had begun.

        Raises
        ------
        KernelLost : the kernel cannot be held any more.
        """
        state, left = self.state, self.state.operation
        kept = state.sleeper[0] if state.sleeper is not None and self.folder.has_sleeper() else None
        for pid in self.folder.sleepers():
            if pid != kept:  # a restore had begun with it
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for run_dir in self.folder.path.glob("run-*/"):
            if kept is None or run_dir.name != state.run:
                shutil.rmtree(run_dir, ignore_errors=True)
        for left_over in (WORKING_COPY, CAPTURE):
            shutil.rmtree(self.folder.path / left_over, ignore_errors=True)
        if kept is None:
            if left is None or left.get("kind") != "restore":
                raise KernelLost("The kernel is gone.", "Its keeper died, and so did its namespace.", "Restart it.")
            log.warning("the keeper before this one died in the middle of a restore; the kernel starts afresh")
            state.operation = {**left, "fresh": True}
            await self.start_kernel()
            return
        space = await Namespace.attach(self.folder.path, state.run, kept)
        self._spaces.append(space)
        if space.outer(state.kernel_pid) is None:
            log.warning("the kernel did not outlive its keeper")
        link = self.new_link(space.run_dir)
        self.hold(space, link, state.kernel_pid)
        link.introduce(self.launch.agent)

    async def recover(self) -> None:
        """Undo or finish what a dead keeper had begun."""
        try:
            await recover(self)
        except KernelLost as e:
            log.error("the kernel is lost: %s", e)
            await self.ended(-signal.SIGKILL)

    async def shut_down(self) -> None:
        """End the kernel and all of its processes, and what is under way; remove its folder.

        A save that is being written goes on: what was taken is not the kernel's any more.
        """
        if self._shut_down:
            return  # the folder may be another keeper's by now
        self._shut_down = self.ending = True
        self.let_go()
        if self.operation is not None and not self.operation.writing:
            self.operation.cancelling.set()
        for space in self._spaces:
            await space.kill()
        if self.link is not None:
            self.link.close()
        await asyncio.to_thread(self.worker.close)
        if self.writes is None:
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(self.idle.wait(), _PATIENCE)
        if self.launch.copy_of and not self._attached:
            # Nobody else will: it was written for the fork.
            Path(self.launch.connection_file).unlink(missing_ok=True)
        self.folder.remove()

    @property
    def writes(self) -> str | None:
        """The name of the snapshot that is being written while the kernel runs on; None for none."""
        return self.operation.name if self.operation is not None and self.operation.writing else None

    def save_state(self) -> None:
        """Write down where the kernel is, for the keeper that comes after this one.

        Raises
        ------
        OSError : it could not be written.
        """
        if not self._shut_down:
            self.folder.write_state(self.state)

    def note_state(self) -> None:
        """Write down where the kernel is, if that can be done: it has changed already."""
        try:
            self.save_state()
        except OSError as e:
            if not self.ending:
                log.error("the keeper's record could not be written: %s", e)

    # -- requests

    async def do(self, op: str, args: dict[str, Any], tell: Tell) -> Any:
        """Do what a client or the agent asks for; `tell` passes progress on.

        Raises
        ------
        GpuckptError : what there is to say to the person.
        """
        if op == "status":
            return self.status()
        if op == "cancel":
            return self._cancel(str(args.get("kind") or ""))
        if op == "signal":
            return self._signal(int(args["signum"]))
        if op == "save":
            return await self._exclusively("save", str(args["name"]), save, args, tell)
        if op == "restore":
            return await self._exclusively("restore", str(args.get("name") or ""), restore, args, tell)
        if op == "fork":
            name = str(args.get("name") or args.get("snapshot") or "this kernel")
            return await self._exclusively("fork", name, fork, args, tell)
        if op == "move":
            return await self._exclusively("move", "this kernel", move, args, tell)
        if op == "list":
            return {**await asyncio.to_thread(listing, self.store), "writing": self.writes}
        if self.writes is not None and self.writes in args.values():
            await self.idle.wait()
        if op == "show":
            return details(await asyncio.to_thread(self.store.get, str(args["name"])))
        if op == "diff":
            return await asyncio.to_thread(compare, self.store, str(args["old"]), str(args["new"]))
        if op == "mv":
            return summary(await asyncio.to_thread(self.store.rename, str(args["name"]), str(args["new"])))
        if op == "pin":
            return asdict(await asyncio.to_thread(self.store.pin, str(args["name"]), bool(args["pinned"])))
        if op == "tag":
            tags, remove = list(map(str, args["tags"])), list(map(str, args["remove"]))
            return asdict(await asyncio.to_thread(self.store.tag, str(args["name"]), tags, remove))
        if op == "rm":
            return {"freed": await asyncio.to_thread(self.store.remove, str(args["name"]))}
        if op == "executed":
            return await self._executed()
        raise GpuckptError(f"The keeper does not know {op!r}.", "", "Upgrade the older of the two.")

    async def _exclusively(
        self,
        kind: str,
        name: str,
        steps: Callable[[Keeper, Operation, dict[str, Any], Tell], Awaitable[Any]],
        args: dict[str, Any],
        tell: Tell,
    ) -> Any:
        await self.held.wait()
        if self.operation is not None and self.operation.answering:
            await self.idle.wait()
        if self.operation is not None and self.operation.writing:
            await self._until_written(Operation(kind, name), tell)
        self.namespace()
        if self.operation is not None:
            under_way = self.operation
            raise Busy(
                f"The kernel is busy with a {under_way.kind} of {under_way.name!r}.",
                "One operation is done at a time.",
                "Wait for it, or cancel it, and ask again.",
            )
        operation = self.operation = Operation(kind, name)
        self.idle.clear()
        try:
            return await steps(self, operation, args, tell)
        finally:
            self.operation = None
            if self.state.operation is not None:
                self.state.operation = None
                self.note_state()
            self.idle.set()

    async def _until_written(self, operation: Operation, tell: Tell) -> None:
        """Let an operation wait for the save before it, whose kernel runs on already, to be on the disk."""
        stages = Stages(operation, tell)
        self._queued.append(operation)
        try:
            assert self.operation is not None
            await stages.enter(f"waiting until {self.operation.name} is written")
            await stages.or_cancelled(self.idle.wait())
        finally:
            self._queued.remove(operation)

    def status(self) -> dict[str, Any]:
        """Return what the kernel is doing, for listings."""
        tree = processes.descendants(self.space.pid) if self.space is not None else []
        operation = self.operation
        pid = self.space.outer(self.state.kernel_pid) if self.space is not None else None
        word = _DOING.get(operation.kind) if operation is not None and not operation.writing else None
        return {
            "kernel_id": self.launch.kernel_id,
            "name": self.launch.name,
            "notebook": self.launch.notebook,
            "connection_file": self.launch.connection_file,
            "state": "ended" if self.exit_status is not None else word or "running",
            "writing": self.writes,
            "queued": [queued.kind for queued in self._queued],
            "stage": operation.stage if operation else "",
            "pid": pid,
            "keeper_pid": os.getpid(),
            "pids": tree,
            "memory": processes.resident_bytes(tree),
            "started": self.state.started,
            "parent": self.state.parent,
            "copy_of": self.launch.copy_of,
            "notes": self.notes,
            "attended": bool(self._attached),
        }

    def holders(self) -> list[int]:
        """Return the pids of the programs that hold the kernel: Jupyter servers, as a rule."""
        return [peer_pid(writer.get_extra_info("socket")) for writer in self._attached]

    async def _executed(self) -> dict[str, Any]:
        """Ask the kernel which cells it has executed; one without an agent does not know."""
        if self.operation is not None and self.operation.kind == "restore":
            await self.idle.wait()  # before that it does not know what it was put back to
        if self.link is None or not self.launch.agent:
            return {"restored": "", "cells": {}, "others": []}
        try:
            found: dict[str, Any] = await self.link.call("executed", {}, _ANSWER)
        except AgentSilent:
            raise Busy(
                "The kernel does not say which cells it has executed.",
                f"It has not answered for {_ANSWER:.0f} s: it is being saved or restored, or holds Python's lock.",
                "Ask again.",
            ) from None
        return found

    def _cancel(self, kind: str) -> bool:
        """Cancel the operation of this kind, or the one there is; what waits for its turn comes first."""
        present = [*self._queued, *([self.operation] if self.operation is not None else [])]
        for operation in present:
            if kind in ("", operation.kind) and operation.cancellable:
                operation.cancelling.set()
                return True
        return False

    def _signal(self, signum: int) -> bool:
        """Send a signal to the kernel's process group, as the kernel manager would; False when there is none now."""
        if self.exit_status is not None:
            return False
        if signum == signal.SIGKILL:
            # What a kernel leaves behind ends with it, and so does one that is on its way back from a snapshot.
            self.ending = True
            for space in self._spaces:
                space.kill_now()
            return True
        pid = self.space.outer(self.state.kernel_pid) if self.space is not None else None
        if pid is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            if signum == 0:
                os.kill(pid, 0)
            else:
                os.killpg(pid, signum)
        return True

    # -- who asks: the agent in the kernel

    async def _on_agent_request(self, number: int, op: str, args: dict[str, Any]) -> None:
        link = self.link
        if link is None:
            return

        async def tell(progress: dict[str, Any]) -> None:
            with contextlib.suppress(AgentSilent):
                await link.send({"for": number, "progress": progress})

        async def pulse(progress: dict[str, Any]) -> None:
            with contextlib.suppress(AgentSilent):
                await link.pulse({"for": number, "progress": progress})

        answer: dict[str, Any]
        try:
            answer = {"result": await self._with_pulse(self.do(op, args, tell), pulse)}
        except GpuckptError as e:
            answer = {"error": e.as_dict()}
        except Exception as e:
            log.exception("%s failed", op)
            answer = {"error": _unforeseen(op, e, self.folder).as_dict()}
        # A restore that succeeded has closed this link, and answers through the restored kernel.
        with contextlib.suppress(AgentSilent):
            await link.send({"for": number, **answer})

    async def _with_pulse(self, work: Coroutine[Any, Any, Any], pulse: Tell) -> Any:
        """Do something for somebody, and let them hear now and then that it is being done."""

        async def beat() -> None:
            began = time.monotonic()
            while True:
                await asyncio.sleep(PULSE)
                stage = self.operation.stage if self.operation is not None else ""
                await pulse({"stage": stage, "seconds": time.monotonic() - began})

        beating = asyncio.create_task(beat())
        try:
            return await work
        finally:
            beating.cancel()

    # -- who asks: clients of the socket

    async def serve(self) -> asyncio.AbstractServer:
        """Open the socket (0600) and listen."""
        listener = socket.socket(socket.AF_UNIX)
        (self.folder.path / SOCKET).unlink(missing_ok=True)
        with short_path(self.folder.path / SOCKET) as path:
            listener.bind(path)
        (self.folder.path / SOCKET).chmod(0o600)
        return await asyncio.start_unix_server(self._client, sock=listener, limit=LINE_LIMIT)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = peer_uid(writer.get_extra_info("socket"))
        if peer not in (0, os.getuid()):
            log.warning("refused a connection of user %d", peer)
            writer.close()
            return
        try:
            while line := await reader.readline():
                request = json.loads(line)
                if not isinstance(request, dict):
                    raise ValueError("a request is a JSON object")
                task = asyncio.create_task(self._serve_request(request, writer))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        except (ValueError, RecursionError, ConnectionError) as e:
            log.warning("a client was cut off: %s", e)
        finally:
            self._attached.discard(writer)
            writer.close()
            if self.exit_status is not None and not self._attached:
                self.closing.set()

    async def _serve_request(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        number, op, args = request.get("id"), str(request.get("op")), request.get("args") or {}

        async def tell(progress: dict[str, Any]) -> None:
            await self._tell(writer, {"id": number, "progress": progress})

        try:
            if op == "attach":
                self._attached.add(writer)
                if self.exit_status is not None:
                    await self._tell(writer, {"event": "exited", "status": self.exit_status})
                result: Any = None
            elif op == "close":
                await self._with_pulse(self.shut_down(), tell)
                result = {"writing": self.writes}
                self.closing.set()
            else:
                result = await self._with_pulse(self.do(op, args, tell), tell)
            await self._tell(writer, {"id": number, "result": result})
        except GpuckptError as e:
            await self._tell(writer, {"id": number, "error": e.as_dict()})
        except Exception as e:
            log.exception("%s failed", op)
            await self._tell(writer, {"id": number, "error": _unforeseen(op, e, self.folder).as_dict()})

    async def _tell(self, writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(json.dumps(message).encode() + b"\n")
            await writer.drain()


def _unforeseen(op: str, error: Exception, folder: KernelFolder) -> GpuckptError:
    return GpuckptError(
        f"The {op} failed in a way that was not foreseen.",
        f"{type(error).__name__}: {error}",
        f"The keeper's log has the details: {folder.path}/keeper.log",
    )


async def keep(folder: KernelFolder, how: str, ready: Callable[[str], None]) -> None:
    """Be the keeper of the kernel in this folder until it has ended; its lock is held by this process.

    `how` is ``start``, ``take-over``, or ``copy`` for a kernel that comes up as a copy of another. `ready` is called
    once, with nothing when the kernel is held, else with the error.
    """
    # The sleeper's parent ends at once: sleepers become this process's children, and are reaped by it.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    keeper = Keeper(folder)
    pid = os.getpid()
    keeper.state.keeper = (pid, processes.start_time(pid) or 0)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # A keeper ends with its kernel, not with the terminal that its server was started from.
        loop.add_signal_handler(number, lambda: None)
    try:
        try:
            keeper.save_state()
            server = await keeper.serve()
            if how == "take-over":
                await keeper.take_over()
            elif how == "copy":
                await arrive(keeper, folder.take_order())
            else:
                await keeper.start_kernel()
        except Exception as e:
            log.exception("the kernel could not be held")
            error = e if isinstance(e, GpuckptError) else _unforeseen("start", e, folder)
            ready(json.dumps(error.as_dict()))
            return
        ready("")
        if how == "take-over":
            await keeper.recover()
        keeper.held.set()
        await keeper.closing.wait()
        server.close()
        await asyncio.sleep(0)  # the last answers go out
    finally:
        await keeper.shut_down()
        await keeper.idle.wait()
        await asyncio.sleep(0)  # the last answers go out
