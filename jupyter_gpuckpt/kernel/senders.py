"""Who has sent a request, also where zmq does not know any more.

A kernel may read a request when its client has connected anew already, as after a hibernation. zmq has given the
client's routing id to the new connection then, and to the old one, by which the request came, a temporary one
(`identify_peer` in libzmq's router.cpp): a reply to that would be sent to nobody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["Senders"]

_MOST = 1000
"""So many clients are remembered: each page that a browser loads is another one."""


class Senders:
    """The clients of one kernel, by the sessions that their requests name."""

    def __init__(self) -> None:
        self._names: dict[str, bytes] = {}

    def address(self, frames: Sequence[Any], header: Mapping[str, Any]) -> list[Any]:
        """Return a request's frames with its sender's own routing id, where that is known (zmq's frames, or bytes)."""
        name, session = bytes(frames[0]), str(header.get("session", ""))
        if not name.startswith(b"\0"):  # a client has chosen it
            self._names.pop(session, None)
            self._names[session] = name
            if len(self._names) > _MOST:
                del self._names[next(iter(self._names))]
        elif session in self._names:
            from zmq.sugar.frame import Frame

            return [Frame(self._names[session]), *frames[1:]]
        return list(frames)
