"""What is built: the wheel has the JupyterLab extension, and it is small."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_MOST = 50_000  # bytes of our own JavaScript that a page loads


def test_the_wheel_has_the_extension_and_it_is_small(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, _ROOT],
        check=True,
        capture_output=True,
        timeout=120,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        place = "/data/share/jupyter/labextensions/jupyter_gpuckpt/"
        sizes = {i.filename.partition(place)[2]: i.file_size for i in archive.infolist() if place in i.filename}
    assert {"package.json", "install.json", "schemas/jupyter_gpuckpt/plugin.json"} <= sizes.keys()
    scripts = {name: size for name, size in sizes.items() if name.endswith(".js")}
    assert any(name.startswith("static/remoteEntry.") for name in scripts)
    assert sum(scripts.values()) < _MOST, scripts
