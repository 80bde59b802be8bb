"""The quick judgement before a kernel starts: can this machine save and restore at all?"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.client.broker_connection import usable_criu
from jupyter_gpuckpt.errors import GpuckptError, Unavailable
from jupyter_gpuckpt.freeze.criu_program import find_criu
from jupyter_gpuckpt.linux import proc, yama

from .trials import try_namespaces

__all__ = [
    "ARCHITECTURES",
    "HELPFUL_CAPABILITIES",
    "NEEDED_CAPABILITIES",
    "missing_capabilities",
    "why_filtered",
    "why_unavailable",
]

ARCHITECTURES = ("x86_64", "aarch64")

NEEDED_CAPABILITIES = {"CAP_SYS_PTRACE": 19, "CAP_SYS_ADMIN": 21}
"""By their numbers in linux/capability.h. Root in a container may lack them."""
HELPFUL_CAPABILITIES = {"CAP_SYS_RESOURCE": 24}
"""Those that only some kernels need to be saved."""

_WHAT = "Kernels and jobs cannot be saved on this machine."
_DOCTOR = "`gpuckpt doctor` has the details."


def why_unavailable(*, with_trial: bool = True) -> Unavailable | None:
    """Return why no kernel can be saved here, or None when nothing speaks against it.

    Takes some 30 ms, most of it for making namespaces, which it does not try with `with_trial` false. It does not try
    to save anything: `doctor.examine` with `deep` does.
    """
    if platform.system() != "Linux" or platform.machine() not in ARCHITECTURES:
        return Unavailable(
            _WHAT,
            f"This is {platform.system()} on {platform.machine()}; it needs Linux on {' or '.join(ARCHITECTURES)}.",
            "Run the Jupyter server on such a machine.",
        )
    if os.geteuid() != 0:
        try:
            usable_criu()  # asks the broker
        except GpuckptError as error:
            return Unavailable(_WHAT, error.why, error.then)
        return None
    missing = missing_capabilities(NEEDED_CAPABILITIES)
    if missing:
        return Unavailable(
            _WHAT,
            f"Root lacks {' and '.join(missing)} here, as is usual in a container.",
            "Start the container privileged.",
        )
    if filtered := why_filtered():
        return filtered
    if yama.ptrace_scope() >= yama.NOBODY:
        return Unavailable(
            _WHAT,
            "Tracing processes is forbidden here, even to root (kernel.yama.ptrace_scope is 3), as CRIU does.",
            "Set it to 2 or less in /etc/sysctl.d and restart the machine.",
        )
    try:
        find_criu()
    except Unavailable as unavailable:
        return unavailable
    if with_trial and (outcome := try_namespaces()).failed:
        return Unavailable(
            _WHAT,
            f"A kernel's namespaces could not be set up (step `{outcome.failed}`): {outcome.why}.",
            f"If this is a container, start it privileged. {_DOCTOR}",
        )
    return None


def why_filtered() -> Unavailable | None:
    """Return why nothing that this process starts can be saved, if that is a filter of system calls which it has."""
    if not proc.is_filtered():
        return None
    if settings.ENV_RUN_DIR in os.environ:
        return Unavailable(
            "A kernel or job that is started in another one cannot be saved.",
            "A seccomp filter keeps this one, and what it starts, from io_uring. Under a filter CRIU saves nothing.",
            f"Start it from outside, or this one with {settings.io_uring.variable}=on in its environment.",
        )
    return Unavailable(
        _WHAT,
        "This process and everything it starts run under a seccomp filter, as in a container. CRIU cannot save "
        "such processes.",
        "Start the container privileged, or with `--security-opt seccomp=unconfined`.",
    )


def missing_capabilities(wanted: Mapping[str, int]) -> list[str]:
    """Return the names of those capabilities, given with their numbers, that this process does not have in effect."""
    status = proc.lines("/proc/self/status")
    effective = next(int(line.split()[1], 16) for line in status if line.startswith("CapEff:"))
    return [name for name, bit in wanted.items() if not effective >> bit & 1]
