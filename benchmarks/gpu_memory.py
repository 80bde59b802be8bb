"""GPU memory by NVML's account."""

from __future__ import annotations

from jupyter_gpuckpt.freeze.nvml import Nvml


def free_bytes() -> int:
    """Return how much all GPUs of the machine have free; nothing where there is none."""
    return sum(gpu.free for gpu in Nvml().gpus())
