"""The quick judgement before a kernel starts: can this machine save and restore at all?"""

from __future__ import annotations

import os
import platform

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.client.broker_connection import usable_criu
from jupyter_gpuckpt.errors import GpuckptError, Unavailable
from jupyter_gpuckpt.freeze.criu_program import find_criu
from jupyter_gpuckpt.linux import seccomp, yama
from jupyter_gpuckpt.linux.capabilities import missing, to_add

from .blocked_calls import blocked_calls
from .capabilities import NEEDED
from .trials import try_namespaces

__all__ = [
    "ARCHITECTURES",
    "why_filtered",
    "why_unavailable",
]

ARCHITECTURES = ("x86_64", "aarch64")

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
            served = usable_criu()  # asks the broker
        except GpuckptError as error:
            return Unavailable(_WHAT, error.why, error.then)
        return why_filtered(served.works_filtered)  # by the broker's own filter: it serves nobody under another
    if lacking := missing(NEEDED):
        return Unavailable(
            _WHAT,
            f"Root lacks {' and '.join(f'CAP_{name}' for name in lacking)} here, as is usual in a container.",
            to_add(lacking),
        )
    if yama.ptrace_scope() >= yama.NOBODY:
        return Unavailable(
            _WHAT,
            "Tracing processes is forbidden here, even to root (kernel.yama.ptrace_scope is 3), as CRIU does.",
            "Set it to 2 or less in /etc/sysctl.d and restart the machine.",
        )
    try:
        program = find_criu()
    except Unavailable as unavailable:
        return unavailable
    if filtered := why_filtered(program.works_filtered):
        return filtered
    if with_trial and (outcome := try_namespaces()).failed:
        return Unavailable(
            _WHAT,
            f"A kernel's namespaces could not be set up (step `{outcome.failed}`): {outcome.why}.",
            _DOCTOR,
        )
    return None


def why_filtered(works_filtered: bool) -> Unavailable | None:
    """Return why nothing that this process starts can be saved, if that is a filter of system calls which it has.

    `works_filtered` is what the criu says of itself that would save it (`CriuProgram`).
    """
    if not seccomp.is_filtered():
        return None
    if settings.ENV_RUN_DIR in os.environ and not seccomp.are_those_of_process_one():
        return Unavailable(
            "A kernel or job that is started in another one cannot be saved.",
            "While it ran, the other could not be saved either, which has a seccomp filter against io_uring.",
            f"Start it from outside, or the other with {settings.io_uring.variable}=on in its environment.",
        )
    here = "This process and everything it starts run under a seccomp filter, as in a container."
    if seccomp.are_counted() and works_filtered:
        if not (blocked := blocked_calls()):
            return None
        return Unavailable(
            _WHAT,
            f"{here} It forbids system calls that CRIU needs: {', '.join(blocked)}.",
            "Write a profile that allows them into a file with `gpuckpt recipe seccomp.json`, and start the container "
            "with `--security-opt seccomp=FILE`; in Kubernetes, name it in securityContext.seccompProfile.",
        )
    return Unavailable(
        _WHAT,
        f"{here} CRIU saves such processes only with a library that was not built, or that this CRIU ignores."
        if seccomp.are_counted()
        else f"{here} CRIU cannot save such processes on Linux before 5.9.",
        "Start the container with `--security-opt seccomp=unconfined`.",
    )
