"""Building the JupyterLab extension for a wheel or an editable installation (called by hatch-jupyter-builder).

What is built already is taken as it is: a source distribution has it. Without node the Python part is installed all
the same, and everything but the sidebar works.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parent
_SOURCES = _ROOT / "labextension"
_BUILT = _ROOT / "jupyter_gpuckpt" / "labextension"


def build(target_name: str, version: str) -> None:
    """Build the extension unless it is there.

    Raises
    ------
    subprocess.CalledProcessError : npm failed, and GPUCKPT_LABEXTENSION is ``required``.
    """
    del target_name, version
    if (_BUILT / "package.json").exists():
        return
    _BUILT.mkdir(exist_ok=True)
    required = os.environ.get("GPUCKPT_LABEXTENSION") == "required"
    npm = shutil.which("npm")
    try:
        if npm is None:
            raise FileNotFoundError("npm is not installed")
        subprocess.run([npm, "ci", "--no-audit", "--no-fund"], cwd=_SOURCES, check=True)
        subprocess.run([npm, "run", "build"], cwd=_SOURCES, check=True)
    except (OSError, subprocess.CalledProcessError) as e:
        if required:
            raise
        print(f"The JupyterLab sidebar is left out: {e}", file=sys.stderr)
