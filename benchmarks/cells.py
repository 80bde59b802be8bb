"""Running cells as a notebook does."""

from __future__ import annotations

from typing import Any

from jupyter_client import BlockingKernelClient


class CellError(Exception):
    """A cell ended with an error; the text says with which."""


def run(client: BlockingKernelClient, code: str, timeout: float = 600) -> str:
    """Execute a cell and return what it printed.

    Raises
    ------
    CellError : it ended with an error.
    TimeoutError : it was not answered within so many seconds.
    """
    printed: list[str] = []

    def hook(message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream":
            printed.append(message["content"]["text"])

    reply = client.execute_interactive(code, output_hook=hook, timeout=timeout)
    content = reply["content"]
    if content["status"] != "ok":
        raise CellError(f"{content.get('ename', content['status'])}: {content.get('evalue', '')}")
    return "".join(printed).strip()
