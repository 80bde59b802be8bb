"""What a kernel manager starts: a kernel in the hands of a keeper, or a plain one where that cannot be."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import zmq
from jupyter_client.connect import KernelConnectionInfo, LocalPortCache, port_names
from jupyter_client.multikernelmanager import MultiKernelManager
from jupyter_client.provisioning import LocalProvisioner
from traitlets import Unicode, default
from zmq.constants import SocketOption

from . import setting, settings
from .client import keepers
from .client.adoption import ADOPT, FRESH
from .client.protocol import KeeperClient
from .client.record import KernelFolder, Launch
from .errors import GpuckptError, KeeperGone, KernelLost, NoSuchKernel, Refused, Unavailable
from .in_thread import begin_in_thread, in_thread
from .launch_command import with_agent
from .linux import processes, socket_ports
from .linux.foreign_sockets import hold
from .linux.reserved_ports import Reserved
from .machine.capability import why_unavailable
from .operations.choices import Choices
from .operations.requests import Attach, Close, Hibernate, Signal, Status

_LOST = -signal.SIGKILL
_TO_LISTEN = 0.3  # how long a start waits for its kernel to listen, in seconds
_TO_WRITE = 3.0  # how long it waits for an encrypted one to write its connection file, in seconds
_LOOK = 0.01
_ANSWER_TIMEOUT = 8.0  # for how long a keeper may be silent when it has been asked, in seconds
_START_TIMEOUT = 60.0
"""The same of one that has just started, in seconds: a busy machine takes its time, and a plain kernel is no gain."""
_RECONNECT, _RECONNECT_AGAIN = 5, 100
"""Milliseconds after which a client that has lost its kernel to a restore connects to it again, and the most where it
is not there yet; 100 to 200 both without (zmq_setsockopt(3), ZMQ_RECONNECT_IVL)."""
_AGAIN_TIMEOUT = 1.0  # the same of one that was silent the last time: a shutdown interrupts first, and then kills


_Started = tuple[subprocess.Popen[bytes], KernelFolder, KeeperClient]

starts: dict[str, Future[_Started]] = {}
"""The kernels that this process is just starting, by their ids."""


class GpuckptProvisioner(LocalProvisioner):  # type: ignore[misc]
    """Starts kernels that can be saved and restored.

    The manager's handle is the keeper, so that it never sees the kernel's process change. Where the machine cannot
    save and restore, it is a `LocalProvisioner`: the kernel is a plain one, and ``%gpuckpt`` in it says why.
    """

    sleep_after = Unicode(help=settings.sleep_after.help).tag(config=True)

    @default("sleep_after")
    def _default_sleep_after(self) -> str:
        return settings.sleep_after() or "off"

    end_after = Unicode(help=settings.end_after.help).tag(config=True)

    @default("end_after")
    def _default_end_after(self) -> str:
        return settings.end_after() or ("off" if self._is_of_server else "1m")

    encryption = Unicode(help=settings.encryption.help).tag(config=True)

    @default("encryption")
    def _default_encryption(self) -> str:
        # Whoever is not root has a machine that others may use as well.
        return settings.encryption() or ("off" if os.geteuid() == 0 else "auto")

    _keeper: KeeperClient | None = None
    _folder: KernelFolder | None = None
    _process: subprocess.Popen[bytes] | None = None
    _exit_status: int | None = None
    _adopting = False
    _was_started = False
    _may_resume = False
    """Whether what starts may be the hibernated kernel of its notebook, and no fresh one."""
    _has_agent = False
    _out_of_reach = ""
    _was_silent = False
    _is_independent = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._one_at_a_time = threading.Lock()
        """Held while the keeper is talked to: the manager polls while it does other things."""
        self._reserved: Reserved | None = None
        """The kernel's ports, from its start to its end: they are its own also while it comes back from a snapshot."""
        self._choices: Choices | None = None
        """What was chosen for the kernel before a restart."""

    @property
    def _is_of_server(self) -> bool:
        """Whether a server has it: that has a manager of many kernels; papermill, nbclient and consoles one of one."""
        return isinstance(self.parent.parent, MultiKernelManager)

    @property
    def has_process(self) -> bool:
        """Tell whether there is a kernel, as far as is known (asked by the manager before most other calls)."""
        return self._folder is not None or super().has_process

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Settle command and connection (called by the manager at a start and at a restart)."""
        # A kernel is only adopted once: the manager says so again at every restart.
        self._adopting = bool(kwargs.pop(ADOPT, False)) and self._folder is None and self._exit_status is None
        is_fresh, self._was_started = kwargs.pop(FRESH, False) or self._was_started, True
        self._may_resume = not is_fresh and settings.resume() == "auto"
        launch = await in_thread(self._running_launch) if self._adopting else None
        is_first = False
        if launch is not None:
            self.parent.connection_file = launch.connection_file
            self.parent.load_connection_file()
            self.ports_cached = True  # its ports are settled: the manager is not to choose others
        elif self.parent.transport == "tcp" and self.parent.cache_ports:
            is_first = not self.ports_cached
            self._reserve_ports()
        found: dict[str, Any] = await super().pre_launch(**kwargs)
        if self._is_of_server:
            # Of the sockets that it connects from now on, for the browsers that look at its notebooks.
            self.parent.context.setsockopt(SocketOption.RECONNECT_IVL, _RECONNECT)
            self.parent.context.setsockopt(SocketOption.RECONNECT_IVL_MAX, _RECONNECT_AGAIN)
        for name in (settings.ENV_RUN_DIR, settings.ENV_ENVIRONMENT, settings.ENV_UNAVAILABLE):
            found["env"].pop(name, None)  # of a kernel that this one is started in
        self.cwd = launch.cwd if launch is not None else str(found.get("cwd") or Path.cwd())
        found["cmd"], ipykernel = await in_thread(with_agent, found["cmd"], found["env"], self.cwd)
        self._has_agent = bool(ipykernel)
        if not self._has_agent:
            self._let_ports_go()  # it could not take them
        elif is_first and self.encryption == "auto" and _can_encrypt(self.parent, ipykernel):
            self._encrypt()
        return found

    def _encrypt(self) -> None:
        """Give the kernel and its clients keys, where they have none; both have them still when it starts again."""
        manager = self.parent
        if manager.curve_publickey is None:
            manager.curve_publickey, manager.curve_secretkey = zmq.curve_keypair()
            self.connection_info = manager.get_connection_info()
            file = Path(manager.connection_file)
            keys = {name: self.connection_info[name] for name in ("curve_publickey", "curve_secretkey")}
            file.write_text(json.dumps({**json.loads(file.read_text()), **keys}, indent=2))

    def _reserve_ports(self) -> None:
        """Choose the kernel's ports, unless it has some, and see to it that nobody else is given them.

        `LocalProvisioner` would choose them here, too; but what is free then may be another's when the kernel begins.

        Raises
        ------
        OSError : no port is free, or this process has too many files open.
        """
        if self._reserved is not None:
            return  # since its start before this one
        reserved = Reserved()
        try:
            for name in port_names:
                if self.ports_cached:
                    with contextlib.suppress(OSError):  # the kernel says what it cannot have
                        reserved.hold(getattr(self.parent, name))
                else:
                    port = reserved.free()
                    LocalPortCache.instance().currently_used_ports.add(port)
                    setattr(self.parent, name, port)
        except OSError:
            reserved.close()
            raise
        self._reserved, self.ports_cached = reserved, True

    def _hold_ports_of(self, folder: KernelFolder) -> None:
        """Hold the ports of a kernel that runs already: they are its own also when it starts again."""
        if not folder.launch().agent or self.connection_info["transport"] != "tcp":
            return  # it could not take them
        head = folder.head()
        pids = [pid for pid, _ in filter(None, (head.keeper, head.sleeper))]
        self._reserved = self._reserved or Reserved()
        try:
            hold(self._reserved, self._ports(), [*pids, *(one for pid in pids for one in processes.descendants(pid))])
        except OSError as e:
            self.log.warning("The ports of kernel %s are not held for its next start. %s", self.kernel_id, e)

    def _ports(self) -> set[int]:
        return {port for name, port in self.connection_info.items() if name.endswith("_port")}

    def _let_ports_go(self) -> None:
        reserved, self._reserved = self._reserved, None
        if reserved is not None:
            reserved.close()

    def _running_launch(self) -> Launch:
        """Return how the running kernel of this id was started.

        Raises
        ------
        NoSuchKernel : there is none.
        Refused : somebody else holds it.
        """
        folder = KernelFolder(settings.kernels_dir() / self.kernel_id)
        with keepers.connect(folder) as keeper:
            attended = keeper.ask(Status(), timeout=_ANSWER_TIMEOUT).attended
        if attended:
            raise Refused(
                f"The kernel {self.kernel_id} was not taken over; it keeps running.",
                "Another program holds it: a Jupyter server, or whatever started it.",
                "Use it there.",
            )
        return folder.launch()

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        """Start the kernel (called by the manager at a start and at a restart, after `pre_launch`)."""
        if self._adopting:
            folder = KernelFolder(settings.kernels_dir() / self.kernel_id)
            self._keeper = await in_thread(self._attach, folder)
            self._folder = folder
            await in_thread(self._hold_ports_of, folder)
            self.pid = folder.head().keeper[0]  # type: ignore[index]  # a keeper has just answered
            return self.connection_info
        self._is_independent = bool(kwargs.get("independent"))  # as jupyter_client's own launcher takes it
        environment = dict(kwargs.get("env") or os.environ)
        # A kernel that watches its parent would end itself when its keeper changes.
        environment.pop("JPY_PARENT_PID", None)
        # Without a trial: the start itself is one, and where it fails a trial says more plainly why.
        reason = await in_thread(why_unavailable, with_trial=False)
        if reason is None:
            launch, written = self._launch(cmd, environment, kwargs), _written_at(self.parent.connection_file)
            starting = starts[self.kernel_id] = begin_in_thread(self._start, launch)
            starting.add_done_callback(lambda _: starts.pop(launch.kernel_id, None))
            try:
                process, folder, keeper = await asyncio.wrap_future(starting)
                self._process, self._folder, self._keeper, self._exit_status = process, folder, keeper, None
                self.pid = process.pid
                await self._until_it_listens()
                if self._has_agent and getattr(self.parent, "curve_publickey", None) is not None:  # jupyter_client 8.10
                    await _until_written(self.parent.connection_file, written)
                return self.connection_info
            except asyncio.CancelledError:
                # Nobody waits for the kernel any more, and the thread does not know.
                self._process = self._folder = self._keeper = None
                self._let_ports_go()
                starting.add_done_callback(_end_unwanted)
                raise
            except GpuckptError as e:
                reason = await in_thread(why_unavailable) or Unavailable(e.what, e.why, e.then)
        self.log.warning("The kernel starts as a plain one, without save and restore: %s", reason)
        kwargs["env"] = {**environment, settings.ENV_UNAVAILABLE: json.dumps(reason.as_dict())}
        return await super().launch_kernel(cmd, **kwargs)

    async def _until_it_listens(self) -> None:
        """Wait for the kernel's ports, a moment at most: by now it is about to listen.

        The kernel is not held up by that, and its first client gains by it: one that finds nobody at a port looks there
        again after 0.1 to 0.2 s only (zmq_setsockopt(3), ZMQ_RECONNECT_IVL).
        """
        deadline = time.monotonic() + _TO_LISTEN
        while self.connection_info["transport"] == "tcp" and time.monotonic() < deadline:
            if self._ports() <= await in_thread(_listened_at):
                return
            await asyncio.sleep(_LOOK)

    def _launch(self, cmd: list[str], env: dict[str, str], kwargs: dict[str, Any]) -> Launch:
        umask = os.umask(0o077)
        os.umask(umask)
        return Launch(
            kernel_id=self.kernel_id,
            argv=cmd,
            env=env,
            cwd=str(self.cwd),
            umask=umask,
            connection_file=str(Path(self.parent.connection_file).absolute()),
            agent=self._has_agent,
            name=self.parent.kernel_name,
            notebook=_own_notebook(env),
            sleep_after=self._parsed("sleep_after"),
            shielded=[signal.SIGTERM] if "stop" in settings.hibernate_on() else [],
        )

    def _parsed(self, name: str) -> float | None:
        try:
            return setting.parse_duration(getattr(self, name))
        except ValueError as e:
            self.log.warning("The setting %s is wrong, so the kernel is started as with off: %s.", name, e)
            return None

    def _start(self, launch: Launch) -> _Started:
        """Start the kernel's keeper, and by it the kernel, and hold it; the one that was hibernated, if it is to be.

        Raises
        ------
        GpuckptError : it could not be started, or not be held; nothing is left behind.
        """
        if self._may_resume and (resumed := self._resume(launch)) is not None:
            return resumed
        process, folder = keepers.start_keeper(launch, choices=self._choices)
        try:
            return process, folder, self._attach(folder, _START_TIMEOUT)
        except BaseException:
            _end_started(process, folder)
            raise

    def _resume(self, launch: Launch) -> _Started | None:
        """Bring up the hibernated kernel of the notebook, and hold it; None where there is none, or it does not come.

        Raises
        ------
        GpuckptError : it came up, and could not be held.
        """
        from .client import resuming  # here, since most starts need none of it

        try:
            manifest = resuming.find(launch)
            if manifest is None:
                return None
            process, folder = resuming.resume(launch, manifest)
        except GpuckptError as e:
            self.log.warning("The hibernated kernel of %s was not resumed; a fresh one starts. %s", launch.notebook, e)
            return None
        try:
            keeper = self._attach(folder, _START_TIMEOUT)
        except BaseException:
            _leave_resumed(folder)
            raise
        self.log.info("The kernel of %s was resumed from %s.", launch.notebook, manifest.name)
        return process, folder, keeper

    def _attach(self, folder: KernelFolder, timeout: float = _ANSWER_TIMEOUT) -> KeeperClient:
        end_after = None if self._is_independent else self._parsed("end_after")
        keeper = keepers.connect(folder)
        try:
            keeper.ask(Attach(end_after=end_after), timeout=timeout)
        except BaseException:
            keeper.close()
            raise
        return keeper

    async def poll(self) -> int | None:
        """Return None while the kernel lives, else its exit code (called by the manager every few seconds)."""
        if self._folder is None:
            status: int | None = await super().poll()
            return status
        if self._exit_status is None:
            await in_thread(self._listen)
        return self._exit_status

    def _listen(self) -> None:
        """Take in what the keeper told; give the kernel a new keeper if that has died."""
        with self._one_at_a_time:
            folder = self._folder
            if folder is None:
                return
            try:
                if self._keeper is not None:
                    self._keeper.listen()
                    self._exit_status = self._keeper.exit_status
                    return
            except KeeperGone:
                self.log.warning("The keeper of kernel %s died; it gets a new one.", self.kernel_id)
                self._hang_up()
            try:
                self._keeper = self._attach(folder)
            except NoSuchKernel:
                self._exit_status = _LOST
            except KernelLost as e:
                self.log.error("The kernel %s is lost. %s", self.kernel_id, e)
                self._exit_status = _LOST
            except (GpuckptError, OSError) as e:
                # Such as that the disk is full, or that the package was upgraded beneath this server. The kernel runs
                # on; it is looked for again whenever the manager looks, and that is told once.
                if str(e) != self._out_of_reach:
                    self.log.error("The kernel %s is out of reach. %s", self.kernel_id, e)
                self._out_of_reach = str(e)
            else:
                self._out_of_reach = ""

    def _hang_up(self) -> None:
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None

    async def wait(self) -> int | None:
        """Wait until the kernel has ended; return its exit code."""
        if self._folder is None:
            status: int | None = await super().wait()
            return status
        while await self.poll() is None:
            await asyncio.sleep(0.05)
        await in_thread(self._close)
        return self._exit_status

    async def send_signal(self, signum: int) -> None:
        """Send a signal to the kernel and the processes of its group."""
        if self._folder is None:
            await super().send_signal(signum)
        elif await self.poll() is None:
            try:
                await in_thread(self._send, signum)
            except GpuckptError as e:
                if signum == signal.SIGKILL:
                    raise
                # A shutdown begins with an interrupt, and must not end with it.
                self.log.warning("Kernel %s was not sent signal %d. %s", self.kernel_id, signum, e)

    def _send(self, signum: int) -> None:
        with self._one_at_a_time:
            if self._keeper is None:
                raise KeeperGone("The kernel was not reached.", "It has no keeper at this moment.", "Ask again.")
            timeout = _AGAIN_TIMEOUT if self._was_silent else _ANSWER_TIMEOUT
            self._was_silent = True
            self._keeper.ask(Signal(signum=int(signum)), timeout=timeout)
            self._was_silent = False

    async def kill(self, restart: bool = False) -> None:
        """End the kernel and every process that it started, at once."""
        if self._folder is None:
            await super().kill(restart)
            return
        try:
            await self.send_signal(signal.SIGKILL)
        except GpuckptError as e:
            self.log.warning("The keeper of kernel %s does not end it, so it is ended by force. %s", self.kernel_id, e)
            await in_thread(keepers.end, self._folder)
            self._exit_status = _LOST

    async def terminate(self, restart: bool = False) -> None:
        """Ask the kernel to end."""
        if self._folder is None:
            await super().terminate(restart)
        else:
            await self.send_signal(signal.SIGTERM)

    async def cleanup(self, restart: bool = False) -> None:
        """Leave nothing behind (called by the manager after the kernel has ended, or is given up)."""
        await in_thread(self._close)
        await super().cleanup(restart)
        if not restart:
            self._let_ports_go()
            self._choices = None

    def _close(self) -> None:
        """End the keeper, and with it whatever is left of the kernel."""
        with self._one_at_a_time:
            folder, self._folder = self._folder, None
            if folder is None:
                return
            with contextlib.suppress(GpuckptError, OSError, ValueError):
                self._choices = folder.state().choices(folder.launch())
            writing = None
            try:
                keeper = self._keeper = self._keeper or keepers.connect(folder)
                # It lets hear of itself for as long as it takes.
                writing = keeper.ask(Close(), timeout=_ANSWER_TIMEOUT).writing
            except GpuckptError as e:
                if folder.path.exists():
                    self.log.warning("Kernel %s is ended by force: %s", self.kernel_id, e)
                keepers.end(folder)
            self._hang_up()
            if writing is not None and self._process is not None:
                self.log.info("The snapshot %s is still being written; its keeper ends when it is.", writing)
                threading.Thread(target=self._process.wait, daemon=True).start()
                self._process = None
            if self._process is not None:
                try:
                    self._process.wait(_ANSWER_TIMEOUT)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait()
                self._process = None

    async def get_provisioner_info(self) -> dict[str, Any]:
        """Return what another process needs to go on holding this kernel."""
        info = await super().get_provisioner_info()
        return {**info, "gpuckpt_folder": str(self._folder.path) if self._folder else None}

    async def load_provisioner_info(self, provisioner_info: dict[str, Any]) -> None:
        """Go on holding a kernel that another process started."""
        await super().load_provisioner_info(provisioner_info)
        if path := provisioner_info.get("gpuckpt_folder"):
            self._folder = KernelFolder(Path(path))
            self._keeper = await in_thread(self._attach, self._folder)
            self.cwd = self._folder.launch().cwd
            await in_thread(self._hold_ports_of, self._folder)


def _end_started(process: subprocess.Popen[bytes], folder: KernelFolder) -> None:
    keepers.end(folder)
    process.wait()


def _end_unwanted(started: Future[_Started]) -> None:
    """End a kernel that has been started, if it has."""
    if not started.cancelled() and started.exception() is None:
        process, folder, keeper = started.result()
        keeper.close()
        if not _leave_resumed(folder):
            _end_started(process, folder)


def _leave_resumed(folder: KernelFolder) -> bool:
    """Hibernate a kernel again that was resumed for nobody; False where it was not resumed.

    One that cannot be keeps running.
    """
    try:
        if folder.state().resumed is None:
            return False
        with keepers.connect(folder) as keeper:
            keeper.ask(Hibernate(end=True))
    except (GpuckptError, OSError, ValueError):
        pass
    return True


def _written_at(file: str) -> int:
    """Return when a file was written, in nanoseconds; 0 where there is none."""
    try:
        return Path(file).stat().st_mtime_ns
    except OSError:
        return 0


async def _until_written(file: str, before: int) -> None:
    """Wait until an encrypted kernel has written its connection file, as ipykernel does right after it listens.

    It compares keys, which it has as bytes, with the text in the file (ipykernel 7.4, `write_connection_file`), so it
    writes each time. The manager reads the file as soon as the kernel is started, and must not find half of it.
    """
    deadline = time.monotonic() + _TO_WRITE
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            if _written_at(file) != before and json.loads(Path(file).read_text()):
                return
        await asyncio.sleep(_LOOK)


def _can_encrypt(manager: Any, ipykernel: str) -> bool:
    """Tell whether the clients of a manager (jupyter_client 8.10), and kernels of a version of ipykernel (7.3), can."""
    found = tuple(map(int, re.findall(r"\d+", ipykernel)[:2]))  # the second part of 8.0rc1 is no number
    return hasattr(manager, "curve_publickey") and zmq.has("curve") and found >= (7, 3)


def _listened_at() -> set[int]:
    return {port for port, _ in socket_ports.port_holders("tcp")}


def _own_notebook(env: dict[str, str]) -> str:
    """Return what the server calls the notebook; nothing where a kernel that a notebook starts has inherited that."""
    name = env.get("JPY_SESSION_NAME", "")
    return "" if name == os.environ.get("JPY_SESSION_NAME") else name
