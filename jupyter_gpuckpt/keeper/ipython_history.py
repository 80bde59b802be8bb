"""IPython's history in a restored kernel that has no agent: a session of its own, asked for as a client would."""

from __future__ import annotations

import contextlib
import logging
import queue
from collections.abc import Sequence

from ..client.record import Launch

__all__ = ["begin_session"]

log = logging.getLogger("gpuckpt.keeper")

_ANSWER = 1.0  # how long the kernel has to answer, in seconds: where a cell runs, it comes to it behind that
_NEW_SESSION = (
    "(lambda history: history and history.enabled and history.new_session())"
    "(getattr(__import__('IPython').get_ipython(), 'history_manager', None))"
)
"""An expression: no variable of the user's is touched."""


def begin_session(launch: Launch) -> None:
    """Have the kernel write to a history session of its own, where it runs IPython and has no agent to see to it.

    It would go on with the numbers of the session that it was saved in, which the kernel before it has used since:
    IPython then prints an error into a cell.
    """
    if launch.agent or not _is_ipykernel(launch.argv):
        return
    from jupyter_client import BlockingKernelClient  # here, since it is hardly ever needed

    client = BlockingKernelClient(connection_file=launch.connection_file)
    try:
        client.load_connection_file()
        client.start_channels(iopub=False, stdin=False, hb=False, control=False)  # shell alone
        client.execute(_NEW_SESSION, silent=True, store_history=False, allow_stdin=False)
        with contextlib.suppress(queue.Empty):
            client.get_shell_msg(timeout=_ANSWER)
    except Exception as e:  # noqa: BLE001 - the kernel is back and runs: no error of this ends it
        log.warning("IPython's history goes on in the session that was saved: %s", e)
    finally:
        client.stop_channels()


def _is_ipykernel(argv: Sequence[str]) -> bool:
    return not {"ipykernel_launcher", "ipykernel"}.isdisjoint(argv)
