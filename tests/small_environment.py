"""A virtual environment of its own with ipykernel in it, made in a moment, and a kernelspec for it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import jupyter_gpuckpt

SPEC = "small"


def _installed(name: str, found: set[str]) -> Iterator[Path]:
    """Yield what stands at the top of site-packages for a distribution and for what it needs."""
    if name in found:
        return
    found.add(name)
    try:
        one = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return
    for file in one.files or ():
        if ".." not in file.parts and file.parts[0] != "__pycache__":
            yield Path(str(one.locate_file(file.parts[0])))
    for needed in one.requires or ():
        if "extra ==" not in needed and (match := re.match(r"[A-Za-z0-9._-]+", needed)):
            yield from _installed(match[0], found)


def _linked(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def small_environment(folder: Path, jupyter: Path) -> None:
    """Make the environment `folder`, and a kernelspec for it in a folder for JUPYTER_PATH.

    In it is ``latecomer``, a package that nobody has imported yet.
    """
    base = getattr(sys, "_base_executable", sys.executable)
    subprocess.run([base, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    for path in set(_installed("ipykernel", set())):
        if path.is_dir() and not (packages / path.name).exists():
            ignored = shutil.ignore_patterns("__pycache__", "tests")
            shutil.copytree(path, packages / path.name, copy_function=_linked, ignore=ignored, symlinks=True)
        elif path.is_file() and not path.name.startswith("__editable__"):
            _linked(str(path), str(packages / path.name))
    (packages / "ours.pth").write_text(str(Path(jupyter_gpuckpt.__file__).parents[1]))
    (packages / "latecomer").mkdir()
    (packages / "latecomer" / "__init__.py").write_text("from .data import answer\n")
    (packages / "latecomer" / "data.py").write_text("answer = 42\n")
    (packages / "latecomer" / "large.bin").write_bytes(os.urandom(100_000))
    spec = jupyter / "kernels" / SPEC
    spec.mkdir(parents=True)
    argv = [str(folder / "bin" / "python"), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    provisioner = {"kernel_provisioner": {"provisioner_name": "gpuckpt-provisioner"}}
    about = {"argv": argv, "display_name": SPEC, "language": "python", "metadata": provisioner}
    (spec / "kernel.json").write_text(json.dumps(about))
