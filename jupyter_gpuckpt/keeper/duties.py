"""What a keeper does beyond its own start: it comes to hold a kernel, serves its clients, and watches."""

from __future__ import annotations

import asyncio

from . import kernel_log
from .idle.auto_hibernate import hibernate_sleepers
from .idle.client_gone import end_with_client, end_with_record, end_with_step
from .kernel_life import Keeper
from .operations.fork import arrive
from .operations.recover import recover, take_over
from .operations.restore import bring_up
from .requests import Requests
from .socket_server import SocketServer

__all__ = ["Duties"]


class Duties:
    """One keeper's, for as long as it lives; apart from its process, which starts a job before this is loaded.

    `how` is as `keeper.process.keep` takes it.
    """

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._requests = Requests(keeper)
        self._server: asyncio.AbstractServer | None = None

    async def take_up(self, how: str) -> None:
        """Listen to clients, and come to hold the kernel, unless it was started.

        Raises
        ------
        GpuckptError, OSError : it cannot be held.
        """
        keeper = self._keeper
        self._server = await SocketServer(self._requests).open()
        if how == "take-over":
            await take_over(keeper)
        elif how == "copy":
            await arrive(keeper)
        elif how in ("restore", "resume"):
            await bring_up(keeper)

    async def do(self, how: str) -> None:
        """Do what is asked for, and look after the kernel, until the keeper is to end."""
        keeper = self._keeper
        if keeper.launch.agent:  # others could not take their ports themselves then
            await keeper.hold_ports()
        if how == "take-over":
            await recover(keeper)
        keeper.held.set()
        requests = self._requests
        watches = [requests.auto_sleep.run(), requests.auto_save.run(), hibernate_sleepers(keeper)]
        watches += [end_with_client(keeper), end_with_step(keeper), end_with_record(keeper)]
        if not keeper.launch.job:
            watches.append(kernel_log.keep_short(keeper.quiet_log))
        watching = [asyncio.create_task(watch) for watch in watches]
        await keeper.closing.wait()
        for task in watching:
            task.cancel()
        if self._server is not None:
            self._server.close()
        await asyncio.sleep(0)  # the last answers go out
