"""Checks of the NVIDIA driver and the GPUs, without starting CUDA in this process.

Starting CUDA can take seconds, and would leave a context that no check needs. The driver's files
in /proc say enough.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from jupyter_gpuckpt.freeze.nvml import Nvml, NvmlError
from jupyter_gpuckpt.installed import PARKING_LIBRARY
from jupyter_gpuckpt.settings import parking

from .checks import Check, judge

__all__ = ["MINIMUM_DRIVER", "gpu_checks"]

MINIMUM_DRIVER = 570
"""The driver of CUDA 12.8, the first whose `cuCheckpointProcess…` calls are there."""

_DRIVER = Path("/proc/driver/nvidia")
_NONE = "none; CPU kernels only"
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_CPU_KERNELS = "Kernels without a GPU can be saved and restored; GPU kernels need an NVIDIA GPU."


def gpu_checks(driver: Path = _DRIVER) -> list[Check]:
    """Return the checks of the GPUs; a machine with none is a good one, for CPU kernels.

    Parameters
    ----------
    driver : the folder in which the driver describes itself.
    """
    if not (driver / "version").is_file():
        return [judge("NVIDIA driver", True, _NONE, _CPU_KERNELS, "", required=False)]
    return [_version(driver), _gpus(driver), _mig(), _bindings(), _parking(), _huge_pages()]


def _version(driver: Path) -> Check:
    # NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build  (…)
    first = (driver / "version").read_text("utf-8", "replace").partition("\n")[0]
    match = re.search(r"\s(\d{3,})\.\d+(?:\.\d+)?(?=\s)", first)
    return judge(
        "NVIDIA driver",
        match is not None and int(match[1]) >= MINIMUM_DRIVER,
        match[0].strip() if match else f"not understood: {first.strip()}",
        f"The driver moves GPU memory out of a process and back, from version {MINIMUM_DRIVER} (CUDA 12.8) on.",
        f"Install NVIDIA driver {MINIMUM_DRIVER} or newer and restart the machine.",
    )


def _gpus(driver: Path) -> Check:
    models = [_model(path) for path in sorted((driver / "gpus").glob("*/information"))]
    means = "A snapshot is restored on the GPUs that it was saved from, or on others of the same model."
    if len(models) > 1:
        means += (
            " Each GPU that a kernel can see adds 0.4 s or so to its pauses, used or not: CUDA_VISIBLE_DEVICES, where "
            "the kernel starts, limits them."
        )
    return judge(
        "GPUs",
        bool(models),
        ", ".join(models) or "none",
        means,
        "The driver is loaded but has no GPU: look at `nvidia-smi` and the kernel's log, or unload the driver.",
        required=False,
    )


def _model(information: Path) -> str:
    match = re.search(r"^Model:\s*(.+)$", information.read_text("utf-8", "replace"), re.MULTILINE)
    return match[1].strip() if match else f"unknown ({information.parent.name})"


def _mig() -> Check:
    try:
        split = [f"GPU {gpu.index}" for gpu in Nvml().gpus() if gpu.mig]
    except NvmlError as error:
        return judge(
            "MIG",
            False,
            f"unknown: {error}",
            "Kernels on part of a GPU (a MIG instance) cannot be saved.",
            "Look at `nvidia-smi -L`.",
            required=False,
        )
    return judge(
        "MIG",
        not split,
        f"{', '.join(split)} split" if split else "no GPU is split",
        "Kernels on part of a GPU (a MIG instance) cannot be saved.",
        "Use a GPU without MIG; an administrator can switch it off (`nvidia-smi -mig 0`).",
        required=False,
    )


def _bindings() -> Check:
    try:
        importlib.import_module("cuda.bindings.driver")
        lacking = ""
    except Exception as error:  # noqa: BLE001 - a broken native library raises anything
        lacking = f"cannot import cuda.bindings.driver ({error})"
    return judge(
        "CUDA for Python",
        not lacking,
        lacking or "cuda-bindings",
        "The CUDA driver is called through this package.",
        "Run `pip install cuda-bindings` in the environment of the Jupyter server.",
    )


def _parking() -> Check:
    built = PARKING_LIBRARY.exists()
    return judge(
        "parking",
        built and parking(),
        "ready" if built and parking() else ("switched off" if built else "not built"),
        "GPU memory is parked for a save: GPU work waits for about a second then, however much memory there is.",
        "Unset GPUCKPT_PARKING where the Jupyter server starts."
        if built
        else "Install a C compiler (`apt-get install gcc`) and reinstall this package.",
        required=False,
    )


def _huge_pages() -> Check:
    match = re.search(r"\[(\w+)\]", _HUGE_PAGES.read_text()) if _HUGE_PAGES.exists() else None
    setting = match[1] if match else "none"
    return judge(
        "huge pages",
        setting not in ("none", "deny"),
        "GPU memory can be copied into huge pages" if match else "this Linux has no huge pages for in-memory files",
        "Without them the driver takes two to three times as long to copy GPU memory; nothing else changes.",
        f"For more speed: echo never > {_HUGE_PAGES} (allows huge pages for programs that request them)"
        if match
        else "",
        required=False,
    )
