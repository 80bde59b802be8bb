"""The kernel's channels bound again, where its clients have other keys (CurveZMQ), or look elsewhere, than at its save.

A socket keeps the keys that it was bound with, so it is bound again; each by the thread that it belongs to, since zmq's
sockets are no others'. The kernel has come up at ports where no client looks: one that finds another encryption than
its own gives the connection up for good.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..linux.listening import is_listened_at, listen
from .clients import until_zmq_has_acted

__all__ = ["can_rebind", "disconnect", "is_at", "is_encrypted", "rebind"]

_TAKEN = 5.0  # for how long a port may still be that of the kernel before this one, in seconds
_LOOK = 0.005
_KEYS = ("curve_publickey", "curve_secretkey")


def can_rebind(kernel: Any) -> bool:
    """Tell whether it is known which threads the kernel's sockets belong to, and what keys they have: ipykernel 7.3."""
    return getattr(kernel, "shell_channel_thread", None) is not None and hasattr(kernel.parent, _KEYS[0])


def is_encrypted(app: Any) -> bool:
    """Tell whether the channels of an `IPKernelApp` are encrypted."""
    return getattr(app, _KEYS[0], None) is not None


def is_at(app: Any, connection: Mapping[str, Any]) -> bool:
    """Tell whether the kernel of an `IPKernelApp` has the keys and the address of this connection."""
    return app.ip == connection["ip"] and all(getattr(app, name, None) == _bytes(connection, name) for name in _KEYS)


def rebind(kernel: Any, connection: Mapping[str, Any]) -> None:
    """Have the kernel serve this connection, at the ports that it names.

    When this returns, all is done but for the stdin channel: the main thread, whose it is, may be in a long call.
    """
    app = kernel.parent
    app.ip = connection["ip"]
    for name in _KEYS:
        setattr(app, name, _bytes(connection, name))
    kernel.in_main_thread(partial(_rebind, app.stdin_socket, connection, "stdin"))
    done = [
        _in_loop(kernel.shell_channel_thread.io_loop, partial(_rebind, app.shell_socket, connection, "shell")),
        _in_loop(kernel.control_thread.io_loop, partial(_rebind, app.control_socket, connection, "control")),
        _in_loop(kernel.control_thread.io_loop, partial(_reconnect, app.debug_shell_socket, connection)),
        _in_loop(kernel.iopub_thread.io_loop, partial(_rebind, kernel.iopub_thread.socket, connection, "iopub")),
    ]
    _begin_another_heartbeat(app, connection)
    for one in done:
        one.wait(2 * _TAKEN)


def disconnect(one: Any) -> None:
    """End a socket's connection; in the thread that the socket belongs to.

    It takes a word of zmq's thread that this one has to hear (`pipe_t::terminate`, libzmq's pipe.cpp). Of a socket that
    is hardly ever used, the connection would stay until then, and be made anew where it had broken.
    """
    one.disconnect(one.last_endpoint)
    until_zmq_has_acted()
    one.poll(0)


def _bytes(connection: Mapping[str, Any], name: str) -> bytes | None:
    value = connection.get(name)
    return str(value).encode() if value else None


def _in_loop(loop: Any, do: Callable[[], None]) -> threading.Event:
    """Do something in the thread of an event loop; what is returned is set when it is done."""
    done = threading.Event()

    def run() -> None:
        try:
            do()
        finally:
            done.set()

    loop.add_callback(run)
    return done


def _rebind(one: Any, connection: Mapping[str, Any], channel: str) -> None:
    one.unbind(one.last_endpoint)
    _encrypt(one, connection)
    _until_free(connection, channel)
    listen(one, connection["ip"], connection[f"{channel}_port"])


def _encrypt(one: Any, connection: Mapping[str, Any]) -> None:
    """Give a socket that is to be bound its keys, or take them away (zmq_curve(7))."""
    secret = _bytes(connection, "curve_secretkey")
    if secret is not None:
        one.curve_secretkey, one.curve_publickey = secret, _bytes(connection, "curve_publickey")
    one.curve_server = secret is not None


def _reconnect(one: Any, connection: Mapping[str, Any]) -> None:
    """Lead the debugger's own connection to the shell channel there."""
    disconnect(one)
    _encrypt(one, connection)
    if connection.get("curve_publickey"):
        one.curve_serverkey = _bytes(connection, "curve_publickey")
    host = "127.0.0.1" if connection["ip"] in ("*", "0.0.0.0") else connection["ip"]  # noqa: S104 - compared
    one.connect(f"tcp://{host}:{connection['shell_port']}")


def _begin_another_heartbeat(app: Any, connection: Mapping[str, Any]) -> None:
    """Its thread is in zmq itself for good, and only leaves it when its context ends."""
    before = app.heartbeat
    threading.Thread(target=before.context.term, name="gpuckpt-heartbeat", daemon=True).start()
    before.join(_TAKEN)
    _until_free(connection, "hb")
    app.init_heartbeat()


def _until_free(connection: Mapping[str, Any], channel: str) -> None:
    """Wait until nobody listens at a channel's port: the kernel before this one is ending, or zmq lets go of it."""
    deadline = time.monotonic() + _TAKEN
    while is_listened_at(connection[f"{channel}_port"]) and time.monotonic() < deadline:
        time.sleep(_LOOK)
