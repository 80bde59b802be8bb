"""Who has sent a request, also where zmq does not know any more.

A kernel may read a request when its client has connected anew already, as after a hibernation. zmq has given the
client's routing id to the new connection then, and to the old one, by which the request came, a temporary one
(`identify_peer` in libzmq's router.cpp): a reply to that would be sent to nobody.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["Senders"]

_MOST = 1000
"""So many clients are remembered: each page that a browser loads is another one."""


class Senders:
    """The clients of one kernel, by the sessions that their requests name; `session` is that of the kernel."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._names: dict[str, bytes] = {}

    def address(self, frames: Sequence[Any], header: Mapping[str, Any]) -> list[Any]:
        """Return a request's frames with its sender's own routing id, where that is known (zmq's frames, or bytes).

        Only who knows the kernel's key is remembered: nobody else is to be sent another's reply.
        """
        name, theirs = bytes(frames[0]), str(header.get("session", ""))
        if not name.startswith(b"\0"):  # a client has chosen it
            if self._names.get(theirs) != name and self._is_signed(frames):
                self._names.pop(theirs, None)
                self._names[theirs] = name
                if len(self._names) > _MOST:
                    del self._names[next(iter(self._names))]
        elif theirs in self._names:
            from zmq.sugar.frame import Frame

            return [Frame(self._names[theirs]), *frames[1:]]
        return list(frames)

    def _is_signed(self, frames: Sequence[Any]) -> bool:
        try:
            _, parts = self._session.feed_identities(list(frames), copy=not hasattr(frames[0], "bytes"))
            signature, *signed = (bytes(part) for part in parts[:5])
        except ValueError:  # it is no request
            return False
        return hmac.compare_digest(signature, self._session.sign(signed))
