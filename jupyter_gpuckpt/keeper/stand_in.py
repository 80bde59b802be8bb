"""What stands in for a hibernated kernel: a doorman at its ports, and a record of what clients ask of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..client.record import Launch, State
from ..errors import GpuckptError

if TYPE_CHECKING:
    from .doorman import Doorman

__all__ = ["StandIn"]

log = logging.getLogger("gpuckpt.keeper")


class StandIn:
    """One kernel's, there while it is hibernated.

    Parameters
    ----------
    launch, state : the kernel's.
    note_state : writes `state` down.
    on_request : called when a client has asked for something that needs the kernel.
    on_shutdown : called when a client asks for the kernel's end.
    """

    def __init__(
        self,
        launch: Launch,
        state: State,
        note_state: Callable[[], None],
        on_request: Callable[[], None],
        on_shutdown: Callable[[], object],
    ) -> None:
        self._launch, self._state, self._note_state = launch, state, note_state
        self._on_request, self._on_shutdown = on_request, on_shutdown
        self._doorman: Doorman | None = None

    @property
    def is_asked(self) -> bool:
        """Whether something waits for the hibernated kernel."""
        hibernated = self._state.hibernated
        return hibernated is not None and bool(hibernated.requests)

    def take_ports(self) -> None:
        """Have a doorman take the ports of the kernel, which is hibernated, where there is none yet."""
        hibernated = self._state.hibernated
        if self._doorman is not None or hibernated is None:
            return
        from .doorman import Doorman  # here, since most kernels are never hibernated

        try:
            self._doorman = Doorman(
                self._launch.connection_file, hibernated.said, hibernated.clients, self._take, self._on_shutdown
            )
        except (OSError, ValueError, KeyError) as e:
            log.error("nobody holds the ports of the hibernated kernel, only `wake` wakes it: %s", e)
            return
        self._doorman.open()

    def _take(self, frames: list[bytes]) -> None:
        """Note what a client sent."""
        if self._state.hibernated is None:
            return
        self._state.hibernated.requests.append([frame.hex() for frame in frames])
        self._note_state()
        self._on_request()

    async def settled(self) -> None:
        """Wait until the clients are connected to the doorman, or have had time for it."""
        if self._doorman is not None:
            await self._doorman.settled()

    async def give_ports_up(self) -> None:
        """Have the ports for the kernel that comes back."""
        doorman, self._doorman = self._doorman, None
        if doorman is not None:
            try:
                await doorman.leave()
            except BaseException:
                await doorman.close()
                raise

    async def close(self) -> None:
        """End the doorman: the kernel is not to come back."""
        if self._doorman is not None:
            await self._doorman.close()

    def announce(self, what: str) -> None:
        """Tell who listens to the hibernated kernel what becomes of it."""
        if self._doorman is not None:
            self._doorman.announce(what)

    async def refuse_requests(self, error: GpuckptError) -> None:
        """Answer what waits for the hibernated kernel with an error."""
        hibernated = self._state.hibernated
        if hibernated is None or self._doorman is None:
            return
        requests, hibernated.requests = hibernated.requests, []
        self._note_state()
        raw = [[bytes.fromhex(frame) for frame in frames] for frames in requests]
        await self._doorman.refuse(raw, error)
