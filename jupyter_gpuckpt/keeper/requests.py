"""What a keeper may be asked for, by its clients, by the agent in the kernel, and by itself."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ..checked import to_json
from ..client import operation_counts
from ..client.listing import left_running
from ..client.protocol import new_operation_id
from ..client.record import Operation, now
from ..errors import Busy, Cancelled, Refused
from ..linux.c_memory import give_memory_back
from ..operations import requests as asked
from ..operations.requests import Long, Request, Restoring, kind_of, request_of
from ..operations.results import (
    AutoSleepSet,
    Executed,
    Kept,
    Labels,
    Progress,
    Removed,
    RoomMade,
    Slept,
    StayingAwake,
    WakeNote,
    Woken,
)
from ..snapshots.comparison import compare
from ..snapshots.naming import find, new_key
from ..snapshots.other_stores import store_of
from ..snapshots.summary import details, is_automatic, is_of, listing, summary
from ..spelling import in_a_cell
from ..store import Labels as StoredLabels
from ..store import Manifest, Store, name_of
from ..store.upkeep.retention import beyond_last, beyond_size
from .agent_channel import AgentSilent
from .agent_replies import checked_reply
from .answers import answer_to
from .gpu import sharing
from .idle.auto_save import AutoSave
from .idle.auto_sleep import AutoSleep
from .kernel_life import Keeper
from .operations.fork import fork
from .operations.hibernate import hibernate
from .operations.move import move
from .operations.progress import OperationProgress, ProgressCallback
from .operations.restore import redo, restore, undo
from .operations.save import save
from .operations.sleep import sleep
from .operations.wake import awaken, wake
from .owner import owner_of
from .status import status

__all__ = ["Requests"]

_ANSWER = 5.0  # how long the kernel may take to answer a question, in seconds
_MOST_LOOKS = 4  # so many requests that read much of the store are served at once: a save needs threads and disk, too

_OPERATIONS: dict[str, Callable[[Keeper, Operation, Any, ProgressCallback], Awaitable[Any]]] = {
    "save": save,
    "restore": restore,
    "fork": fork,
    "move": move,
    "sleep": sleep,
    "hibernate": hibernate,
    "wake": wake,
    "undo": undo,
    "redo": redo,
}
_GPU = re.compile(r"GPU-[0-9a-f-]{1,64}")
_NO_ROOM = "There is no room on the GPU for what the cell asked for."


class Requests:
    """Does what is asked for of one kernel, which it has the keeper of."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self.auto_sleep, self.auto_save = AutoSleep(self.keeper), AutoSave(self.keeper)
        self._looking = asyncio.Semaphore(_MOST_LOOKS)
        keeper.can(self)

    async def do(self, op: str, args: dict[str, Any], on_progress: ProgressCallback) -> Any:
        """Do what a client or the agent asks for; `tell` passes progress on.

        Raises
        ------
        GpuckptError : what there is to say to the person.
        """
        store, args = store_of(args)
        return await self._do(request_of(op, args), store, on_progress)

    async def do_by_itself(self, request: Long[Any], on_progress: ProgressCallback) -> Any:
        """Do what nobody asked for: nobody cancels it, either.

        It is brought to its end as what a client asks for is, also where who waits here is cancelled: the kernel has
        ended then, but not a save that is being written.
        """
        doing = self._do(replace(request, operation=new_operation_id()), None, on_progress)
        return await asyncio.shield(self.keeper.in_background(doing))

    async def _do(self, request: Request[Any], store: Store | None, on_progress: ProgressCallback) -> Any:
        keeper = self.keeper
        match request:
            case Long():
                unasked = isinstance(request, asked.Save) and request.automatic
                operation = Operation(request.op, _subject(request), request.operation, store, unasked=unasked)
                return await self._operate(operation, request, on_progress)
            case asked.Cancel():
                return keeper.operations.cancel(request.operation, request.kind)
            case asked.Status():
                return status(keeper)
            case asked.Left():
                return await asyncio.to_thread(left_running, keeper.launch)
            case asked.Renamed():
                return keeper.belong_to(request.notebook)
            case asked.Signal():
                return keeper.signal(request.signum)
            case asked.Awake():
                keeper.state.awake = request.on
                keeper.save_state()
                return StayingAwake(pinned=keeper.state.awake)
            case asked.AutoSleep():
                return self._set_auto_sleep(request.after)
            case asked.Auto():
                return self.auto_save.set(request)
            case asked.Ending():
                return keeper.end_asleep()
            case asked.Executed():
                return await self._executed()
            case asked.Room():
                return await self._make_room(request.gpu, request.size, on_progress)
        return await self._about_snapshots(request, store or keeper.store)

    async def _about_snapshots(self, request: Request[Any], store: Store) -> Any:
        operations = self.keeper.operations
        if operations.writes is not None and _names(request, operations.writes):
            await operations.idle.wait()
        match request:
            case asked.List() | asked.Show() | asked.Diff():
                async with self._looking:
                    return await asyncio.to_thread(self._look, store, request)
            case asked.Keep():
                return await asyncio.to_thread(self._keep, store, request)
            case asked.OfSnapshot():
                return await asyncio.to_thread(self._change, store, request)
        raise AssertionError(f"nobody does {request.op!r}")

    # -- operations, which there is one of at a time

    async def _operate(self, operation: Operation, request: Long[Any], on_progress: ProgressCallback) -> Any:
        keeper, operations = self.keeper, self.keeper.operations
        if not keeper.held.is_set():
            await operations.wait_for_recovery(operation, on_progress)
            await keeper.held.wait()
        patient = not isinstance(request, asked.Sleep) or request.idle_for is None
        await operations.wait_for_others(operation, on_progress, patient=patient, for_all=request.waits_for_all)
        if keeper.state.hibernated is None or not request.of_hibernated:
            keeper.namespace()
        try:
            with operations.begin(operation):
                return await self._counted(operation, request, on_progress)
        finally:
            keeper.wake_if_asked()
            give_memory_back()

    async def _counted(self, operation: Operation, request: Long[Any], on_progress: ProgressCallback) -> Any:
        """Carry out the operation that is under way, and note how it ended and how long it took."""
        keeper, kind = self.keeper, operation.kind
        began, result = time.monotonic(), "failed"
        try:
            await keeper.tidied()
            if request.needs_awake or (request.takes_asleep and not await self._can_be_taken_asleep()):
                await awaken(keeper, OperationProgress(operation, on_progress))
            done = await _OPERATIONS[kind](keeper, operation, request, on_progress)
            if isinstance(request, asked.Restore) and request.resume:  # what was chosen for it has come back, too
                self.auto_sleep.look_again()
                self.auto_save.look_again()
            result = "" if isinstance(done, Slept | Woken) and done.already else "done"
            if kind == "wake" and result:
                keeper.woken = WakeNote(at=now(), seconds=time.monotonic() - began)
            return done
        except Cancelled:
            result = "cancelled"
            raise
        finally:
            if result:
                asyncio.get_running_loop().run_in_executor(
                    None, operation_counts.note, kind, result, time.monotonic() - began
                )
            if keeper.state.operation is not None:
                keeper.state.operation = None
                keeper.note_state()
            await keeper.end_unless_watched()

    async def _can_be_taken_asleep(self) -> bool:
        """Tell whether a kernel that sleeps can be saved in its sleep: nothing of it may use a GPU before or after."""
        keeper = self.keeper
        asleep, noted = keeper.asleep, keeper.state.sleep
        if asleep is None or noted is None or noted.hooks:
            return False
        kernel = keeper.space.outer(keeper.state.kernel_pid) if keeper.space is not None else None
        return kernel is not None and await asleep.is_all(kernel)

    # -- the rest, which may be done beside an operation

    def _look(self, store: Store, request: asked.List | asked.Show | asked.Diff) -> Any:
        if isinstance(request, asked.List):
            return replace(listing(store, in_a_cell), writing=self.keeper.operations.writes)
        if isinstance(request, asked.Show):
            return details(store.get(self._key(store, request)))
        owner = owner_of(self.keeper)
        return compare(store, find(store, request.old, owner), find(store, request.new, owner))

    def _key(self, store: Store, request: asked.OfSnapshot[Any]) -> str:
        """Return the key of the snapshot that is meant."""
        return request.key or find(store, request.name or "", owner_of(self.keeper))

    def _change(self, store: Store, request: asked.OfSnapshot[Any]) -> Any:
        key = self._key(store, request)
        match request:
            case asked.Rename():
                return summary(store.rename(key, new_key(store, key, request.new)))
            case asked.Note():
                return summary(store.note(key, request.message))
            case asked.Pin():
                return _labels(store.pin(key, request.pinned))
            case asked.Tag():
                return _labels(store.tag(key, request.tags, request.remove))
        return Removed(freed=store.remove(key))

    def _keep(self, store: Store, request: asked.Keep) -> Kept:
        """Remove old snapshots of this kernel or its notebook by a rule; or only tell which.

        Raises
        ------
        GpuckptError : one could not be removed; the others are.
        """
        launch = self.keeper.launch

        def own(manifest: Manifest) -> bool:
            return is_of(manifest, launch.kernel_id, launch.notebook) and not is_automatic(manifest)

        if request.last is not None:
            keys = beyond_last(store, request.last, own)
        else:
            keys = beyond_size(store, request.under or 0, own)
        going, freed, errors = (store.would_remove if request.dry_run else store.remove_all)(keys)
        if errors:
            raise errors[0]
        return Kept(removed=[name_of(key) for key in going], freed=freed)

    def _set_auto_sleep(self, after: float | None) -> AutoSleepSet:
        """Set after how many idle seconds the kernel goes to sleep by itself; None or 0 for never."""
        state = self.keeper.state
        state.sleep_after = after or None
        self.keeper.note_state()
        self.auto_sleep.look_again()
        return AutoSleepSet(sleep_after=state.sleep_after)

    async def _make_room(self, gpu: str, size: int, on_progress: ProgressCallback) -> RoomMade:
        """Have idle kernels fall asleep for one that found too little memory of a GPU (its UUID), `size` bytes.

        It is beside the operations: nothing is done with the kernel itself.
        """
        if not _GPU.fullmatch(gpu):
            raise Refused(_NO_ROOM, f"{gpu!a} is no UUID of a GPU.", "`nvidia-smi -L` shows them.")
        progress = OperationProgress(Operation("room", ""), on_progress)
        async with sharing.turn([gpu], progress):
            asleep = await sharing.make_room(self.keeper, {gpu: size}, progress, _NO_ROOM, patience=0.0)
        return RoomMade(asleep=asleep)

    async def _executed(self) -> Executed:
        """Ask the kernel which cells it has executed; one without an agent does not know."""
        keeper, operations = self.keeper, self.keeper.operations
        if operations.current is not None and issubclass(kind_of(operations.current.kind), Restoring):
            await operations.idle.wait()  # before that it does not know what it was put back to
        if keeper.channel is None and keeper.state.hibernated is not None:
            return keeper.state.hibernated.said.executed
        if keeper.channel is None or not keeper.launch.agent:
            return Executed(restored="", cells={}, others=[])
        try:
            said = await keeper.channel.call("executed", {}, _ANSWER)
        except AgentSilent:
            raise Busy(
                "The kernel does not say which cells it has executed.",
                f"It has not answered for {_ANSWER:.0f} s: it is being saved or restored, or holds Python's lock.",
                "Ask again.",
            ) from None
        return checked_reply(Executed, said, Busy, "The kernel does not say which cells it has executed.")

    # -- who asks: the agent in the kernel

    async def answer_agent(self, number: int, op: str, args: dict[str, Any]) -> None:
        """Do what the agent in the kernel asks for, and answer it."""
        keeper, channel = self.keeper, self.keeper.channel
        if channel is None:
            return

        async def on_progress(progress: Progress) -> None:
            with contextlib.suppress(AgentSilent):
                await channel.send({"for": number, "progress": to_json(progress)})

        async def pulse(progress: Progress) -> None:
            with contextlib.suppress(AgentSilent):
                await channel.pulse({"for": number, "progress": to_json(progress)})

        answer = await answer_to(op, partial(self.do, op, args), on_progress, pulse, keeper.folder.path)
        # A restore that succeeded has closed this link, and answers through the restored kernel.
        with contextlib.suppress(AgentSilent):
            await channel.send({"for": number, **answer.as_members()})


def _labels(found: StoredLabels) -> Labels:
    return Labels(pinned=found.pinned, tags=found.tags)


def _names(request: Request[Any], name: str) -> bool:
    """Tell whether a request may be about the snapshot `name`."""
    return any(name_of(text.rpartition(":")[2]) == name for text in vars(request).values() if isinstance(text, str))


def _subject(request: Long[Any]) -> str:
    """Return what the operation is said to be of, when others are told about it."""
    match request:
        case asked.Save():
            return request.name
        case asked.Restore():
            return name_of(request.key or request.of_any or request.name or "")
        case asked.Fork():
            return request.name or request.snapshot or "this kernel"
    return "this kernel"
