"""Running cells as a notebook does."""

from __future__ import annotations

from typing import Any

from jupyter_client import BlockingKernelClient


def run(client: BlockingKernelClient, code: str) -> str:
    """Execute a cell and return what it printed."""
    printed: list[str] = []

    def hook(message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream":
            printed.append(message["content"]["text"])

    reply = client.execute_interactive(code, output_hook=hook, timeout=600)
    assert reply["content"]["status"] == "ok", reply
    return "".join(printed).strip()
