"""The kernel that a restored one takes the place of: it runs until the other one has come up beside it, where it can.

What the two cannot both have stands in the way of that: memory and GPU memory for both, locks of files, terminals, UDP
ports, names of Unix sockets. TCP ports they share for that while.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...client.in_progress import RestoreInProgress
from ...errors import GpuckptError
from ...freeze import cuda, images
from ...linux import memory
from ...linux.foreign_sockets import ClosedPorts, SharedPorts
from ...operations.results import Restored
from ...snapshots.saved import kernel_of, processes_of
from ...store import Manifest, Snapshot
from .. import ports, preflight
from ..agent_channel import AgentChannel, AgentSilent
from ..connections import Connections
from ..gpu.parked import place_of
from .parts import CRIU_IMAGES
from .progress import OperationProgress

if TYPE_CHECKING:
    from ..gpu.late_vram import LateVram
    from ..kernel_life import Keeper

__all__ = ["Predecessor", "has_room"]

log = logging.getLogger("gpuckpt.keeper")

_HELPERS = 2 << 30
"""Bytes of GPU memory that the programs around a restore take at most, beside what the kernel gets back."""
_LOOK = 0.005  # seconds between two looks at who listens
_AWAY = 0.1  # for how long most clients are away at least, in seconds: ZMQ_RECONNECT_IVL, zmq_setsockopt(3)
_CLIENTS = 0.5  # how long a kernel's clients may take to close their connections, in seconds
_LAST_WORDS = 0.5  # how long a kernel may take to have all that it has said on its way, in seconds
_ASKED = 2.0  # how long one may take to say which cells it leaves unanswered, in seconds


def has_room(keeper: Keeper, manifest: Manifest, gpu_map: Mapping[str, str] | None, *, gpu_later: bool) -> bool:
    """Tell whether memory and GPUs have room for a snapshot beside what runs; with `gpu_later` GPUs need not have."""
    needs = cuda.needs(manifest.cuda)
    needed = cuda.in_use(manifest.cuda) + processes_of(manifest).private_bytes
    if needed > memory.room(os.getpid()).bytes:
        return False
    if needs and not gpu_later:
        free = {gpu.uuid: gpu.free for gpu in keeper.worker.gpus()}
        for saved, size in needs.items():
            place = place_of((gpu_map or {}).get(saved, saved), free)
            free[place] -= size + _HELPERS
        return all(left >= 0 for left in free.values())
    return True


class Predecessor:
    """The running kernel, which is given up for another one.

    Parameters
    ----------
    name : of the snapshot that the other one is restored from.
    cell : the one that asked; None where none did.

    Attributes
    ----------
    asked : which cells it has left unanswered.
    peers : how many clients it had at each channel since the other one began to come up.
    has_left : it was given up.
    result : what the other one is told, by the next keeper where this one does not come to it.
    """

    def __init__(self, keeper: Keeper, progress: OperationProgress, name: str, cell: dict[str, Any] | None) -> None:
        self._keeper, self._progress, self._name, self._cell = keeper, progress, name, cell
        self.asked: dict[str, Any] = {}
        self.peers: dict[str, int] = {}
        self.has_left = False
        self.result: Restored | None = None
        self._sent_away = -math.inf
        """When its clients were made to connect again (`time.monotonic`)."""
        self._away: Counter[int] = Counter()
        """How many of them, by port."""
        self._kernel: int | None = None
        """Its process, whose connections with itself are no clients: nobody waits for those of the other one."""
        self._sharing: asyncio.Task[SharedPorts] | None = None
        self._shared: SharedPorts | None = None
        self._closed: ClosedPorts | None = None
        self._told_to_leave = False
        self._is_followed = False
        """Whether the other one listens where this one does as soon as it comes up."""

    def get_ready(self, running: Sequence[int]) -> None:
        """Begin with what takes a moment, to have another one beside these processes of its."""
        self._sharing = asyncio.create_task(asyncio.to_thread(SharedPorts, running))

    async def ports_with(self, snapshot: Snapshot) -> set[int] | None:
        """Share its ports with the other one, and return which; None where both cannot be at once."""
        kernel = None if self._keeper.space is None else self._keeper.space.outer(self._keeper.state.kernel_pid)
        self._kernel = kernel
        self._count_clients()
        self._is_followed = not ports.endpoint_differs(
            kernel_of(snapshot.manifest), self._keeper.launch.connection_file
        )
        if self._sharing is None:
            return None
        try:
            shared = await self._sharing
        except OSError as e:
            alone = str(e)
        else:
            alone = await asyncio.to_thread(_alone, snapshot)
            if not alone:
                self._shared = shared
                return shared.ports
        log.info("the kernel is given up before the snapshot comes up: %s", alone)
        await self._unshare()
        return None

    async def turn(self) -> None:
        """Have its clients connect to the other one as soon as that listens: it can take them 0.1 to 0.2 s.

        That one has to be about to run. Nothing that this one says comes to its clients afterwards.
        """
        file = self._keeper.launch.connection_file
        shared, kernel, channels = self._shared, self._kernel, ports.of_connection_file(file).values()
        if shared is None or kernel is None or not self._is_followed or not shared.ports.issuperset(channels):
            return
        while not await asyncio.to_thread(ports.have_two_listeners, file):
            await asyncio.sleep(_LOOK)
        # First the ports, and then whoever is connected: somebody may come to this one until then.
        shared.turn()
        await self._tell_to_leave()
        await self._send_away(kernel, shared.ports)

    async def leave(self, late: LateVram | None, way_back: contextlib.AsyncExitStack) -> None:
        """Give it up: `way_back`, which undoes all that was done so far, is cleared when there is none any more.

        What was read so far of `late` must be right.

        Raises
        ------
        GpuckptError, OSError : it cannot be now; it was not.
        """
        keeper, beside = self._keeper, self._shared is not None
        await self._progress.enter("restoring", cancellable=False)
        if keeper.space is not None:
            keeper.namespace()  # it may have ended meanwhile
        if late is not None:
            late.check()
        await self._tell_to_leave()
        self._count_clients()
        if self._sent_away == -math.inf:
            await self._have_no_clients()
        self.asked = await self._interrupted()
        run = keeper.state.run
        keeper.state.operation = RestoreInProgress(
            self._name, self.asked, self.peers, run=run, result=self.result, asked_at=self._progress.asked_at()
        )
        keeper.save_state()
        await self._unshare()
        # The point of no return: from here on the kernel that runs is given up for the one that comes.
        way_back.pop_all()
        self.has_left = True
        if self._closed is not None:
            self._closed.close()
        await keeper.give_up(wait=not beside)

    async def stay(self) -> None:
        """Leave it as it is: nothing comes in its place."""
        if self._shared is not None:
            self._shared.turn_back()
        if self._closed is not None:
            self._closed.open()
        await self._unshare()
        self._keeper.state.operation = None
        if self._told_to_leave:
            await self._ask("stays", _LAST_WORDS)

    async def _have_no_clients(self) -> None:
        """Have its clients wait for the other one with what they send from now on."""
        kernel, channels = self._kernel, set(ports.of_connection_file(self._keeper.launch.connection_file).values())
        if kernel is not None and channels:
            try:
                self._closed = await asyncio.to_thread(ClosedPorts, kernel, channels)
            except OSError as e:
                log.warning("clients can still connect to the kernel: %s", e)
            await self._send_away(kernel, channels)

    async def _send_away(self, kernel: int, at: Collection[int]) -> None:
        """End the connections of its clients at these ports, when all that they have sent has come."""
        try:
            connections = await asyncio.to_thread(Connections, kernel, at)
        except OSError as e:
            log.warning("the kernel's clients stay with it until it ends: %s", e)
            return
        with contextlib.closing(connections), contextlib.suppress(OSError):
            self._count_clients()
            self._sent_away, self._away = time.monotonic(), connections.by_port()
            await connections.end(_CLIENTS)

    def _count_clients(self) -> None:
        """Count the clients that the other one is to wait for: those that were sent away come to it, as do new ones."""
        away = self._away if time.monotonic() < self._sent_away + _AWAY else Counter[int]()
        file, holders = self._keeper.launch.connection_file, self._keeper.holders.pids()
        for channel, now in ports.peers(file, self._kernel, away=away, of=holders).items():
            self.peers[channel] = max(self.peers.get(channel, 0), now)

    async def _unshare(self) -> None:
        if self._sharing is not None:
            with contextlib.suppress(OSError):
                (await self._sharing).close()
        self._sharing = self._shared = None

    async def _tell_to_leave(self) -> None:
        """Have it begin and answer nothing any more: its clients would not hear of it, once they are disconnected."""
        if not self._told_to_leave:
            self._told_to_leave = True
            await self._ask("leaves", _LAST_WORDS)

    async def _interrupted(self) -> dict[str, Any]:
        """Ask the kernel which cells it leaves unanswered: the one that asked, or else runs, and those behind it.

        As late as can be: cells that come to the kernel afterwards are lost with it.
        """
        asked = {"cell": self._cell} if self._cell is not None else {}
        if self._agent is None:
            return asked
        found = await self._ask("interrupted", _ASKED)
        if found is None:
            found = self._agent.asked  # a call into C keeps Python's lock: nobody there can say what waits behind it
        return {**found, **asked, "from_outside": not asked}

    @property
    def _agent(self) -> AgentChannel | None:
        return self._keeper.channel if self._keeper.launch.agent else None

    async def _ask(self, what: str, seconds: float) -> Any:
        """Have its agent do something, and return what it answers; None where it cannot, or not in time."""
        if self._agent is None:
            return None
        try:
            return await self._agent.call(what, {}, seconds)
        except AgentSilent:
            return None
        except GpuckptError as e:
            log.warning("the kernel failed at %r: %s", what, e)
            return None


def _alone(snapshot: Snapshot) -> str:
    """Return what of a saved tree nobody else can have at the same time, in words; nothing where there is no such."""
    directory = snapshot.directory / CRIU_IMAGES
    if alone := images.locks_or_terminals(directory):
        return f"it has {alone}"
    if any(bound.kind != "tcp" for bound in images.bound_sockets(directory)):
        return "it has UDP ports"
    own_names = {name for name in images.abstract_names(directory) if not name.startswith(ports.DRIVERS)}
    if ports.taken_paths(preflight.shared_socket_paths(directory)) or ports.taken_names(own_names):
        return "a Unix socket's name is taken"
    return ""
