"""A reply goes to who has asked, also where zmq has another name for them by then."""

from __future__ import annotations

from jupyter_client.session import Session

from jupyter_gpuckpt.kernel import senders
from jupyter_gpuckpt.kernel.senders import Senders

_TEMPORARY = b"\0abcd"


def request(name: bytes, session: str, key: bytes = b"the kernel's") -> tuple[list[bytes], dict[str, str]]:
    """Return a request as it comes to a kernel, and its header."""
    message = Session(key=key, session=session).msg("execute_request", {"code": ""})
    frames: list[bytes] = Session(key=key, session=session).serialize(message, ident=name)
    return frames, message["header"]


def test_one_that_was_read_late_is_its_client_s() -> None:
    known = Senders(Session(key=b"the kernel's"))
    asked = request(b"a", "session a")
    assert known.address(*asked) == asked[0]
    known.address(*request(b"b", "session b"))
    late, header = request(_TEMPORARY, "session a")
    first, *others = known.address(late, header)
    assert (bytes(first), others) == (b"a", late[1:])


def test_a_client_that_was_not_seen_before_has_the_name_that_zmq_has_given_it() -> None:
    known = Senders(Session(key=b"the kernel's"))
    for _ in range(2):
        asked = request(_TEMPORARY, "session a")
        assert known.address(*asked) == asked[0]


def test_nobody_is_sent_another_s_reply_without_the_kernel_s_key() -> None:
    known = Senders(Session(key=b"the kernel's"))
    known.address(*request(b"a", "session a"))
    known.address(*request(b"thief", "session a", key=b"another"))
    for no_request in ([], [b"no request"], [b"<IDS|MSG>"], [b"<IDS|MSG>", b"", b"{}"]):
        known.address([b"thief", *no_request], {"session": "session a"})
    assert bytes(known.address(*request(_TEMPORARY, "session a"))[0]) == b"a"


def test_they_are_not_remembered_without_end() -> None:
    known = Senders(Session(key=b"the kernel's"))
    for number in range(senders._MOST + 1):
        known.address(*request(b"client", f"session {number}"))
    assert bytes(known.address(*request(_TEMPORARY, "session 0"))[0]) == _TEMPORARY
    assert bytes(known.address(*request(_TEMPORARY, "session 1"))[0]) == b"client"
