"""Building the library that parks GPU memory, for a wheel or an editable installation (called by hatchling).

Without a C compiler it is left out, and everything works: saves of GPU kernels then take longer.
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

_SOURCE = "jupyter_gpuckpt/kernel/parking.c"
_LIBRARY = "jupyter_gpuckpt/kernel/libgpuckpt-parking.so"
_FLAGS = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-fPIC", "-fvisibility=hidden", "-shared"]


class ParkingHook(BuildHookInterface):
    """Compiles the library, and makes the wheel one for this kind of machine."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build it, for wheels and editable installations alike.

        Raises
        ------
        subprocess.CalledProcessError : the compiler failed, and GPUCKPT_PARKING_LIBRARY is ``required``.
        """
        del version
        if self.target_name != "wheel":
            return
        library = Path(self.root, _LIBRARY)
        try:
            if platform.machine() != "x86_64":
                raise FileNotFoundError(f"there is no parking for {platform.machine()}")
            compiler = shutil.which(os.environ.get("CC", "cc"))
            if compiler is None:
                raise FileNotFoundError("there is no C compiler")
            command = [compiler, *_FLAGS, "-o", str(library), str(Path(self.root, _SOURCE)), "-ldl", "-lpthread"]
            subprocess.run(command, check=True)
        except (OSError, subprocess.CalledProcessError) as e:
            if os.environ.get("GPUCKPT_PARKING_LIBRARY") == "required":
                raise
            library.unlink(missing_ok=True)
            print(f"Parking of GPU memory is left out: {e}", file=sys.stderr)
            return
        build_data["artifacts"].append(_LIBRARY)
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")
