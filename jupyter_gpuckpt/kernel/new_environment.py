"""The environment that a restored program would be started with now: what it says of host, job and GPUs holds there.

A restored process has the environment of its first start. The run folder has the new one
(`client/kernel_start.py`), as /proc/PID/environ has it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from .. import settings

__all__ = ["NewEnvironment", "bring_up_to_date", "note_given"]

_BATCH_SYSTEMS = ("SLURM", "PBS_", "LSB_", "SGE_", "FLUX_", "OAR_", "_CONDOR_")
_STARTED_BY = ("JUPYTERHUB_", "KUBERNETES_")
_PREFIXES = (*_BATCH_SYSTEMS, *_STARTED_BY)
_GPUS = (
    "CUDA_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "HIP_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)
_NAMES = (*_GPUS, "HOSTNAME", "TMPDIR")


@dataclass(frozen=True)
class NewEnvironment:
    """What a restored program would be started with now.

    Attributes
    ----------
    variables : all of it; empty where that is not known.
    changed : the names of those that were brought up to date in ``os.environ``, in order.
    """

    variables: dict[str, str] = field(default_factory=dict, repr=False)  # there are secrets in it
    changed: list[str] = field(default_factory=list)


_given: dict[str, str] = {}


def note_given() -> None:
    """Take down what the program was started with: what differs from it later, the program has set itself."""
    if not _given:
        _given.update(_read())


def bring_up_to_date() -> NewEnvironment:
    """Give ``os.environ`` what it says of host, batch job and GPUs as it is now, but for what the program has set."""
    new = _read()
    if not new:
        return NewEnvironment()
    changed = []
    for name in sorted({*_given, *new}):
        before, now = _given.get(name), new.get(name)
        if before == now or not _tells_of_the_place(name) or os.environ.get(name) != before:
            continue
        if now is None:
            del os.environ[name]
        else:
            os.environ[name] = now
        changed.append(name)
    _given.clear()
    _given.update(new)
    return NewEnvironment(new, changed)


def _tells_of_the_place(name: str) -> bool:
    return name in _NAMES or name.startswith(_PREFIXES)


def _read() -> dict[str, str]:
    """Return the variables that the run folder has; none where there is none."""
    try:
        entries = Path(os.environ[settings.ENV_ENVIRONMENT]).read_bytes().split(b"\0")
    except (KeyError, OSError):
        return {}
    pairs = (entry.partition(b"=") for entry in entries)
    return {os.fsdecode(name): os.fsdecode(value) for name, found, value in pairs if found}
