"""Widgets in a restored kernel: pages show what the kernel before had, until they are told what this one has."""

from __future__ import annotations

import logging
from typing import Any

__all__ = ["send_states"]

log = logging.getLogger("gpuckpt.agent")

_TARGET = "jupyter.widget"
"""The target of every widget's comm (ipywidgets' messaging protocol)."""
_OUTPUT = "OutputModel"
"""What pages have put into one reaches the kernel late, and may be in no snapshot: it stays, as cells' outputs do."""


def send_states(kernel: Any) -> None:
    """Have every widget send its state, as for a page that was loaded anew."""
    for channel in list(kernel.comm_manager.comms.values()):
        answer = getattr(channel, "_msg_callback", None)
        widget = getattr(answer, "__self__", None)
        if channel.target_name != _TARGET or answer is None or getattr(widget, "_model_name", "") == _OUTPUT:
            continue
        try:
            # Not by the comm's handle_msg: that runs what users have for before and after cells.
            answer({"content": {"comm_id": channel.comm_id, "data": {"method": "request_state"}}, "buffers": []})
        except Exception:
            log.exception("a widget did not say how it is")
