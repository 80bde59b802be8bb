"""The test suites of projects that start kernels, run once with Jupyter's own provisioner and once with ours."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from jupyter_gpuckpt import settings

from . import outcomes
from .known import Difference

__all__ = ["SUITES", "environment", "fetch", "run"]

REPOSITORY = Path(__file__).parents[2]

SUITES = {
    # package: what of its sources is run
    "ipykernel": "tests",
    "nbclient": "tests",
    "nbconvert": "tests/preprocessors/test_execute.py",
    "papermill": "papermill/tests",
    "jupyter_client": "tests",
    "jupyter_server": "tests",
}

_NEEDED = [
    *("boto3", "flaky", "ipyparallel", "ipywidgets", "moto", "msgpack", "pytest-asyncio", "pytest-console-scripts"),
    *("pytest-cov", "pytest-env", "pytest-jupyter[server]", "pytest-mock", "pytest-timeout", "requests", "testpath"),
    *("trio", "xmltodict"),
    *("hatch-jupyter-builder", "hatchling", "setuptools", "wheel"),
]
"""What the suites need beside the packages that they are of; and what pip looks into sources with."""

_PROVISIONER = "JUPYTER_DEFAULT_PROVISIONER_NAME"
_OURS, _PLAIN = "gpuckpt-provisioner", "local-provisioner"
_LIMIT = 7200.0
"""Seconds that one run of a suite may take."""
_AGAIN = 40
"""Tests at most that are run a second time, by themselves: of more, load is not the reason."""


def environment(folder: Path) -> Path:
    """Return the Python of a virtual environment with this project, the packages and what their suites need.

    It is made where it is not there; the packages have the versions that they have beside this project.
    """
    python = folder / "venv/bin/python"
    ready = folder / "venv/ready"
    if not ready.exists():
        pip = [sys.executable, "-m", "pip"]
        versions = subprocess.run([*pip, "freeze", "--exclude-editable"], capture_output=True, text=True, check=True)
        (folder / "versions.txt").write_text(versions.stdout)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder / "venv")], check=True)
        install = [str(python), "-m", "pip", "install", "-qq", "--constraint", str(folder / "versions.txt")]
        install += ["--editable", f"{REPOSITORY}[server]", *SUITES, *_NEEDED]
        subprocess.run(install, env={**os.environ, "SKIP_JUPYTER_BUILDER": "1"}, check=True)
        ready.touch()
    return python


def fetch(package: str, python: Path, folder: Path) -> Path:
    """Return the folder with the sources of a package in the version that is installed; they are downloaded once."""
    ask = f"from importlib.metadata import version; print(version({package!r}))"
    version = subprocess.run([str(python), "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    unpacked = folder / f"{package}-{version}"
    if not unpacked.exists():
        download = ["download", "-qq", "--no-binary", ":all:", "--no-deps", "--no-build-isolation", "--dest"]
        subprocess.run([str(python), "-m", "pip", *download, str(folder), f"{package}=={version}"], check=True)
        with tarfile.open(folder / f"{unpacked.name}.tar.gz") as sources:
            sources.extractall(folder, filter="data")
    return unpacked


def run(package: str, python: Path, sources: Path, logs: Path) -> tuple[int, list[Difference]]:
    """Run a suite with Jupyter's provisioner, then with ours; return how many tests that were, and what differs.

    What differs is run again by itself, and counts where it does so again.
    """
    wanted = [SUITES[package]]
    plain = _outcomes(_PLAIN, python, sources, wanted, logs / f"{package}-plain.log")
    ours = _outcomes(_OURS, python, sources, wanted, logs / f"{package}-ours.log")
    odd = [test for test in plain if _is_worse(ours, plain, test)]
    if 0 < len(odd) <= _AGAIN:
        ours |= _outcomes(_OURS, python, sources, odd, logs / f"{package}-again.log")
    differing = [test for test in odd if _is_worse(ours, plain, test)]
    return len(plain), [Difference(package, test, " ".join(ours.get(test, ("did not run",)))) for test in differing]


def _is_worse(ours: Mapping[str, tuple[str, str]], plain: Mapping[str, tuple[str, str]], test: str) -> bool:
    return plain[test][0] != "failed" and ours.get(test, ("", ""))[0] != plain[test][0]


def _outcomes(
    provisioner: str, python: Path, sources: Path, wanted: Sequence[str], log: Path
) -> dict[str, tuple[str, str]]:
    """Run some of a suite's tests in a home of their own."""
    with tempfile.TemporaryDirectory(prefix="gpuckpt-peers-") as home, log.open("wb") as output:
        told = Path(home, "outcomes")
        command = [
            str(python),
            "-m",
            "pytest",
            "-p",
            outcomes.PLUGIN,
            "-p",
            "no:cacheprovider",
            "-W",
            "default",
            # Their own limits are for machines that do nothing else; and one test that hangs ends as one.
            "--timeout=300",
            "--timeout-method=signal",
            # Of papermill's, some are for clouds whose packages are not here.
            "--continue-on-collection-errors",
            *wanted,
        ]
        more = {
            "HOME": home,
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "PATH": f"{python.parent}:{os.environ['PATH']}",
            "GPUCKPT_CRIU_PREFIX": str(settings.criu_prefix()),
            _PROVISIONER: provisioner,
            outcomes.FILE: str(told),
        }
        if provisioner == _OURS:  # with it goes the server's extension
            more["JUPYTER_CONFIG_PATH"] = str(REPOSITORY / "jupyter-config")
        cleared = {name: value for name, value in os.environ.items() if not name.startswith(("GPUCKPT_", "JUPYTER_"))}
        subprocess.run(
            command,
            cwd=sources,
            env={**cleared, **more},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=_LIMIT,
            check=False,
        )
        return outcomes.read(told)
