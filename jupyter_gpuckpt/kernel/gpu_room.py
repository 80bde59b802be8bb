"""What comes of a cell that found too little memory on its GPU: idle kernels fall asleep, so that it can be run again.

What a kernel will allocate is not known before it does, so that this is the first moment at which room can be made.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

from ..errors import GpuckptError, Refused
from ..operations.requests import Room
from .agent import Agent

__all__ = ["make_room_after"]

_TOO_LITTLE = re.compile(r"Tried to allocate (?P<count>[\d.]+) (?P<unit>[KMG]iB)\. GPU (?P<number>\d+) ")
"""How torch says what it could not have (c10/cuda/CUDACachingAllocator.cpp)."""
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_NOTHING = "CUDA error: out of memory"
"""How it begins where there was not even room to begin to use the GPU; the driver takes about `_BEGINNING` bytes."""
_BEGINNING = 1 << 30


def make_room_after(agent: Agent, reply: Mapping[str, Any]) -> None:
    """Have room made for what a cell that ended with this error asked for, and print what came of it.

    Nothing is done about other errors.
    """
    lacking = _lacking(reply)
    if lacking is None:
        return
    gpu, size = lacking
    try:
        asleep = agent.keeper.request(Room, {"gpu": gpu, "size": size}).asleep
    except Refused as e:
        print(e, file=sys.stderr)
    except (GpuckptError, KeyboardInterrupt):
        return  # the driver does not tell, an older keeper does not know how, or nobody wants to wait
    else:
        if asleep:
            print(f"GPU memory has been freed: {', '.join(asleep)} put to sleep. Run the cell again.")


def _lacking(reply: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return which GPU (its UUID) lacks how many bytes; None where the error says nothing of that."""
    torch: Any = sys.modules.get("torch")
    said = str(reply.get("evalue"))
    if torch is None:
        return None
    try:
        if reply.get("ename") == "OutOfMemoryError" and (found := _TOO_LITTLE.search(said)) is not None:
            number, size = int(found["number"]), int(float(found["count"]) * _UNITS[found["unit"]])
        elif said.startswith(_NOTHING):
            number, size = torch.cuda.current_device(), _BEGINNING
        else:
            return None
        return f"GPU-{torch.cuda.get_device_properties(number).uuid}", size
    except (RuntimeError, AssertionError, AttributeError):  # its GPU cannot be asked, or torch is older than 2.4
        return None
