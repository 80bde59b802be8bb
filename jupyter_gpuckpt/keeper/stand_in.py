"""What stands in for a hibernated kernel: a listener at its ports, and a record of what clients ask of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..client.record import Launch, State
from ..errors import GpuckptError

if TYPE_CHECKING:
    from .port_listener import Announced, PortListener

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
        self._listener: PortListener | None = None

    @property
    def is_asked(self) -> bool:
        """Whether something waits for the hibernated kernel."""
        hibernated = self._state.hibernated
        return hibernated is not None and bool(hibernated.requests)

    def take_ports(self) -> None:
        """Listen at the ports of the hibernated kernel, unless that is done already."""
        hibernated = self._state.hibernated
        if self._listener is not None or hibernated is None:
            return
        from .port_listener import PortListener  # here, since most kernels are never hibernated

        try:
            self._listener = PortListener(
                self._launch.connection_file, hibernated.said, hibernated.clients, self._take, self._on_shutdown
            )
        except (OSError, ValueError, KeyError) as e:
            log.error("nobody holds the ports of the hibernated kernel, only `wake` wakes it: %s", e)
            return
        self._listener.open()

    def _take(self, frames: list[bytes]) -> None:
        """Note what a client sent."""
        if self._state.hibernated is None:
            return
        self._state.hibernated.requests.append([frame.hex() for frame in frames])
        self._note_state()
        self._on_request()

    async def settled(self) -> None:
        """Wait until the clients are connected to the listener, or have had time to connect."""
        if self._listener is not None:
            await self._listener.settled()

    async def give_ports_up(self) -> None:
        """Have the ports for the kernel that comes back."""
        listener, self._listener = self._listener, None
        if listener is not None:
            try:
                await listener.leave()
            except BaseException:
                await listener.close()
                raise

    async def close(self) -> None:
        """Stop listening: the kernel is not to come back."""
        if self._listener is not None:
            await self._listener.close()

    def announce(self, what: Announced) -> None:
        """Tell who listens to the hibernated kernel what becomes of it."""
        if self._listener is not None:
            self._listener.announce(what)

    async def refuse_requests(self, error: GpuckptError) -> None:
        """Answer what waits for the hibernated kernel with an error."""
        hibernated = self._state.hibernated
        if hibernated is None or self._listener is None:
            return
        requests, hibernated.requests = hibernated.requests, []
        self._note_state()
        raw = [[bytes.fromhex(frame) for frame in frames] for frames in requests]
        await self._listener.refuse(raw, error)
