"""The kernel's channels come up at ports that are held for its user (`listening`)."""

from __future__ import annotations

from typing import Any

from ipykernel.heartbeat import Heartbeat
from ipykernel.kernelapp import IPKernelApp

from ..linux.listening import listen

__all__ = ["come_up_at_held_ports"]

_of_app, _of_heartbeat = IPKernelApp._try_bind_socket, Heartbeat._try_bind_socket


def come_up_at_held_ports() -> None:
    """Have ipykernel, which is about to bind its channels, take ports that are held. Others are taken as before."""
    IPKernelApp._try_bind_socket = _bind
    Heartbeat._try_bind_socket = _bind_heartbeat


def _bind(app: Any, one: Any, port: int) -> int:
    if app.transport != "tcp" or port <= 0:
        return int(_of_app(app, one, port))
    listen(one, app.ip, port)
    return port


def _bind_heartbeat(heartbeat: Any) -> None:
    if heartbeat.transport != "tcp":
        _of_heartbeat(heartbeat)
    else:
        listen(heartbeat.socket, heartbeat.ip, heartbeat.port)
