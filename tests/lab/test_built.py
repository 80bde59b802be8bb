"""What is built: the wheel has the JupyterLab extension."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def test_the_wheel_has_the_extension(tmp_path: Path) -> None:
    # Of a copy: building compiles the libraries again, which kernels of other tests have open.
    copy = tmp_path / "copy"
    left_out = shutil.ignore_patterns(".git", ".venv", ".*_cache", ".peers", ".pods", "node_modules")
    shutil.copytree(_ROOT, copy, symlinks=True, ignore=left_out)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, copy],
        check=True,
        capture_output=True,
        timeout=120,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        place = "/data/share/jupyter/labextensions/jupyter_gpuckpt/"
        names = {name.partition(place)[2] for name in archive.namelist() if place in name}
        assert "jupyter_gpuckpt/kernel/panel.js" in archive.namelist()
        assert any(name.endswith("/kernels/python3-gpuckpt/logo-svg.svg") for name in archive.namelist())
    assert {"package.json", "install.json", "schemas/jupyter_gpuckpt/plugin.json"} <= names
    assert any(name.startswith("static/remoteEntry.") for name in names)
