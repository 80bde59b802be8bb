"""Building what is written in C, for a wheel or an editable installation (called by hatchling).

Without a C compiler it is left out. Then saves take longer, of GPU kernels above all, other users of the machine can
disturb saves and restores, and the broker does not start; `jupyter gpuckpt doctor` says so. And a signal to every
process of a server that stops ends its kernels.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_FLAGS = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-fPIC", "-fvisibility=hidden"]
_SOCKETS = ("jupyter_gpuckpt/freeze/criu_*.c", "jupyter_gpuckpt/freeze/libgpuckpt-criu-sockets.so.1", ["-shared"])
_PACKER = ("jupyter_gpuckpt/freeze/shm_packer.c", "jupyter_gpuckpt/freeze/gpuckpt-shm-packer", [])
_PARKING = (
    "jupyter_gpuckpt/kernel/driver/*.c",
    "jupyter_gpuckpt/kernel/libgpuckpt-parking.so",
    # What is loaded first under this name is what others find that look for the driver.
    ["-shared", "-Wl,-soname,libcuda.so.1", "-Wl,-Bsymbolic"],
)
_SHIELD = ("jupyter_gpuckpt/linux/shield.c", "jupyter_gpuckpt/linux/libgpuckpt-shield.so", ["-shared"])
_BLOCKS = ("jupyter_gpuckpt/store/blocks.c", "jupyter_gpuckpt/store/libgpuckpt-blocks.so", ["-shared"])
_NCCL = ("jupyter_gpuckpt/kernel/nccl/*.c", "jupyter_gpuckpt/kernel/libgpuckpt-nccl.so", ["-shared"])
_LIBRARIES = (_SOCKETS, _PACKER, _SHIELD, _NCCL, _BLOCKS, *([_PARKING] if platform.machine() == "x86_64" else []))
"""Sources and library of each, or program, and what the linker is told; parking is for x86-64 alone."""


class LibrariesHook(BuildHookInterface):
    """Compiles the libraries, and makes the wheel one for this kind of machine."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build them, for wheels and editable installations alike.

        Raises
        ------
        OSError, subprocess.CalledProcessError : the compiler failed, and GPUCKPT_LIBRARIES is ``required``.
        """
        del version
        if self.target_name != "wheel":
            return
        for sources, library, linking in _LIBRARIES:
            try:
                self._compile(sorted(Path(self.root).glob(sources)), Path(self.root, library), linking)
            except (OSError, subprocess.CalledProcessError) as e:
                if os.environ.get("GPUCKPT_LIBRARIES") == "required":
                    raise
                Path(self.root, library).unlink(missing_ok=True)
                print(f"{library} is left out: {e}", file=sys.stderr)
                continue
            build_data["artifacts"].append(library)
            build_data["pure_python"] = False
            build_data["tag"] = "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")

    @staticmethod
    def _compile(sources: list[Path], library: Path, linking: list[str]) -> None:
        compiler = shutil.which(os.environ.get("CC", "cc"))
        if compiler is None:
            raise FileNotFoundError("there is no C compiler")
        # Kernels may have the one that is there open: it is replaced, not written over.
        made = library.with_name(f"{library.name}.{os.getpid()}")
        try:
            words = [compiler, *_FLAGS, *linking, "-o", str(made), *map(str, sources), "-ldl", "-lpthread"]
            subprocess.run(words, check=True)
            made.replace(library)
        finally:
            made.unlink(missing_ok=True)
