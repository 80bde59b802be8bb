"""The check of a user without root: whether the broker does what needs it."""

from __future__ import annotations

import os

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.client.broker_connection import usable_criu
from jupyter_gpuckpt.errors import GpuckptError
from jupyter_gpuckpt.freeze.criu_program import version_text

from .checks import Check, judge

__all__ = ["broker_check"]


def broker_check() -> Check:
    """Return whether the broker serves this process."""
    try:
        program, why, mend = usable_criu(), "", ""
    except GpuckptError as error:
        program, why, mend = None, error.why, error.then
    found = f"user {os.geteuid()}, served at {settings.broker_socket()}"
    return judge(
        "rights",
        program is not None,
        f"{found}, with CRIU {version_text(program.version)}" if program else why,
        "The broker does what needs root in a save and a restore, with its own CRIU.",
        mend,
    )
