"""A sleeper as the keeper holds it: a fresh PID and mount namespace in which programs are started."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..client import broker_connection
from ..client.broker_connection import Deputy
from ..client.kernel_start import socket_of
from ..client.protocol import LINE_LIMIT
from ..client.sleeper_messages import Adopt, Exited, NextPid, NotSpawned, Spawned, request, told_in
from ..errors import GpuckptError, KernelLost
from ..linux import processes, proof, spawning
from ..linux.spawning import Program
from ..linux.unix_sockets import peer_pid, short_path

log = logging.getLogger("gpuckpt.keeper")

_START_TIMEOUT = 20.0
_GIVE_UP, _DIE = 3.0, 20.0  # how long a program may take to end when it is asked to, and when it is killed, in seconds
_KILL_TIMEOUT = 120.0  # the driver can take a minute to take down a process that holds much VRAM


class Namespace:
    """A living sleeper, its run folder, and the programs that it started.

    `pid` is process 1 as the machine knows it. Made by `start`, or by `attach` for one that is there.
    `deputy` does what needs root, where this process is not root.
    """

    def __init__(self, kernel_dir: Path, run_dir: Path, pid: int, deputy: Deputy | None = None) -> None:
        self.kernel_dir, self.run_dir, self.pid, self.deputy = kernel_dir, run_dir, pid, deputy
        self.start_time = processes.start_time(pid)
        self._pidfd = os.pidfd_open(pid)
        self._socket = socket_of(kernel_dir, run_dir)
        self._tags = itertools.count()
        self._answers: dict[int, asyncio.Future[int]] = {}
        self._exits: dict[int, asyncio.Future[int]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self.dead = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._pidfd, self._died)

    @classmethod
    async def start(cls, kernel_dir: Path, run_dir: Path) -> Namespace:
        """Start a sleeper over a new run folder.

        Raises
        ------
        GpuckptError, OSError : the namespaces could not be made; nothing is left behind, and no run folder.
        """
        listening_at = socket_of(kernel_dir, run_dir)
        pid, helper = 0, None
        try:
            if broker_connection.is_needed():
                helper = await asyncio.to_thread(Deputy)
                pid = await asyncio.to_thread(helper.start, run_dir, listening_at)
            else:
                pid = await _put_to_sleep(kernel_dir, run_dir)
            space = cls(kernel_dir, run_dir, pid, helper)
            await space._connect()
            return space
        except BaseException:
            if pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if helper is not None:
                helper.close()
            shutil.rmtree(run_dir, ignore_errors=True)
            listening_at.unlink(missing_ok=True)
            raise

    @classmethod
    async def attach(cls, kernel_dir: Path, run: str, pid: int) -> Namespace:
        """Hold a sleeper that another process started."""
        helper = None
        if broker_connection.is_needed():
            helper = await asyncio.to_thread(Deputy)
            await asyncio.to_thread(helper.hold, pid)
        space = cls(kernel_dir, kernel_dir / run, pid, helper)
        await space._connect()
        return space

    async def _connect(self) -> None:
        reader, self._writer = await _connect_to(self._socket)
        self._reader = asyncio.create_task(self._listen(reader))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            try:
                told = told_in(line)
            except ValueError as e:
                log.warning("invalid message of process 1 of the kernel's namespace: %s", e)
                continue
            match told:
                case Exited(pid, status):
                    end = self._exit(pid)
                    if not end.done():
                        end.set_result(status)
                case Spawned(pid, tag):
                    if answer := self._awaited(tag):
                        # An end that was told of this pid before was another process's: pids are used again.
                        self._exits.pop(pid, None)
                        answer.set_result(pid)
                case NotSpawned(why, tag):
                    if answer := self._awaited(tag):
                        answer.set_exception(OSError(why))

    def _awaited(self, tag: int) -> asyncio.Future[int] | None:
        """Return the answer that is still waited for, and no longer: it is here."""
        answer = self._answers.pop(tag, None)
        return answer if answer is not None and not answer.done() else None

    def _exit(self, pid: int) -> asyncio.Future[int]:
        return self._exits.setdefault(pid, asyncio.get_running_loop().create_future())

    def _died(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        # It is this keeper's child only when this keeper started it.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)
        self.dead.set()
        lost = KernelLost("The {kernel}'s namespace is gone.", "Its process 1 ended.")
        for pending in (*self._answers.values(), *self._exits.values()):
            if not pending.done():
                pending.set_exception(lost)
                pending.exception()  # seen: who waits is told, and nobody has to

    async def spawn(self, program: Program) -> int:
        """Start a program in the namespace and return its pid there; its `stdout` is a path inside.

        Raises
        ------
        OSError : the program could not be started.
        """
        if program.after_pid and self.deputy is not None:
            await self.set_last_pid(program.after_pid)
            program = program.at_any_pid()
        return await self._ask(program)

    async def adopt(self, pid: int) -> None:
        """Count a process that criu restored (its pid in the namespace) among those whose end is told."""
        await self._ask(Adopt(pid))

    async def set_last_pid(self, pid: int) -> None:
        """Make the next process of the namespace take the next free pid after this one."""
        if self.deputy is not None:
            await asyncio.to_thread(self.deputy.next_pid, pid)
            return
        await self._ask(NextPid(pid))

    async def _ask(self, what: Program | Adopt | NextPid) -> int:
        if self._writer is None or self.dead.is_set():
            raise KernelLost("The {kernel}'s namespace is gone.", "Its process 1 ended.")
        tag = next(self._tags)
        answer = self._answers[tag] = asyncio.get_running_loop().create_future()
        self._writer.write(request(what, tag))
        try:
            return await asyncio.wait_for(answer, _START_TIMEOUT)
        except (TimeoutError, asyncio.TimeoutError):
            raise KernelLost(
                "The {kernel}'s namespace does not answer.", f"Its process 1 did not answer for {_START_TIMEOUT:.0f} s."
            ) from None
        finally:
            self._answers.pop(tag, None)

    async def wait(self, pid: int) -> int:
        """Wait until the program with this pid (in the namespace) ends; return its exit code, -N for signal N."""
        return await asyncio.shield(self._exit(pid))

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        stdout: str,
        timeout: float,
        started: Callable[[int], None] | None = None,
    ) -> int:
        """Run a program to its end and return its exit code; if it fails, what it started ends with it.

        `started` is told its pid (in the namespace). After `timeout` seconds it is ended and TimeoutError raised;
        it is ended, too, when nobody waits for it any longer.

        Raises
        ------
        GpuckptError : it does not end.
        """
        spawning = asyncio.create_task(self.spawn(Program(list(argv), dict(env), stdout)))
        try:
            pid = await asyncio.shield(spawning)
        except asyncio.CancelledError:
            # It may be on its way already: nobody else would ever end it.
            with contextlib.suppress(OSError, KernelLost):
                pid = await spawning
                await self.end(pid, self._exit(pid))
            raise
        leader = self.outer(pid)
        failed = True
        if started is not None:
            started(pid)
        try:
            status = await asyncio.wait_for(self.wait(pid), timeout)
            failed = status != 0
            return status
        except (TimeoutError, asyncio.TimeoutError):
            await self.end(pid, self._exit(pid))
            raise TimeoutError from None
        except asyncio.CancelledError:
            await self.end(pid, self._exit(pid))
            raise
        finally:
            self._exits.pop(pid, None)
            if failed and leader is not None:
                self.end_session(leader)

    async def end(self, pid: int, ended: asyncio.Future[Any]) -> None:
        """End a program (its pid in the namespace), and wait until that is `ended`.

        First by SIGALRM, at which criu gives up what it waits for and lets go of the processes that it holds.

        Raises
        ------
        GpuckptError : it does not end.
        """
        for number, seconds in ((signal.SIGALRM, _GIVE_UP), (signal.SIGKILL, _DIE)):
            if (outer := self.program(pid)) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(outer, number)
            await asyncio.wait({ended}, timeout=seconds)
            if ended.done():
                return
        raise GpuckptError(
            "A program does not end.",
            f"Process {self.program(pid)} was killed {_DIE:.0f} s ago and hangs inside the system.",
            "Look at `dmesg`; a process in state D ends when its disk or device answers, or at a reboot.",
        )

    def end_session(self, leader: int) -> None:
        """Kill the processes that a program (its pid on the machine) left; every program is spawned as a session."""
        processes.end_session(self.pid, leader)

    def outer(self, pid: int) -> int | None:
        """Return the machine's pid of a process that has this pid in the namespace, or None when there is none."""
        for candidate in processes.descendants(self.pid):
            with contextlib.suppress(OSError):
                if processes.inner_pid(candidate) == pid:
                    return candidate
        return None

    def program(self, pid: int) -> int | None:
        """Return the same of a program that was started to do something with the processes, as criu is.

        A deputy's is not below process 1: it is found where it holds one of these.
        """
        if (outer := self.outer(pid)) is not None:
            return outer
        for tracer in {processes.tracer(one) for one in processes.descendants(self.pid)} - {0}:
            with contextlib.suppress(OSError):
                if processes.inner_pid(tracer) == pid:
                    return tracer
        return None

    def path(self, inside: str) -> Path:
        """Return how a path of the namespace is reached from outside."""
        return Path(f"/proc/{self.pid}/root{inside}")

    @property
    def shared_memory(self) -> Path:
        """The namespace's /dev/shm, from outside."""
        return self.path("/dev/shm")  # noqa: S108

    def kill_now(self) -> None:
        """Have every process of the namespace end, without waiting for it."""
        if not self.dead.is_set():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def kill(self) -> None:
        """End every process of the namespace, and remove its run folder.

        Raises
        ------
        GpuckptError : a process did not end in time (it hangs in the kernel or the driver).
        """
        if not self.dead.is_set():
            self.kill_now()
            try:
                await asyncio.wait_for(self.dead.wait(), _KILL_TIMEOUT)
            except (TimeoutError, asyncio.TimeoutError):
                raise GpuckptError(
                    "The {kernel}'s processes do not end.",
                    f"They were killed {_KILL_TIMEOUT:.0f} s ago and hang inside the system or the GPU driver.",
                    "Look at `dmesg`; a process in state D ends when its device answers, or at a reboot.",
                ) from None
        if self.deputy is not None:
            self.deputy.close()
        if self._writer is not None:
            self._writer.close()
        if self._reader is not None:
            self._reader.cancel()
        shutil.rmtree(self.run_dir, ignore_errors=True)
        self._socket.unlink(missing_ok=True)


async def _put_to_sleep(kernel_dir: Path, run_dir: Path) -> int:
    """Start a sleeper, and return its pid on the machine.

    Raises
    ------
    GpuckptError, OSError : it could not be started.
    """
    program = await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        "-S",
        "-B",
        spawning.SLEEPER,
        str(kernel_dir),
        str(run_dir),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={},
    )
    assert program.stdout is not None
    assert program.stderr is not None
    said = await asyncio.wait_for(program.stdout.readline(), _START_TIMEOUT)
    if not said.startswith(b"asleep "):
        why = (await program.stderr.read()).decode("utf-8", "replace").strip()
        raise GpuckptError(
            "No sleeper could be started.",
            why.splitlines()[-1] if why else "it ended immediately",
            "Run `gpuckpt doctor`: it checks the rights and kernel features that are needed.",
        )
    await program.wait()
    return int(said.split()[1])


async def _connect_to(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the socket of a sleeper."""
    with short_path(path) as short:
        reader, writer = await asyncio.open_unix_connection(short, limit=LINE_LIMIT)
    writer.write(await asyncio.to_thread(proof.first_line, peer_pid(writer.get_extra_info("socket"))))
    return reader, writer
