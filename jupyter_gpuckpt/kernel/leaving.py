"""What a kernel begins and answers when another one is about to take its place.

Its clients are disconnected before it ends: what it said from then on would reach nobody. So it begins no request and
sends no reply any more. Whoever takes its place answers for it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from .cells import Cells
from .clients import COMING_BACK, introduced, until_zmq_has_acted, wait_for_peers
from .rebinding import is_encrypted

__all__ = ["Leaving"]

_ON_ITS_WAY = 0.2  # how long a reply may take from the end of its cell until it was sent, in seconds
_LOOK = 0.001  # seconds


class Leaving:
    """Whether a kernel is about to be given up; at first, it is not."""

    def __init__(self, kernel: Any, cells: Cells) -> None:
        self._kernel, self._cells = kernel, cells
        self._stays = threading.Event()
        self._stays.set()
        self._replying: set[int] = set()
        self.clients: Counter[int] = Counter()
        """How many there were when it was told to leave, by local port."""

    def is_under_way(self) -> bool:
        """Tell whether the kernel is about to be given up."""
        return not self._stays.is_set()

    def begin(self) -> None:
        """Begin and answer nothing from now on; return when all that was said before is on its way to the clients."""
        encrypted = is_encrypted(self._kernel.parent)
        self.clients = introduced(encrypted=encrypted)
        self._stays.clear()
        self.until_said()

    def until_said(self, then: Callable[[], object] = lambda: None) -> None:
        """Return when all that was said is on its way; what is said later is behind what is done `then`."""
        deadline = time.monotonic() + _ON_ITS_WAY
        while self._replying and time.monotonic() < deadline:
            time.sleep(_LOOK)
        said = threading.Event()

        def go_on() -> None:
            said.set()
            then()

        self._kernel.iopub_thread.schedule(go_on)
        self.have_read()
        said.wait(_ON_ITS_WAY)
        until_zmq_has_acted()

    def have_read(self) -> None:
        """Wait until the kernel knows of all that has come to it."""
        until_zmq_has_acted()
        self._cells.let_be_read()

    def stay(self) -> None:
        """Go on, as soon as the clients that were disconnected are back."""
        wait_for_peers(self.clients, encrypted=is_encrypted(self._kernel.parent), connecting=COMING_BACK)
        self._stays.set()

    def wait(self) -> None:
        """Return when the kernel stays; where nobody tells that it does, after a while."""
        if self.is_under_way() and not self._stays.wait(COMING_BACK):
            self._stays.set()

    @contextlib.contextmanager
    def replying(self) -> Iterator[None]:
        """Wait likewise before something is answered."""
        self.reply()
        try:
            yield
        finally:
            self.replied()

    def reply(self) -> None:
        """Wait likewise, and for it to be heard, before a reply, which is on its way until it was `replied`."""
        thread, reconnection = threading.get_ident(), self._kernel.agent.reconnection
        self._replying.add(thread)
        while self.is_under_way() or not reconnection.is_heard():
            self._replying.discard(thread)
            self.wait()
            heard = reconnection.until_heard()
            self._replying.add(thread)
            if not heard:
                break

    def replied(self) -> None:
        """Note that the reply of this thread was sent, or that there is none."""
        self._replying.discard(threading.get_ident())
